"""One object of a job besides its pods and services, under the job's name: a PodGroup, a disruption budget, an
autoscaler.

`NamesakeControl` creates the object, keeps it up to date, and deletes it. The object is owned by the job. Only our own
fields are compared and patched, so that fields added by the API server or another client stay; quantities are compared
by value, because an API server may write them in another form. An object of that name that the job does not own is left
alone.

The cache holds all objects of the kind, not only those with our labels, so that one that another operator made for the
job is found as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from controllers.jobs.api import not_ours
from controllers.jobs.control import ChildControl, Identity
from store.kube.api.errors import AlreadyExists, NotFound
from store.kube.api.objects import (
    Object,
    is_controlled_by,
    join_key,
    merge_patch_between,
    name_of,
    namespace_of,
    uid_of,
)
from store.kube.informer.informer import Informer
from store.quantity import parse_quantity


class NamesakeControl:
    """Keeps one object per job. `control`: of its resource, as served. `cache`: an informer on these objects.

    A desired state has our fields of the `spec`, where None means absent, and the `metadata` of a new object. `kept`:
    fields of the spec that stay once they are set, whatever the desired state says.
    """

    def __init__(self, control: ChildControl, *, cache: Informer | None = None, kept: Collection[str] = ()) -> None:
        self.api, self.resource = control.api, control.resource
        self._control, self._cache, self._kept = control, cache, kept

    def seen(self, job: Object) -> Object | None:
        """Return the cached object if the job owns it."""
        current = self._cached(job)
        return current if current is not None and is_controlled_by(current, job) else None

    def is_current(self, job: Object, wanted: Object) -> bool:
        """Return whether the cached object is as desired."""
        current = self.seen(job)
        return current is not None and not self._patch_towards(current, wanted)

    async def apply(self, identity: Identity, wanted: Object) -> Object:
        """Create the object, or patch what differs. Return its state. Raises `KubeError`, `JobError`."""
        job = identity.job
        current = self._cached(job)
        if current is None:
            body = _without_none(wanted)
            owned = {
                "name": name_of(job),
                "namespace": namespace_of(job),
                "ownerReferences": [identity.owner_reference],
            }
            body["metadata"] = body.get("metadata", {}) | owned
            new = {"apiVersion": self.resource.api_version, "kind": self.resource.kind, **body}
            try:
                return await self._control.create(job, new)
            except AlreadyExists:
                current = await self.api.get(self.resource, name_of(job), namespace_of(job))
        if not is_controlled_by(current, job):
            raise not_ours(current, self.resource, job, self._control.job_kind.kind)
        patch = self._patch_towards(current, wanted)
        if not patch:
            return current
        patch["metadata"] = {"uid": uid_of(current)}
        return await self.api.patch(self.resource, name_of(current), namespace_of(current), patch)

    async def delete(self, job: Object) -> None:
        """Delete the job's object, if there is one. Raises `KubeError`."""
        try:
            current = self._cached(job) or await self.api.get(self.resource, name_of(job), namespace_of(job))
        except NotFound:
            return
        if is_controlled_by(current, job):
            await self._control.delete(job, name_of(current), uid_of(current))

    def _cached(self, job: Object) -> Object | None:
        return self._cache.get(join_key(namespace_of(job), name_of(job))) if self._cache is not None else None

    def _patch_towards(self, current: Object, wanted: Object) -> Object:
        """Return the merge patch that sets our fields of the spec exactly."""
        present = current.get("spec") or {}
        changes: Object = {}
        for field, value in wanted["spec"].items():
            now = present.get(field)
            settled = field in self._kept and now not in (None, "")
            if not settled and not _same(now, _without_none(value)):
                changes |= merge_patch_between({field: now} if now is not None else {}, _without_none({field: value}))
        return {"spec": changes} if changes else {}


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_none(inner) for key, inner in value.items() if inner is not None}


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, where quantities such as `0.5` and `500m` are."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if one == other or not (isinstance(one, str | int) and isinstance(other, str | int)):
        return bool(one == other)
    try:
        return parse_quantity(one) == parse_quantity(other)
    except ValueError:
        return False
