"""Executes a `Decision` about a job: its actions, as calls to the API server.

The model: the gang's object comes first; then deletions, and the creations of each replica type, concurrently within
bounds; the job itself last. Before each call its effect is registered with the expectations; a call that certainly
failed removes the entry, a call without an answer shortens its life. Creations start slowly: one, two, four at a time,
and stop after the first batch with a failure.

A failure does not affect the other actions; at the end all failures are raised together, and the job is retried.
Everything that can fail before a call (an operator's hook, above all) does so before anything is registered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from controllers.jobs.api.errors import ActionsFailed, JobError, not_ours
from controllers.jobs.api.types import (
    Action,
    CreatePod,
    CreateService,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeleteService,
    JobView,
    SyncGang,
)
from controllers.jobs.children.control import ChildControl, Identity
from controllers.jobs.children.expectations import Expected
from controllers.jobs.controller import JobController
from controllers.loop.writes import attempt_all, slow_start
from store.kube.api.errors import AlreadyExists, Conflict, KubeError, NotFound, ServerTimeout, Unreachable
from store.kube.api.objects import (
    Object,
    Resource,
    controller_of,
    is_deleting,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)

_UNCERTAIN = (Unreachable, ServerTimeout)  # the call may have been carried out all the same

Creation: TypeAlias = CreatePod | CreateService
Deletion: TypeAlias = DeletePod | DeleteService
Build: TypeAlias = Callable[[Identity, JobView, Creation], Object]
_Errors: TypeAlias = list[Exception]


@dataclass(frozen=True, slots=True)
class _Children:
    """Pods or services: their control, and the function that returns the key of their expectations."""

    control: ChildControl
    key: Callable[[Object, Object], str]


class JobExecutor:
    """Executes decisions for one operator. `resource`: that of the jobs. `build`: makes the object of a creation."""

    def __init__(self, jobs: JobController, resource: Resource, build: Build) -> None:
        self._jobs, self._resource, self._build = jobs, resource, build
        self._expectations = jobs.expectations
        self._pods = _Children(jobs.pod_control, jobs.pods_key)
        self._services = _Children(jobs.service_control, jobs.services_key)

    async def execute(
        self, identity: Identity, view: JobView, actions: Sequence[Action], known: Iterable[Object]
    ) -> None:
        """Take the actions. `known`: the pods and services that may be deleted.

        Raises `ActionsFailed` at the end. Errors of `build` are raised before any call.
        """
        job = identity.job
        work = [*self._creations(identity, view, actions), *self._deletions(job, actions, known)]
        errors = await self._care_for_gang(identity, view, actions)
        if not errors:
            for failures in await attempt_all(work, lambda start: start(), errors=()):
                errors += failures
        if errors:
            raise ActionsFailed(job, errors)
        if any(isinstance(action, DeleteJob) for action in actions):
            with suppress(NotFound, Conflict):  # gone, or another of its name
                await self._jobs.kube_client.delete(
                    self._resource, name_of(job), namespace_of(job), uid=uid_of(job), propagation="Background"
                )

    async def _care_for_gang(self, identity: Identity, view: JobView, actions: Sequence[Action]) -> _Errors:
        gang = self._jobs.gang
        if gang is None:
            return []
        try:
            for action in actions:
                if isinstance(action, SyncGang):
                    await gang.sync(identity, view, action.min_available)
                elif isinstance(action, DeleteGang):
                    await gang.delete(identity.job)
        except (KubeError, JobError) as error:
            return [error]
        return []

    def _creations(
        self, identity: Identity, view: JobView, actions: Sequence[Action]
    ) -> Iterator[Callable[[], Awaitable[_Errors]]]:
        """Yield one function per kind of child and replica type, which creates all its objects."""
        groups: dict[tuple[type, str], list[Object]] = {}
        for action in actions:
            if isinstance(action, CreatePod | CreateService):
                body = self._build(identity, view, action)
                groups.setdefault((type(action), action.type), []).append(body)
        for (kind, _), bodies in groups.items():
            children = self._pods if kind is CreatePod else self._services
            yield partial(self._create_all, identity.job, children, bodies)

    async def _create_all(self, job: Object, children: _Children, bodies: list[Object]) -> _Errors:
        key = children.key(job, bodies[0])
        self._expectations.expect_creations(key, map(name_of, bodies))
        errors: _Errors = []

        async def create(body: Object) -> bool:
            error = await self._create(job, children, key, body)
            errors.extend([error] if error is not None else [])
            return error is None

        for body in await slow_start(bodies, create):
            self._expectations.creation_observed(key, name_of(body))
        return errors

    async def _create(self, job: Object, children: _Children, key: str, body: Object) -> Exception | None:
        name = name_of(body)
        try:
            await children.control.create(job, body)
        except _UNCERTAIN as error:
            self._expectations.uncertain(Expected(key, "create", name))
            return error
        except AlreadyExists:
            self._expectations.creation_observed(key, name)
            return await self._trouble_with_namesake(job, children.control.resource, name)
        except KubeError as error:
            self._expectations.creation_observed(key, name)
            return error
        return None

    async def _trouble_with_namesake(self, job: Object, resource: Resource, name: str) -> Exception | None:
        """Return the error for a taken name; None if its holder is the job's own object or an orphan it will adopt."""
        try:
            found = await self._jobs.kube_client.get(resource, name, namespace_of(job))
        except KubeError as error:
            return error
        controller = controller_of(found)
        ours = controller is not None and controller.get("uid") == uid_of(job)
        labels = self._jobs.gen_labels(name_of(job))
        adoptable = controller is None and labels.items() <= labels_of(found).items() and not is_deleting(found)
        return None if ours or adoptable else not_ours(found, resource, job, self._jobs.kind.kind)

    def _deletions(
        self, job: Object, actions: Sequence[Action], known: Iterable[Object]
    ) -> Iterator[Callable[[], Awaitable[_Errors]]]:
        """Yield one function per kind of child, which deletes all its objects."""
        objects = {uid_of(obj): obj for obj in known}
        for kind, children in ((DeletePod, self._pods), (DeleteService, self._services)):
            deletions = [action for action in actions if isinstance(action, kind)]
            if deletions:
                keys = {action.uid: children.key(job, objects[action.uid]) for action in deletions}
                yield partial(self._delete_all, job, children, deletions, keys)

    async def _delete_all(
        self, job: Object, children: _Children, deletions: Sequence[Deletion], keys: Mapping[str, str]
    ) -> _Errors:
        for uid, key in keys.items():
            self._expectations.expect_deletions(key, [uid])

        async def delete(deletion: Deletion) -> Exception | None:
            return await self._delete(job, children, keys[deletion.uid], deletion)

        errors = await attempt_all(deletions, delete, errors=())
        return [error for error in errors if error is not None]

    async def _delete(self, job: Object, children: _Children, key: str, deletion: Deletion) -> Exception | None:
        force = isinstance(deletion, DeletePod) and deletion.force
        try:
            accepted = await children.control.delete(job, deletion.name, deletion.uid, why=deletion.reason, force=force)
        except _UNCERTAIN as error:
            self._expectations.uncertain(Expected(key, "delete", deletion.uid))
            return error
        except KubeError as error:
            self._expectations.deletion_observed(key, deletion.uid)
            return error
        if not accepted:
            self._expectations.deletion_observed(key, deletion.uid)
        return None
