"""Show the logs of pods, from the listeners of their nodes' agents: the one way, for RCs and for tasks.

The model: each pod is read by a task of its own. Without `--follow`, the lines of all pods are merged by their times.
With it, lines are shown as they come; a lost connection is made again where it ended, once the node's record says that
there is an agent; a pod that joins is followed too, and one that leaves ends with a note. Lines go to standard output,
everything else to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import UsageProblem, parse_time
from rcfarm.cli.rc.follow import watched
from rcfarm.daemon.visible import visible, visible_json
from rcfarm.operations.nodes import NodeError
from rcfarm.operations.pod_client import AgentAway, Credentials, Listener, listener_of, read_logs
from rcfarm.operations.pod_wire import LogFrame
from store.kv.protocol import Unavailable
from store.open import dev_directory

FOLLOWED_LINES = 10  # with which --follow begins
JOINED = 10_000  # milliseconds: how much older than its discovery the first line of a pod that joins may be
RETRY = 2.0  # seconds after which an agent is called again that has not registered again
PATIENCE = 60.0  # seconds that the store may take to answer
MAX_LINE = 1 << 20  # bytes: a longer line is shown in parts
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until interrupted.")]
Previous = Annotated[bool, typer.Option("--previous", "-p", help="Of the run before the process was last started.")]
LogsSince = Annotated[
    str, typer.Option("--since", metavar="TIME", help="Only lines from this time on: 10m, 2h, or an RFC 3339 time.")
]
Tail = Annotated[
    int | None,
    typer.Option("--tail", metavar="N", min=0, help="Only the last N lines of each stream; with --follow: 10."),
]
LaunchableName = Annotated[str, typer.Option("--launchable", metavar="NAME", help="Only this process of the pods.")]


class PodLogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a log, as `--output json` shows it, one per line. `stream`: stdout or stderr. `time`: when the agent
    saw it, RFC 3339 in UTC."""

    node: str
    pod: str
    launchable: str
    stream: str
    time: str
    line: str


class Options(NamedTuple):
    """What is to be shown. `since`: milliseconds since 1970."""

    follow: bool
    previous: bool
    since: int | None
    tail: int | None
    launchable: str

    def parameters(self) -> dict[str, str]:
        """Return them as the listener takes them."""
        given: dict[str, object] = {"since": self.since, "tail": self.tail, "launchable": self.launchable or None}
        given |= {"follow": int(self.follow) or None, "previous": int(self.previous) or None}
        return {name: str(value) for name, value in given.items() if value is not None}


def log_options(*, follow: bool, previous: bool, since: str, tail: int | None, launchable: str) -> Options:
    """Check the options of a command. Raises `UsageProblem`."""
    if follow and previous:
        raise UsageProblem("--follow and --previous: a run that has ended writes nothing more; give one of them")
    begin = parse_time("--since", since)
    if follow and tail is None and begin is None:
        tail = FOLLOWED_LINES
    return Options(follow, previous, int(begin.timestamp() * 1000) if begin else None, tail, launchable)


async def listener(cli: Cli, node: str) -> Listener:
    """Return the listener of a node's agent. Raises `ListenerError`, and the errors of `Nodes.get`."""
    view = await cli.nodes.get(node)
    return listener_of(node, view, Credentials(*cli.agents, _homes(cli.options.store, node)))


def _homes(store: str, node: str) -> list[Path]:
    """Return where the state directory of a node's agent may be, if that is on this machine."""
    from rcfarm.config.agent import default_state_dir  # few commands come here

    own = os.environ.get("RCFARM_AGENT_STATE_DIR", "")
    stores = [dev_directory()]
    if store.startswith("embedded:"):
        stores.insert(0, Path(store.removeprefix("embedded:")).expanduser())
    return [*(directory / "nodes" / node for directory in stores), Path(own) if own else default_state_dir()]


class Place(NamedTuple):
    """A pod on a node."""

    node: str
    pod: str


