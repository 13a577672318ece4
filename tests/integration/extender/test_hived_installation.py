"""HiveD as it is installed: the objects of `kubectl apply -k` on a real API server, and programs under those rights."""

from __future__ import annotations

import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from scheduler.hived.config.resolve import resolve
from scheduler.hived.contract import POD_LEAF_CELL_ISOLATION
from store.kube.api.objects import NODES, PODS, Object, annotations_of, name_of
from store.kube.client.client import KubeClient
from tests.support.extender.manifests import (
    COMPLETE,
    EXAMPLES,
    built,
    configuration,
    example_pods,
    scheduler_configurations,
)
from tests.support.extender.real_cluster import create_pod
from tests.support.extender.replica import ExtenderProcess
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import CAPACITY
from tests.support.kube.hollow.scheduler import node_body

SYSTEM = "rcfarm-hived"
PLURALS = {"NetworkPolicy": "networkpolicies", "PriorityClass": "priorityclasses"}
CLUSTER_WIDE = {"Namespace", "ClusterRole", "ClusterRoleBinding", "PriorityClass"}


def collection_of(obj: Object) -> str:
    """Return the path of the collection that an object belongs to."""
    version, kind = obj["apiVersion"], obj["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = "" if kind in CLUSTER_WIDE else f"/namespaces/{obj['metadata']['namespace']}"
    return f"{root}{place}/{PLURALS.get(kind, f'{kind.lower()}s')}"


@pytest.fixture
def installed(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The shared control plane with all objects applied. Other tests may have created the priority classes."""
    created = [obj for obj in built(COMPLETE).values() if create(control_plane, obj)]
    yield control_plane
    for obj in reversed(created):
        control_plane.request("DELETE", f"{collection_of(obj)}/{name_of(obj)}")


def create(plane: ControlPlane, obj: Object) -> bool:
    """Create the object. Return whether it was new."""
    try:
        plane.request("POST", collection_of(obj), obj)
    except urllib.error.HTTPError as error:
        if error.code == 409 and obj["kind"] == "PriorityClass":
            return False
        raise AssertionError(f"{obj['kind']} {name_of(obj)}: {error.read().decode()}") from error
    return True


def kubeconfig(plane: ControlPlane, directory: Path, account: str) -> Path:
    """Write the kubeconfig of an installed service account."""
    return plane.write_kubeconfig(directory / account, token=plane.new_token(SYSTEM, account))


@asynccontextmanager
async def machines(kube: KubeClient) -> AsyncIterator[None]:
    """Create the nodes of the example's configuration, without a kubelet that would start containers."""
    chains = resolve(configuration(EXAMPLES / "hived.yaml")).chains.values()
    names = [node for chain in chains for node in chain.nodes]
    for name in names:
        await kube.create(NODES, node_body(name, CAPACITY, {}))
        await kube.patch(NODES, name, "", {"spec": {"taints": None}})  # a new node is not ready
    yield
    for name in names:
        await kube.delete(NODES, name)


@asynccontextmanager
async def extender(plane: ControlPlane, directory: Path) -> AsyncIterator[ExtenderProcess]:
    """Run the extender with its installed rights and the example's configuration."""
    written = yaml.safe_load((EXAMPLES / "hived.yaml").read_text())
    access = kubeconfig(plane, directory, "rcfarm-extender")
    with ExtenderProcess(directory / "extender", access, written, {}) as process:
        await process.until_ready()
        yield process


def start_scheduler(plane: ControlPlane, directory: Path, tenant: str, url: str) -> None:
    """Start a tenant's kube-scheduler as installed, except for paths and the version, which is 1.20 here."""
    shipped = scheduler_configurations()[tenant]
    (entry,) = shipped["extenders"]
    changes = {
        "apiVersion": "kubescheduler.config.k8s.io/v1beta1",
        "clientConnection": {"kubeconfig": str(kubeconfig(plane, directory, "hived-scheduler"))},
        "extenders": [entry | {"urlPrefix": f"{url}/v1/extender"}],
    }
    plane.start_scheduler(shipped | changes)


async def test_the_examples_run_on_what_is_installed(
    installed: ControlPlane, kube: KubeClient, namespace: str, tmp_path: Path
) -> None:
    """Every manifest is accepted. With just their rights, the extender and each tenant's kube-scheduler place the pods
    of the examples: the gang on two whole nodes, the guaranteed pod on a socket, the opportunistic pod on two devices.
    No request is ever forbidden."""
    async with machines(kube), extender(installed, tmp_path) as process:
        for tenant, files in (("prod", ["gang.yaml"]), ("research", ["guaranteed.yaml", "opportunistic.yaml"])):
            start_scheduler(installed, tmp_path, tenant, process.url)
            for pod in (each for file in files for each in example_pods(file)):
                await create_pod(kube, pod, namespace)
            await until(partial(all_bound, kube, namespace, tenant), f"the pods of {tenant} bound")
            assert "forbidden" not in installed.scheduler.log()
        pods = {name_of(pod): pod for pod in (await kube.list(PODS, namespace)).items}
        assert "forbidden" not in process.log()
    installed.scheduler.kill()
    devices = {name: annotations_of(pod)[POD_LEAF_CELL_ISOLATION].split(",") for name, pod in pods.items()}
    assert devices["train-0"] == devices["train-1"] == list("01234567")
    assert pods["train-0"]["spec"]["nodeName"] != pods["train-1"]["spec"]["nodeName"]
    assert devices["tune"] in (list("0123"), list("4567"))
    assert len(devices["sweep"]) == 2


async def all_bound(kube: KubeClient, namespace: str, tenant: str) -> bool:
    pods = (await kube.list(PODS, namespace)).items
    own = [pod for pod in pods if pod["spec"]["schedulerName"] == f"hived-{tenant}"]
    return bool(own) and all(pod["spec"].get("nodeName") for pod in own)
