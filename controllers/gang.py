"""The object that makes a gang of a job's pods: created, kept up to date, and deleted with the job.

It has the job's name and belongs to the job. Only the fields that are ours are compared and patched, so that what the
scheduler or the API server adds stays. An object of that name that is not the job's is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from controllers.child_control import ChildControl
from controllers.controller_interface import GroupVersionKind
from controllers.gang_kinds import GangKind, GangSize
from controllers.gang_resources import min_resources, priority_class
from controllers.job_errors import NotServed, not_ours
from controllers.job_metrics import JobMetrics
from controllers.job_objects import Identity
from controllers.job_types import Gang, JobView, ReplicaSpec, SchedulingPolicy
from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, KubeError, NotFound
from store.kube.events import Recorder
from store.kube.informer import Informer
from store.kube.objects import Object, annotations_of, controller_of, join_key, name_of, namespace_of, uid_of
from store.kube.patches import merge_patch_between
from store.kube.resources import Resource

log = structlog.get_logger(__name__)

PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"  # of the job: as large as it, and not ours
_NOUNS = {"PodDisruptionBudget": "Pdb"}  # in the reasons of Events, as in the reference


async def served_resource(api: KubeApi, resources: Iterable[Resource]) -> Resource:
    """The first that the API server serves. Raises `NotServed`."""
    wanted = []
    for resource in resources:
        if await api.served(resource):
            return resource
        wanted.append(f"{resource.plural} in {resource.api_version}")
    raise NotServed(f"The API server does not serve {' or '.join(wanted)}: install it, or switch gang scheduling off")


async def discover_resource(api: KubeApi, resources: Iterable[Resource], *, retry_period: float = 2.0) -> Resource:
    """`served_resource`, asked again every `retry_period` seconds until the API server answers. Raises `NotServed`."""
    candidates = tuple(resources)
    while True:
        try:
            return await served_resource(api, candidates)
        except KubeError as error:
            log.warning("The API server does not say what it serves", kind=candidates[0].kind, error=str(error))
        await asyncio.sleep(retry_period)


class GangControl:
    """Keeps one object per job. `resource`: what it is, as served. `cache`: an informer that shows these objects."""

    def __init__(
        self,
        api: KubeApi,
        kind: GangKind,
        resource: Resource,
        job_kind: GroupVersionKind,
        recorder: Recorder,
        metrics: JobMetrics,
        *,
        cache: Informer | None = None,
    ) -> None:
        self.kind, self.resource = kind, resource
        self._api, self._job_kind, self._cache = api, job_kind, cache
        noun = _NOUNS.get(resource.kind, resource.kind)
        self._control = ChildControl(api, resource, job_kind, recorder, metrics, noun=noun)
        self._priorities: dict[str, int] = {}

    async def observe(self, identity: Identity, view: JobView) -> Gang:
        """What a decision has to know about the job's object. Raises `BadSpec`."""
        current = self._seen(identity.job)
        ours = current is not None and _belongs_to(current, identity.job)
        wanted = await self._wanted(identity, view, view.min_available)
        return Gang(
            exists=ours,
            current=current is not None and ours and not _patch_towards(current, wanted),
            holds_creation=self.kind.holds_creation(current if ours else None),
        )

    async def sync(self, identity: Identity, view: JobView, min_available: int) -> Object:
        """Make the job's object what the view says. Raises `KubeError`, `JobError`, `BadSpec`."""
        return await self.apply(identity, await self._wanted(identity, view, min_available))

    async def apply(self, identity: Identity, wanted: Object) -> Object:
        """Create the object, or patch what differs; None in `wanted` means absent. Raises `KubeError`, `JobError`."""
        current = self._seen(identity.job)
        if current is None:
            try:
                return await self._control.create(identity.job, self._new(identity, wanted))
            except AlreadyExists:
                current = await self._live(identity.job)
        if not _belongs_to(current, identity.job):
            raise not_ours(current, self.resource, identity.job, self._job_kind.kind)
        patch = _patch_towards(current, wanted)
        if not patch:
            return current
        patch.setdefault("metadata", {})["uid"] = uid_of(current)
        return await self._api.patch(self.resource, name_of(current), namespace_of(current), patch)

    async def delete(self, job: Object) -> None:
        """Delete the job's object, if there is one. Raises `KubeError`."""
        try:
            current = self._seen(job) or await self._live(job)
        except NotFound:
            return
        if _belongs_to(current, job):
            await self._control.delete(job, name_of(current), uid_of(current))

    def body(self, identity: Identity, policy: SchedulingPolicy, size: GangSize) -> Object:
        """The object as it should be, as far as it may change later."""
        annotations = {key: value for key, value in annotations_of(identity.job).items() if key != _LAST_APPLIED}
        return {
            "metadata": {
                "name": name_of(identity.job),
                "namespace": namespace_of(identity.job),
                "labels": dict(identity.labels),
                "annotations": annotations,
            },
            "spec": self.kind.spec(policy, size, identity.labels),
        }

    def _new(self, identity: Identity, wanted: Object) -> Object:
        body = _without_none(wanted)
        body["metadata"] |= {"ownerReferences": [identity.owner_reference]}
        return {"apiVersion": self.resource.api_version, "kind": self.resource.kind, **body}

    async def _wanted(self, identity: Identity, view: JobView, min_available: int) -> Object:
        policy = view.run_policy.scheduling_policy
        resources = policy.min_resources
        if resources is None and self.kind.needs_resources:
            await self._learn_priorities(view.replica_specs.values())
            resources = min_resources(view.replica_specs, min_available, lambda name: self._priorities.get(name, 0))
        return self.body(identity, policy, GangSize(min_available, resources))

    async def _learn_priorities(self, specs: Iterable[ReplicaSpec]) -> None:
        """Priorities only decide between several classes; a class's value never changes, so it is read once."""
        names = {priority_class(spec) for spec in specs}
        for name in sorted(names - self._priorities.keys() - {""}) if len(names) > 1 else ():
            try:
                found = await self._api.get(PRIORITY_CLASSES, name)
            except NotFound:
                continue
            self._priorities[name] = int(found.get("value") or 0)

    def _seen(self, job: Object) -> Object | None:
        return self._cache.get(join_key(namespace_of(job), name_of(job))) if self._cache is not None else None

    async def _live(self, job: Object) -> Object:
        return await self._api.get(self.resource, name_of(job), namespace_of(job))


def _belongs_to(obj: Object, job: Object) -> bool:
    return (controller_of(obj) or {}).get("uid") == uid_of(job)


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_none(inner) for key, inner in value.items() if inner is not None}


def _patch_towards(current: Object, wanted: Object) -> Object:
    """The merge patch that makes it so: our fields of the spec exactly, our labels and annotations beside others'."""
    metadata = {
        field: added
        for field in ("labels", "annotations")
        if (added := _added(current["metadata"].get(field) or {}, wanted["metadata"][field]))
    }
    spec, present = wanted["spec"], current.get("spec") or {}
    ours = {field: present[field] for field in spec if present.get(field) is not None}
    changes = merge_patch_between(ours, _without_none(spec))
    return ({"metadata": metadata} if metadata else {}) | ({"spec": changes} if changes else {})


def _added(present: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in wanted.items() if present.get(key) != value}
