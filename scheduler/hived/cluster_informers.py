"""Informers on all nodes and all live pods, and what of them is kept.

Pods that have completed are left out by the API server itself, as kube-scheduler has it: to the watch they are
deleted. Of pods that do not ask for HiveD, and of what no decision looks at, hardly anything is kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from scheduler.hived.pod_contract import is_hived_enabled
from scheduler.hived.scheduling_view import SchedulingView
from store.kube.api import KubeApi
from store.kube.handlers import DeletedFinalStateUnknown, last_state
from store.kube.informer import Informer
from store.kube.intake import without_managed_fields
from store.kube.objects import Object
from store.kube.resources import NODES, PODS

LIVE_PODS: Final = "status.phase!=Succeeded,status.phase!=Failed"
_IDENTITY = ("name", "namespace", "uid", "resourceVersion")


class ClusterInformers:
    """They tell `view`. `pod_seen` is called with each pod afterwards. `clock`: monotonic seconds."""

    def __init__(
        self,
        api: KubeApi,
        view: SchedulingView,
        pod_seen: Callable[[Object], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.nodes = Informer(api, NODES, transform=_node, clock=clock, rng=rng)
        self.pods = Informer(api, PODS, field_selector=LIVE_PODS, transform=_pod, clock=clock, rng=rng)
        self.nodes.add_handler(_NodeHandler(view))
        self.pods.add_handler(_PodHandler(view, pod_seen))


class _NodeHandler:
    def __init__(self, view: SchedulingView) -> None:
        self._view = view

    def added(self, obj: Object) -> None:
        self._view.node_seen(obj)

    def updated(self, old: Object, new: Object) -> None:
        self._view.node_seen(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self._view.node_gone(last_state(obj))


class _PodHandler:
    def __init__(self, view: SchedulingView, pod_seen: Callable[[Object], None]) -> None:
        self._view, self._pod_seen = view, pod_seen

    def added(self, obj: Object) -> None:
        self._view.pod_seen(obj)
        self._pod_seen(obj)

    def updated(self, old: Object, new: Object) -> None:
        self._view.pod_seen(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self._view.pod_gone(last_state(obj))


def _node(node: Object) -> Object:
    """Transform: its health is in its spec and its conditions."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return without_managed_fields(node) | {"status": {"conditions": conditions}}


def _pod(pod: Object) -> Object:
    """Transform: everything of a pod that asks for HiveD, of any other only who it is."""
    if is_hived_enabled(pod):
        return without_managed_fields(pod)
    return {"metadata": {name: pod["metadata"][name] for name in _IDENTITY if name in pod["metadata"]}}
