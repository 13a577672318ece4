"""Who is woken by what happens to Frameworks, their ConfigMaps and their pods.

All three lead to the Framework's key: the objects carry its name in a label, and which attempt an object belongs to is
decided in the step, by UIDs, where strangers and leftovers are told apart.
"""

from __future__ import annotations

from controllers.framework.actions import Gone
from controllers.framework.constants import FRAMEWORK_NAME
from controllers.framework.history import History
from controllers.framework.meter import Meter
from controllers.framework.sync import FrameworkSync
from store.kube.handlers import DeletedFinalStateUnknown, last_state
from store.kube.objects import Object, join_key, key_of, labels_of, namespace_of, resource_version_of, uid_of


def framework_key(obj: Object) -> str:
    """Of the Framework that a labelled ConfigMap or pod belongs to; "" without the label."""
    name = labels_of(obj).get(FRAMEWORK_NAME)
    return join_key(namespace_of(obj), name) if name else ""


class FrameworkHandler:
    """Queues Frameworks that somebody else than their own sync has written."""

    def __init__(self, queue: Meter, sync: FrameworkSync, history: History) -> None:
        self._queue, self._sync, self._history = queue, sync, history

    def added(self, obj: Object) -> None:
        self._queue.add(key_of(obj))

    def updated(self, old: Object, new: Object) -> None:
        if resource_version_of(old) != resource_version_of(new) and not self._sync.is_echo(new):
            self._queue.add(key_of(new))

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        final = last_state(obj)
        self._history.framework_deleted(final)
        self._queue.add(key_of(final))


class ChildHandler:
    """Queues the Framework of a ConfigMap or pod, and tells its next step of the object's end."""

    def __init__(self, queue: Meter, sync: FrameworkSync) -> None:
        self._queue, self._sync = queue, sync

    def added(self, obj: Object) -> None:
        self._wake(framework_key(obj))

    def updated(self, old: Object, new: Object) -> None:
        former, current = framework_key(old), framework_key(new)
        self._wake(current)
        if former != current:
            self._wake(former)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        final = last_state(obj)
        key = framework_key(final)
        if not isinstance(obj, DeletedFinalStateUnknown):  # otherwise only a read tells how it ended
            self._sync.tell(key, Gone(uid_of(final), final))
        self._wake(key)

    def _wake(self, key: str) -> None:
        if key:
            self._queue.add_after(key, self._sync.patience.seconds)


class PodHandler(ChildHandler):
    """Pods are also part of the history."""

    def __init__(self, queue: Meter, sync: FrameworkSync, history: History) -> None:
        super().__init__(queue, sync)
        self._history = history

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        final = last_state(obj)
        if framework_key(final):
            self._history.pod_deleted(final)
        super().deleted(obj)
