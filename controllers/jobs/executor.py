"""Executes a `Decision` about a job: its actions, as calls to the API server.

The model: the gang's object comes first; then deletions, and the creations of each replica type, concurrently within
bounds; the job itself last. Before each call its effect is registered with the expectations; a call that certainly
failed removes the entry, a call without an answer shortens its life. Creations start slowly: one, two, four at a time,
and stop after the first batch with a failure.

A failure does not affect the other actions; at the end all failures are raised together, and the job is retried.
Everything that can fail before a call (an operator's hook, above all) does so before anything is registered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from controllers.jobs.api import (
    Action,
    ActionsFailed,
    CreatePod,
    CreateService,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeleteService,
    JobError,
    JobView,
    SyncGang,
    not_ours,
)
from controllers.jobs.children import Expected
from controllers.jobs.control import ChildControl, Identity
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


class JobExecutor:
    """Executes decisions for one operator. `resource`: that of the jobs. `build`: makes the object of a creation."""

    def __init__(self, jobs: JobController, resource: Resource, build: Build) -> None:
        self._jobs, self._resource, self._build = jobs, resource, build
        self._expectations = jobs.expectations

    async def execute(
        self, identity: Identity, view: JobView, actions: Sequence[Action], known: Iterable[Object]
    ) -> None:
        """Take the actions. `known`: the pods and services that may be deleted.

        Raises `ActionsFailed` at the end. Errors of `build` are raised before any call.
        """
        job = identity.job
        work = [*self._creations(identity, view, actions), *self._deletions(job, actions, known)]
        errors: _Errors = []
        gang = self._jobs.gang
        try:
            for action in actions:
                if gang is not None and isinstance(action, SyncGang):
                    await gang.sync(identity, view, action.min_available)
                elif gang is not None and isinstance(action, DeleteGang):
                    await gang.delete(identity.job)
        except (KubeError, JobError) as error:
            errors.append(error)
        else:
            for failures in await attempt_all(work, lambda start: start(), errors=()):
                errors += failures
        if errors:
            raise ActionsFailed(job, errors)
        if any(isinstance(action, DeleteJob) for action in actions):
            with suppress(NotFound, Conflict):  # gone, or another of its name
                await self._jobs.kube_client.delete(
                    self._resource, name_of(job), namespace_of(job), uid=uid_of(job), propagation="Background"
                )

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
            control = self._jobs.pod_control if kind is CreatePod else self._jobs.service_control
            yield partial(self._create_all, identity.job, control, bodies)

    async def _create_all(self, job: Object, control: ChildControl, bodies: list[Object]) -> _Errors:
        key = self._jobs.expectations_key(job, control.resource, bodies[0])
        self._expectations.expect_creations(key, map(name_of, bodies))
        errors: _Errors = []

        async def create(body: Object) -> bool:
            name = name_of(body)
            try:
                await control.create(job, body)
            except _UNCERTAIN as error:
                self._expectations.uncertain(Expected(key, "create", name))
                errors.append(error)
            except AlreadyExists:
                self._expectations.creation_observed(key, name)
                trouble = await self._trouble_with_namesake(job, control.resource, name)
                errors.extend([trouble] if trouble is not None else [])
                return trouble is None
            except KubeError as error:
                self._expectations.creation_observed(key, name)
                errors.append(error)
            else:
                return True
            return False

        for body in await slow_start(bodies, create):
            self._expectations.creation_observed(key, name_of(body))
        return errors

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
        for kind, control in ((DeletePod, self._jobs.pod_control), (DeleteService, self._jobs.service_control)):
            deletions = [action for action in actions if isinstance(action, kind)]
            if deletions:
                found = [(action, objects[action.uid]) for action in deletions]
                yield partial(self._delete_all, job, control, found)

    async def _delete_all(
        self, job: Object, control: ChildControl, deletions: Sequence[tuple[Deletion, Object]]
    ) -> _Errors:
        work = [(self._jobs.expectations_key(job, control.resource, obj), deletion) for deletion, obj in deletions]
        for key, deletion in work:
            self._expectations.expect_deletions(key, [deletion.uid])

        async def delete(item: tuple[str, Deletion]) -> Exception | None:
            key, deletion = item
            force = isinstance(deletion, DeletePod) and deletion.force
            try:
                accepted = await control.delete(job, deletion.name, deletion.uid, why=deletion.reason, force=force)
            except _UNCERTAIN as error:
                self._expectations.uncertain(Expected(key, "delete", deletion.uid))
                return error
            except KubeError as error:
                self._expectations.deletion_observed(key, deletion.uid)
                return error
            if not accepted:
                self._expectations.deletion_observed(key, deletion.uid)
            return None

        errors = await attempt_all(work, delete, errors=())
        return [error for error in errors if error is not None]
