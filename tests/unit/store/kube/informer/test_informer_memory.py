"""Informers on `MemoryKube`, as an operator's tests use them; on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from store.kube.api.errors import NotFound, Unreachable
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, labels_of, owner_reference, uid_of
from store.kube.informer.informer import Informer, by_controller
from store.kube.memory.kube import Call, MemoryKube
from tests.support.kube.informers.checked import RecordingHandler, loop_time, running, until

pytestmark = pytest.mark.looptime


@pytest.fixture
def api() -> MemoryKube:
    return MemoryKube(namespaces=["team"])


async def new_pod(api: MemoryKube, name: str, owner: Object | None = None, group: str = "ours") -> Object:
    metadata: Object = {"name": name, "labels": {"group": group}}
    if owner is not None:
        metadata["ownerReferences"] = [owner_reference(owner, api_version="v1", kind="ConfigMap")]
    return await api.create(
        PODS, {"metadata": metadata, "spec": {"containers": [{"name": "main", "image": "main"}]}}, "team"
    )


async def test_an_operators_children_are_found_and_their_end_is_reported(api: MemoryKube) -> None:
    """Pods come by their owner's UID, through changes, and go with it when the garbage is collected."""
    informer, recorded = Informer(api, PODS, indexers={"owner": by_controller}, clock=loop_time), RecordingHandler()
    informer.add_handler(recorded)
    async with running(informer):
        await informer.synced()
        owner = await api.create(CONFIG_MAPS, {"metadata": {"name": "job"}}, "team")
        for name in "ab":
            await new_pod(api, name, owner)
        await new_pod(api, "orphan")
        await api.patch(PODS, "a", "team", {"status": {"phase": "Running"}}, subresource="status")
        await until(lambda: recorded.counts == {"added": 3, "updated": 1})
        found = informer.by_index("owner", uid_of(owner))
        assert [pod["status"].get("phase") for pod in found] == ["Running", "Pending"]
        await api.delete(CONFIG_MAPS, "job", "team")
        await until(lambda: not informer.by_index("owner", uid_of(owner)))
        assert [*recorded.view] == ["team/orphan"]
        assert recorded.violations == []


async def test_an_outage_with_another_history_ends_in_the_same_view(api: MemoryKube) -> None:
    """After a cut, changes that the history does not hold any more are found by a list."""
    recorded, reachable = RecordingHandler(), asyncio.Event()
    reachable.set()

    def network(call: Call) -> None:
        if call.verb in ("list", "watch") and not reachable.is_set():
            raise Unreachable("cut off")

    api.before_call = network
    informer = Informer(api, PODS, clock=loop_time)
    informer.add_handler(recorded)
    async with running(informer):
        for name in "abc":
            await new_pod(api, name)
        await until(lambda: recorded.counts["added"] == 3)
        reachable.clear()
        api.break_watches()
        await until(lambda: not api.watch_count)
        await api.delete(PODS, "a", "team", grace_period=0)
        await api.delete(PODS, "b", "team", grace_period=0)
        second = await new_pod(api, "b")
        api.compact()
        reachable.set()
        await until(lambda: recorded.counts["deleted"] == 2)
        assert sorted(recorded.view) == ["team/b", "team/c"]
        assert uid_of(recorded.view["team/b"]) == uid_of(second)
        assert {tombstone.key for tombstone in recorded.tombstones} == {"team/a", "team/b"}
        assert recorded.violations == []


async def test_a_released_pod_leaves_and_a_deleted_one_is_gone(api: MemoryKube) -> None:
    """With a selector: an object that loses its label is kept; a deletion is reported once it is certain."""
    informer, recorded = Informer(api, PODS, label_selector="group=ours", clock=loop_time), RecordingHandler()
    informer.add_handler(recorded)
    async with running(informer):
        await informer.synced()
        await new_pod(api, "a")
        await new_pod(api, "b")
        await api.patch(PODS, "a", "team", {"metadata": {"labels": {"group": None}}})
        await api.delete(PODS, "b", "team", grace_period=0)
        await until(lambda: [*recorded.view] == ["team/a"] and not labels_of(recorded.view["team/a"]))
        assert [what for what, name in recorded.log if name.startswith("a")] == ["added", "updated"]
        with pytest.raises(NotFound):
            await api.get(PODS, "b", "team")
        informer.discard("team/a", uid_of(recorded.view["team/a"]))
        assert recorded.view == {}
        assert recorded.violations == []
