"""The PoolScheduler: reserving, choosing nodes, giving back, and explaining."""

from __future__ import annotations

import pytest

from scheduler.pool.scheduler import PoolScheduler
from scheduler.protocol import SchedulerError
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.records import Capacity
from store.schema.selectors import Selector
from tests.support.farm.pool import GIB, Directory, manifest, place, pool_node, reserved

keys = Keys()
WEB = Selector.parse("pool=web")
HELLO = manifest("hello", cpu=1000, memory=GIB)


@pytest.fixture
def store() -> EmbeddedStore:
    return EmbeddedStore()


def _scheduler(store: EmbeddedStore, directory: Directory, strategy: str = "spread") -> PoolScheduler:
    return PoolScheduler(store, keys, directory, strategy)  # type: ignore[arg-type]


async def test_only_reserved_nodes_are_eligible(store: EmbeddedStore) -> None:
    """Nothing is eligible before it is allocated; what is allocated is eligible, also for another farm."""
    directory = Directory(*(pool_node(f"n{n}") for n in range(4)), pool_node("db1", pool="db"))
    scheduler = _scheduler(store, directory)
    assert (await scheduler.eligible_nodes(HELLO, WEB)).eligible == frozenset()
    assert await scheduler.allocate_nodes(HELLO, WEB, 2) == ["n0", "n1"]
    for farm in (scheduler, _scheduler(store, directory)):
        answer = await farm.eligible_nodes(HELLO, WEB)
        assert answer == (frozenset({"n0", "n1"}), ("n0", "n1"))
        assert (await farm.eligible_nodes(manifest("other"), WEB)).eligible == frozenset()
    assert await scheduler.allocate_nodes(HELLO, WEB, 9) == ["n2", "n3"], "fewer than asked for is an answer"


async def test_a_node_holds_one_pod_of_an_id_and_never_more_than_it_has(store: EmbeddedStore) -> None:
    """Different pods share a node up to its capacity, whatever selector they come by; then allocation is refused."""
    directory = Directory(pool_node("n0"), pool_node("n1"))
    scheduler = _scheduler(store, directory)
    for number, selector in enumerate(["pool=web", "", "pool in (web,db)", "pool"]):
        nodes = await scheduler.allocate_nodes(
            manifest(f"pod{number}", cpu=1000), Selector.parse(selector), 9, force=True
        )
        assert nodes == ["n0", "n1"]
    with pytest.raises(SchedulerError, match="n0: needs 1m cpu, 0m free of 4000m; n1: needs 1m cpu"):
        await scheduler.allocate_nodes(manifest("late", cpu=1), WEB, 1, force=True)
    assert await scheduler.allocate_nodes(manifest("idle"), WEB, 1), "who asks for nothing finds room on a full node"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (manifest("big", cpu=4001), "needs 4001m cpu, 4000m free of 4000m"),
        (manifest("big", memory=17 * GIB), "needs 17 GiB memory, 16 GiB free of 16 GiB"),
        (manifest("big", gpu=3), "needs 3 gpu, 2 free of 2"),
        (manifest("big", fpga=1), "needs 1 fpga, 0 free of 0"),
    ],
)
async def test_every_resource_counts(store: EmbeddedStore, asked: object, message: str) -> None:
    """Cpu, memory and each kind of device; the error says what lacks, in the units of a manifest."""
    scheduler = _scheduler(store, Directory(pool_node("n0", gpu=2)))
    with pytest.raises(SchedulerError, match=message):
        await scheduler.allocate_nodes(asked, WEB, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("strategy", "order"), [("spread", ["n2", "n0", "n1"]), ("pack", ["n1", "n0", "n2"])])
async def test_strategies(store: EmbeddedStore, strategy: str, order: list[str]) -> None:
    """Spread takes the emptiest nodes first, pack the fullest that have room; the fullest resource decides."""
    directory = Directory(*(pool_node(f"n{n}") for n in range(4)))
    scheduler = _scheduler(store, directory, strategy)
    for node, load in [("n3", manifest("a", cpu=3500)), ("n1", manifest("b", memory=8 * GIB))]:
        others = [name for name in directory.nodes() if name != node]
        for name in others:
            directory.change(name, schedulable=False)
        assert await scheduler.allocate_nodes(load, WEB, 1) == [node]
        for name in others:
            directory.change(name, schedulable=True)
    directory.change("n0", capacity=Capacity(2000, 16 * GIB))
    chosen = [await scheduler.allocate_nodes(HELLO, WEB, 1) for _ in range(3)]
    assert [name for names in chosen for name in names] == order


