"""Informers on a real API server: its watch cache, pages, bookmarks, restarts and 410 answers."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import store.kube.informer.reflector
from store.kube.api.errors import Expired
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, labels_of
from store.kube.api.protocol import Page
from store.kube.client.client import KubeClient
from store.kube.informer.informer import Informer
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.informers.checked import RecordingHandler, running
from tests.support.kube.informers.real import watching
from tests.support.waiting import until

CROWD = 5000
WRITERS = 64


class Scripted(KubeClient):
    """A client that counts its calls and pauses at each list: `before_list` may wait or raise."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lists: list[tuple[str, int, bool]] = []
        self.gets = 0
        self.before_list: Callable[[int], Awaitable[None]] | None = None

    async def get(self, *args: Any) -> Object:
        self.gets += 1
        return await super().get(*args)

    async def list(self, *args: Any, **options: Any) -> Page:
        self.lists.append((options["resource_version"], options["limit"], bool(options["continue_token"])))
        if self.before_list is not None:
            await self.before_list(len(self.lists))
        return await super().list(*args, **options)


@pytest.fixture
async def client(control_plane: ControlPlane) -> AsyncIterator[Scripted]:
    async with await Scripted.connect(str(control_plane.kubeconfig)) as client:
        yield client


@pytest.fixture(scope="module")
def crowd(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace with 5,000 config maps."""
    namespace = f"crowd-{secrets.token_hex(5)}"
    control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    asyncio.run(fill(control_plane, namespace))
    yield namespace
    control_plane.request("DELETE", f"/api/v1/namespaces/{namespace}")


async def fill(plane: ControlPlane, namespace: str) -> None:
    numbers = iter(range(CROWD))

    async def write() -> None:
        for number in numbers:
            await api.create(CONFIG_MAPS, {"metadata": {"name": f"c{number:04}"}}, namespace)

    async with await KubeClient.connect(str(plane.kubeconfig)) as api, asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(write())


async def test_changes_of_pods_come_as_they_happen(
    control_plane: ControlPlane, client: Scripted, namespace: str
) -> None:
    """Creations, updates and deletions are reported from the watch cache's version on."""
    await client.create(PODS, pod("a"), namespace)
    async with watching(client, PODS, namespace) as watched:
        await client.create(PODS, pod("b"), namespace)
        await client.patch(PODS, "a", namespace, {"metadata": {"labels": {"new": "label"}}})
        await client.delete(PODS, "b", namespace, grace_period=0)
        await until(lambda: watched.recorded.counts["deleted"])
        assert watched.shows(control_plane, namespace, "pods")
        assert labels_of(watched.recorded.view[f"{namespace}/a"])["new"] == "label"
        assert client.lists == [("0", 500, False)]


async def test_a_name_that_is_reused_is_two_objects(
    control_plane: ControlPlane, client: Scripted, namespace: str
) -> None:
    """Deletion and creation under one name: never an update across UIDs."""
    async with watching(client, CONFIG_MAPS, namespace) as watched:
        for _ in range(20):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "again"}}, namespace)
            await client.delete(CONFIG_MAPS, "again", namespace)
        await until(lambda: watched.recorded.counts["deleted"] == 20)
        assert watched.recorded.counts["updated"] == 0
        assert watched.shows(control_plane, namespace, "configmaps")


async def test_what_leaves_the_selector_stays_unmatched_and_what_is_deleted_is_gone(
    control_plane: ControlPlane, client: Scripted, namespace: str
) -> None:
    """A watch's DELETED is confirmed by a GET, except for pods that end normally."""
    for name in ("leaves", "ends", "done"):
        await client.create(PODS, pod(name, labels={"group": "ours"}), namespace)
    await client.create(CONFIG_MAPS, {"metadata": {"name": "c", "labels": {"group": "ours"}}}, namespace)
    await client.patch(PODS, "done", namespace, {"status": {"phase": "Succeeded"}}, subresource="status")
    async with watching(client, PODS, namespace, label_selector="group=ours") as watched:
        await client.delete(PODS, "done", namespace)
        await client.delete(PODS, "ends", namespace)
        await client.delete(PODS, "ends", namespace, grace_period=0)
        await until(lambda: watched.recorded.counts["deleted"] == 2)
        assert client.gets == 0
        await client.patch(PODS, "leaves", namespace, {"metadata": {"labels": {"group": "theirs"}}})
        await until(lambda: labels_of(watched.recorded.view[f"{namespace}/leaves"])["group"] == "theirs")
        assert client.gets == 1
        assert watched.shows(control_plane, namespace, "pods")
    async with watching(client, CONFIG_MAPS, namespace, label_selector="group=ours") as watched:
        await client.delete(CONFIG_MAPS, "c", namespace)
        await until(lambda: watched.recorded.counts["deleted"])
        assert client.gets == 2
        assert watched.recorded.tombstones == []


