"""HollowKubelet: nodes without containers, on any `KubeApi`: a real cluster's, or one in memory and in virtual time.

The model: one informer watches pods; each pod bound to one of our nodes is played by one task (`tests.support.
hollow_pod`), which ends when the pod is gone. A pod's behaviour is given by its annotations, see
`tests.support.kube.hollow.behaviour`. With `schedules`, pods that are not bound are bound here as well.

A few calls per pod are made: a status for each step of its life, and its final deletion.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Self

from store.kube.api.errors import NotFound
from store.kube.api.objects import NODES, PODS, Object, uid_of
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state
from tests.support.kube.hollow.pod import EVICTED, Host, PodRun, Program
from tests.support.kube.hollow.scheduler import HollowScheduler, node_body

CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}
PARALLEL = 32  # calls that may be under way


class HollowKubelet:
    """The kubelet of all nodes that `add_nodes` made. `run` is to be cancelled at the end.

    `namespace`: of the pods that are watched, "" for all. `clock`: Unix seconds. `programs`: what containers run in
    earnest, by name. `restart_delay`: seconds until a container that ended starts again.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.time,
        programs: Mapping[str, Program] | None = None,
        schedules: bool = False,
        restart_delay: float = 0.1,
    ) -> None:
        self._api = api
        self._host = Host(api, clock, programs or {}, asyncio.Semaphore(PARALLEL), restart_delay)
        bound_only = "" if schedules else "spec.nodeName!="
        self._informer = Informer(api, PODS, namespace=namespace, field_selector=bound_only, clock=_loop_time)
        self._scheduler = HollowScheduler(api) if schedules else None
        self._nodes: set[str] = set()
        self._runs: dict[str, tuple[PodRun, asyncio.Task[None]]] = {}  # by UID
        self._group: asyncio.TaskGroup | None = None
        self._addresses = ipaddress.ip_network("10.0.0.0/8").hosts()
        self._hosts = ipaddress.ip_network("172.16.0.0/12").hosts()
        self._host_ips: dict[str, str] = {}  # by node

    async def add_nodes(
        self,
        count: int = 1,
        *,
        prefix: str = "",
        labels: Mapping[str, str] | None = None,
        capacity: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Register ready nodes and return their names, `PREFIX-0` and so on; without a prefix, with a unique one.
        `capacity` changes `CAPACITY`."""
        prefix = prefix or f"hollow-{secrets.token_hex(4)}"
        names = [f"{prefix}-{number}" for number in range(count)]
        await asyncio.gather(*(self._register(name, {**CAPACITY, **(capacity or {})}, labels or {}) for name in names))
        return names

    async def remove_nodes(self) -> None:
        """Delete the nodes."""
        for name in self._host_ips:
            try:
                await self._api.delete(NODES, name)
            except NotFound:
                continue

    @asynccontextmanager
    async def playing(self, nodes: int = 0) -> AsyncIterator[Self]:
        """Run it, with this number of nodes, for the duration of the block. All nodes are deleted at its end."""
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.run())
            await self.add_nodes(nodes)
            yield self
            await self.remove_nodes()
            running.cancel()

    async def run(self) -> None:
        """Play pods until cancelled. Raises a program's exception."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._informer.add_handler(self)
            group.create_task(self._informer.run(), name="hollow kubelet's pods")
            if self._scheduler is not None:
                group.create_task(self._scheduler.run(), name="hollow scheduler")

    def fail(self, pod: Object, reason: str = "Evicted", message: str = EVICTED) -> None:
        """Fail a pod on one of the nodes, as its node does in an eviction."""
        self._runs[uid_of(pod)][0].fail(reason, message)

    def added(self, obj: Object) -> None:
        """Handle a new pod, for the informer."""
        if self._scheduler is not None:
            self._scheduler.observe(obj)
        uid, node = uid_of(obj), obj["spec"].get("nodeName")
        if node not in self._nodes or self._group is None:
            return
        if uid in self._runs:
            self._runs[uid][0].update(obj)
        else:
            run = PodRun(obj, self._host, self._new_addresses(node))
            self._runs[uid] = run, self._group.create_task(run.run(), name=f"pod {uid}")

    def updated(self, old: Object, new: Object) -> None:
        """Handle a changed pod, for the informer."""
        self.added(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        """Handle a deleted pod, for the informer."""
        uid = uid_of(last_state(obj))
        if self._scheduler is not None:
            self._scheduler.forget(uid)
        if uid in self._runs:
            self._runs.pop(uid)[1].cancel()

    async def _register(self, name: str, capacity: Mapping[str, str], labels: Mapping[str, str]) -> None:
        self._host_ips[name] = str(next(self._hosts))
        await self._api.create(NODES, node_body(name, capacity, labels))
        await self._api.patch(NODES, name, "", {"spec": {"taints": None}})  # admission marked it as not ready
        if self._scheduler is not None:
            self._scheduler.add_node(name, capacity, labels)
        self._nodes.add(name)
        for obj in self._informer.items():  # pods that were bound before
            if obj["spec"].get("nodeName") == name:
                self.added(obj)

    def _new_addresses(self, node: str) -> Object:
        address = str(next(self._addresses))
        return {"podIP": address, "podIPs": [{"ip": address}], "hostIP": self._host_ips[node]}


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