async def test_equal_nodes_are_taken_by_name_and_by_number_of_pods(store: EmbeddedStore) -> None:
    """Pods that ask for nothing are spread, too."""
    scheduler = _scheduler(store, Directory(*(pool_node(f"n{n}") for n in range(3))))
    for number in range(6):
        await scheduler.allocate_nodes(manifest(f"p{number}"), WEB, 1)
    assert {node: len(pods) for node, pods in (await reserved(store, keys)).items()} == {"n0": 2, "n1": 2, "n2": 2}


async def test_only_live_schedulable_nodes_get_new_pods(store: EmbeddedStore) -> None:
    """Cordoned or dead nodes keep their pods and get no others; emptied or lost ones keep none."""
    directory = Directory(*(pool_node(f"n{n}") for n in range(4)))
    scheduler = _scheduler(store, directory)
    await scheduler.allocate_nodes(HELLO, WEB, 4)
    directory.change("n0", schedulable=False)
    directory.change("n1", live=False)
    directory.change("n2", schedulable=False, evict=True)
    directory.change("n3", live=False, lost=True)
    assert await scheduler.eligible_nodes(HELLO, WEB) == (frozenset({"n0", "n1"}), ())
    with pytest.raises(SchedulerError, match="cordoned"):
        await scheduler.allocate_nodes(manifest("other"), WEB, 1)


async def test_deallocating_frees_once_and_only_what_is_named(store: EmbeddedStore) -> None:
    """By pod id, or all of a selector; freeing twice, or where nothing is, is no error. No empty record stays."""
    directory = Directory(pool_node("n0"), pool_node("n1"))
    scheduler = _scheduler(store, directory)
    await scheduler.allocate_nodes(HELLO, WEB, 2)
    await scheduler.allocate_nodes(manifest("other"), Selector.everything(), 2)
    for _ in range(2):
        await scheduler.deallocate_nodes(WEB, ["n0", "n9"], pod_id="hello")
    found = await reserved(store, keys)
    assert {node: set(pods) for node, pods in found.items()} == {"n0": {"other"}, "n1": {"other", "hello"}}
    await scheduler.deallocate_nodes(WEB, ["n0", "n1"])
    await scheduler.deallocate_nodes(Selector.everything(), ["n0", "n1"])
    assert await store.keys(keys.pools) == []
    assert (await scheduler.eligible_nodes(HELLO, WEB)).eligible == frozenset()


async def test_capacity_is_not_free_while_the_pod_stands(store: EmbeddedStore) -> None:
    """Deallocated before its pod is gone, a reservation still counts but takes no new pod; afterwards it is freed."""
    scheduler = _scheduler(store, Directory(pool_node("n0", cpu=1000)))
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    await place(store, keys, "n0", HELLO)
    await scheduler.deallocate_nodes(WEB, ["n0"], pod_id="hello")
    with pytest.raises(SchedulerError, match="0m free"):
        await scheduler.allocate_nodes(manifest("other", cpu=1), WEB, 1)
    assert await scheduler.eligible_nodes(HELLO, WEB) == (frozenset({"n0"}), ())
    assert "being given back" in scheduler.explain(HELLO, WEB)["n0"]
    await store.delete(keys.intent("n0", "hello"))
    await scheduler.deallocate_nodes(WEB, ["n0"], pod_id="hello")
    assert await scheduler.allocate_nodes(manifest("other", cpu=1), WEB, 1) == ["n0"]


async def test_a_node_with_a_foreign_pod_of_the_same_id_is_not_allocated(store: EmbeddedStore) -> None:
    """(node, pod id) is exclusive: where another RC's pod of that id stands, a reservation would be of no use."""
    scheduler = _scheduler(store, Directory(pool_node("n0"), pool_node("n1")))
    await scheduler.eligible_nodes(HELLO, WEB)
    await place(store, keys, "n0", HELLO, rc_id="another")
    assert await scheduler.allocate_nodes(HELLO, WEB, 2) == ["n1"]