async def test_a_bookmark_moves_the_position(client: Scripted, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that saw no event continues from its last bookmark."""
    monkeypatch.setattr(store.kube.informer.reflector, "WATCH_TIMEOUT", (4.0, 4.0))
    async with watching(client, CONFIG_MAPS, namespace) as watched, asyncio.timeout(60.0):
        began = watched.informer.resource_version
        while watched.informer.resource_version == began:
            elsewhere = await client.create(CONFIG_MAPS, {"metadata": {"generateName": "elsewhere-"}}, "default")
            await client.delete(CONFIG_MAPS, elsewhere["metadata"]["name"], "default")
            await asyncio.sleep(0.2)
        await until(lambda: watched.informer.stats.watches["closed"])
        assert int(watched.informer.resource_version) > int(began)
        assert watched.recorded.log == []
        assert len(client.lists) == 1


async def test_a_forbidden_list_is_shown_until_it_is_granted(
    control_plane: ControlPlane, client: Scripted, namespace: str, tmp_path: Path
) -> None:
    """Without permission to list, the informer reports it and stays unsynced; with it, the informer is current without
    a restart."""
    await client.create(CONFIG_MAPS, {"metadata": {"name": "a"}}, namespace)
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]
    token = control_plane.create_user(rules, namespace=namespace)
    kubeconfig = control_plane.write_kubeconfig(tmp_path / "kubeconfig", token=token)
    async with await KubeClient.connect(str(kubeconfig)) as limited:
        informer, recorded = Informer(limited, CONFIG_MAPS, namespace=namespace), RecordingHandler()
        informer.add_handler(recorded)
        async with running(informer):
            await until(lambda: informer.problem)
            assert informer.problem.startswith("can't list configmaps: configmaps is forbidden: User")
            assert not informer.has_synced
            roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles"
            (role,) = control_plane.request("GET", roles)["items"]
            role["rules"][0]["verbs"] = ["list", "watch"]
            control_plane.request("PUT", f"{roles}/{role['metadata']['name']}", role)
            await until(lambda: informer.has_synced and not informer.problem)
            assert [*recorded.view] == [f"{namespace}/a"]


async def test_five_thousand_objects_in_pages(control_plane: ControlPlane, client: Scripted, crowd: str) -> None:
    """The first list is one answer out of the watch cache; a quorum list comes in ten pages. Both show all objects."""

    async def refuse_the_first(number: int) -> None:
        if number == 1:
            raise Expired("as if the server had forgotten", status=410)

    async with watching(client, CONFIG_MAPS, crowd) as watched:
        assert watched.recorded.counts == Counter(added=CROWD)
        assert client.lists == [("0", 500, False)]
    client.lists.clear()
    client.before_list = refuse_the_first
    async with watching(client, CONFIG_MAPS, crowd) as watched:
        assert client.lists == [("0", 500, False), ("", 500, False)] + [("", 500, True)] * 9
        assert watched.recorded.counts == Counter(added=CROWD)
        await client.patch(CONFIG_MAPS, "c2500", crowd, {"data": {"x": "y"}})
        await until(lambda: watched.recorded.counts["updated"])
        assert watched.shows(control_plane, crowd, "configmaps")


async def test_a_compaction_between_two_pages(control_plane: ControlPlane, client: Scripted, crowd: str) -> None:
    """etcd compacts the version of the first page; the informer then lists everything in one request."""

    async def compact_before_the_second_page(number: int) -> None:
        if number == 1:
            raise Expired("as if the server had forgotten", status=410)
        if number == 3:
            await client.patch(CONFIG_MAPS, "c0000", crowd, {"data": {"late": secrets.token_hex(4)}})
            await asyncio.to_thread(control_plane.compact)

    client.before_list = compact_before_the_second_page
    async with watching(client, CONFIG_MAPS, crowd) as watched:
        assert client.lists[2:] == [("", 500, True), ("", 0, False)]
        assert watched.recorded.counts == Counter(added=CROWD)
        assert watched.shows(control_plane, crowd, "configmaps")


def pod(name: str, **metadata: Any) -> Object:
    """Return a pod that needs a node, so that its deletion is graceful."""
    return {
        "metadata": {"name": name, **metadata},
        "spec": {"containers": [{"name": "main", "image": "main"}], "nodeName": "nowhere"},
    }
