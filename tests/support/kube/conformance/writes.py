"""The guarantees that control loops need when they write through a `KubeApi`: one suite for a real API server and
`MemoryKube`.

Subclasses give the fixtures `api` and `namespace` (a namespace of the test's own). The other half, of lists and
watches, is in `kube_conformance_reads`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from store.kube.api.errors import AlreadyExists, Conflict, Invalid, NotFound
from store.kube.api.objects import CONFIG_MAPS, NODES, PODS, Object, Resource, name_of, resource_version_of, uid_of
from store.kube.api.protocol import KubeApi, WatchEvent
from tests.support.waiting import until


def config_map(name: str = "a", **data: str) -> Object:
    return {"metadata": {"name": name}, "data": data}


def pod(name: str = "a", **metadata: Any) -> Object:
    spec = {"containers": [{"name": "main", "image": "none"}], "restartPolicy": "Never"}
    return {"metadata": {"name": name, **metadata}, "spec": spec}


def owned_by(owner: Object, name: str) -> Object:
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": name_of(owner), "uid": uid_of(owner)}
    return {"metadata": {"name": name, "ownerReferences": [{**reference, "blockOwnerDeletion": True}]}}


async def is_gone(api: KubeApi, resource: Resource, name: str, namespace: str) -> bool:
    try:
        await api.get(resource, name, namespace)
    except NotFound:
        return True
    return False


async def gone(api: KubeApi, resource: Resource, name: str, namespace: str) -> None:
    """Wait until the object is gone."""
    await until(lambda: is_gone(api, resource, name, namespace), every=0.05)


def watching(api: KubeApi, namespace: str, version: str) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
    """Watch the namespace's config maps after a version."""
    return api.watch(CONFIG_MAPS, namespace, resource_version=version, timeout=60)


async def take(watch: AsyncIterator[WatchEvent], count: int) -> list[WatchEvent]:
    """Return the next events that are no bookmarks."""
    taken: list[WatchEvent] = []
    async with asyncio.timeout(30):
        while len(taken) < count:
            event = await anext(watch)
            if event.type != "BOOKMARK":
                taken.append(event)
    return taken


def named(events: list[WatchEvent]) -> list[tuple[str, str]]:
    """Return type and name of each event."""
    return [(event.type, name_of(event.object)) for event in events]


