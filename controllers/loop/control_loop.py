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

The calls that a sync makes: a status was decided from one state of the object, and is written onto that state, by its
resource version, which no successor of the object can have. Upon a conflict the state is read again, and the operator
decides whether the status may be written onto that (`write_onto_latest`). `StatusWriter` is for operators that keep no
state of their own between syncs. When something other than the status has changed since, the write is retried onto the
new state; a decision from the new spec follows, because the change wakes the object's key. When the status has changed,
another client writes it, and our decision is void: `Conflict`. The result of a write is kept until the cache has caught
up, so that the next decision never starts from a status that is older than our own. Resource versions are only compared
for equality. `attempt_all` and `slow_start` return when every call that they started has ended. Cancelling them cancels
and awaits the calls in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypeVar

import structlog

from controllers.loop.workqueue import ShutDown, WorkQueue
from store.kube.api.errors import Conflict, KubeError
from store.kube.api.objects import Object, Resource, key_of, name_of, namespace_of, resource_version_of, uid_of
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import DeletedFinalStateUnknown, last_state

log = structlog.get_logger(__name__)

ChildVerb: TypeAlias = Literal["create", "delete"]
JobOutcome: TypeAlias = Literal["created", "restarted", "successful", "failed", "deleted"]
ReconcileResult: TypeAlias = Literal["ok", "waiting", "retry", "error"]

ATTEMPTS = 5  # to write one status when other clients write, too
MAX_AT_ONCE = 16  # calls in flight per job and kind of call

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)


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


async def write_onto_latest(
    state: Object,
    write: Callable[[Object], Awaitable[Object]],
    reread: Callable[[KubeError], Awaitable[Object]],
    *,
    conflicts: tuple[type[KubeError], ...] = (Conflict,),
) -> Object:
    """Call `write` with the state; after a conflict, with what `reread` returns. Return the answer to the write.

    `write`: sends the status with the resource version of the given state. `reread`: given the conflict, returns the
    object's present state, or raises if the status must not be written onto it. `conflicts`: the errors after which the
    state is read again. The last of `ATTEMPTS` raises its error.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await write(state)
        except conflicts as conflict:
            state = await reread(conflict)
    return await write(state)


@dataclass(slots=True)
class _Written:
    """`superseded`: the resource versions before `latest` that the cache may still show. `is_ours_alone`: no other
    client changed the object between the state that was decided about and `latest`.
    """

    latest: Object
    superseded: set[str] = field(default_factory=set)
    is_ours_alone: bool = True


class StatusWriter:
    """Writes the status subresource of one resource."""

    def __init__(self, api: KubeApi, resource: Resource) -> None:
        self._api, self._resource = api, resource
        self._written: dict[str, _Written] = {}  # by UID

    def latest(self, cached: Object) -> Object:
        """Return our own last write while the cache shows an earlier state, else the cached object."""
        written = self._written.get(uid_of(cached))
        if written is None:
            return cached
        if resource_version_of(cached) in written.superseded:
            return written.latest
        del self._written[uid_of(cached)]
        return cached

    def wrote(self, obj: Object) -> bool:
        """Return whether this state is our own last write, without another client's changes."""
        written = self._written.get(uid_of(obj))
        if written is None or not written.is_ours_alone:
            return False
        return resource_version_of(written.latest) == resource_version_of(obj)

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted object."""
        self._written.pop(uid, None)

    async def write(self, obj: Object, status_patch: Object) -> Object:
        """Merge the patch into the status of this object. Return its new state. Raises `KubeError`."""
        superseded = {resource_version_of(obj)}

        async def write(state: Object) -> Object:
            patch = {"metadata": {"resourceVersion": resource_version_of(state)}, "status": status_patch}
            place = name_of(state), namespace_of(state)
            return await self._api.patch(self._resource, *place, patch, subresource="status")

        async def reread(_: KubeError) -> Object:
            live = await self._api.get(self._resource, name_of(obj), namespace_of(obj))
            if uid_of(live) != uid_of(obj):
                raise Conflict(f"{key_of(obj)}: deleted and created again; the new object's status is not written")
            if (live.get("status") or {}) != (obj.get("status") or {}):
                raise Conflict(f"{key_of(obj)}: its status was changed by another client; the decision is repeated")
            superseded.add(resource_version_of(live))
            return live

        updated = await write_onto_latest(obj, write, reread)
        former = self._written.pop(uid_of(obj), _Written(obj))
        self._written[uid_of(obj)] = _Written(updated, former.superseded | superseded, len(superseded) == 1)
        return updated


async def attempt_all(
    items: Sequence[T],
    work: Callable[[T], Awaitable[R]],
    *,
    errors: tuple[type[E], ...],
    limit: int = MAX_AT_ONCE,
) -> list[R | E]:
    """Call `work` on each item, `limit` at once. Return the results in the order of the items.

    An error of the listed types is the result of its item and does not affect the others; any other error cancels the
    rest.
    """
    slots = asyncio.Semaphore(limit)

    async def attempt(item: T) -> R | E:
        async with slots:
            try:
                return await work(item)
            except errors as error:
                return error

    if len(items) == 1:
        return [await attempt(items[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(item)) for item in items]
    return [task.result() for task in tasks]


async def slow_start(
    items: Sequence[T], work: Callable[[T], Awaitable[bool]], *, limit: int = MAX_AT_ONCE
) -> Sequence[T]:
    """Call `work` on the items in batches of 1, 2, 4, ...; stop after a batch in which a call returned False.

    Return the items that were not tried. They would fail for the same reason (a quota, a rejected template), so a job
    that can't be created costs few requests however large it is. Source: Kubernetes' `slowStartBatch`.
    """
    start, size = 0, 1
    while start < len(items):
        batch = items[start : start + size]
        start, size = start + size, size * 2
        if not all(await attempt_all(batch, work, errors=(), limit=limit)):
            break
    return items[start:]


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
