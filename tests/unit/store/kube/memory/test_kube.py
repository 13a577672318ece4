"""MemoryKube behaves as an API server of Kubernetes 1.20 was seen to; what its hooks and history add to that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from store.kube.api import errors
from store.kube.api.objects import (
    CONFIG_MAPS,
    CUSTOM_RESOURCE_DEFINITIONS,
    LEASES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Object,
    Resource,
    is_deleting,
    name_of,
    resource_version_of,
    uid_of,
)
from store.kube.api.protocol import WatchEvent
from store.kube.memory.kube import Call, MemoryKube
from store.kube.memory.rules import NAMESPACES

pytestmark = pytest.mark.looptime

EPOCH = 1_700_000_000.0  # 2023-11-14T22:13:20Z
WIDGETS = Resource("example.dev", "v1", "widgets", "Widget")


@pytest.fixture
async def kube() -> MemoryKube:
    return MemoryKube(clock=lambda: EPOCH + asyncio.get_running_loop().time(), rng=random.Random(1))


def config_map(name: str, *owners: Object, block: bool = True, **metadata: Any) -> Object:
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": owner["metadata"]["name"], "uid": uid_of(owner)}
        | {"blockOwnerDeletion": block}
        for owner in owners
    ]
    return {"metadata": {"name": name, "ownerReferences": references, **metadata}}


def pod(name: str, node: str = "", **metadata: Any) -> Object:
    spec: Object = {"containers": [{"name": "main", "image": "scratch"}]}
    return {"metadata": {"name": name, **metadata}, "spec": spec | ({"nodeName": node} if node else {})}


async def add(kube: MemoryKube, body: Object, resource: Resource = CONFIG_MAPS) -> Object:
    return await kube.create(resource, body, "default" if resource.namespaced else "")


async def names(kube: MemoryKube, resource: Resource = CONFIG_MAPS, **options: Any) -> list[str]:
    page = await kube.list(resource, "default" if resource.namespaced else "", **options)
    return [item["metadata"]["name"] for item in page.items]


@asynccontextmanager
async def watching(
    kube: MemoryKube, resource: Resource = CONFIG_MAPS, **options: Any
) -> AsyncIterator[list[WatchEvent]]:
    """Collects the events of a watch from now on."""
    seen: list[WatchEvent] = []
    version = str(kube.version)
    async with kube.watch(resource, "default", resource_version=version, timeout=3600, **options) as events:

        async def collect() -> None:
            async for event in events:
                seen.append(event)  # noqa: PERF401 (each one is seen at once)

        task = asyncio.create_task(collect())
        yield seen
        await settled()
        task.cancel()
        await asyncio.wait([task])


async def settled() -> None:
    """Let everything happen that needs no time to pass."""
    await asyncio.sleep(0.001)


def shape(events: list[WatchEvent]) -> list[tuple[str, str]]:
    return [(event.type, event.object["metadata"]["name"]) for event in events]


class TestWrites:
    async def test_the_server_owns_system_metadata(self, kube: MemoryKube) -> None:
        """UID, times, version and deletion are the server's, whatever the writer says."""
        body: dict[str, Any] = {
            "uid": "mine",
            "creationTimestamp": "2001-01-01T00:00:00Z",
            "deletionTimestamp": "2001-01-01T00:00:00Z",
        }
        made = await add(kube, config_map("a", **body))
        assert made["kind"] == "ConfigMap"
        assert made["metadata"]["creationTimestamp"] == "2023-11-14T22:13:20Z"
        assert made["metadata"]["namespace"] == "default"
        assert "deletionTimestamp" not in made["metadata"]
        assert uid_of(made) not in ("", "mine")
        again = await kube.patch(CONFIG_MAPS, "a", "default", {"metadata": {"creationTimestamp": "x", "generation": 9}})
        assert again == made

    async def test_what_callers_hold_is_theirs(self, kube: MemoryKube) -> None:
        """Changing an object that was sent or received changes nothing in the server."""
        body = config_map("a", labels={"x": "1"})
        made = await add(kube, body)
        body["metadata"]["labels"]["x"] = made["metadata"]["labels"]["x"] = "2"
        async with watching(kube) as seen:
            await kube.patch(CONFIG_MAPS, "a", "default", {"data": {"k": "v"}})
        seen[0].object["metadata"]["labels"]["x"] = "3"
        (await kube.list(CONFIG_MAPS)).items[0]["metadata"]["labels"]["x"] = "4"
        assert (await kube.get(CONFIG_MAPS, "a", "default"))["metadata"]["labels"] == {"x": "1"}

    @pytest.mark.parametrize(
        ("resource", "body", "error", "message"),
        [
            (CONFIG_MAPS, {"metadata": {}}, errors.Invalid, "name or generateName"),
            (CONFIG_MAPS, {"metadata": {"name": "a", "namespace": "other"}}, errors.BadRequest, "does not match"),
            (CONFIG_MAPS, {"kind": "Pod", "metadata": {"name": "a"}}, errors.BadRequest, "Pod"),
            (CONFIG_MAPS, {"metadata": {"name": "a", "resourceVersion": "1"}}, errors.ServerError, "resourceVersion"),
            (CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"a": "x" * 1_100_000}}, errors.Invalid, "Too long"),
            (CONFIG_MAPS, {"metadata": {"name": "a", "ownerReferences": [{"uid": "u"}]}}, errors.Invalid, "apiVersion"),
            (WIDGETS, {"metadata": {"name": "a"}, "spec": "x" * 1_600_000}, errors.ServerError, "too large"),
            (WIDGETS, {"metadata": {"name": "a"}, "spec": "x" * 3_200_000}, errors.TooLarge, "too large"),
            (SERVICES, {"metadata": {"name": "1a"}}, errors.Invalid, "metadata.name"),
            (PODS, {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "c"}]}}, errors.Invalid, "image"),
            (LEASES, {"metadata": {"name": "a"}, "spec": {"leaseDurationSeconds": 0}}, errors.Invalid, "greater than"),
            (NODES, {"metadata": {"name": "a"}, "spec": object()}, errors.BadRequest, "JSON"),
        ],
    )
    async def test_what_is_not_created(
        self, kube: MemoryKube, resource: Resource, body: Any, error: type[errors.KubeError], message: str
    ) -> None:
        """Each refusal has the server's type and says what is wrong."""
        with pytest.raises(error, match=message):
            await add(kube, body, resource)

    async def test_a_namespace_is_needed(self, kube: MemoryKube) -> None:
        """A creation without a namespace is no request of this server's."""
        with pytest.raises(errors.KubeError, match="not allow"):
            await kube.create(CONFIG_MAPS, config_map("a"))

    async def test_a_replacement_of_another_uid(self, kube: MemoryKube) -> None:
        """The UID in a body is a precondition, too."""
        made = await add(kube, config_map("a"))
        with pytest.raises(errors.Conflict, match="UID in precondition"):
            await kube.replace(CONFIG_MAPS, made | {"metadata": made["metadata"] | {"uid": "other"}})
        assert await kube.get(CONFIG_MAPS, "a", "default") == made

    async def test_some_kinds_need_the_version(self, kube: MemoryKube) -> None:
        """A replacement without a version overwrites a ConfigMap, and is refused for leases and custom resources."""
        for resource in (CONFIG_MAPS, LEASES, WIDGETS):
            await add(kube, {"metadata": {"name": "a"}}, resource)
        body = {"metadata": {"name": "a", "namespace": "default", "labels": {"x": "1"}}}
        assert (await kube.replace(CONFIG_MAPS, body))["metadata"]["labels"] == {"x": "1"}
        for resource in (LEASES, WIDGETS):
            with pytest.raises(errors.Invalid, match="must be specified"):
                await kube.replace(resource, body)

    async def test_a_custom_status_of_its_own(self, kube: MemoryKube) -> None:
        """With the subresource, each write changes its half only; the generation counts changes of the spec."""
        kube.register(WIDGETS, has_status=True)
        made = await add(kube, {"metadata": {"name": "a"}, "spec": {"x": 1}, "status": {"y": 1}}, WIDGETS)
        assert "status" not in made
        await kube.patch(WIDGETS, "a", "default", {"spec": {"x": 2}, "status": {"y": 2}})
        both = {"spec": {"x": 3}, "status": {"y": 3}, "metadata": {"labels": {"l": "1"}}}
        done = await kube.patch(WIDGETS, "a", "default", both, subresource="status")
        assert (done["spec"], done["status"]) == ({"x": 2}, {"y": 3})
        assert "labels" not in done["metadata"]
        assert done["metadata"]["generation"] == 2

    async def test_a_custom_status_among_the_rest(self, kube: MemoryKube) -> None:
        """Without the subresource any write changes the status, and explicit nulls stay."""
        body = {"metadata": {"name": "a"}, "spec": {}, "status": {"y": None}}
        assert (await add(kube, body, WIDGETS))["status"] == {"y": None}
        done = await kube.patch(WIDGETS, "a", "default", {"status": {"z": 1}})
        assert (done["status"], done["metadata"]["generation"]) == ({"y": None, "z": 1}, 2)
        with pytest.raises(errors.NotFound):
            await kube.patch(WIDGETS, "a", "default", {"status": {}}, subresource="status")

    async def test_a_definition_registers_its_kind(self, kube: MemoryKube) -> None:
        """A CustomResourceDefinition is established at once, and its status subresource holds."""
        spec = {
            "group": WIDGETS.group,
            "names": {"plural": WIDGETS.plural},
            "versions": [{"name": "v1", "subresources": {"status": {}}}],
        }
        body = {"metadata": {"name": "widgets.example.dev"}, "spec": spec}
        made = await add(kube, body, CUSTOM_RESOURCE_DEFINITIONS)
        assert {"type": "Established", "status": "True"} in made["status"]["conditions"]
        assert "status" not in await add(kube, {"metadata": {"name": "a"}, "status": {"y": 1}}, WIDGETS)

    async def test_refused_patches(self) -> None:
        """A second controller, the removal of an owner where there are none, a strategic patch of a custom resource."""
        kube = MemoryKube(gc_delay=None)
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "u1", "controller": True}
        await add(kube, {"metadata": {"name": "a", "ownerReferences": [owner]}})
        second = {"metadata": {"ownerReferences": [owner | {"uid": "u2"}]}}
        with pytest.raises(errors.Invalid, match="Only one reference"):
            await kube.patch(CONFIG_MAPS, "a", "default", second, patch_type="strategic")
        await add(kube, config_map("free"))
        release = {"metadata": {"ownerReferences": [{"$patch": "delete", "uid": "u1"}]}}
        with pytest.raises(errors.Invalid):
            await kube.patch(CONFIG_MAPS, "free", "default", release, patch_type="strategic")
        await add(kube, {"metadata": {"name": "w"}}, WIDGETS)
        with pytest.raises(errors.KubeError) as refused:
            await kube.patch(WIDGETS, "w", "default", {}, patch_type="strategic")
        assert refused.value.status == 415


