"""The control loop of every operator: sources fill caches, handlers of their events add keys to a queue, and workers
take keys and sync each.

The model: sources start in stages. Each source of a stage must be filled before the next stage starts, and all of them
before the first sync, because an object that a cache does not have must mean that it does not exist. A handler does no
work; it only queues keys and notes facts. Events may come in any order and any number of times.

Then `workers` tasks share one queue, which never gives a key to two of them. A sync that succeeds clears the key's
failure count, and returns the seconds after which the key is due again without an event, or None. A sync that may fail
after it knows when time alone matters adds the key with `add_after`; the earliest time counts. A key whose sync fails
is retried under the queue's rate limit, and affects no other: expected errors (the API refuses or is unreachable) are
logged as warnings, any other exception, which is a defect of ours or of an operator's hook, with its traceback.

What dies when: `run` owns every task. Cancelling it stops the intake, gives the syncs in flight and the keys that are
ready up to `drain` seconds, then cancels and awaits the rest; the sources run until the last sync has ended. Delayed
keys are discarded. A queue that was shut down stays so: a loop runs once.

The caller's implementation of `JobMetrics` names and exports the measurements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Literal, Protocol, TypeAlias

import structlog

from controllers.loop.workqueue import ShutDown, WorkQueue
from store.kube.api.errors import KubeError
from store.kube.api.objects import Object, resource_version_of
from store.kube.informer.informer import DeletedFinalStateUnknown, last_state

log = structlog.get_logger(__name__)

ChildVerb: TypeAlias = Literal["create", "delete"]
JobOutcome: TypeAlias = Literal["created", "restarted", "successful", "failed", "deleted"]
ReconcileResult: TypeAlias = Literal["ok", "waiting", "retry", "error"]


class Source(Protocol):
    """What must be ready before anything is synced, and runs beside the syncs: an informer, for instance."""

    async def run(self) -> None:
        """Run until cancelled."""

    async def synced(self) -> None:
        """Wait until the cache is filled. Called while `run` runs."""


class ControlLoop:
    """Calls `sync(key)` for the keys of `queue`. `drain`: seconds. `expected`: errors that need no traceback.

    `has_synced`: whether all sources were filled, so that syncs have begun.
    """

    def __init__(
        self,
        queue: WorkQueue[str],
        sync: Callable[[str], Awaitable[float | None]],
        *,
        workers: int = 4,
        drain: float = 5.0,
        expected: tuple[type[Exception], ...] = (KubeError,),
    ) -> None:
        self.has_synced = False
        self._queue, self._sync, self._workers, self._drain = queue, sync, workers, drain
        self._expected = expected

    async def run(self, *stages: Iterable[Source]) -> None:
        """Work until cancelled, or until the queue is shut down and empty."""
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            try:
                for stage in map(tuple, stages):
                    tasks += [group.create_task(source.run()) for source in stage]
                    for source in stage:
                        await source.synced()
                self.has_synced = True
                await self._run_workers()
            finally:
                for task in tasks:
                    task.cancel()

    async def _run_workers(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._work(), name=f"worker {number}") for number in range(self._workers)]
            try:
                await asyncio.wait(tasks)
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._drain):
                        await self._queue.shut_down_with_drain()
                for task in tasks:
                    task.cancel()

    async def _work(self) -> None:
        while True:
            try:
                key = await self._queue.get()
            except ShutDown:
                return
            try:
                requeue_after = await self._sync(key)
            except Exception as error:  # one key's failure must not stop the others
                if isinstance(error, self._expected):
                    log.warning("Sync failed; retrying", key=key, error=str(error))
                else:
                    log.exception("Sync failed unexpectedly; retrying", key=key)
                self._queue.add_rate_limited(key)
            else:
                self._queue.forget(key)
                if requeue_after is not None:
                    self._queue.add_after(key, requeue_after)
            finally:
                self._queue.done(key)


class ObjectHandler:
    """Calls `changed` with each new state of an object, `gone` with the last known state of a deleted one."""

    def __init__(self, changed: Callable[[Object], None], gone: Callable[[Object], None]) -> None:
        self._on_change, self._on_deletion = changed, gone

    def added(self, obj: Object) -> None:
        self._on_change(obj)

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) != resource_version_of(new):
            self._on_change(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self._on_deletion(last_state(obj))


class ChildHandler(ObjectHandler):
    """Calls `wake` with the key of a child's owner; when the owner changes, with the former and the present one.

    `owner_key`: returns the key that a state of the child belongs to; None without a known owner.
    """

    def __init__(self, owner_key: Callable[[Object], str | None], wake: Callable[[str], None]) -> None:
        super().__init__(self._wake_owners, self._wake_owners)
        self._owner_key, self._wake = owner_key, wake

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) != resource_version_of(new):
            self._wake_owners(old, new)

    def _wake_owners(self, *states: Object) -> None:
        for key in dict.fromkeys(map(self._owner_key, states)):
            if key is not None:
                self._wake(key)


class JobMetrics(Protocol):
    """Durations in seconds. `job_kind`: the kind of the custom resource. What is not overridden is not measured."""

    def child(self, job_kind: str, verb: ChildVerb, kind: str, namespace: str, *, ok: bool) -> None:
        """Count a creation or deletion of a pod, service, PodGroup or PodDisruptionBudget (`kind`), or its failure."""
        return

    def pod_failed(self, job_kind: str, namespace: str) -> None:
        """Count a failed pod of a job, once per pod."""
        return

    def job(self, job_kind: str, outcome: JobOutcome, namespace: str) -> None:
        """Count a job's change into this state."""
        return

    def reconciled(self, job_kind: str, result: ReconcileResult, seconds: float) -> None:
        """Record one sync. `waiting`: expectations are outstanding. `retry`: the API refused or was unreachable."""
        return

    def acted(self, job_kind: str, lag: float) -> None:
        """Record the time from the first event that woke a job to the first request that it led to."""
        return


class NoJobMetrics(JobMetrics):
    """Measures nothing."""
