"""The kinds of jobs of one `rcfarm jobs`: an operator for each, while the API server serves it.

The model: a runner per kind waits until the kind is served, then runs its operators (one per watched namespace, or one
for all). An error ends this kind's operators alone: it is logged, shown by readiness, and new operators start after a
while. A kind that nobody asked for by name is stopped when its definition goes, and missed by nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import structlog

from controllers.jobs.api import JobError
from controllers.loop.workqueue import WorkQueue
from rcfarm.daemon.health import Condition, StallDetector
from rcfarm.telemetry.kube import SCOPE, RestClientMetrics
from store.kube.api.errors import KubeError
from store.kube.api.objects import EVENTS, LEASES, Resource
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import Informer

log = structlog.get_logger(__name__)

CHECK = 5.0  # seconds between two questions about whether a kind is served
RESTART = 10.0  # seconds until new operators start after an error
STALL_AFTER = 90.0  # seconds: far above the longest request
_BESIDE_THE_WORK = frozenset({EVENTS.plural, LEASES.plural})


class Operator(Protocol):
    """What a runner needs of an operator. It is run once."""

    @property
    def queue(self) -> WorkQueue[str]: ...

    @property
    def informers(self) -> Sequence[Informer]: ...

    def problems(self) -> Mapping[str, str]:
        """Return why the operator does not work, by component; "" for a component without a problem."""

    async def run(self) -> None:
        """Work until cancelled."""


class Kind(NamedTuple):
    """A kind of jobs. `name`: as in `jobs.kinds`. `install`: how an administrator makes the API server serve it.
    `make`: returns new operators. `waits`: whether they wait for their kind by themselves."""

    name: str
    resource: Resource
    install: str
    make: Callable[[], Awaitable[Sequence[Operator]]]
    waits: bool = False


class KindRunner:
    """Runs the operators of one kind. `is_named`: the kind was asked for by name. `clock`: monotonic seconds.

    `operators`: those that run now.
    """

    def __init__(
        self,
        api: KubeApi,
        kind: Kind,
        requests: RestClientMetrics,
        *,
        is_named: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind, self.operators = kind, tuple[Operator, ...]()
        self._api, self._requests, self._is_named = api, requests, is_named
        self._is_served: bool | None = None  # None: not known yet
        self._problem = "not started yet"
        self._progress = StallDetector(STALL_AFTER, clock)

    @property
    def is_absent(self) -> bool:
        """Whether the kind is not served, and that is no problem: nobody asked for it by name."""
        return self._is_served is False and not self._is_named

    async def run(self) -> None:
        """Run operators whenever the kind is served, until cancelled."""
        SCOPE.set(self.kind.name)
        while True:
            if not (self.kind.waits and self._is_named):
                await self._until_served()
            try:
                await self._operate()
            except* (KubeError, JobError) as errors:
                self._failed(errors)
                log.warning("Kind stopped; starting it again", kind=self.kind.name, error=self._problem)
            except* Exception as errors:
                self._failed(errors)
                log.exception("Kind stopped unexpectedly; starting it again", kind=self.kind.name)
            else:
                continue
            await asyncio.sleep(RESTART)

    def conditions(self) -> Iterator[Condition]:
        """Yield what readiness requires of the kind."""
        name = self.kind.name
        if self.is_absent:
            yield Condition(name, True, self._problem)
        elif self._problem:
            yield Condition(name, False, self._problem)
        for operator in self.operators:
            for component, reason in operator.problems().items():
                yield Condition(f"{name} {component}", not reason, reason)

    def stalled(self) -> str:
        """Return why there is no progress, or "". Requests count as progress, as one sync of a large job may be
        long."""
        answered = sum(
            count
            for (scope, resource), count in self._requests.answered.items()
            if scope == self.kind.name and resource not in _BESIDE_THE_WORK
        )
        completed = sum(operator.queue.completed for operator in self.operators)
        is_busy = any(not each.problems()["operator"] and each.queue.is_busy for each in self.operators)
        stuck = self._progress.stalled_for(completed + answered, busy=is_busy)
        return f"{self.kind.resource.kind}s are queued, but none has progressed for {stuck:.0f} s" if stuck else ""

    async def _operate(self) -> None:
        """Run new operators until the kind goes, if that may be. Raises a group of what ended them."""
        self.operators, self._problem = tuple(await self.kind.make()), ""
        why = "jobs.kinds names it" if self._is_named else "the API server serves it, and jobs.kinds names no kinds"
        log.info("Running the jobs of a kind", kind=self.kind.name, reason=why)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(operator.run()) for operator in self.operators]
                if not self._is_named:
                    await self._until_gone()
                    for task in tasks:
                        task.cancel()
        finally:
            self.operators = ()

    def _failed(self, errors: BaseExceptionGroup[BaseException]) -> None:
        """Keep the first error as the reason why the kind does not run."""
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        self._problem = str(first) or repr(first)

    async def _until_served(self) -> None:
        """Ask the API server until it serves the kind. What it lacks is logged once."""
        resource = self.kind.resource
        name = f"{resource.plural}.{resource.group}"
        while True:
            try:
                self._is_served = await self._api.served(resource, fresh=True)
            except KubeError as error:
                problem = f"can't learn whether the API server serves {name}: {error}"
            else:
                problem = "" if self._is_served else f"the API server does not serve {name}; {self.kind.install}"
            if problem and problem != self._problem:
                say = log.info if self.is_absent else log.error
                say("Kind is not run; waiting for it", kind=self.kind.name, reason=problem)
            self._problem = problem
            if not problem:
                return
            await asyncio.sleep(CHECK)

    async def _until_gone(self) -> None:
        """Wait until the kind is not served any more. Ask the API server only while a cache can't be kept current."""
        while True:
            await asyncio.sleep(CHECK)
            if any(each.problem for operator in self.operators for each in operator.informers):
                with suppress(KubeError):
                    if not await self._api.served(self.kind.resource, fresh=True):
                        return