class TestPods:
    async def test_what_a_new_pod_is_like(self, kube: MemoryKube) -> None:
        """It is Pending, whatever was sent; its spec hardly ever changes."""
        made = await add(kube, pod("p") | {"status": {"phase": "Running"}}, PODS)
        assert (made["status"]["phase"], made["spec"]["restartPolicy"]) == ("Pending", "Always")
        with pytest.raises(errors.Invalid, match="may not change"):
            await kube.patch(PODS, "p", "default", {"spec": {"nodeName": "n"}})

    async def test_a_bound_pod_ends_gracefully(self, kube: MemoryKube) -> None:
        """It stays until its kubelet deletes it with grace 0; the time left can only be shortened."""
        await add(kube, pod("p", "n1"), PODS)
        async with watching(kube, PODS) as seen:
            await kube.delete(PODS, "p", "default")
            await kube.delete(PODS, "p", "default", grace_period=60)
            await kube.delete(PODS, "p", "default", grace_period=5)
            await kube.delete(PODS, "p", "default", grace_period=0)
        assert shape(seen) == [("MODIFIED", "p")] * 3 + [("DELETED", "p")]
        marks = [event.object["metadata"] for event in seen]
        assert [mark["deletionGracePeriodSeconds"] for mark in marks] == [30, 5, 0, 0]
        assert marks[0]["deletionTimestamp"] == "2023-11-14T22:13:50Z"
        assert marks[1]["deletionTimestamp"] == "2023-11-14T22:13:25Z"

    async def test_a_pod_without_anything_to_stop(self, kube: MemoryKube) -> None:
        """A finished pod is gone at once; a finalizer still holds it."""
        for name, finalizers in (("p", []), ("held", ["example.dev/hold"])):
            await add(kube, pod(name, "n1", finalizers=finalizers), PODS)
            await kube.patch(PODS, name, "default", {"status": {"phase": "Succeeded"}}, subresource="status")
            await kube.delete(PODS, name, "default")
        assert await names(kube, PODS) == ["held"]
        await kube.patch(PODS, "held", "default", {"metadata": {"finalizers": None}})
        assert await names(kube, PODS) == []


