"""Writing the status of custom resources, and knowing what was written before the cache shows it.

The model: a status was decided from one state of the object, and is written onto that state (by its resource version,
which no successor of the object can have) or not at all. When only something else than the status changed meanwhile,
the write is tried again onto the new state: a decision from the new spec follows by itself, because the change wakes
the object's key. When the status changed, somebody else decides about this object, and ours must be decided again:
`Conflict`.

What a write answered is kept until the cache has caught up, so that the next decision never starts from a status that
is older than our own. Resource versions are only compared for equality.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from store.kube.api import KubeApi
from store.kube.errors import Conflict
from store.kube.objects import Object, key_of, name_of, namespace_of, resource_version_of, uid_of
from store.kube.resources import Resource

_ATTEMPTS = 5


@dataclass(slots=True)
class _Written:
    """`superseded`: the resource versions that `latest` came after, as the cache may still show them. `is_ours_alone`:
    nobody else changed the object between the state that was decided about and `latest`.
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
        """The object as we know it: our own last write while the cache shows a state before that."""
        written = self._written.get(uid_of(cached))
        if written is None:
            return cached
        if resource_version_of(cached) in written.superseded:
            return written.latest
        del self._written[uid_of(cached)]
        return cached

    def wrote(self, obj: Object) -> bool:
        """Whether this state is our own last write, and tells us nothing new."""
        written = self._written.get(uid_of(obj))
        if written is None or not written.is_ours_alone:
            return False
        return resource_version_of(written.latest) == resource_version_of(obj)

    def forget(self, uid: str) -> None:
        """The object is gone."""
        self._written.pop(uid, None)

    async def write(self, obj: Object, status_patch: Object) -> Object:
        """Merge the patch into the status of this object; its new state. Raises `KubeError`."""
        superseded = {resource_version_of(obj)}
        state = obj
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                updated = await self._patch(state, status_patch)
                break
            except Conflict:
                if attempt == _ATTEMPTS:
                    raise
            state = await self._reread(obj)
            superseded.add(resource_version_of(state))
        former = self._written.pop(uid_of(obj), _Written(obj))
        self._written[uid_of(obj)] = _Written(updated, former.superseded | superseded, len(superseded) == 1)
        return updated

    async def _patch(self, state: Object, status_patch: Object) -> Object:
        patch = {"metadata": {"resourceVersion": resource_version_of(state)}, "status": status_patch}
        return await self._api.patch(self._resource, name_of(state), namespace_of(state), patch, subresource="status")

    async def _reread(self, obj: Object) -> Object:
        live = await self._api.get(self._resource, name_of(obj), namespace_of(obj))
        if uid_of(live) != uid_of(obj):
            raise Conflict(f"{key_of(obj)}: deleted and created again meanwhile; its status is not ours to write")
        if (live.get("status") or {}) != (obj.get("status") or {}):
            raise Conflict(f"{key_of(obj)}: its status was changed by somebody else; it is decided again")
        return live
