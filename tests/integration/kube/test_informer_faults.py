"""Informers behind a bad network, and on a control plane whose parts are killed: their view ends equal to the
server's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from store.kube.api.objects import CONFIG_MAPS, Object, uid_of
from store.kube.client.client import KubeClient
from store.kube.client.transport import Limits
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.faults.fault_proxy import FaultProxy, answers, cuts_after, error_event, fault_proxy, sends
from tests.support.kube.informers.real import watching
from tests.support.waiting import until

SILENCE = 2.0  # seconds after which a stream counts as dead here


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that tests of this module may stop and start."""
    with ControlPlane(tmp_path_factory.mktemp("informer-plane")) as plane:
        yield plane


@pytest.fixture
def namespace(plane: ControlPlane, request: pytest.FixtureRequest) -> str:
    name: str = request.node.name.replace("_", "-")[:63].strip("-")
    plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def proxy(plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(plane.url, ca=plane.ca) as proxy:
        yield proxy


@pytest.fixture
async def behind(plane: ControlPlane, proxy: FaultProxy, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """A client behind the bad network that soon treats a silent stream as dead."""
    kubeconfig = plane.write_kubeconfig(tmp_path / "kubeconfig", url=proxy.url)
    async with await KubeClient.connect(str(kubeconfig), limits=Limits(stream_silence=SILENCE)) as client:
        yield client


@pytest.fixture
async def direct(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """A client that always reaches the server."""
    async with await KubeClient.connect(str(plane.kubeconfig)) as client:
        yield client


async def new_map(client: KubeClient, name: str, namespace: str) -> Object:
    return await client.create(CONFIG_MAPS, {"metadata": {"name": name}}, namespace)


async def change(client: KubeClient, name: str, namespace: str, value: object) -> None:
    await client.patch(CONFIG_MAPS, name, namespace, {"data": {"value": str(value)}})


async def test_what_happened_in_a_short_outage_is_reported_in_order(
    plane: ControlPlane, proxy: FaultProxy, behind: KubeClient, direct: KubeClient, namespace: str
) -> None:
    """As long as the server's history reaches back, the watch resumes where it broke: every event, and no list."""
    await new_map(direct, "goes", namespace)
    async with watching(behind, CONFIG_MAPS, namespace) as watched:
        await proxy.go_down()
        await change(direct, "goes", namespace, 1)
        await direct.delete(CONFIG_MAPS, "goes", namespace)
        await new_map(direct, "comes", namespace)
        await until(lambda: watched.informer.problem)
        await proxy.come_up()
        await until(lambda: watched.shows(plane, namespace, "configmaps"))
        assert [what for what, _ in watched.recorded.log] == ["added", "updated", "deleted", "added"]
        assert watched.recorded.tombstones == []
        assert watched.informer.stats.lists.total() == 1


async def test_what_an_outage_hid_ends_in_tombstones(
    plane: ControlPlane, proxy: FaultProxy, behind: KubeClient, direct: KubeClient, namespace: str
) -> None:
    """The server's history does not reach back to the outage. A vanished object is reported as a tombstone, a reused
    name as the deletion of the old UID and another object."""
    created = {name: await new_map(direct, name, namespace) for name in ("goes", "reused", "changes", "stays")}
    async with watching(behind, CONFIG_MAPS, namespace) as watched:
        await proxy.go_down()
        for name in ("goes", "reused"):
            await direct.delete(CONFIG_MAPS, name, namespace)
        await change(direct, "changes", namespace, 1)
        reused = await new_map(direct, "reused", namespace)
        await asyncio.to_thread(plane.restart_apiserver)
        watched.recorded.forget()
        await proxy.come_up()
        await until(lambda: watched.shows(plane, namespace, "configmaps"))
        assert {tombstone.key: uid_of(tombstone.obj) for tombstone in watched.recorded.tombstones} == {
            f"{namespace}/{name}": uid_of(created[name]) for name in ("goes", "reused")
        }
        assert uid_of(watched.recorded.view[f"{namespace}/reused"]) == uid_of(reused)
        assert watched.recorded.counts == {"updated": 1, "deleted": 2, "added": 1}
        assert watched.informer.stats.lists["expired"] == 1


async def test_a_watch_that_is_cut_at_any_byte(
    plane: ControlPlane, proxy: FaultProxy, behind: KubeClient, direct: KubeClient, namespace: str
) -> None:
    """No cut loses an event, repeats one, or leads to a list."""
    rng = random.Random(1)
    for size in [1, 300, *(rng.randrange(800, 5000) for _ in range(40))]:
        proxy.add(cuts_after(size), path=f"{namespace}/configmaps.*watch=true", times=1)
    async with watching(behind, CONFIG_MAPS, namespace) as watched:
        for number in range(200):
            name = f"c{rng.randrange(10)}"
            if not plane.exists(f"/api/v1/namespaces/{namespace}/configmaps/{name}"):
                await new_map(direct, name, namespace)
            elif rng.random() < 0.3:
                await direct.delete(CONFIG_MAPS, name, namespace)
            else:
                await change(direct, name, namespace, number)
        await until(lambda: watched.shows(plane, namespace, "configmaps"))
        assert watched.recorded.counts.total() == 200
        assert watched.informer.stats.watches["broken"] > 10
        assert watched.informer.stats.lists.total() == 1


async def test_a_stream_that_falls_silent_is_replaced(
    plane: ControlPlane, proxy: FaultProxy, behind: KubeClient, direct: KubeClient, namespace: str
) -> None:
    """A connection on which nothing arrives any more is replaced, without a list."""
    async with watching(behind, CONFIG_MAPS, namespace) as watched:
        await until(lambda: proxy.count("GET", "watch=true"))
        proxy.flowing.clear()
        await new_map(direct, "a", namespace)
        await until(lambda: watched.informer.stats.watches["broken"])
        assert watched.recorded.log == []
        proxy.flowing.set()
        await until(lambda: watched.shows(plane, namespace, "configmaps"))
        assert watched.informer.stats.lists.total() == 1


async def test_a_server_that_sheds_load_or_forgets(
    plane: ControlPlane, proxy: FaultProxy, behind: KubeClient, direct: KubeClient, namespace: str
) -> None:
    """429 and 500 for a watch lead to the same watch again; a 410 in its stream leads to a list at the last version."""
    watch = f"{namespace}/configmaps.*watch=true"
    proxy.add(answers(429, "TooManyRequests", retry_after=1), path=watch, times=1)
    proxy.add(answers(500, "InternalError"), path=watch, times=1)
    proxy.add(sends(error_event(410, "Expired")), path=watch, times=1)
    async with watching(behind, CONFIG_MAPS, namespace) as watched:
        await new_map(direct, "a", namespace)
        await until(lambda: watched.shows(plane, namespace, "configmaps"))
        await until(lambda: proxy.count("GET", watch) == 4)
        assert watched.informer.stats.lists == {"start": 1, "expired": 1}
        assert watched.informer.stats.watches["refused"] == 1


async def test_parts_of_the_control_plane_are_killed(plane: ControlPlane, direct: KubeClient, namespace: str) -> None:
    """After the API server, and after etcd, was killed and came back, changes are seen again."""
    await new_map(direct, "reused", namespace)
    async with watching(direct, CONFIG_MAPS, namespace) as watched:
        for number, restart in enumerate((plane.restart_apiserver, lambda: restart_etcd(plane))):
            await asyncio.to_thread(restart)
            await until(lambda: is_back(plane))
            await direct.delete(CONFIG_MAPS, "reused", namespace)
            await new_map(direct, "reused", namespace)
            await new_map(direct, f"new-{number}", namespace)
            await until(lambda: watched.shows(plane, namespace, "configmaps"))
            await until(lambda: not watched.informer.problem)


def restart_etcd(plane: ControlPlane) -> None:
    plane.etcd.kill()
    plane.etcd.start()


def is_back(plane: ControlPlane) -> bool:
    try:
        return plane.exists("/api/v1/namespaces/default")
    except OSError:
        return False