class TestEvictions:
    """What budgets cover, and what they have left, beyond the conformance suite."""

    @staticmethod
    async def prepare(kube: MemoryKube, budgets: dict[str, Object], allowed: int) -> None:
        """Add budgets with these selectors, and two running pods."""
        for name, selector in budgets.items():
            await add(kube, {"metadata": {"name": name}, "spec": {"selector": selector}}, POD_DISRUPTION_BUDGETS)
            status = {"status": {"disruptionsAllowed": allowed, "observedGeneration": 1}}
            await kube.patch(POD_DISRUPTION_BUDGETS, name, "default", status, subresource="status")
        for name in "pq":
            await add(kube, pod(name, "n", labels={"app": "x"}), PODS)
            await kube.patch(PODS, name, "default", {"status": {"phase": "Running"}}, subresource="status")

    @staticmethod
    async def evict(kube: MemoryKube, name: str) -> None:
        body: Object = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        await kube.create(PODS, body, "default", name=name, subresource="eviction")

    async def test_each_takes_one(self, kube: MemoryKube) -> None:
        """When a budget allows one disruption, the second pod has to wait until it allows another."""
        await self.prepare(kube, {"b": {"matchLabels": {"app": "x"}}}, allowed=1)
        await self.evict(kube, "p")
        with pytest.raises(errors.TooManyRequests):
            await self.evict(kube, "q")
        pods = (await kube.list(PODS, "default")).items
        assert [name_of(pod) for pod in pods if is_deleting(pod)] == ["p"]

    @pytest.mark.parametrize(
        ("selector", "covers"),
        [
            ({"matchLabels": {"app": "y"}}, False),
            ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["x", "y"]}]}, True),
            ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}, False),
            ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
            ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
            ({}, False),
        ],
    )
    async def test_what_a_budget_covers(self, kube: MemoryKube, selector: Object, covers: bool) -> None:
        """The pods that its selector matches; an empty one matches none."""
        await self.prepare(kube, {"b": selector}, allowed=0)
        if covers:
            with pytest.raises(errors.TooManyRequests):
                await self.evict(kube, "p")
        else:
            await self.evict(kube, "p")
        assert is_deleting(await kube.get(PODS, "p", "default")) is not covers

    async def test_a_pod_in_two_budgets(self, kube: MemoryKube) -> None:
        """The server does not know which one to take from."""
        await self.prepare(kube, {name: {"matchLabels": {"app": "x"}} for name in "ab"}, allowed=1)
        with pytest.raises(errors.ServerError, match="more than one"):
            await self.evict(kube, "p")


