"""The calls of a sync: writes of an object's status, and many calls at once, within bounds.

The model: a status was decided from one state of the object, and is written onto that state, by its resource version,
which no successor of the object can have. Upon a conflict the state is read again, and the operator decides whether the
status may be written onto that (`write_onto_latest`).

`StatusWriter` is for operators that keep no state of their own between syncs. When something other than the status has
changed since, the write is retried onto the new state; a decision from the new spec follows, because the change wakes
the object's key. When the status has changed, another client writes it, and our decision is void: `Conflict`. The
result of a write is kept until the cache has caught up, so that the next decision never starts from a status that is
older than our own. Resource versions are only compared for equality.

`attempt_all` and `slow_start` return when every call that they started has ended. Cancelling them cancels and awaits
the calls in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from store.kube.api.errors import Conflict, KubeError
from store.kube.api.objects import Object, Resource, key_of, name_of, namespace_of, resource_version_of, uid_of
from store.kube.api.protocol import KubeApi

ATTEMPTS = 5  # to write one status when other clients write, too

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)

MAX_AT_ONCE = 16  # calls in flight per job and kind of call


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
