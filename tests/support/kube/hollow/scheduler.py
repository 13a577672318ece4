"""Binds pods to hollow nodes, first fit in node name order, by what pods request and nodes have.

The model: pods wait in the order in which they were seen; one that does not fit stays, and does not hold up the others.
A pod holds its share from the moment it is bound (before the API says so) until it is finished or gone.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from decimal import Decimal

from store.kube.api.errors import KubeError, NotFound
from store.kube.api.objects import PODS, Object, is_deleting, name_of, namespace_of, uid_of
from store.kube.api.protocol import KubeApi
from store.quantity import parse_quantity

Amounts = Mapping[str, Decimal]
_FINISHED = ("Succeeded", "Failed")
_PARALLEL = 32
RETRY = 0.1  # seconds after a binding that failed


class HollowScheduler:
    """Gets pods by `observe` and `forget`; `add_node` adds capacity."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._nodes: dict[str, tuple[Amounts, Mapping[str, str]]] = {}
        self._used: dict[str, defaultdict[str, Decimal]] = {}
        self._held: dict[str, tuple[str, Amounts]] = {}  # by UID
        self._waiting: dict[str, Object] = {}
        self._changed = asyncio.Event()

    def add_node(self, name: str, capacity: Mapping[str, str], labels: Mapping[str, str]) -> None:
        self._nodes[name] = {resource: parse_quantity(amount) for resource, amount in capacity.items()}, labels
        self._used.setdefault(name, defaultdict(Decimal))
        self._changed.set()

    def observe(self, pod: Object) -> None:
        """Take note of a new or changed pod."""
        uid, node = uid_of(pod), pod["spec"].get("nodeName")
        if (pod.get("status") or {}).get("phase") in _FINISHED:
            self.forget(uid)
        elif node:
            self._waiting.pop(uid, None)
            if uid not in self._held and node in self._nodes:
                self._hold(uid, node, requests_of(pod))
        elif uid not in self._held and not is_deleting(pod):
            self._waiting[uid] = pod
            self._changed.set()

    def forget(self, uid: str) -> None:
        """Take note that a pod is gone, or needs nothing any more."""
        self._waiting.pop(uid, None)
        node, amounts = self._held.pop(uid, ("", {}))
        if node:
            self._take(node, amounts, -1)
            self._changed.set()

    async def run(self) -> None:
        """Bind pods until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            placed = [(pod, node) for pod in list(self._waiting.values()) if (node := self._place(pod))]
            for start in range(0, len(placed), _PARALLEL):
                await asyncio.gather(*(self._bind(pod, node) for pod, node in placed[start : start + _PARALLEL]))

    def _place(self, pod: Object) -> str | None:
        """Return the node that takes the pod, and reserve the pod's share there."""
        amounts, wanted = requests_of(pod), (pod["spec"].get("nodeSelector") or {}).items()
        for name, (capacity, labels) in sorted(self._nodes.items()):
            used = self._used[name]
            if wanted <= labels.items() and all(used[key] + amounts[key] <= capacity.get(key, 0) for key in amounts):
                self._hold(uid_of(pod), name, amounts)
                del self._waiting[uid_of(pod)]
                return name
        return None

    def _hold(self, uid: str, node: str, amounts: Amounts) -> None:
        self._held[uid] = node, amounts
        self._take(node, amounts, 1)

    def _take(self, node: str, amounts: Amounts, times: int) -> None:
        for name, amount in amounts.items():
            self._used[node][name] += amount * times

    async def _bind(self, pod: Object, node: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name_of(pod), "uid": uid_of(pod)},
            "target": {"kind": "Node", "name": node},
        }
        try:
            await self._api.create(PODS, body, namespace_of(pod), name=name_of(pod), subresource="binding")
        except KubeError:
            self.forget(uid_of(pod))
            await self._look_again(pod)

    async def _look_again(self, pod: Object) -> None:
        """Read the pod after a failed binding: it may be bound, still waiting, or gone."""
        while True:
            await asyncio.sleep(RETRY)
            try:
                current = await self._api.get(PODS, name_of(pod), namespace_of(pod))
            except NotFound:
                return
            except KubeError:
                continue
            if uid_of(current) == uid_of(pod):
                self.observe(current)
            return


def requests_of(pod: Object) -> Amounts:
    """Return what a pod needs: the sum over its containers, or the largest init container, and one pod slot."""
    spec = pod["spec"]
    total: dict[str, Decimal] = {}
    for container in spec["containers"]:
        for name, amount in _amounts(container):
            total[name] = total.get(name, Decimal(0)) + amount
    for container in spec.get("initContainers") or ():
        for name, amount in _amounts(container):
            total[name] = max(total.get(name, amount), amount)
    return total | {"pods": Decimal(1)}


def _amounts(container: Object) -> Iterator[tuple[str, Decimal]]:
    resources = container.get("resources") or {}
    asked = (resources.get("limits") or {}) | (resources.get("requests") or {})
    for name, value in asked.items():
        yield name, parse_quantity(value)


def node_body(name: str, capacity: Mapping[str, str], labels: Mapping[str, str]) -> Object:
    """Return a ready Node as its kubelet would register it."""
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {"capacity": dict(capacity), "allocatable": dict(capacity), "conditions": [ready]}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
