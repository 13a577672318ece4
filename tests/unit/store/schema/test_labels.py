"""Labels of nodes, pods and RCs: where they live, merging under compare-and-swap, and bad neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

import pytest

from rcfarm.operations.rcs import ReplicationControllers
from store.embedded.store import EmbeddedStore
from store.kv.ops import Transaction
from store.kv.protocol import BadRecord, SessionSpec, TxnConflict
from store.schema.audit import ChangeRefused, events
from store.schema.keys import BadLabel, Keys
from store.schema.labels import Labeler, LabelType, PodLocation, UnknownObject, current_pods
from store.schema.records import (
    POD_ID_LABEL,
    RC_ID_LABEL,
    Intent,
    Labels,
    NodeSpec,
    RCSpec,
    decode,
    decode_labels,
    encode,
)
from store.schema.selectors import Selector

keys = Keys()
OBJECTS: list[tuple[LabelType, str]] = [("node", "n1"), ("rc", "web"), ("pod", "n1/hello")]


async def _put_pod(store: EmbeddedStore, rc_id: str, node: str, pod_id: str = "hello", **labels: str) -> None:
    labels = {POD_ID_LABEL: pod_id, RC_ID_LABEL: rc_id, **labels}
    await store.put(keys.pod(rc_id, node), encode(labels))
    await store.put(keys.intent(node, pod_id), encode(Intent(manifest="0" * 64, rc=rc_id, shard="00", labels=labels)))


@pytest.fixture
async def store() -> EmbeddedStore:
    store = EmbeddedStore()
    await store.put(keys.node_spec("n1"), encode(NodeSpec(name="n1", labels={"zone": "a"}, schedulable=False)))
    await store.put(keys.node_alive("n1"), b'{"agent":"a","since":""}')
    spec = RCSpec(id="web", manifest="0" * 64, replicas_desired=3, rc_labels={POD_ID_LABEL: "hello", "zone": "a"})
    await store.put(keys.spec("web"), encode(spec))
    await _put_pod(store, "web", "n1", zone="a")
    return store


@pytest.fixture
def labeler(store: EmbeddedStore) -> Labeler:
    return Labeler(store, keys)


async def _labels(labeler: Labeler, label_type: LabelType, object_id: str) -> Labels:
    return (await labeler.get_labels(label_type, object_id)).labels


@pytest.mark.parametrize(("label_type", "object_id"), OBJECTS)
async def test_setting_merges_and_removing_removes_only_what_is_named(
    labeler: Labeler, label_type: LabelType, object_id: str
) -> None:
    """Labels that are not mentioned stay; an absent label can be removed without error."""
    before = await _labels(labeler, label_type, object_id)
    await labeler.set_labels(label_type, object_id, {"tier": "gold", "zone": "b"}, actor="me")
    assert await _labels(labeler, label_type, object_id) == before | {"tier": "gold", "zone": "b"}
    await labeler.remove_labels(label_type, object_id, ["tier", "absent"], actor="me")
    assert await _labels(labeler, label_type, object_id) == before | {"zone": "b"}


async def test_the_rest_of_the_record_stays(store: EmbeddedStore, labeler: Labeler) -> None:
    """Labelling neither uncordons a node nor changes what an RC desires; a pod's intent gets the same labels."""
    for label_type, object_id in OBJECTS:
        await labeler.set_labels(label_type, object_id, {"tier": "gold"}, actor="me")
    stored = {entry.key: entry.value for entry in (await store.list("")).entries}
    node, spec, pod, intent = keys.node_spec("n1"), keys.spec("web"), keys.pod("web", "n1"), keys.intent("n1", "hello")
    assert decode(NodeSpec, node, stored[node]).schedulable is False
    assert decode(RCSpec, spec, stored[spec]).replicas_desired == 3
    assert decode(Intent, intent, stored[intent]).labels == decode_labels(pod, stored[pod])