class TestDeletion:
    async def test_finalizers_hold_an_object(self, kube: MemoryKube) -> None:
        """It is marked, takes no new finalizers, and goes away with the last one."""
        await add(kube, config_map("a", finalizers=["example.dev/one", "example.dev/two"]))
        await kube.delete(CONFIG_MAPS, "a", "default")
        marked = await kube.get(CONFIG_MAPS, "a", "default")
        assert marked["metadata"]["deletionTimestamp"]
        await kube.delete(CONFIG_MAPS, "a", "default")
        assert await kube.get(CONFIG_MAPS, "a", "default") == marked
        with pytest.raises(errors.Invalid, match="no new finalizers"):
            await kube.patch(CONFIG_MAPS, "a", "default", {"metadata": {"finalizers": ["example.dev/three"]}})
        await kube.patch(CONFIG_MAPS, "a", "default", {"metadata": {"finalizers": ["example.dev/two"]}})
        assert await names(kube) == ["a"]
        await kube.patch(CONFIG_MAPS, "a", "default", {"metadata": {"finalizers": []}})
        assert await names(kube) == []

    async def test_in_the_background(self, kube: MemoryKube) -> None:
        """The dependents of a deleted owner are collected, transitively; another owner keeps them."""
        top, other = await add(kube, config_map("top")), await add(kube, config_map("other"))
        middle = await add(kube, config_map("middle", top))
        await add(kube, config_map("bottom", middle))
        await add(kube, config_map("shared", top, other))
        await kube.delete(CONFIG_MAPS, "top", "default")
        assert "bottom" in await names(kube)
        await settled()
        assert await names(kube) == ["other", "shared"]
        owners = (await kube.get(CONFIG_MAPS, "shared", "default"))["metadata"]["ownerReferences"]
        assert [owner["name"] for owner in owners] == ["other"]

    async def test_in_the_foreground(self, kube: MemoryKube) -> None:
        """The owner waits for the dependents that block it, here for a pod's graceful end."""
        owner = await add(kube, config_map("owner", finalizers=["foregroundDeletion"]))
        child = await add(kube, config_map("child", owner))
        await add(kube, pod("p", "n1", ownerReferences=config_map("", owner)["metadata"]["ownerReferences"]), PODS)
        await add(kube, config_map("grandchild", child))
        await kube.delete(CONFIG_MAPS, "owner", "default")
        await settled()
        assert await names(kube) == ["owner"]
        assert (await kube.get(PODS, "p", "default"))["metadata"]["deletionGracePeriodSeconds"] == 30
        await kube.delete(PODS, "p", "default", grace_period=0)
        await settled()
        assert await names(kube) == []

    async def test_a_policy_overrules_the_finalizer(self, kube: MemoryKube) -> None:
        """Background, asked for, removes an object that carries the foreground finalizer at once."""
        owner = await add(kube, config_map("owner", finalizers=["foregroundDeletion"]))
        await add(kube, config_map("child", owner))
        await kube.delete(CONFIG_MAPS, "owner", "default", propagation="Background")
        assert await names(kube) == ["child"]
        await settled()
        assert await names(kube) == []

    async def test_the_owner_was_never_there(self, kube: MemoryKube) -> None:
        """An object of a lost owner is collected, unless the owner's kind is unknown."""
        lost = {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "lost"}
        for name, reference in (("a", lost), ("b", lost | {"apiVersion": "unknown.dev/v1"})):
            await add(kube, {"metadata": {"name": name, "ownerReferences": [reference]}})
        await settled()
        assert await names(kube) == ["b"]

    async def test_the_collector_takes_its_time(self) -> None:
        """`gc_delay` is the time from the cause to the collection; without a collector, garbage stays."""
        for delay, left in ((60.0, []), (None, ["child"])):
            kube = MemoryKube(gc_delay=delay)
            owner = await add(kube, config_map("owner"))
            await add(kube, config_map("child", owner))
            await asyncio.sleep(3600)
            await kube.delete(CONFIG_MAPS, "owner", "default")
            await asyncio.sleep(59)
            assert await names(kube) == ["child"]
            await asyncio.sleep(2)
            assert await names(kube) == left

    async def test_a_namespace_ends_with_its_content(self, kube: MemoryKube) -> None:
        """It takes nothing new, deletes what it has, and goes last."""
        await kube.create(NAMESPACES, {"metadata": {"name": "n"}})
        await kube.create(CONFIG_MAPS, config_map("free"), "n")
        await kube.create(CONFIG_MAPS, config_map("held", finalizers=["example.dev/hold"]), "n")
        await kube.delete(NAMESPACES, "n")
        await settled()
        assert [item["metadata"]["name"] for item in (await kube.list(CONFIG_MAPS, "n")).items] == ["held"]
        with pytest.raises(errors.Forbidden, match="being terminated"):
            await kube.create(CONFIG_MAPS, config_map("new"), "n")
        await kube.patch(CONFIG_MAPS, "held", "n", {"metadata": {"finalizers": None}})
        await settled()
        with pytest.raises(errors.NotFound):
            await kube.get(NAMESPACES, "n")


