"""Show what a training job's replicas print: `rcfarm job logs`.

Without `--follow` the replicas are read one after the other. With it each is read by a task of its own, so that a quiet
one holds up no other: a broken connection is made again from the time of the last line, whose repetition is left out,
and a pod that is replaced is followed by its successor, until the job has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec
import typer

from controllers.jobs.api import JobView, gen_general_name
from controllers.jobs.replicas import Slot, slots_of
from controllers.jobs.status import decode_status
from rcfarm.cli import ERROR
from rcfarm.cli.job.show import JobName, find, pods_of, title, view_of
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.options import Since, parse_time
from rcfarm.operations.errors import BadInput
from rcfarm.reports.training import replica_name
from store.kube.api.errors import BadRequest, KubeError, NotFound, ServerError, TooManyRequests, Unreachable
from store.kube.api.objects import PODS, Object, Resource, has_ended, name_of, uid_of

RETRY_PERIOD = 2.0  # seconds until a pod is asked again that has not started, or whose stream broke
MAX_LINE = 1 << 20  # bytes: a longer line is shown in parts
_PASSING = (Unreachable, ServerError, TooManyRequests)  # a kubelet that does not answer is a ServerError

Replicas = Annotated[
    list[str] | None,
    typer.Option("--replica", "-r", metavar="TYPE-INDEX", help="Only this replica (worker-0); may be repeated."),
]


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


async def logs(
    cli: KubeCli,
    job: JobName,
    replica: Replicas = None,
    container: Annotated[
        str, typer.Option("--container", "-c", metavar="NAME", help="Another container than the one that trains.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Of the run before the container's last restart.")
    ] = False,
    tail: Annotated[int | None, typer.Option("--tail", metavar="N", min=0, help="Only the last lines of each.")] = None,
    since: Since = "",
) -> int:
    """Show what the replicas print. If there are several, each line begins with its replica."""
    if follow and previous:
        raise BadInput("--follow and --previous: a run that has ended prints nothing more; give one of them")
    if follow and cli.out.as_json:
        raise BadInput("--follow prints lines as they come, not one JSON document; leave out one of the options")
    begin = parse_time("--since", since)
    kind, obj = await find(cli, job)
    view = view_of(kind, obj)
    slots = _chosen(slots_of(view, await pods_of(cli, kind, obj)), replica or [], title(kind, obj))
    width = max(len(replica_name(slot)) for slot in slots) if len(slots) > 1 else 0
    containers = [_container(cli, view, slot, container, previous, tail, begin) for slot in slots]

    def show(line: LogLine) -> None:
        cli.out.line(f"{line.replica:<{width}} | {line.text}" if width else line.text)

    if follow:
        try:
            async with asyncio.TaskGroup() as group:
                for each in containers:
                    group.create_task(_follow(each, kind.resource, obj, show))
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


def _chosen(slots: Sequence[Slot], names: Sequence[str], job: str) -> list[Slot]:
    known = {replica_name(slot): slot for slot in slots}
    if unknown := [name for name in names if name.lower() not in known]:
        raise BadInput(f"{job} has no replica {unknown[0]}; it has {', '.join(known) or 'none'}")
    if not known:
        raise BadInput(f"{job} has no replicas")
    return [known[name.lower()] for name in dict.fromkeys(names)] or list(slots)


def _container(
    cli: KubeCli, view: JobView, slot: Slot, name: str, previous: bool, tail: int | None, since: datetime | None
) -> Container:
    pod = name_of(slot.pod) if slot.pod is not None else gen_general_name(view.name, slot.type, slot.index)
    return Container(cli, replica_name(slot), pod, name or view.default_container, previous, tail, since)


async def _follow(container: Container, resource: Resource, job: Object, show: Callable[[LogLine], None]) -> None:
    """Show lines until the job has ended and its pod, too. What keeps the log from being read is noted once."""
    cli, noted, is_over = container.cli, "", False
    while not is_over:
        is_over = await _is_over(container, resource, job)  # asked before the log is read: nothing may follow it
        try:
            async for line in container.read(follow=not is_over):
                show(line)
        except (NotFound, BadRequest, *_PASSING) as error:
            if str(error) != noted:
                noted = str(error)
                cli.out.note(f"{container.replica}: {error}")
        if not is_over:
            await asyncio.sleep(RETRY_PERIOD)


async def _is_over(container: Container, resource: Resource, job: Object) -> bool:
    """Return whether nothing more will be printed: the job is gone, or it has ended and the pod has, too."""
    cli = container.cli
    try:
        found = await cli.api.get(resource, name_of(job), cli.namespace)
        if uid_of(found) != uid_of(job):
            return True
        if not decode_status(found.get("status")).finished:
            return False
        return has_ended(await cli.api.get(PODS, container.pod, cli.namespace))
    except NotFound:
        return True
    except _PASSING:
        return False
