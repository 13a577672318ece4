"""Waking jobs: what an event about a pod, a service, a gang's object or a job itself says about whose turn it is.

The model: an event is never worked on, it only marks keys as needing work and crosses off expectations. One handler
class serves every kind of child. Whatever changed hands wakes both sides: the former controller and the present one,
or, for an orphan, the jobs that its labels named before and name now. Events come in any order and any number of times.

Source: the handlers of client-go's ReplicaSet controller; the seed's AddPod, UpdatePod, DeletePod and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from controllers.expectations import Expectations
from store.kube.handlers import DeletedFinalStateUnknown, last_state
from store.kube.objects import (
    Object,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    resource_version_of,
    uid_of,
)


class Owners(Protocol):
    """Finds jobs for children, in the cache."""

    def resolve_controller_ref(self, namespace: str, reference: Object | None) -> Object | None:
        """The job that the owner reference means; None for another kind, group, or UID."""

    def job_key_by_labels(self, obj: Object) -> str | None:
        """The key of the job that an orphan's labels name."""

    def enqueue(self, key: str) -> None:
        """The job needs work."""


class ChildHandler:
    """Handles one kind of child. `expectations_key`: where a job's expectations about such a child are, given the job
    and the child; None for a kind of which nothing is expected.
    """

    def __init__(
        self,
        owners: Owners,
        expectations: Expectations,
        expectations_key: Callable[[Object, Object], str] | None = None,
    ) -> None:
        self._owners, self._expectations, self._expectations_key = owners, expectations, expectations_key

    def added(self, obj: Object) -> None:
        """Something new that is being deleted already counts as a deletion: it was there before we were."""
        job = self._owners.resolve_controller_ref(namespace_of(obj), controller_of(obj))
        if job is not None:
            self._cross_off(job, obj, created=not is_deleting(obj), deleted=is_deleting(obj))
            self._owners.enqueue(key_of(job))
        elif controller_of(obj) is None and not is_deleting(obj):
            self._wake_by_labels(obj)

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) == resource_version_of(new):
            return
        changed_hands = controller_of(old) != controller_of(new)
        if changed_hands:
            self._wake_controller(old)
        job = self._owners.resolve_controller_ref(namespace_of(new), controller_of(new))
        if job is not None:
            self._cross_off(job, new, deleted=is_deleting(new))
            self._owners.enqueue(key_of(job))
        elif controller_of(new) is None and (changed_hands or labels_of(old) != labels_of(new)):
            self._wake_by_labels(old)
            self._wake_by_labels(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """What is gone was also created, should its beginning have been missed."""
        last = last_state(obj)
        job = self._owners.resolve_controller_ref(namespace_of(last), controller_of(last))
        if job is not None:
            self._cross_off(job, last, created=True, deleted=True)
            self._owners.enqueue(key_of(job))

    def _cross_off(self, job: Object, obj: Object, *, created: bool = False, deleted: bool = False) -> None:
        if self._expectations_key is None:
            return
        key = self._expectations_key(job, obj)
        if created:
            self._expectations.creation_observed(key, name_of(obj))
        if deleted:
            self._expectations.deletion_observed(key, uid_of(obj))

    def _wake_controller(self, obj: Object) -> None:
        job = self._owners.resolve_controller_ref(namespace_of(obj), controller_of(obj))
        if job is not None:
            self._owners.enqueue(key_of(job))

    def _wake_by_labels(self, obj: Object) -> None:
        key = self._owners.job_key_by_labels(obj)
        if key is not None:
            self._owners.enqueue(key)


class PodHandler(ChildHandler):
    """Also tells `failed` of each pod that is seen to fail."""

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
        if _phase(new) == "Failed" != _phase(old) and controller_of(new) is not None:
            self._failed(new)


def _phase(pod: Object) -> object:
    return (pod.get("status") or {}).get("phase")


class JobHandler:
    """Handles the jobs themselves. `wake`, `gone`: told of each that needs work, or was deleted."""

    def __init__(self, wake: Callable[[Object], None], gone: Callable[[Object], None]) -> None:
        self._wake, self._gone = wake, gone

    def added(self, obj: Object) -> None:
        self._wake(obj)

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) != resource_version_of(new):
            self._wake(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self._gone(last_state(obj))
