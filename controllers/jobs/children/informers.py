"""Informers on the objects that an operator's jobs own, and the handlers that queue jobs upon events about them.

Only objects with the operator's group label are watched. They are indexed by the UID of the controlling job and, for
orphans, by the job that their labels name, so the cost of a sync depends on the number of the job's own pods only.

Besides waking its job, an event about a child removes the expectation that it fulfils. An object whose controller
changed wakes both the former and the present one; an orphan wakes the jobs that its labels named before and name now.
One handler class serves every kind of child.

Source of the handlers: those of Kubernetes' ReplicaSet controller, as kubeflow's AddPod, UpdatePod and DeletePod.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

from controllers.jobs.api.names import ControllerInterface
from controllers.jobs.children.expectations import Expectations
from controllers.loop import control_loop
from store.kube.api.objects import (
    PODS,
    SERVICES,
    Object,
    PodPhase,
    Resource,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    phase_of,
    resource_version_of,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, by_controller, by_label, last_state

_OWNER, _ORPHANS = "owner", "orphans"


class JobInformers:
    """Informers in one namespace or, with "", in all. `clock`: monotonic seconds."""

    def __init__(
        self,
        api: KubeApi,
        controller: ControllerInterface,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._namespace, self._clock, self._rng = api, namespace, clock, rng
        self._selector = f"{controller.get_group_name_label_key()}={controller.get_group_name_label_value()}"
        self._job_label = controller.get_job_name_label_key()
        self.pods, self.services = self.make(PODS), self.make(SERVICES)

    def make(self, resource: Resource) -> Informer:
        """Make an informer on one kind of child. Orphans are indexed by `NAMESPACE/VALUE` of the job's label."""
        named = by_label(self._job_label)
        return Informer(
            self._api,
            resource,
            namespace=self._namespace,
            label_selector=self._selector,
            indexers={_OWNER: by_controller, _ORPHANS: lambda obj: named(obj) if controller_of(obj) is None else ()},
            clock=self._clock,
            rng=self._rng,
        )


def candidates(children: Informer, job_uid: str, namespace: str, label_value: str) -> list[Object]:
    """Return the objects that a job may claim: all under its UID, and the orphans under its label."""
    return children.by_index(_OWNER, job_uid) + children.by_index(_ORPHANS, f"{namespace}/{label_value}")


class Owners(Protocol):
    """Finds jobs for children, in the cache."""

    def resolve_controller_ref(self, namespace: str, reference: Object | None) -> Object | None:
        """Return the job that the owner reference names; None for another kind, group, or UID."""

    def job_key_by_labels(self, obj: Object) -> str | None:
        """Return the key of the job that an orphan's labels name."""

    def enqueue(self, key: str) -> None:
        """Queue the job."""


class ChildHandler(control_loop.ChildHandler):
    """Handles one kind of child. `expectations_key`: returns the key of the expectations, given the job and the child;
    None for a kind without expectations.
    """

    def __init__(
        self,
        owners: Owners,
        expectations: Expectations,
        expectations_key: Callable[[Object, Object], str] | None = None,
    ) -> None:
        super().__init__(self._job_key, self._enqueue)
        self._owners, self._expectations, self._expectations_key = owners, expectations, expectations_key

    def added(self, obj: Object) -> None:
        """Handle a new object. If it is being deleted already, it counts as a deletion: it existed before our start."""
        self._cross_off(obj, created=not is_deleting(obj), deleted=is_deleting(obj))
        super().added(obj)
        if controller_of(obj) is None and not is_deleting(obj):
            self._wake_by_labels(obj)

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) == resource_version_of(new):
            return
        self._cross_off(new, deleted=is_deleting(new))
        super().updated(old, new)
        was_released = controller_of(old) is not None
        if controller_of(new) is None and (was_released or labels_of(old) != labels_of(new)):
            self._wake_by_labels(old)
            self._wake_by_labels(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """Handle a deletion. It also counts as the creation, whose event may have been missed."""
        self._cross_off(last_state(obj), created=True, deleted=True)
        super().deleted(obj)

    def _job(self, obj: Object) -> Object | None:
        return self._owners.resolve_controller_ref(namespace_of(obj), controller_of(obj))

    def _job_key(self, obj: Object) -> str | None:
        job = self._job(obj)
        return None if job is None else key_of(job)

    def _cross_off(self, obj: Object, *, created: bool = False, deleted: bool = False) -> None:
        if self._expectations_key is None or not (created or deleted) or (job := self._job(obj)) is None:
            return
        key = self._expectations_key(job, obj)
        if created:
            self._expectations.creation_observed(key, name_of(obj))
        if deleted:
            self._expectations.deletion_observed(key, uid_of(obj))

    def _wake_by_labels(self, obj: Object) -> None:
        key = self._owners.job_key_by_labels(obj)
        if key is not None:
            self._enqueue(key)

    def _enqueue(self, key: str) -> None:
        self._owners.enqueue(key)  # looked up at each event: an operator may replace it


class PodHandler(ChildHandler):
    """Calls `failed` with each pod that is seen to fail, too."""

    def __init__(
        self,
        owners: Owners,
        expectations: Expectations,
        expectations_key: Callable[[Object, Object], str],
        failed: Callable[[Object], None],
    ) -> None:
        super().__init__(owners, expectations, expectations_key)
        self._failed = failed

    def updated(self, old: Object, new: Object) -> None:
        super().updated(old, new)
        if phase_of(new) == PodPhase.FAILED != phase_of(old) and controller_of(new) is not None:
            self._failed(new)