class TestLists:
    async def test_version_0_comes_in_one_page(self, kube: MemoryKube) -> None:
        """It is answered as from the server's cache, which ignores the limit."""
        for name in "abc":
            await add(kube, config_map(name))
        assert await names(kube, limit=1, resource_version="0") == ["a", "b", "c"]

    async def test_items_of_built_in_kinds_do_not_name_it(self, kube: MemoryKube) -> None:
        """Custom resources carry kind and version in lists, others do not."""
        await add(kube, config_map("a"))
        await add(kube, {"metadata": {"name": "a"}}, WIDGETS)
        assert "kind" not in (await kube.list(CONFIG_MAPS)).items[0]
        assert (await kube.list(WIDGETS)).items[0]["kind"] == "Widget"

    async def test_what_the_server_does_not_have(self) -> None:
        """An unserved resource is NotFound for every verb; other versions of it share its objects."""
        kube, old = MemoryKube(unserved=[POD_DISRUPTION_BUDGETS]), POD_DISRUPTION_BUDGETS.in_version("v1beta1")
        assert not await kube.served(POD_DISRUPTION_BUDGETS)
        assert await kube.served(old)
        with pytest.raises(errors.NotFound, match="could not find the requested resource"):
            await kube.list(POD_DISRUPTION_BUDGETS)
        assert (await add(kube, {"metadata": {"name": "a"}}, old))["apiVersion"] == "policy/v1beta1"


