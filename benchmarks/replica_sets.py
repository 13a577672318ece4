"""Speed of Kubernetes' own ReplicaSets on a real control plane, to compare with the start of a farm.

The ReplicaSets and the nodes exist before kube-controller-manager and kube-scheduler start, as the RCs and nodes do
before the farm. Measured is the time from the start of the two programs until every pod is bound to a node. Their
limits (requests per second, concurrent syncs) are raised so far that none of them is reached. There are no kubelets:
a bound pod is what an intent is to a farm.

The two do different work. The scheduler looks for room on the node for each pod's requests and weighs the nodes; a farm
takes the eligible nodes with the fewest pods. A ReplicaSet's pod may share its node with another of the same set; an
RC's may not. etcd does not wait for the disk, and Consul keeps its data in memory.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.fleet import report
from store.kube.api.objects import Object, Resource
from store.kube.client.client import KubeClient
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet

REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
NAMESPACE = "default"
QPS = 10_000  # more than this control plane can answer
LIMIT = 300.0  # seconds after which Kubernetes has failed
POLL = 0.2  # seconds; a poll of 5,000 names takes the API server some 20 ms
_CREATORS = 16  # objects that are created at once
_NAMES = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
_BOUND = f"/api/v1/namespaces/{NAMESPACE}/pods?resourceVersion=0&fieldSelector=spec.nodeName%21%3D"
_APISERVER = ("--max-requests-inflight=5000", "--max-mutating-requests-inflight=5000")
_CONTROLLER_MANAGER = (
    "--controllers=replicaset",
    "--concurrent-replicaset-syncs=100",
    f"--kube-api-qps={QPS}",
    f"--kube-api-burst={QPS}",
)


async def start(sets: int, replicas: int, nodes: int) -> None:
    """Measure the time from the start of kube-controller-manager and kube-scheduler until every pod is bound."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ControlPlane(
            Path(directory), apiserver_flags=_APISERVER, controller_manager_flags=_CONTROLLER_MANAGER
        ) as plane,
    ):
        plane.controller_manager.kill()
        async with await KubeClient.connect(str(plane.kubeconfig)) as api:
            await HollowKubelet(api).add_nodes(nodes)
            await _create(api, [_replica_set(number, replicas) for number in range(sets)])
        began = time.perf_counter()
        plane.controller_manager.spawn()
        client = {"kubeconfig": str(plane.kubeconfig), "qps": QPS, "burst": QPS}
        plane.start_scheduler({"clientConnection": client})
        await _until_bound(plane, sets * replicas)
        seconds = time.perf_counter() - began
    report(f"replicasets_{sets}x{replicas}_on_{nodes}", seconds=round(seconds, 2))


def _replica_set(number: int, replicas: int) -> Object:
    labels = {"app": f"rc{number:05}"}
    container = {"name": "main", "image": "example.org/serve:1"}
    return {
        "apiVersion": REPLICA_SETS.api_version,
        "kind": REPLICA_SETS.kind,
        "metadata": {"name": labels["app"], "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


async def _create(api: KubeClient, bodies: list[Object]) -> None:
    slots = asyncio.Semaphore(_CREATORS)

    async def one(body: Object) -> None:
        async with slots:
            await api.create(REPLICA_SETS, body, NAMESPACE)

    await asyncio.gather(*map(one, bodies))


async def _until_bound(plane: ControlPlane, count: int) -> None:
    async with asyncio.timeout(LIMIT):
        while await asyncio.to_thread(_bound, plane) < count:  # noqa: ASYNC110  # other processes bind them
            await asyncio.sleep(POLL)


def _bound(plane: ControlPlane) -> int:
    return len(plane.request("GET", _BOUND, accept=_NAMES)["items"] or ())
