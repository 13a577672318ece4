"""Show what containers of a job's pods print, for `rcfarm job logs` and `rcfarm framework logs`.

Without `--follow` the pods are read one after the other. With it each is read by a task of its own, so that a quiet one
holds up no other: a broken connection is made again from the time of the last line, whose repetition is left out, and a
pod that is replaced is followed by its successor, until the job has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple

import msgspec
import typer

from rcfarm.cli import ERROR
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.options import Since, parse_time
from rcfarm.operations.errors import BadInput
from store.kube.api.errors import BadRequest, KubeError, NotFound, ServerError, TooManyRequests, Unreachable
from store.kube.api.objects import PODS, Object, Resource, has_ended, name_of, uid_of

RETRY_PERIOD = 2.0  # seconds until a pod is asked again that has not started, or whose stream broke
MAX_LINE = 1 << 20  # bytes: a longer line is shown in parts
_PASSING = (Unreachable, ServerError, TooManyRequests)  # a kubelet that does not answer is a ServerError

ContainerName = Annotated[
    str, typer.Option("--container", "-c", metavar="NAME", help="Another container than the one that works.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]
Previous = Annotated[bool, typer.Option("--previous", "-p", help="Of the run before the container's last restart.")]
Tail = Annotated[int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last lines of each.")]


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line. `time`: as the container runtime wrote it, RFC 3339 in nanoseconds."""

    replica: str
    time: str
    text: str


@dataclass(slots=True)
class Container:
    """The container of one replica whose log is read, and how far. `since`: only lines from this time on. `last`: the
    time of the last line, "" before the first."""

    cli: KubeCli
    replica: str
    pod: str
    name: str
    previous: bool
    tail: int | None
    since: datetime | None
    last: str = ""

    async def read(self, *, follow: bool = False) -> AsyncIterator[LogLine]:
        """Yield the lines after the last one. Raises `KubeError`."""
        since, done = (datetime.fromisoformat(self.last), self.last) if self.last else (self.since, "")
        log = self.cli.api.log(
            self.pod,
            self.cli.namespace,
            container=self.name,
            follow=follow,
            previous=self.previous,
            tail=None if self.last else self.tail,
            since=since,
        )
        async with log as chunks:
            rest = b""
            while chunk := await chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE:
                    lines, rest = [*lines, rest], rest.partition(b" ")[0] + b" "  # the next part has the same time
                for line in lines:
                    if (found := self._line(line)).time > done:
                        yield found
            if rest and (found := self._line(rest)).time > done:
                yield found

    def _line(self, raw: bytes) -> LogLine:
        time, _, text = raw.decode(errors="replace").partition(" ")
        self.last = max(self.last, time)
        return LogLine(replica=self.replica, time=time, text=text)


class Choice(NamedTuple):
    """The lines that are asked for."""

    follow: bool
    previous: bool
    tail: int | None
    since: datetime | None


def choice(cli: KubeCli, follow: bool, previous: bool, tail: int | None, since: Since) -> Choice:
    """Return what the options ask for. Raises `BadInput` for options that exclude each other."""
    if follow and previous:
        raise BadInput("--follow and --previous: a run that has ended prints nothing more; give one of them")
    if follow and cli.out.as_json:
        raise BadInput("--follow prints lines as they come, not one JSON document; leave out one of the options")
    return Choice(follow, previous, tail, parse_time("--since", since))


async def show_logs(
    cli: KubeCli,
    containers: Sequence[Container],
    resource: Resource,
    job: Object,
    is_finished: Callable[[Object], bool],
    *,
    follow: bool,
) -> int:
    """Show the lines of the containers, each with its replica if there are several. Return the exit code.

    `is_finished` returns whether the job, as it is read again, has ended.
    """
    width = max(len(each.replica) for each in containers) if len(containers) > 1 else 0

    def show(line: LogLine) -> None:
        cli.out.line(f"{line.replica:<{width}} | {line.text}" if width else line.text)

    if follow:
        try:
            async with asyncio.TaskGroup() as group:
                for each in containers:
                    group.create_task(_follow(each, resource, job, is_finished, show))
        except ExceptionGroup as errors:  # its first error has ended the other reads
            raise errors.exceptions[0] from None
        return 0
    found: list[LogLine] = []
    failed = False
    for each in containers:
        try:
            async for line in each.read():
                if cli.out.as_json:
                    found.append(line)
                else:
                    show(line)
        except (NotFound, BadRequest) as error:  # it has no pod, or its container has not started
            cli.out.note(f"{each.replica}: {error}")
        except KubeError as error:
            cli.out.error(f"{each.replica}: {error}")
            failed = True
    if cli.out.as_json:
        cli.out.json(found)
    return ERROR if failed else 0


async def _follow(
    container: Container,
    resource: Resource,
    job: Object,
    is_finished: Callable[[Object], bool],
    show: Callable[[LogLine], None],
) -> None:
    """Show lines until the job has ended and its pod, too, or the job is gone. What keeps the log from being read is
    noted once."""
    cli, noted, is_over = container.cli, "", False
    while not is_over:
        try:  # asked before the log is read: nothing follows
            found = await cli.api.get(resource, name_of(job), cli.namespace)
            if uid_of(found) != uid_of(job):
                is_over = True
            elif is_finished(found):
                is_over = has_ended(await cli.api.get(PODS, container.pod, cli.namespace))
        except NotFound:
            is_over = True
        except _PASSING:
            is_over = False
        try:
            async for line in container.read(follow=not is_over):
                show(line)
        except (NotFound, BadRequest, *_PASSING) as error:
            if str(error) != noted:
                noted = str(error)
                cli.out.note(f"{container.replica}: {error}")
        if not is_over:
            await asyncio.sleep(RETRY_PERIOD)
