"""Executes a `Decision` about a job: its actions, as calls to the API server.

The model: the gang's object comes first; then the companion, deletions, and the creations of services; then those of
pods, so that a pod's name is known when it starts; the job itself last. The calls of a step run concurrently within
bounds. Before each call its effect is registered with the expectations; a call that certainly
failed removes the entry, a call without an answer shortens its life. Creations start slowly: one, two, four at a time,
and stop after the first batch with a failure. Of a job's creations only the first `MAX_CREATIONS` are executed; the
events about these wake the job for the rest. So a job of thousands of replicas leaves time and memory to the others.

A failure does not affect the other actions; at the end all failures are raised together, and the job is retried.
Everything that can fail before a call (an operator's hook, above all) does so before anything is registered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeAlias

from controllers.jobs.api import (
    Action,
    ActionsFailed,
    CreatePod,
    CreateService,
    DeleteCompanion,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeleteService,
    JobError,
    JobView,
    SyncCompanion,
    SyncGang,
    not_ours,
)
from controllers.jobs.control import ChildControl, Identity
from controllers.jobs.controller import Expected, JobController
from controllers.loop.control_loop import ChildVerb, attempt_all, slow_start
from store.kube.api.errors import AlreadyExists, Conflict, KubeError, NotFound, ServerTimeout, Unreachable
from store.kube.api.objects import (
    Object,
    Resource,
    controller_of,
    is_controlled_by,
    is_deleting,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)

MAX_CREATIONS = 500  # of one kind, in one sync; as in Kubernetes' Job controller

_UNCERTAIN = (Unreachable, ServerTimeout)  # the call may have been carried out all the same

Creation: TypeAlias = CreatePod | CreateService
Deletion: TypeAlias = DeletePod | DeleteService
Build: TypeAlias = Callable[[Identity, JobView, Creation], Object]
CompanionBody: TypeAlias = Callable[[Object, JobView], Object | None]
_Errors: TypeAlias = list[Exception]
_Done: TypeAlias = defaultdict[tuple[ChildControl, ChildVerb, str], list[str]]  # names of objects, to announce


class JobExecutor:
    """Executes decisions for one operator. `resource`: that of the jobs. `build`: makes the object of a creation;
    `companion_body`: the desired state of the job's companion."""

    def __init__(self, jobs: JobController, resource: Resource, build: Build, companion_body: CompanionBody) -> None:
        self._jobs, self._resource, self._build, self._companion_body = jobs, resource, build, companion_body
        self._expectations = jobs.expectations

    async def execute(
        self, identity: Identity, view: JobView, actions: Sequence[Action], known: Iterable[Object]
    ) -> None:
        """Take the actions. `known`: the pods and services that may be deleted.

        Raises `ActionsFailed` at the end. Errors of `build` are raised before any call.
        """
        job = identity.job
        done: _Done = defaultdict(list)
        services = [*self._creations(identity, view, actions, CreateService, done)]
        objects = {uid_of(obj): obj for obj in known}
        for kind, control in ((DeletePod, self._jobs.pod_control), (DeleteService, self._jobs.service_control)):
            deletions = [(action, objects[action.uid]) for action in actions if isinstance(action, kind)]
            if deletions:
                services.append(partial(self._delete_all, job, control, deletions, done))
        pods = [*self._creations(identity, view, actions, CreatePod, done)]
        companion = partial(self._tend_companion, identity, view)
        services += [
            partial(companion, action) for action in actions if isinstance(action, SyncCompanion | DeleteCompanion)
        ]
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
            for step in (services, pods):
                for failures in await attempt_all(step, lambda start: start(), errors=()):
                    errors += failures
        finally:
            for (control, verb, why), names in done.items():
                if names:
                    control.announce(job, verb, names, why=why)
        if errors:
            raise ActionsFailed(job, errors)
        if any(isinstance(action, DeleteJob) for action in actions):
            with suppress(NotFound, Conflict):  # gone, or another of its name
                await self._jobs.kube_client.delete(
                    self._resource, name_of(job), namespace_of(job), uid=uid_of(job), propagation="Background"
                )

    async def _tend_companion(
        self, identity: Identity, view: JobView, action: SyncCompanion | DeleteCompanion
    ) -> _Errors:
        control = self._jobs.companion
        if control is None:
            return []
        try:
            if isinstance(action, DeleteCompanion):
                await control.delete(identity.job)
            elif (body := self._companion_body(identity.job, view)) is not None:
                await control.apply(identity, body)
        except (KubeError, JobError) as error:
            return [error]
        return []

    def _creations(
        self,
        identity: Identity,
        view: JobView,
        actions: Sequence[Action],
        kind: type[CreatePod] | type[CreateService],
        done: _Done,
    ) -> Iterator[Callable[[], Awaitable[_Errors]]]:
        """Yield one function per replica type, which creates its objects of this kind."""
        groups: dict[str, list[Object]] = {}
        creations = (action for action in actions if isinstance(action, kind))
        for creation in islice(creations, MAX_CREATIONS):
            groups.setdefault(creation.type, []).append(self._build(identity, view, creation))
        control = self._jobs.pod_control if kind is CreatePod else self._jobs.service_control
        for bodies in groups.values():
            yield partial(self._create_all, identity.job, control, bodies, done[control, "create", ""])

    async def _create_all(
        self, job: Object, control: ChildControl, bodies: list[Object], created: list[str]
    ) -> _Errors:
        key = self._jobs.expectations_key(job, control.resource, bodies[0])
        self._expectations.expect(Expected(key, "create", name_of(body)) for body in bodies)
        errors: _Errors = []

        async def create(body: Object) -> bool:
            name = name_of(body)
            expected = Expected(key, "create", name)
            try:
                await control.create(job, body, announced=False)
            except _UNCERTAIN as error:
                self._expectations.uncertain(expected)
                errors.append(error)
            except AlreadyExists:
                self._expectations.cross_off(expected)
                trouble = await self._trouble_with_namesake(job, control.resource, name)
                errors.extend([trouble] if trouble is not None else [])
                return trouble is None
            except KubeError as error:
                self._expectations.cross_off(expected)
                errors.append(error)
            else:
                created.append(name)
                return True
            return False

        for body in await slow_start(bodies, create):
            self._expectations.cross_off(Expected(key, "create", name_of(body)))
        return errors

    async def _trouble_with_namesake(self, job: Object, resource: Resource, name: str) -> Exception | None:
        """Return the error for a taken name; None if its holder is the job's own object or an orphan it will adopt."""
        try:
            found = await self._jobs.kube_client.get(resource, name, namespace_of(job))
        except KubeError as error:
            return error
        if is_controlled_by(found, job):
            return None
        labels, is_orphan = self._jobs.gen_labels(name_of(job)), controller_of(found) is None
        adoptable = is_orphan and labels.items() <= labels_of(found).items() and not is_deleting(found)
        return None if adoptable else not_ours(found, resource, job, self._jobs.kind.kind)

    async def _delete_all(
        self, job: Object, control: ChildControl, deletions: Sequence[tuple[Deletion, Object]], done: _Done
    ) -> _Errors:
        work = []
        for deletion, obj in deletions:
            key = self._jobs.expectations_key(job, control.resource, obj)
            work.append((Expected(key, "delete", deletion.uid), deletion))
        self._expectations.expect(expected for expected, _ in work)

        async def delete(item: tuple[Expected, Deletion]) -> Exception | None:
            expected, deletion = item
            force = isinstance(deletion, DeletePod) and deletion.force
            try:
                accepted = await control.delete(job, deletion.name, deletion.uid, force=force, announced=False)
            except _UNCERTAIN as error:
                self._expectations.uncertain(expected)
                return error
            except KubeError as error:
                self._expectations.cross_off(expected)
                return error
            if accepted:
                done[control, "delete", deletion.reason].append(deletion.name)
            else:
                self._expectations.cross_off(expected)
            return None

        errors = await attempt_all(work, delete, errors=())
        return [error for error in errors if error is not None]