@pytest.mark.parametrize(("label_type", "object_id"), OBJECTS)
async def test_a_concurrent_change_is_a_conflict_without_retries(
    store: EmbeddedStore, labeler: Labeler, label_type: LabelType, object_id: str
) -> None:
    """A transaction that was prepared on an older read is refused whole, and nothing of it is applied."""
    txn = Transaction()
    await labeler.set_labels_txn(txn, label_type, object_id, {"mine": "1"})
    await labeler.set_labels(label_type, object_id, {"theirs": "1"}, actor="them")
    with pytest.raises(TxnConflict):
        await txn.commit(store)
    labels = await _labels(labeler, label_type, object_id)
    assert "theirs" in labels
    assert "mine" not in labels


async def test_labelling_an_rc_is_an_edit_of_it(store: EmbeddedStore, labeler: Labeler) -> None:
    """A change raises the generation once, and is refused under another's mutation lock, taken before or in
    between, and for an RC that is being deleted; the labels are still read."""
    await labeler.set_labels("rc", "web", {"tier": "gold"}, actor="me")
    await labeler.set_labels("rc", "web", {"tier": "gold"}, actor="me")
    rcs = ReplicationControllers(store, keys, actor="me")
    assert (await rcs.get("web")).generation == 2

    txn = Transaction()
    await labeler.remove_labels_txn(txn, "rc", "web", ["tier"])
    session = (await store.create_session(SessionSpec("rollout"))).id
    async with rcs.lock_for_mutation("web", session, "rollout"):
        with pytest.raises(TxnConflict):
            await txn.commit(store)
        with pytest.raises(ChangeRefused, match=r"rc web is being changed by me \(rollout\); try again"):
            await labeler.set_labels("rc", "web", {"tier": "tin"}, actor="me")
        with pytest.raises(ChangeRefused):
            await labeler.remove_labels_txn(Transaction(), "rc", "web", ["tier"])
    await rcs.delete("web", force=True)

    with pytest.raises(ChangeRefused, match="rc web is being deleted"):
        await labeler.set_labels("rc", "web", {"tier": "tin"}, actor="me")
    assert (await _labels(labeler, "rc", "web"))["tier"] == "gold"


