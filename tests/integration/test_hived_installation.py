"""HiveD as it is installed: what `kubectl apply -k` applies, on a real API server, and programs under those rights."""

from __future__ import annotations

import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from scheduler.hived.constants import POD_LEAF_CELL_ISOLATION
from scheduler.hived.resolving import resolve
from store.kube.client import KubeClient
from store.kube.objects import Object, annotations_of, name_of
from store.kube.resources import NODES, PODS
from tests.support.control_plane import ControlPlane
from tests.support.extender_process import ExtenderProcess
from tests.support.hived_cluster import create_pod
from tests.support.hived_manifests import (
    COMPLETE,
    EXAMPLES,
    built,
    configuration,
    example_pods,
    scheduler_configurations,
)
from tests.support.hollow_kubelet import CAPACITY
from tests.support.hollow_scheduler import node_body
from tests.support.jobs_replica import until

SYSTEM = "rcfarm-hived"
PLURALS = {"NetworkPolicy": "networkpolicies", "PriorityClass": "priorityclasses"}
CLUSTER_WIDE = {"Namespace", "ClusterRole", "ClusterRoleBinding", "PriorityClass"}


def collection_of(obj: Object) -> str:
    """The path of the collection that an object belongs to."""
    version, kind = obj["apiVersion"], obj["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    place = "" if kind in CLUSTER_WIDE else f"/namespaces/{obj['metadata']['namespace']}"
    return f"{root}{place}/{PLURALS.get(kind, f'{kind.lower()}s')}"


@pytest.fixture
def installed(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The shared control plane, with all of it applied. Priority classes may be there from other tests."""
    created = [obj for obj in built(COMPLETE).values() if create(control_plane, obj)]
    yield control_plane
    for obj in reversed(created):
        control_plane.request("DELETE", f"{collection_of(obj)}/{name_of(obj)}")


def create(plane: ControlPlane, obj: Object) -> bool:
    """Whether it was not there before."""
    try:
        plane.request("POST", collection_of(obj), obj)
    except urllib.error.HTTPError as error:
        if error.code == 409 and obj["kind"] == "PriorityClass":
            return False
        raise AssertionError(f"{obj['kind']} {name_of(obj)}: {error.read().decode()}") from error
    return True


def kubeconfig(plane: ControlPlane, directory: Path, account: str) -> Path:
    """Of a service account that is installed."""
    return plane.write_kubeconfig(directory / account, token=plane.new_token(SYSTEM, account))


@asynccontextmanager
async def machines(kube: KubeClient) -> AsyncIterator[None]:
    """The nodes of the example's configuration, with nobody on them who would start a container."""
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
    """The extender with the rights that it is installed with, and the example's configuration."""
    written = yaml.safe_load((EXAMPLES / "hived.yaml").read_text())
    access = kubeconfig(plane, directory, "rcfarm-extender")
    with ExtenderProcess(directory / "extender", access, written, {}) as process:
        await process.until_ready()
        yield process


def start_scheduler(plane: ControlPlane, directory: Path, tenant: str, url: str) -> None:
    """The kube-scheduler of a tenant as it is installed, but for where things are and the version: this one is 1.20."""
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
    """Every manifest is accepted. Under their rights and no others, the extender and each tenant's kube-scheduler give
    the pods of the examples their places: the gang two whole nodes, the guaranteed pod a socket, the opportunistic one
    two devices. Nothing is ever forbidden."""
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
