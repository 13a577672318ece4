"""Objects that no decoder can read, beside good ones, on a real API server, which accepts ten thousand levels: the
operators and the extender go on and start again, and the objects are named."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd
from store.kube.api.errors import Unreadable
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, key_of
from store.kube.client.client import KubeClient
from tests.integration.programs.test_framework_cli import FrameworkCommands
from tests.support.consul.server import free_ports
from tests.support.framework.cluster import framework, role
from tests.support.hostile import nested
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.informers.real import watching
from tests.support.programs.daemon import DaemonProcess, running
from tests.support.waiting import until

CORE, GROUP = "/api/v1", "/apis/frameworkcontroller.microsoft.com/v1"
HIVED = """\
kubeConfigFilePath: {kubeconfig}
webServerAddress: 127.0.0.1:{web}
physicalCluster:
  cellTypes:
    HOST: {{childCellType: GPU, childCellNumber: 4, isNodeLevel: true}}
  physicalCells:
  - {{cellType: HOST, cellAddress: a0}}
virtualClusters:
  vision: {{virtualCells: [{{cellType: HOST, cellNumber: 1}}]}}
"""


def post(plane: ControlPlane, path: str, body: Object, deep: bytes) -> None:
    """Create an object; "DEEP" in it stands for the bytes. The answer, which is as deep, is not read."""
    content = json.dumps(body).encode().replace(b'"DEEP"', deep)
    request = urllib.request.Request(f"{plane.url}{path}", data=content, method="POST")
    request.add_header("Authorization", f"Bearer {plane.token}")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30, context=plane._trust) as answer:
            answer.read()
    except urllib.error.HTTPError as refusal:
        raise AssertionError(refusal.read().decode()[:1000]) from refusal


def with_deep_fields(obj: Object) -> Object:
    """Return the object with managed fields that are nested as deep as they may be; any kind has them."""
    fields = {"manager": "m", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": "DEEP"}
    return obj | {"metadata": {**obj["metadata"], "managedFields": [fields]}}


def config_map(name: str, **labels: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}}


def pod(name: str) -> Object:
    spec = {"containers": [{"name": "main", "image": "example.org/task:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def installed(control_plane: ControlPlane) -> ControlPlane:
    """The shared control plane, with Frameworks."""
    control_plane.install(crd("compatible"))
    return control_plane


@pytest.mark.parametrize("levels", [300, 900, 1_000, 1_500, 9_000])
async def test_an_informer_goes_on(installed: ControlPlane, kube: KubeClient, namespace: str, levels: int) -> None:
    """At the first list, in a watch, and when such an object is deleted, whether or not its depth would fit the stack:
    other objects are shown at once, the unreadable one is named, and an object with deep managed fields alone is shown
    normally."""
    deep, frameworks = nested(levels), f"{GROUP}/namespaces/{namespace}/frameworks"

    def create(name: str) -> None:
        body = framework(name, role("worker", 1))
        body["metadata"]["namespace"] = namespace
        if name.startswith("fields"):
            body = with_deep_fields(body)
        elif name.startswith("spec"):
            body["spec"]["taskRoles"][0]["task"]["pod"]["spec"]["x"] = "DEEP"
        elif name.startswith("status"):
            body["status"] = {"x": "DEEP"}
        post(installed, frameworks, body, deep)

    for name in ("good1", "spec1", "status1", "fields1"):
        await asyncio.to_thread(create, name)
    async with watching(kube, FRAMEWORKS, namespace, page_size=2) as watched:
        informer = watched.informer
        assert {key_of(obj) for obj in informer.items()} == {f"{namespace}/good1", f"{namespace}/fields1"}
        for name in ("spec2", "status2", "fields2", "good2"):
            await asyncio.to_thread(create, name)
        await until(lambda: informer.get(f"{namespace}/good2"))
        unreadable = [f"{namespace}/{name}" for name in ("spec1", "spec2", "status1", "status2")]
        assert sorted(informer.unreadable) == unreadable
        assert set(informer.unreadable.values()) == {"nested more than 200 levels deep"}
        assert informer.get(f"{namespace}/fields2")
        assert informer.problem == ""

        with pytest.raises(Unreadable, match="nested more than 200 levels deep"):
            await kube.get(FRAMEWORKS, "spec1", namespace)
        assert (await kube.get(FRAMEWORKS, "fields1", namespace))["spec"]["executionType"] == "Start"
        for name in ("spec1", "spec2", "status1", "status2", "good1", "fields1"):
            await kube.delete(FRAMEWORKS, name, namespace)
        await until(lambda: not informer.unreadable and len(informer) == 2)
        assert informer.stats.crashes == 0


async def test_a_pod_cannot_be_hidden(installed: ControlPlane, kube: KubeClient, namespace: str) -> None:
    """Otherwise a user could make the scheduler forget a pod that holds a device."""
    await asyncio.to_thread(
        post, installed, f"{CORE}/namespaces/{namespace}/pods", with_deep_fields(pod("hidden")), nested()
    )
    async with watching(kube, PODS, namespace) as watched:
        assert [key_of(obj) for obj in watched.informer.items()] == [f"{namespace}/hidden"]
    await kube.delete(PODS, "hidden", namespace, grace_period=0)


async def test_the_daemons_go_on(installed: ControlPlane, kube: KubeClient, namespace: str, tmp_path: Path) -> None:
    """Deep objects of every kind that the daemons watch: a Framework beside them runs to its end, also after a restart
    of the daemons, the commands list them as unreadable, and metrics count them."""
    commands = FrameworkCommands(installed, kube, namespace, "framework")
    (web,) = free_ports(1)
    (tmp_path / "hived.yaml").write_text(HIVED.format(web=web, kubeconfig=installed.kubeconfig))
    kubeconfig = str(installed.kubeconfig)
    jobs = ["jobs", "--kubeconfig", kubeconfig, "--lease", "off"]
    extender = ["extender", "--config", str(tmp_path / "hived.yaml")]
    at = f"{CORE}/namespaces/{namespace}"
    bad = framework("deep", role("worker", 1))
    bad["metadata"]["namespace"] = namespace
    bad["spec"]["taskRoles"][0]["task"]["pod"]["x"] = "DEEP"
    labelled = with_deep_fields(config_map("deep", FC_FRAMEWORK_NAME="x"))

    async def until_run(name: str) -> None:
        await commands.add(framework(name, role("worker", 1)))
        await commands.reaches(name, "Completed")

    def is_well(daemon: DaemonProcess) -> None:
        daemon.until_ready()
        assert daemon.is_running
        assert "RecursionError" not in daemon.log()

    kubelet = HollowKubelet(kube, schedules=True, namespace=namespace)
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(kubelet.run())
        await kubelet.add_nodes(1, prefix=namespace)
        with running(tmp_path / "a", *jobs) as operator, running(tmp_path / "b", *extender) as hived:
            await asyncio.to_thread(is_well, operator)
            await asyncio.to_thread(is_well, hived)
            await asyncio.to_thread(post, installed, f"{GROUP}/namespaces/{namespace}/frameworks", bad, nested())
            await asyncio.to_thread(post, installed, f"{at}/configmaps", labelled, nested())
            await asyncio.to_thread(post, installed, f"{at}/pods", with_deep_fields(pod("deep")), nested(9_000))
            await until_run("first")
            await asyncio.to_thread(is_well, operator)
            await asyncio.to_thread(is_well, hived)
            metric = 'rcfarm_informer_unreadable{resource="frameworks"} 1.0'
            assert metric in (await asyncio.to_thread(operator.get, "/metrics"))[1]
        with running(tmp_path / "c", *jobs) as operator, running(tmp_path / "d", *extender) as hived:
            await asyncio.to_thread(is_well, operator)
            await asyncio.to_thread(is_well, hived)
            await until_run("second")
        commands.processes = True
        listed = await commands.ours("list")
        assert listed.code == 0
        assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [
            ["deep", "unreadable"],
            ["first", "Completed"],
            ["second", "Completed"],
        ]
        shown = await commands.ours("status", "deep")
        assert (shown.code, shown.err) == (
            1,
            "error: the object can't be understood: nested more than 200 levels deep\n",
        )
        await kube.delete(FRAMEWORKS, "deep", namespace)
        await kube.delete(CONFIG_MAPS, "deep", namespace)
        await kube.delete(PODS, "deep", namespace, grace_period=0)
        await kubelet.remove_nodes()
        playing.cancel()
