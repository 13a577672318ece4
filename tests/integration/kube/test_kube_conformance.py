"""KubeClient against a real API server: the suite that `MemoryKube` passes too, and the features that only a real
server has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from store.kube.api.errors import Forbidden, Unauthorized, Unreachable
from store.kube.api.objects import CONFIG_MAPS, POD_DISRUPTION_BUDGETS
from store.kube.client.client import KubeClient
from store.kube.client.credentials import ServiceAccount
from store.kube.client.transport import Credentials
from tests.support.kube.conformance.pods import PodConformance
from tests.support.kube.conformance.reads import ReadConformance
from tests.support.kube.conformance.writes import WriteConformance
from tests.support.kube.control_plane import ControlPlane


@pytest.fixture
def api(kube: KubeClient) -> KubeClient:
    """The administrator's client."""
    return kube


@pytest.fixture
def forget(control_plane: ControlPlane) -> Callable[[], None]:
    return control_plane.compact


class TestWrites(WriteConformance):
    """On the real API server, with the real garbage collector."""


class TestPods(PodConformance):
    """On the real API server and its disruption controller."""


class TestReads(ReadConformance):
    """On the real API server and its watch cache."""


async def test_every_way_to_say_who_we_are(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """A client certificate and a service account's token are both accepted; an unknown token is not."""
    certificate = control_plane.issue_certificate("carol")
    by_certificate = control_plane.write_kubeconfig(tmp_path / "certificate", certificate=certificate)
    reader = control_plane.create_user(
        [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}], namespace=namespace
    )
    by_token = control_plane.write_kubeconfig(tmp_path / "token", token=reader)
    for kubeconfig in (by_certificate, by_token):
        async with await KubeClient.connect(str(kubeconfig)) as client:
            assert (await client.list(CONFIG_MAPS, namespace)).items == []
    async with await KubeClient.connect(str(control_plane.write_kubeconfig(tmp_path / "no", token="no"))) as client:
        with pytest.raises(Unauthorized):
            await client.list(CONFIG_MAPS, namespace)


async def test_what_we_may_not(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """A refusal by RBAC is `Forbidden` and names the denied request, on a watch before the first event."""
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]
    token = control_plane.create_user(rules, namespace=namespace)
    async with await KubeClient.connect(
        str(control_plane.write_kubeconfig(tmp_path / "config", token=token))
    ) as client:
        with pytest.raises(Forbidden, match=f'cannot create resource "configmaps".*namespace "{namespace}"'):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, namespace)
        with pytest.raises(Forbidden, match='cannot watch resource "configmaps"'):
            async with client.watch(CONFIG_MAPS, namespace, resource_version="0", timeout=60):
                pass


async def test_in_a_pod(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """The files that the kubelet mounts are enough, and a token that was replaced in place is used after a refusal."""
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    (tmp_path / "ca.crt").write_bytes(control_plane.ca.read_bytes())
    (tmp_path / "token").write_text("stale")
    host, port = control_plane.url.removeprefix("https://").split(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    async with KubeClient(await Credentials.open(ServiceAccount(environ, tmp_path))) as client:
        (tmp_path / "token").write_text(control_plane.create_user(rules, namespace=namespace))
        assert (await client.list(CONFIG_MAPS, namespace)).items == []


async def test_versions_are_discovered(api: KubeClient) -> None:
    """This server has disruption budgets in v1beta1 only."""
    assert not await api.served(POD_DISRUPTION_BUDGETS)
    assert await api.served(POD_DISRUPTION_BUDGETS.in_version("v1beta1"))


async def test_the_server_restarts(own_control_plane: ControlPlane) -> None:
    """Calls during the outage end as `Unreachable`, and so do open watches; the same client continues afterwards."""
    own_control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
    async with await KubeClient.connect(str(own_control_plane.kubeconfig)) as client:
        created = await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, "ns")
        version = created["metadata"]["resourceVersion"]
        async with client.watch(CONFIG_MAPS, "ns", resource_version=version, timeout=60) as watch:
            own_control_plane.apiserver.kill()
            with pytest.raises(Unreachable):
                await anext(watch)
        with pytest.raises(Unreachable, match="it was not applied"):
            await client.delete(CONFIG_MAPS, "a", "ns")
        await asyncio.to_thread(own_control_plane.apiserver.start)
        assert await client.get(CONFIG_MAPS, "a", "ns") == created
