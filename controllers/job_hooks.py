"""What an operator tells about its own jobs, and what is made of it. Its code may fail: that is one job's trouble."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import structlog

from controllers.job_controller import JobController
from controllers.job_errors import HookFailed
from controllers.job_objects import Amend, Identity, build_pod, build_service
from controllers.job_status import BadStatus
from controllers.job_types import BadSpec, CreatePod, CreateService, JobView
from store.kube.objects import Object, key_of, name_of
from store.kube.resources import Resource

log = structlog.get_logger(__name__)


class JobHooks(Protocol):
    """What the reconciler asks an operator about its jobs."""

    resource: Resource

    def view(self, job: Object) -> JobView:
        """The job as a decision sees it, without its gang. Raises `BadSpec`, `BadStatus`."""

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Tell the pod, which is about to be created, who and where the others are. `pod` may be changed."""


class GuardedHooks:
    """The hooks, and the objects built with them. What their code raises unexpectedly becomes `HookFailed`."""

    def __init__(self, jobs: JobController, hooks: JobHooks) -> None:
        self._jobs, self._hooks = jobs, hooks

    def view(self, job: Object) -> JobView:
        """See `JobHooks.view`."""
        with _guarded("view", key_of(job)):
            return self._hooks.view(job)

    def build(self, identity: Identity, view: JobView, creation: CreatePod | CreateService) -> Object:
        """The object that the action is about; what it overrules is told on the job. Raises `BadSpec`, `HookFailed`."""
        spec = view.replica_specs[creation.type]
        if isinstance(creation, CreateService):
            container = view.default_container
            return build_service(identity, creation.type, creation.index, spec, default_container=container)
        amendments = self._amendments(identity.job, creation)
        pod, warnings = build_pod(identity, creation.type, creation.index, spec, amendments=amendments)
        for warning in warnings:
            self._jobs.tell(identity.job, warning)
        return pod

    def _amendments(self, job: Object, creation: CreatePod) -> Iterator[Amend]:
        yield partial(self._set_cluster_spec, job, creation)
        if self._jobs.gang is not None:
            yield partial(self._jobs.gang.kind.decorate, group=name_of(job), replica_type=creation.type)

    def _set_cluster_spec(self, job: Object, creation: CreatePod, pod: Object) -> None:
        with _guarded("set_cluster_spec", name_of(pod)):
            self._hooks.set_cluster_spec(job, pod, creation.type, creation.index)


@contextmanager
def _guarded(hook: str, about: str) -> Iterator[None]:
    try:
        yield
    except (BadSpec, BadStatus):
        raise
    except Exception as error:  # whatever it is, it must not pass for an error of ours
        log.exception("An operator's hook failed", hook=hook, about=about)
        raise HookFailed(f"{hook} failed for {about}: {error!r}") from error