class WriteConformance:
    """Writes, conflicts, deletions, garbage."""

    async def test_a_created_object_is_what_was_sent_and_more(self, api: KubeApi, namespace: str) -> None:
        """The server adds UID, resource version and time of creation; a read returns the same object."""
        created = await api.create(CONFIG_MAPS, config_map(x="1"), namespace)
        assert created["data"] == {"x": "1"}
        metadata = created["metadata"]
        assert metadata["namespace"] == namespace
        assert metadata["uid"]
        assert metadata["resourceVersion"]
        assert metadata["creationTimestamp"].endswith("Z")
        assert await api.get(CONFIG_MAPS, "a", namespace) == created

    async def test_names_are_unique(self, api: KubeApi, namespace: str) -> None:
        """A second creation is refused with `AlreadyExists`, which is also a conflict."""
        await api.create(CONFIG_MAPS, config_map(), namespace)
        with pytest.raises(AlreadyExists, match=r'configmaps "a" already exists') as caught:
            await api.create(CONFIG_MAPS, config_map(), namespace)
        assert (caught.value.status, caught.value.reason) == (409, "AlreadyExists")

    async def test_names_are_generated(self, api: KubeApi, namespace: str) -> None:
        """`generateName` gives each object a name of its own, cut to fit."""
        body = {"metadata": {"generateName": "gen-" + "x" * 66}}
        names = {name_of(await api.create(CONFIG_MAPS, body, namespace)) for _ in range(5)}
        assert len(names) == 5
        assert all(name.startswith("gen-x") and len(name) == 63 for name in names)

    async def test_what_is_not_there(self, api: KubeApi, namespace: str) -> None:
        """Every verb on an unused name raises `NotFound`."""
        with pytest.raises(NotFound):
            await api.get(CONFIG_MAPS, "a", namespace)
        with pytest.raises(NotFound):
            await api.patch(CONFIG_MAPS, "a", namespace, {"data": {}})
        with pytest.raises(NotFound):
            await api.delete(CONFIG_MAPS, "a", namespace)
        with pytest.raises(NotFound):
            await api.create(CONFIG_MAPS, config_map(), f"missing-{secrets.token_hex(4)}")
        with pytest.raises(NotFound):
            await api.replace(PODS, pod() | {"metadata": {"name": "a", "namespace": namespace}})

    async def test_names_are_checked(self, api: KubeApi, namespace: str) -> None:
        """An invalid name is `Invalid`, with the field in the message."""
        with pytest.raises(Invalid, match=r"metadata\.name"):
            await api.create(CONFIG_MAPS, config_map("Not_A_Name"), namespace)
        with pytest.raises(Invalid, match=r"spec\.containers"):
            await api.create(PODS, {"metadata": {"name": "a"}, "spec": {"containers": []}}, namespace)
        with pytest.raises(Invalid, match=r"metadata\.labels"):
            await api.create(PODS, pod(labels={"a": "not a label"}), namespace)

    async def test_a_stale_replacement_conflicts(self, api: KubeApi, namespace: str) -> None:
        """The resource version in a body is a precondition; without one, the last writer wins."""
        first = await api.create(CONFIG_MAPS, config_map(x="1"), namespace)
        second = await api.replace(CONFIG_MAPS, first | {"data": {"x": "2"}})
        assert resource_version_of(second) != resource_version_of(first)
        with pytest.raises(Conflict) as caught:
            await api.replace(CONFIG_MAPS, first | {"data": {"x": "3"}})
        assert not isinstance(caught.value, AlreadyExists)
        plain = {"metadata": {"name": "a", "namespace": namespace}, "data": {"x": "4"}}
        assert (await api.replace(CONFIG_MAPS, plain))["data"] == {"x": "4"}

    async def test_merge_patches(self, api: KubeApi, namespace: str) -> None:
        """Merge patches set, add, and remove by null; other fields stay."""
        await api.create(CONFIG_MAPS, config_map(x="1", y="2"), namespace)
        patched = await api.patch(CONFIG_MAPS, "a", namespace, {"data": {"x": None, "z": "3"}})
        assert patched["data"] == {"y": "2", "z": "3"}

    async def test_preconditions_of_patches(self, api: KubeApi, namespace: str) -> None:
        """A resource version in a patch makes it conflict with any change; another UID is never accepted."""
        created = await api.create(CONFIG_MAPS, config_map(), namespace)
        fresh = {"metadata": {"resourceVersion": resource_version_of(created), "uid": uid_of(created)}}
        await api.patch(CONFIG_MAPS, "a", namespace, {**fresh, "data": {"x": "1"}})
        with pytest.raises(Conflict):
            await api.patch(CONFIG_MAPS, "a", namespace, {**fresh, "data": {"x": "2"}})
        with pytest.raises(Invalid, match=r"metadata\.uid"):
            await api.patch(CONFIG_MAPS, "a", namespace, {"metadata": {"uid": "other"}, "data": {"x": "3"}})
        assert (await api.get(CONFIG_MAPS, "a", namespace))["data"] == {"x": "1"}

    async def test_strategic_patches(self, api: KubeApi, namespace: str) -> None:
        """Owner references are merged by UID, and one is removed by a directive."""
        owners = [await api.create(CONFIG_MAPS, config_map(name), namespace) for name in ("one", "two")]
        references = [owned_by(owner, "x")["metadata"]["ownerReferences"][0] for owner in owners]
        await api.create(PODS, pod(ownerReferences=[references[0]]), namespace)
        add = {"metadata": {"ownerReferences": [references[1]]}}
        patched = await api.patch(PODS, "a", namespace, add, patch_type="strategic")
        assert {each["uid"] for each in patched["metadata"]["ownerReferences"]} == {uid_of(each) for each in owners}
        remove = {"metadata": {"ownerReferences": [{"$patch": "delete", "uid": uid_of(owners[0])}]}}
        patched = await api.patch(PODS, "a", namespace, remove, patch_type="strategic")
        assert [each["uid"] for each in patched["metadata"]["ownerReferences"]] == [uid_of(owners[1])]

    async def test_json_patches(self, api: KubeApi, namespace: str) -> None:
        """JSON patches apply as a whole or not at all: a failing test refuses the rest."""
        await api.create(CONFIG_MAPS, config_map(x="1"), namespace)
        change = {"op": "replace", "path": "/data/x", "value": "2"}
        with pytest.raises(Invalid):
            await api.patch(
                CONFIG_MAPS,
                "a",
                namespace,
                [change, {"op": "test", "path": "/data/x", "value": "1"}],
                patch_type="json",
            )
        good = [{"op": "test", "path": "/data/x", "value": "1"}, change]
        assert (await api.patch(CONFIG_MAPS, "a", namespace, good, patch_type="json"))["data"] == {"x": "2"}

    async def test_a_write_that_changes_nothing(self, api: KubeApi, namespace: str) -> None:
        """It makes no new version and no watch event."""
        created = await api.create(CONFIG_MAPS, config_map(x="1"), namespace)
        assert await api.patch(CONFIG_MAPS, "a", namespace, {"data": {"x": "1"}}) == created
        assert await api.replace(CONFIG_MAPS, created) == created
        async with watching(api, namespace, resource_version_of(created)) as watch:
            await api.create(CONFIG_MAPS, config_map("b"), namespace)
            assert named(await take(watch, 1)) == [("ADDED", "b")]

    async def test_the_status_is_a_part_of_its_own(self, api: KubeApi, namespace: str) -> None:
        """The subresource changes nothing but the status, and no other write changes the status."""
        await api.create(PODS, pod(), namespace)
        change = {"status": {"phase": "Running", "podIP": "10.0.0.1"}, "metadata": {"labels": {"a": "b"}}}
        plain = await api.patch(PODS, "a", namespace, change)
        assert plain["status"]["phase"] == "Pending"
        assert plain["metadata"]["labels"] == {"a": "b"}
        change["spec"] = {"activeDeadlineSeconds": 5}
        patched = await api.patch(PODS, "a", namespace, change, subresource="status")
        assert patched["status"]["phase"] == "Running"
        assert "activeDeadlineSeconds" not in patched["spec"]
        patched["status"]["phase"] = "Succeeded"
        replaced = await api.replace(PODS, patched, subresource="status")
        assert replaced["status"]["phase"] == "Succeeded"

    async def test_counting_together(self, api: KubeApi, namespace: str) -> None:
        """Many tasks increment one number by read, replace, and retry upon a conflict: no increment is lost."""
        await api.create(CONFIG_MAPS, config_map(n="0"), namespace)

        async def increment() -> None:
            while True:
                seen = await api.get(CONFIG_MAPS, "a", namespace)
                try:
                    await api.replace(CONFIG_MAPS, seen | {"data": {"n": str(int(seen["data"]["n"]) + 1)}})
                except Conflict:
                    continue
                return

        await asyncio.gather(*(increment() for _ in range(8)))
        assert (await api.get(CONFIG_MAPS, "a", namespace))["data"] == {"n": "8"}

    async def test_a_successor_is_not_deleted(self, api: KubeApi, namespace: str) -> None:
        """A UID as precondition protects a new object of the same name."""
        old = await api.create(CONFIG_MAPS, config_map(), namespace)
        await api.delete(CONFIG_MAPS, "a", namespace, uid=uid_of(old))
        new = await api.create(CONFIG_MAPS, config_map(), namespace)
        assert uid_of(new) != uid_of(old)
        with pytest.raises(Conflict):
            await api.delete(CONFIG_MAPS, "a", namespace, uid=uid_of(old))
        assert uid_of(await api.get(CONFIG_MAPS, "a", namespace)) == uid_of(new)

    async def test_finalizers(self, api: KubeApi, namespace: str) -> None:
        """A deletion waits for finalizers: the object is first marked, and gone when the last one is removed."""
        body = {"metadata": {"name": "a", "finalizers": ["example.org/hold"]}}
        created = await api.create(CONFIG_MAPS, body, namespace)
        async with watching(api, namespace, resource_version_of(created)) as watch:
            await api.delete(CONFIG_MAPS, "a", namespace)
            assert (await api.get(CONFIG_MAPS, "a", namespace))["metadata"]["deletionTimestamp"]
            await api.patch(CONFIG_MAPS, "a", namespace, {"metadata": {"finalizers": None}})
            assert await is_gone(api, CONFIG_MAPS, "a", namespace)
            assert named(await take(watch, 2)) == [("MODIFIED", "a"), ("DELETED", "a")]

    async def test_a_pod_on_a_node_ends_gracefully(self, api: KubeApi, namespace: str) -> None:
        """The pod stays, marked with its grace period, until the kubelet deletes it without one."""
        body = pod()
        body["spec"] |= {"nodeName": "node-x", "terminationGracePeriodSeconds": 40}
        await api.create(PODS, body, namespace)
        await api.delete(PODS, "a", namespace)
        metadata = (await api.get(PODS, "a", namespace))["metadata"]
        assert metadata["deletionTimestamp"]
        assert metadata["deletionGracePeriodSeconds"] == 40
        await api.delete(PODS, "a", namespace, grace_period=0)
        assert await is_gone(api, PODS, "a", namespace)

    async def test_a_pod_without_a_node_is_gone_at_once(self, api: KubeApi, namespace: str) -> None:
        """Without a kubelet nothing has to end it."""
        await api.create(PODS, pod(), namespace)
        await api.delete(PODS, "a", namespace)
        assert await is_gone(api, PODS, "a", namespace)

    async def test_garbage_is_collected(self, api: KubeApi, namespace: str) -> None:
        """A dependent goes after its last owner; with Orphan, it stays without the reference."""
        one, two = [await api.create(CONFIG_MAPS, config_map(name), namespace) for name in ("one", "two")]
        await api.create(CONFIG_MAPS, owned_by(one, "of-one"), namespace)
        await api.create(CONFIG_MAPS, owned_by(two, "of-two"), namespace)
        await api.delete(CONFIG_MAPS, "one", namespace, propagation="Background")
        await api.delete(CONFIG_MAPS, "two", namespace, propagation="Orphan")
        await gone(api, CONFIG_MAPS, "of-one", namespace)
        await gone(api, CONFIG_MAPS, "two", namespace)
        left = await api.get(CONFIG_MAPS, "of-two", namespace)
        assert not left["metadata"].get("ownerReferences")

    async def test_foreground_deletion(self, api: KubeApi, namespace: str) -> None:
        """The owner stays, marked, until all dependents that block it are gone."""
        owner = await api.create(CONFIG_MAPS, config_map("owner"), namespace)
        child = owned_by(owner, "child")
        child["metadata"]["finalizers"] = ["example.org/hold"]
        await api.create(CONFIG_MAPS, child, namespace)
        await api.delete(CONFIG_MAPS, "owner", namespace, propagation="Foreground")
        async with asyncio.timeout(60):
            while "deletionTimestamp" not in (await api.get(CONFIG_MAPS, "child", namespace))["metadata"]:
                await asyncio.sleep(0.05)
        metadata = (await api.get(CONFIG_MAPS, "owner", namespace))["metadata"]
        assert metadata["finalizers"] == ["foregroundDeletion"]
        await api.patch(CONFIG_MAPS, "child", namespace, {"metadata": {"finalizers": None}})
        await gone(api, CONFIG_MAPS, "owner", namespace)

    async def test_cluster_objects(self, api: KubeApi, namespace: str) -> None:
        """Objects of the whole cluster have no namespace."""
        name = f"node-{secrets.token_hex(4)}"
        created = await api.create(NODES, {"metadata": {"name": name}})
        assert "namespace" not in created["metadata"]
        assert name_of(await api.get(NODES, name)) == name
        assert name in [name_of(item) for item in (await api.list(NODES)).items]
        await api.delete(NODES, name)