class TestWatches:
    async def test_a_selector_makes_comings_and_goings(self, kube: MemoryKube) -> None:
        """An object that leaves the selector is DELETED as it last matched, at the version of the change."""
        async with watching(kube, label_selector="x=1") as seen:
            await add(kube, config_map("a"))
            await kube.patch(CONFIG_MAPS, "a", "default", {"metadata": {"labels": {"x": "1"}}})
            left = await kube.patch(CONFIG_MAPS, "a", "default", {"metadata": {"labels": {"x": "2"}}})
        assert shape(seen) == [("ADDED", "a"), ("DELETED", "a")]
        assert seen[1].object["metadata"]["labels"] == {"x": "1"}
        assert resource_version_of(seen[1].object) == resource_version_of(left)

    async def test_from_a_version_on(self, kube: MemoryKube) -> None:
        """A watch repeats the history after any version that is not compacted; from 0, the existing objects."""
        first = await add(kube, config_map("a"))
        await add(kube, config_map("b"))
        await kube.delete(CONFIG_MAPS, "a", "default")
        for version, expected in (
            (resource_version_of(first), [("ADDED", "b"), ("DELETED", "a")]),
            ("0", [("ADDED", "b")]),
        ):
            async with kube.watch(CONFIG_MAPS, resource_version=version, timeout=1) as events:
                assert shape([event async for event in events]) == expected
        kube.compact()
        with pytest.raises(errors.Expired):
            async with kube.watch(CONFIG_MAPS, resource_version=resource_version_of(first), timeout=1):
                pass

    async def test_history_is_bounded(self) -> None:
        """Only the last `history_limit` changes are remembered."""
        kube = MemoryKube(history_limit=5)
        for number in range(10):
            await add(kube, config_map(f"m{number}"))
        for behind, is_expired in ((5, False), (6, True)):
            try:
                async with kube.watch(CONFIG_MAPS, resource_version=str(kube.version - behind), timeout=1) as events:
                    assert len([event async for event in events]) == behind
            except errors.Expired:
                assert is_expired
            else:
                assert not is_expired

    async def test_it_ends_when_it_was_asked_to(self, kube: MemoryKube) -> None:
        """A bookmark each minute and just before the end, with a version to go on from; then a clean end, on time."""
        now = asyncio.get_running_loop().time
        began, marks = now(), []
        async with kube.watch(CONFIG_MAPS, resource_version=str(kube.version), timeout=150) as events:
            async for event in events:
                assert event.type == "BOOKMARK"
                assert event.object["metadata"] == {"resourceVersion": str(kube.version)}
                marks.append(round(now() - began))
        assert marks == [60, 120, 148]
        assert now() - began == pytest.approx(150)
        assert kube.watch_count == 0

    async def test_it_breaks(self, kube: MemoryKube) -> None:
        """A broken watch delivers what it had, then raises; the next one goes on from there."""
        async with kube.watch(CONFIG_MAPS, resource_version=str(kube.version), timeout=60) as events:
            await add(kube, config_map("a"))
            kube.break_watches()
            assert (await anext(events)).type == "ADDED"
            with pytest.raises(errors.Unreachable):
                await anext(events)


