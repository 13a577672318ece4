"""The fault proxy stands between a client and a real API server, with the server's own watches and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.kube import errors
from store.kube.client import KubeClient
from store.kube.resources import CONFIG_MAPS
from tests.support.control_plane import ControlPlane
from tests.support.fault_proxy import FaultProxy, cuts_after, error_event, fault_proxy, loses_answer, sends


@pytest.fixture
async def proxy(control_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(control_plane.url, ca=control_plane.ca) as proxy:
        yield proxy


@pytest.fixture
async def client(control_plane: ControlPlane, proxy: FaultProxy, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """A client that goes through the proxy."""
    kubeconfig = control_plane.write_kubeconfig(tmp_path / "kubeconfig", url=proxy.url)
    async with await KubeClient.connect(str(kubeconfig)) as client:
        yield client


async def test_a_write_whose_answer_is_lost(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    """The server has the object, and the client knows that it does not know."""
    proxy.add(loses_answer, method="POST", path="/configmaps", times=1)
    with pytest.raises(errors.Unreachable):
        await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, namespace)
    assert (await client.get(CONFIG_MAPS, "a", namespace))["metadata"]["name"] == "a"
    assert proxy.count("POST", "/configmaps") == 1


async def test_watches_that_end_badly(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    """Cut in the middle of an event, or told that its version is too old; without a fault, the events come."""
    version = (await client.list(CONFIG_MAPS, namespace)).resource_version
    proxy.add(cuts_after(100), path="watch=true", times=1)
    proxy.add(sends(error_event(410, "Expired")), path="watch=true", times=1)
    await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, namespace)
    for error in (errors.Unreachable, errors.Expired):
        async with client.watch(CONFIG_MAPS, namespace, resource_version=version, timeout=30) as events:
            with pytest.raises(error):
                await anext(events)
    async with client.watch(CONFIG_MAPS, namespace, resource_version=version, timeout=30) as events:
        assert (await anext(events)).type == "ADDED"
