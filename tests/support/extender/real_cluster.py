"""HiveD on a real control plane: its kube-scheduler, hollow nodes with GPUs, and `rcfarm extender` as a process.

The model: everything but the control plane belongs to this block. Its nodes have the names in its configuration; its
kube-scheduler calls its extender, which sees every enabled pod of the whole cluster: use one such block at a time.

What kube-scheduler 1.20.2 does with an extender (`tests/data/hived` has bodies that it sent):

- A pod that got no node is retried once more when its own condition has been written, after some 50 ms, and then only
  when something happens in the cluster (a pod leaves a node, a node is added or changes in what matters), or 60 to 90 s
  later. Clusters in use have such traffic; here a task relabels a node every `TRAFFIC` seconds.
- `preempt` is never called: 1.20.0 to 1.20.9 and 1.21.0 to 1.21.3 ignore extenders when they preempt
  (kubernetes#102971). They nominate a node without naming a victim when it has a pod of lower priority, and when two
  nodes have one, they panic and exit: here, the plugin DefaultPreemption is switched off. Fixed releases call `preempt`
  within the same attempt, milliseconds after `filter`, with the nodes that have such pods; a node without victims of
  the scheduler's own has `"Pods": null` there. Later ones leave such nodes out and so don't call at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from scheduler.hived.contract import POD_SCHEDULING_ENABLE, POD_SCHEDULING_SPEC
from store.kube.api.errors import AlreadyExists, Forbidden, KubeError, NotFound
from store.kube.api.objects import EVENTS, NODES, PODS, Object, Resource, name_of
from store.kube.client.client import KubeClient
from tests.support.extender.replica import ExtenderProcess
from tests.support.hived.cluster import Job
from tests.support.hived.design_cluster import quota, regular
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet

SCHEDULER = "hived"
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)
TRAFFIC = 0.4  # seconds
_CLASS = "hived-test-"
PATIENCE = 40.0  # time limit for pods, in seconds


def hosts(nodes: Sequence[str], quotas: Mapping[str, int], **settings: Any) -> Object:
    """Return a configuration of nodes of 8 GPUs, in two sockets of 4. `quotas`: whole nodes by virtual cluster."""
    whole = {name: quota(("V100-HOST", number)) for name, number in quotas.items()}
    return regular("V100 4 V100-SOCKET 2 V100-HOST*", nodes, **whole) | settings


def pod_of(job: Job, name: str, leaves: int, **hollow: str) -> Object:
    """Return a pod of a job as its owner writes it. `hollow`: options of its hollow kubelet, with underscores."""
    plan = {f"hollow/{key.replace('_', '-')}": value for key, value in hollow.items()}
    annotations = {POD_SCHEDULING_SPEC: yaml.safe_dump(job.spec(leaves)), **plan}
    return enabled_pod(name, annotations, priorityClassName=priority_class(job.priority))


def enabled_pod(name: str, annotations: Mapping[str, str], **spec: Any) -> Object:
    limits = {POD_SCHEDULING_ENABLE: 1}
    container = {"name": "main", "image": "example.org/train:1", "resources": {"limits": limits}}
    spec = {"schedulerName": SCHEDULER, "restartPolicy": "Never", "containers": [container], **spec}
    return {"metadata": {"name": name, "annotations": dict(annotations)}, "spec": spec}


def priority_class(priority: int) -> str:
    """Return the name of the Kubernetes PriorityClass for a priority of HiveD."""
    return _CLASS + ("opportunistic" if priority < 0 else str(priority))


async def create_pod(api: KubeClient, pod: Object, namespace: str) -> Object:
    """Create a pod whose PriorityClass may be new: admission reads it from a cache."""
    created: list[Object] = []

    async def is_admitted() -> bool:
        try:
            created.append(await api.create(PODS, pod, namespace))
        except Forbidden as error:
            if "no PriorityClass" not in str(error):
                raise
        return bool(created)

    await until(is_admitted, f"the PriorityClass of pod {name_of(pod)} seen by admission")
    return created[0]


class HivedCluster:
    """Actions on the cluster of a block, and its state. `nodes`: the nodes of 8 GPUs."""

    def __init__(
        self, api: KubeClient, kubelet: HollowKubelet, namespace: str, nodes: Sequence[str], extender: ExtenderProcess
    ) -> None:
        self.api, self.kubelet, self.namespace, self.nodes, self.extender = api, kubelet, namespace, nodes, extender
        self._classes: set[str] = set()

    def job(self, name: str, virtual_cluster: str, priority: int, *members: tuple[int, int], **asked: Any) -> Job:
        """Return a job whose group name is unique in the whole cluster. `members`: (pods, GPUs of each) pairs."""
        return Job(f"{self.namespace}/{name}", virtual_cluster, priority, members, **{"ignore": True, **asked})

    async def submit(self, job: Job, **hollow: str) -> list[str]:
        """Create all pods of a job, `NAME-0` and so on. Return their names."""
        sizes = [leaves for pods, leaves in job.members for _ in range(pods)]
        names = [f"{job.name.rpartition('/')[2]}-{number}" for number in range(len(sizes))]
        for name, leaves in zip(names, sizes, strict=True):
            await self.create(pod_of(job, name, leaves, **hollow))
        return names

    async def create(self, pod: Object) -> Object:
        await self.ensure_priority(pod["spec"].get("priorityClassName", ""))
        return await create_pod(self.api, pod, self.namespace)

    async def ensure_priority(self, name: str) -> None:
        """Create the PriorityClass of a name that `priority_class` made."""
        if name.startswith(_CLASS) and name not in self._classes:
            level = name.removeprefix(_CLASS)
            value = -10 if level == "opportunistic" else int(level)
            with contextlib.suppress(AlreadyExists):
                await self.api.create(PRIORITY_CLASSES, {"metadata": {"name": name}, "value": value})
            self._classes.add(name)

    async def pods(self) -> dict[str, Object]:
        """Return the pods by name."""
        return {name_of(pod): pod for pod in (await self.api.list(PODS, self.namespace)).items}

    async def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(NotFound):
                await self.api.delete(PODS, name, self.namespace)

    async def set_ready(self, node: str, ready: bool) -> None:
        """Set a node's Ready condition, as its kubelet would."""
        status = {"status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}
        await self.api.patch(NODES, node, "", status, patch_type="strategic", subresource="status")

    async def set_cordoned(self, node: str, cordoned: bool) -> None:
        await self.api.patch(NODES, node, "", {"spec": {"unschedulable": cordoned or None}})

    async def until_bound(self, names: Collection[str]) -> dict[str, Object]:
        """Wait until each of the pods has a node. Return the pods."""
        return await self.until_pods(names, node_of, "bound")

    async def until_gone(self, names: Collection[str]) -> None:
        """Wait until the API server has none of the pods."""

        async def are_gone() -> bool:
            return not set(names) & set(await self.pods())

        await until(are_gone, f"{names} gone")

    async def until_pods(
        self, names: Collection[str], condition: Callable[[Object], object], what: str
    ) -> dict[str, Object]:
        """Wait until the condition holds for each of the pods. Return the pods."""
        found: dict[str, Object] = {}

        async def are_so() -> bool:
            nonlocal found
            found = await self.pods()
            return all(name in found and condition(found[name]) for name in names)

        try:
            await until(are_so, f"{sorted(names)} {what}", within=PATIENCE)
        except AssertionError as error:
            state = {name: (node_of(pod), message_of(pod)) for name, pod in found.items()}
            raise AssertionError(f"{error}; the pods: {state}; the extender: {self.extender.log()[-4000:]}") from None
        return {name: found[name] for name in names}

    async def until_reported(self, name: str, text: str) -> None:
        """Wait until a pod's condition and a FailedScheduling Event contain the text."""
        await self.until_pods([name], lambda pod: text in message_of(pod), f"reported {text!r}")

        async def is_reported() -> bool:
            selector = f"involvedObject.name={name},reason=FailedScheduling"
            events = (await self.api.list(EVENTS, self.namespace, field_selector=selector)).items
            return any(text in (event.get("message") or "") for event in events)

        await until(is_reported, f"an Event of {name} with {text!r}")

    async def inspect(self, path: str) -> Any:
        """Return the extender's answer under /v1/inspect/."""
        return await asyncio.to_thread(_request, f"{self.extender.url}/v1/inspect/{path}")

    async def ask_whom_to_preempt(self, pod: Object) -> Mapping[str, Any]:
        """Call `preempt` for all nodes, as kube-schedulers do that call it, without victims of their own. Return the
        answer by node; empty if a place was found for the pod in the meantime, which is a user error.
        """
        nodes = {node: {"Pods": None, "NumPDBViolations": 0} for node in self.nodes}
        asked = {"Pod": pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": nodes}
        try:
            answer = await asyncio.to_thread(_request, f"{self.extender.url}/v1/extender/preempt", asked)
        except urllib.error.HTTPError as error:
            if error.code == 400 and b"it is already" in error.read():
                return {}
            raise
        return answer["NodeNameToMetaVictims"] or {}

    async def groups(self) -> dict[str, Object]:
        """Return the groups that hold or claim something, by the last part of their names."""
        items = (await self.inspect("affinitygroups/"))["items"] or ()
        return {name_of(each).rpartition("/")[2]: each["status"] for each in items}

    async def make_traffic(self) -> None:
        """Make kube-scheduler retry pods without a place, until cancelled."""
        while True:
            await asyncio.sleep(TRAFFIC)
            with contextlib.suppress(KubeError):
                await self.api.patch(NODES, self.nodes[-1], "", {"metadata": {"labels": {"seen": str(time.time())}}})


@asynccontextmanager
async def hived_cluster(
    plane: ControlPlane,
    namespace: str,
    directory: Path,
    *,
    nodes: int = 2,
    quotas: Mapping[str, int] | None = None,
    config: Object | None = None,
    schedulers: Sequence[str] = (SCHEDULER,),
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[HivedCluster]:
    """Run `nodes` of 8 GPUs with `quotas` of whole ones by virtual cluster (by default all are for "a"), or another
    `config`, and everything that serves them. `schedulers`: names of kube-schedulers for pods. `settings`: the
    extender's.
    """
    names = [f"{namespace}-{number}" for number in range(nodes)]
    config = config or hosts(names, quotas or {"a": nodes})
    async with await KubeClient.connect(str(plane.kubeconfig)) as api, asyncio.TaskGroup() as group:
        kubelet = HollowKubelet(api, namespace=namespace, restart_delay=0.05)
        tasks = [group.create_task(kubelet.run())]
        await kubelet.add_nodes(nodes, prefix=namespace)
        with ExtenderProcess(directory, plane.kubeconfig, config, settings or {}) as extender:
            cluster = HivedCluster(api, kubelet, namespace, names, extender)
            plane.start_scheduler(scheduler_configuration(extender.url, schedulers))
            await extender.until_ready()
            tasks.append(group.create_task(cluster.make_traffic()))
            try:
                yield cluster
            finally:
                plane.scheduler.kill()
                for task in tasks:
                    task.cancel()
                await kubelet.remove_nodes()


def scheduler_configuration(url: str, names: Sequence[str]) -> dict[str, Any]:
    """Return keys of a `KubeSchedulerConfiguration`: the extender at `url`, for pods of these `schedulerName`s."""
    entry = {
        "urlPrefix": f"{url}/v1/extender",
        "filterVerb": "filter",
        "preemptVerb": "preempt",
        "bindVerb": "bind",
        "enableHTTPS": False,
        "httpTimeout": "5s",
        "nodeCacheCapable": True,
        "ignorable": False,
        "managedResources": [{"name": POD_SCHEDULING_ENABLE, "ignoredByScheduler": True}],
    }
    plugins = {"postFilter": {"disabled": [{"name": "DefaultPreemption"}]}}
    profiles = [{"schedulerName": name, "plugins": plugins} for name in names]
    backoff = {"podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 1}
    return {"extenders": [entry], "profiles": profiles, **backoff}


def node_of(pod: Object) -> str:
    return str(pod["spec"].get("nodeName") or "")


def message_of(pod: Object) -> str:
    """Return why the pod is not scheduled."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((each.get("message", "") for each in conditions if each["type"] == "PodScheduled"), "")


def _request(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as answer:
        return json.load(answer)