class TestHooks:
    async def test_a_call_fails_before_or_after(self, kube: MemoryKube) -> None:
        """`before_call`: nothing was applied. `after_call`: it was, and only the answer is lost."""
        calls: list[Call] = []

        def fail(call: Call) -> None:
            calls.append(call)
            raise errors.Unreachable("no answer")

        kube.before_call = fail
        with pytest.raises(errors.Unreachable):
            await add(kube, config_map("a"))
        kube.before_call, kube.after_call = None, fail
        with pytest.raises(errors.Unreachable):
            await add(kube, config_map("b"))
        kube.after_call = None
        assert await names(kube) == ["b"]
        assert [(call.verb, call.name) for call in calls] == [("create", "a"), ("create", "b")]

    async def test_a_slow_network(self, kube: MemoryKube) -> None:
        """A hook may wait: the call takes its time, and others pass it."""

        async def wait(call: Call) -> None:
            await asyncio.sleep(5 if call.name == "slow" else 0)

        kube.before_call = wait
        slow = asyncio.create_task(add(kube, config_map("slow")))
        quick = await add(kube, config_map("quick"))
        assert int(resource_version_of(await slow)) > int(resource_version_of(quick))

    async def test_admission(self, kube: MemoryKube) -> None:
        """A validation of the test's own refuses creations and changes, and sees the old object."""

        def refuse(resource: Resource, new: Object, old: Object | None) -> None:
            if resource == CONFIG_MAPS and old is not None and new.get("data") != old.get("data"):
                raise errors.Forbidden("frozen", status=403)

        kube.admission = refuse
        await add(kube, config_map("a"))
        with pytest.raises(errors.Forbidden, match="frozen"):
            await kube.patch(CONFIG_MAPS, "a", "default", {"data": {"k": "v"}})

    async def test_other_tasks_run_between_a_read_and_its_use(self, kube: MemoryKube) -> None:
        """Two read-modify-write loops that do not check versions lose an update, as against a real server."""
        await add(kube, config_map("a") | {"data": {"n": "0"}})

        async def increment() -> None:
            found = await kube.get(CONFIG_MAPS, "a", "default")
            await kube.patch(CONFIG_MAPS, "a", "default", {"data": {"n": str(int(found["data"]["n"]) + 1)}})

        await asyncio.gather(increment(), increment())
        assert (await kube.get(CONFIG_MAPS, "a", "default"))["data"] == {"n": "1"}