async def test_a_rewritten_selector_keeps_the_nodes_that_still_match(store: EmbeddedStore) -> None:
    """Reservations belong to the pod: they don't have to be made again because the selector is spelled otherwise."""
    directory = Directory(pool_node("n0"), pool_node("n1"))
    scheduler = _scheduler(store, directory)
    await scheduler.allocate_nodes(HELLO, WEB, 2)
    directory.change("n1", labels={"pool": "web", "zone": "b"})
    narrower = Selector.parse("pool=web,zone=b")
    assert (await scheduler.eligible_nodes(HELLO, narrower)).eligible == {"n1"}


async def test_a_reservation_grows_with_its_manifest_where_there_is_room(store: EmbeddedStore) -> None:
    """A pod that asks for more keeps the nodes that have it; the others are no longer eligible, and say why."""
    directory = Directory(pool_node("n0", cpu=3000), pool_node("n1", cpu=1500))
    scheduler = _scheduler(store, directory)
    await scheduler.allocate_nodes(HELLO, WEB, 2)
    larger = manifest("hello", cpu=2000)
    assert (await scheduler.eligible_nodes(larger, WEB)).eligible == {"n0"}
    assert (await reserved(store, keys))["n0"]["hello"].request == Capacity(2000, GIB)
    assert scheduler.explain(larger, WEB) == {"n1": "needs 2000m cpu, 1500m free of 1500m"}
    assert (await scheduler.eligible_nodes(HELLO, WEB)).eligible == {"n0", "n1"}, "the old manifest still fits"


async def test_a_node_that_shrank_keeps_its_oldest_reservations(store: EmbeddedStore) -> None:
    """What it can't hold any more is not eligible there, latest first, and nothing new comes until it fits again."""
    directory = Directory(pool_node("n0", cpu=3000))
    scheduler = _scheduler(store, directory)
    pods = [manifest(pod_id, cpu=1000) for pod_id in ("c", "a", "b")]
    for pod in pods:
        await scheduler.allocate_nodes(pod, WEB, 1)
    directory.change("n0", capacity=Capacity(2500, GIB))
    assert [bool((await scheduler.eligible_nodes(pod, WEB)).eligible) for pod in pods] == [True, True, False]
    assert "more is reserved on it than it has: needs 3000m cpu" in scheduler.explain(pods[2], WEB)["n0"]
    await scheduler.deallocate_nodes(WEB, ["n0"], pod_id="c")
    assert (await scheduler.eligible_nodes(pods[2], WEB)).eligible == {"n0"}


async def test_every_node_left_out_is_explained(store: EmbeddedStore) -> None:
    """What `placeable` leaves out has a reason in numbers, and nothing else has one."""
    directory = Directory(
        pool_node("n0"), pool_node("n1", cpu=500), pool_node("n2", pool="db"), pool_node("n3"), pool_node("n4")
    )
    scheduler = _scheduler(store, directory)
    await store.put(keys.reservations("n4"), b"{")
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    reasons = scheduler.explain(HELLO, WEB)
    assert set(directory.nodes()) - set((await scheduler.eligible_nodes(HELLO, WEB)).placeable) == set(reasons)
    assert reasons["n1"] == "needs 1000m cpu, 500m free of 500m"
    assert reasons["n2"] == "it has pool=db, the selector asks for pool=web"
    assert reasons["n3"] == "it has room; it is reserved when a pod needs it"
    assert "can't be read" in reasons["n4"]
    assert keys.reservations("n4") in reasons["n4"]


async def test_an_unreadable_record_moves_nothing_and_takes_nothing(store: EmbeddedStore) -> None:
    """Nobody knows what is reserved there: pods stay, no new ones come, and the other nodes are as they were."""
    scheduler = _scheduler(store, Directory(pool_node("n0"), pool_node("n1")))
    await store.put(keys.reservations("n0"), b'{"pods": 7}')
    assert await scheduler.allocate_nodes(HELLO, WEB, 2) == ["n1"]
    assert await scheduler.eligible_nodes(HELLO, WEB) == (frozenset({"n0", "n1"}), ("n1",))