@dataclass
class Stream:
    """The logs of one pod. `positions`: how far each source was read; `rests`: the line that is not whole yet."""

    place: Place
    positions: dict[str, int] = field(default_factory=dict)
    rests: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def lines(self, frame: LogFrame, data: bytes) -> tuple[int, list[bytes]]:
        """Return the lines that are whole with this data, and the time of the first one."""
        self.positions[frame.source] = frame.position + frame.size
        began, rest = self.rests.pop(frame.source, (frame.time, b""))
        *lines, last = (rest + data).split(b"\n")
        if last:
            if len(last) > MAX_LINE:
                lines.append(last)
            else:
                self.rests[frame.source] = began if not lines else frame.time, last
        return began if rest else frame.time, lines


class _OutputClosed(Exception):
    """The reader of our output has gone."""


class Printer:
    """Writes lines, many at once. `labels`: before each line, its place; `shows_launchable`: with the launchable."""

    def __init__(self, cli: Cli, places: Sequence[Place], *, labels: bool, shows_launchable: bool) -> None:
        self._out = cli.out
        self._is_terminal = cli.out.stdout.is_terminal
        self._has_colour = self._is_terminal and cli.out.stdout.color_system is not None
        self._labels, self._shows_launchable = labels, shows_launchable
        self._nodes: dict[str, int] = {}
        self._width = 0
        for place in places:
            self._number(place.node)

    def write(self, place: Place, source: str, at: int, lines: Sequence[bytes]) -> None:
        """Write lines that came at one time. Raises `_OutputClosed`: an `OSError` would count as one of the network."""
        launchable, _, stream = source.partition("/")
        named = f"{launchable} " if self._shows_launchable else ""
        label = f"{named}| " if named else ""
        if self._labels:
            number = self._number(place.node)
            label = f"{place.node:<{self._width}} {named}| "
            if self._has_colour:
                label = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{label}\x1b[0m"
        if self._out.as_json:
            moment = datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            texts = [
                visible_json(
                    msgspec.json.encode(
                        PodLogLine(
                            node=place.node,
                            pod=place.pod,
                            launchable=launchable,
                            stream=stream,
                            time=moment,
                            line=line.decode(errors="backslashreplace"),
                        )
                    ).decode()
                )
                for line in lines
            ]
            shown = "".join(f"{text}\n" for text in texts).encode()
        elif self._is_terminal:
            texts = [visible(line.decode(errors="backslashreplace").expandtabs()) for line in lines]
            shown = "".join(f"{label}{text}\n" for text in texts).encode()
        else:
            shown = b"".join(b"%b%b\n" % (label.encode(), line) for line in lines)
        try:
            sys.stdout.buffer.write(shown)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise _OutputClosed from None

    def note(self, place: Place, text: str) -> None:
        """Print a remark about a pod to standard error."""
        self._out.note(f"{place.node}: {text}")

    def _number(self, node: str) -> int:
        self._width = max(self._width, len(node))
        return self._nodes.setdefault(node, len(self._nodes))


async def show(cli: Cli, places: Sequence[Place], options: Options, printer: Printer) -> int:
    """Show the logs of pods as they are now, merged by time. Return the exit code."""
    failures: list[NodeError] = []

    async def lines_of(place: Place) -> AsyncIterator[tuple[int, Place, str, list[bytes]]]:
        stream = Stream(place)
        try:
            async with read_logs(await listener(cli, place.node), place.pod, options.parameters()) as frames:
                async for frame, data in _flat(frames):
                    if frame.event in ("started", "skipped"):
                        yield frame.time, place, frame.event, [frame.text.encode() or _started(frame)]
                    elif frame.size:
                        at, lines = stream.lines(frame, data)
                        yield at, place, frame.source, lines
        except NodeError as error:
            failures.append(error)
            cli.out.error(str(error))
        for source, (at, rest) in stream.rests.items():
            yield at, place, source, [rest]

    with _pipe_may_close():
        async for at, place, source, lines in _merged([lines_of(place) for place in places]):
            if source in ("started", "skipped"):
                printer.note(place, lines[0].decode())
            elif lines:
                printer.write(place, source, at, lines)
    return ERROR if failures else 0


async def follow(
    cli: Cli,
    places: Sequence[Place],
    options: Options,
    printer: Printer,
    changes: Callable[[], AsyncIterator[Sequence[Place]]] | None = None,
) -> int:
    """Show the logs of pods until all of them are gone, or until cancelled. Return the exit code.

    `changes`: yields where there are pods each time that it changes, and ends when there will be no more; None: the
    places stay as they are.
    """
    running: dict[Place, asyncio.Task[None]] = {}
    unreadable: set[Place] = set()

    async def one(place: Place, asked: Options, *, joins: bool) -> None:
        try:
            await _reported(cli, place)
            if joins:
                printer.note(place, "the pod has joined")
            await _follow(cli, Stream(place), asked, printer)
        except NodeError as error:
            unreadable.add(place)
            cli.out.error(str(error))

    with _pipe_may_close():
        async with asyncio.TaskGroup() as group:
            for place in places:
                running[place] = group.create_task(one(place, options, joins=False))
            if changes is None:
                return 0
            async for present in changes():
                for place in present:
                    if place not in unreadable and (place not in running or running[place].done()):
                        joined = options._replace(tail=None, since=int(time.time() * 1000) - JOINED)
                        running[place] = group.create_task(one(place, joined, joins=True))
    return ERROR if unreadable else 0


async def _reported(cli: Cli, place: Place) -> None:
    """Wait until the node's agent has reported the pod."""
    keys = cli.keys.reality(place.node, place.pod), cli.keys.task_pod(place.node, place.pod)
    if any([await cli.store.get(key) for key in keys]):
        return
    async with watched(cli.store, keys[0]) as tree:
        while True:
            tree.event.clear()
            deadline = asyncio.get_running_loop().time() + PATIENCE
            if any(entry.key == keys[0] for entry in await tree.entries(deadline)):
                return
            await tree.changed(deadline)


async def _follow(cli: Cli, stream: Stream, options: Options, printer: Printer) -> None:
    """Show a pod's lines until it is gone. Raises `ListenerError` for what waiting does not change."""
    place, is_away = stream.place, False
    while True:
        parameters = options.parameters()
        if stream.positions:
            parameters["from"] = ",".join(f"{name}:{position}" for name, position in stream.positions.items())
        try:
            async with read_logs(await listener(cli, place.node), place.pod, parameters) as frames:
                if is_away:
                    printer.note(place, "its agent answers again")
                is_away = False
                async for frame, data in _flat(frames):
                    if frame.event == "end":
                        for source, (at, rest) in stream.rests.items():
                            printer.write(place, source, at, [rest])
                        printer.note(place, frame.text or "the log has ended")
                        return
                    if frame.event in ("started", "skipped"):
                        printer.note(place, frame.text or _started(frame).decode())
                    elif frame.size:
                        at, lines = stream.lines(frame, data)
                        if lines:
                            printer.write(place, frame.source, at, lines)
            reason = "the connection was closed"
        except (AgentAway, Unavailable) as error:
            reason = str(error)
        if not is_away:
            printer.note(place, f"{reason}; waiting for it")
            is_away = True
        async with watched(cli.store, cli.keys.node(place.node)) as node:
            now = asyncio.get_running_loop().time()
            with contextlib.suppress(Unavailable):
                await node.entries(now + RETRY)
            node.event.clear()
            await node.changed(now + RETRY)


def _started(frame: LogFrame) -> bytes:
    moment = datetime.fromtimestamp(frame.time / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"{frame.source.partition('/')[0]} was started again at {moment}".encode()


async def _flat(frames: AsyncIterator[list[tuple[LogFrame, bytes]]]) -> AsyncIterator[tuple[LogFrame, bytes]]:
    async for several in frames:
        for each in several:
            yield each


async def _merged(sources: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Yield the items of several sources, each of which is in order of its items' first element, in that order."""
    heap: list[tuple[int, int, Any]] = []

    async def advance(number: int) -> None:
        with contextlib.suppress(StopAsyncIteration):
            item = await anext(sources[number])
            heapq.heappush(heap, (item[0], number, item))

    await asyncio.gather(*(advance(number) for number in range(len(sources))))
    while heap:
        _, number, item = heapq.heappop(heap)
        yield item
        await advance(number)


@contextlib.contextmanager
def _pipe_may_close() -> Iterator[None]:
    """End quietly when the reader of our output, such as `head`, has gone. Raise the only error of a group instead of
    the group."""
    try:
        try:
            yield
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    except _OutputClosed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