async def test_concurrent_changes_are_merged_with_retries(store: EmbeddedStore, labeler: Labeler) -> None:
    """`set_labels` reads again after a conflict, so no change is lost; without retries one is refused."""

    def racing(prefix: str, attempts: int) -> Iterable[Coroutine[None, None, None]]:
        return (
            labeler.set_labels("node", "n1", {f"{prefix}-{number}": "1"}, actor="me", attempts=attempts)
            for number in range(8)
        )

    await asyncio.gather(*racing("patient", attempts=8))
    assert len(await _labels(labeler, "node", "n1")) == 1 + 8
    results = await asyncio.gather(*racing("hasty", attempts=1), return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [TxnConflict] * 7
    assert len(await _labels(labeler, "node", "n1")) == 1 + 8 + 1


async def test_changes_are_recorded(store: EmbeddedStore, labeler: Labeler) -> None:
    """Each change is one audit event that says who changed what, and the RC that it concerns."""
    await labeler.set_labels("pod", "n1/hello", {"tier": "gold"}, actor="me")
    (event,) = await events(store, keys, rc="web")
    assert event.actor == "me"
    assert event.event_details == {"type": "pod", "id": "n1/hello", "set": {"tier": "gold"}, "removed": [], "rc": "web"}


@pytest.mark.parametrize(
    ("label_type", "object_id"),
    [("node", "n2"), ("node", "N/2"), ("rc", "db"), ("rc", "a/b"), ("pod", "n1/db"), ("pod", "n1"), ("pod", "a/b/c")],
)
async def test_an_unknown_object_is_named(labeler: Labeler, label_type: LabelType, object_id: str) -> None:
    """Labels of something that does not exist are an error, not an empty map: it is most likely a typo."""
    with pytest.raises(UnknownObject, match=object_id):
        await labeler.get_labels(label_type, object_id)
    with pytest.raises(UnknownObject, match=object_id):
        await labeler.set_labels(label_type, object_id, {"a": "1"}, actor="me")


async def test_bad_labels_are_refused(labeler: Labeler) -> None:
    """Neither values that no selector could name, nor another identity of a pod or an RC."""
    with pytest.raises(BadLabel, match="a b"):
        await labeler.set_labels("node", "n1", {"a b": "1"}, actor="me")
    with pytest.raises(BadLabel, match=RC_ID_LABEL):
        await labeler.set_labels("pod", "n1/hello", {RC_ID_LABEL: "db"}, actor="me")
    with pytest.raises(BadLabel, match=POD_ID_LABEL):
        await labeler.remove_labels("rc", "web", [POD_ID_LABEL], actor="me")
    await labeler.set_labels("pod", "n1/hello", {RC_ID_LABEL: "web", "ok": "1"}, actor="me")


async def test_one_listing_serves_every_selector(labeler: Labeler, store: EmbeddedStore) -> None:
    """Each selector gets only its matches, of the type asked for; no match is an empty list. Only for pods does a
    selector by the RC's id narrow what is read."""
    await store.put(keys.node_spec("n2"), encode(NodeSpec(name="n2", labels={"zone": "b"})))
    await _put_pod(store, "web", "n2", zone="b")
    for label_type, in_a, in_b in [("node", ["n1"], ["n2"]), ("pod", ["n1/hello"], ["n2/hello"]), ("rc", ["web"], [])]:
        for zone, expected in [("a", in_a), ("b", in_b), ("c", [])]:
            matches = await labeler.get_matches(Selector.parse(f"zone={zone}"), label_type)  # type: ignore[arg-type]
            assert [labeled.id for labeled in matches] == expected
    assert len(await labeler.get_matches(Selector.everything(), "pod")) == 2
    await store.put(keys.node_spec("n9"), encode(NodeSpec(name="n9", labels={RC_ID_LABEL: "web"})))
    matches = await labeler.get_matches(Selector.parse(f"{RC_ID_LABEL}=web"), "node")
    assert [labeled.id for labeled in matches] == ["n9"]


async def test_no_labels_at_all_is_an_answer() -> None:
    """An empty tree has no pods: the first pod of a new cluster can be placed."""
    labeler = Labeler(EmbeddedStore(), keys)
    assert await labeler.get_matches(Selector.everything(), "pod") == []
    assert await current_pods("web", labeler) == []


async def test_a_bad_record_is_reported_and_hides_no_neighbour(store: EmbeddedStore) -> None:
    """One malformed record, of a node, a pod or an RC, or a foreign key, costs only itself."""
    bad: list[BadRecord] = []
    labeler = Labeler(store, keys, on_bad=bad.append)
    broken = [keys.node_spec("n0"), keys.spec("api"), keys.pod("web", "n0"), keys.rcs + "zz/lost"]
    for key in broken:
        await store.put(key, b"{")
    await store.put(keys.pod("web", "n9"), encode({POD_ID_LABEL: "hello", RC_ID_LABEL: "api"}))
    assert [labeled.id for labeled in await labeler.get_matches(Selector.everything(), "node")] == ["n1"]
    assert [labeled.id for labeled in await labeler.get_matches(Selector.everything(), "pod")] == ["n1/hello"]
    assert [labeled.id for labeled in await labeler.get_matches(Selector.everything(), "rc")] == ["web"]
    assert {error.key for error in bad} == {*broken, keys.pod("web", "n9")}


async def test_current_pods_are_those_of_the_rc(store: EmbeddedStore, labeler: Labeler) -> None:
    """Placed pods carry their pod id and their RC's id, and an RC sees its own only."""
    await _put_pod(store, "web", "n2")
    await _put_pod(store, "db", "n2", pod_id="postgres")
    assert await current_pods("web", labeler) == [PodLocation("n1", "hello"), PodLocation("n2", "hello")]
    assert await current_pods("db", labeler) == [PodLocation("n2", "postgres")]
