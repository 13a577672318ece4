"""Informers on all nodes and all live pods, and what they cache.

The API server filters out completed pods, as for kube-scheduler: the watch reports them as deleted. Of pods without
HiveD's resource limit only the identity is kept, and of nodes only what decisions use.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from controllers.extender.cluster_state import SchedulingView
from scheduler.hived.contract.pods import is_hived_enabled
from store.kube.api.objects import NODES, PODS, Object
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state
from store.kube.informer.reflector import without_managed_fields

LIVE_PODS: Final = "status.phase!=Succeeded,status.phase!=Failed"
_IDENTITY = ("name", "namespace", "uid", "resourceVersion")


class ClusterInformers:
    """Node and pod informers that notify `view`, then call `pod_seen` with each new pod. `clock`: monotonic seconds."""

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
    """Transform: keep what determines a node's health, its spec and conditions."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return without_managed_fields(node) | {"status": {"conditions": conditions}}


def _pod(pod: Object) -> Object:
    """Transform: keep all of a pod that asks for HiveD, and only the identity of any other pod."""
    if is_hived_enabled(pod):
        return without_managed_fields(pod)
    return {"metadata": {name: pod["metadata"][name] for name in _IDENTITY if name in pod["metadata"]}}
