"""Sweeps: reservations without pods, pods without reservations, and the races in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from scheduler.pool.ledger import Ledger, Reservation
from scheduler.pool.reclaim import Finding, Sweeper, plan_sweep
from scheduler.pool.scheduler import PoolScheduler
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.labels import PodLocation
from store.schema.records import Capacity, encode
from store.schema.selectors import Selector
from tests.support.farm.pool import Directory, manifest, place, pool_node, reserved

keys = Keys()
WEB = Selector.parse("pool=web")
HELLO = manifest("hello", cpu=1000)
POD = PodLocation("n0", "hello")


@pytest.fixture
def store() -> EmbeddedStore:
    return EmbeddedStore()


@pytest.fixture
def scheduler(store: EmbeddedStore) -> PoolScheduler:
    return PoolScheduler(store, keys, Directory(pool_node("n0"), pool_node("n1")))


@pytest.mark.parametrize(
    ("releasing", "placed", "seen_before", "action"),
    [
        (False, True, False, ""),
        (False, False, False, ""),
        (False, False, True, "mark"),
        (True, False, False, ""),
        (True, False, True, "free"),
        (True, True, False, ""),
        (True, True, True, "unmark"),
    ],
)
def test_only_what_two_sweeps_have_found_is_acted_on(
    releasing: bool, placed: bool, seen_before: bool, action: str
) -> None:
    """A reservation in order is left alone; one that is not, until it was found the same twice."""
    before = {Finding(POD, releasing, placed)} if seen_before else set()
    sweep = plan_sweep({POD: Reservation(releasing=releasing)}, {POD} if placed else set(), before)
    assert sweep.adopt == ()
    assert {name for name in ("mark", "unmark", "free") if getattr(sweep, name)} == ({action} if action else set())


def test_a_finding_that_changed_in_between_starts_anew() -> None:
    """Placed and given back between two sweeps is not the same finding as never placed."""
    sweep = plan_sweep({POD: Reservation(releasing=True)}, set(), {Finding(POD, False, False)})
    assert sweep.free == ()


async def test_a_reservation_whose_pod_was_never_placed_is_freed(
    store: EmbeddedStore, scheduler: PoolScheduler
) -> None:
    """First it takes no pod any more, then it is gone; a reservation with a pod stays."""
    await scheduler.allocate_nodes(HELLO, WEB, 2)
    await place(store, keys, "n1", HELLO)
    for _ in range(2):
        assert (await scheduler.eligible_nodes(HELLO, WEB)).placeable == ("n0", "n1")
        await scheduler.sweeper.sweep()
    assert (await scheduler.eligible_nodes(HELLO, WEB)).placeable == ("n1",)
    assert (await reserved(store, keys))["n0"]["hello"].releasing
    await scheduler.sweeper.sweep()
    assert set(await reserved(store, keys)) == {"n1"}


async def test_a_marked_reservation_can_be_allocated_again(store: EmbeddedStore, scheduler: PoolScheduler) -> None:
    """An RC that needs the node in the meantime takes it over, and the mark is removed."""
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    for _ in range(2):
        await scheduler.sweeper.sweep()
    assert (await reserved(store, keys))["n0"]["hello"].releasing
    assert set(await scheduler.allocate_nodes(HELLO, WEB, 2)) == {"n0", "n1"}
    assert not (await reserved(store, keys))["n0"]["hello"].releasing


async def test_a_pod_that_stays_keeps_its_reservation(store: EmbeddedStore, scheduler: PoolScheduler) -> None:
    """A transfer that was given up leaves a mark on a pod that stays: it is removed."""
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    await place(store, keys, "n0", HELLO)
    await scheduler.deallocate_nodes(WEB, ["n0"], pod_id="hello")
    for _ in range(2):
        assert (await reserved(store, keys))["n0"]["hello"].releasing
        await scheduler.sweeper.sweep()
    assert not (await reserved(store, keys))["n0"]["hello"].releasing


class _ActsLate(EmbeddedStore):
    """A store in which another farm acts just after the sweep has listed the pods."""

    act: Callable[[], Awaitable[object]] | None = None

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> list[str]:
        found = await super().keys(prefix, separator=separator, consistent=consistent)
        if self.act is not None:
            act, self.act = self.act, None
            await act()
        return found


async def test_never_frees_what_another_farm_has_taken_over() -> None:
    """The mark is removed between the listing and the change: the reservation is in use again."""
    store, directory = _ActsLate(), Directory(pool_node("n0"))
    scheduler, other = PoolScheduler(store, keys, directory), PoolScheduler(store, keys, directory)
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    for _ in range(2):
        await scheduler.sweeper.sweep()
    await other.refresh()
    store.act = lambda: other.allocate_nodes(HELLO, WEB, 1)
    assert (await scheduler.sweeper.sweep()).free == (POD,)
    assert not (await reserved(store, keys))["n0"]["hello"].releasing


@pytest.mark.parametrize(("sweeps_before", "releasing"), [(1, False), (2, True)])
async def test_never_frees_under_a_pod(sweeps_before: int, releasing: bool) -> None:
    """The guard decides, not the listing: where a pod appears between both, nothing is marked and nothing freed."""
    store = _ActsLate()
    scheduler = PoolScheduler(store, keys, Directory(pool_node("n0")))
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    for _ in range(sweeps_before):
        await scheduler.sweeper.sweep()
    store.act = lambda: place(store, keys, "n0", HELLO)
    sweep = await scheduler.sweeper.sweep()
    assert (sweep.mark, sweep.free) == (((), (POD,)) if releasing else ((POD,), ()))
    kept = Reservation(request=Capacity(1000), selector="pool=web", releasing=releasing)
    assert (await reserved(store, keys))["n0"]["hello"] == kept


async def test_pods_that_are_already_there_get_reservations(store: EmbeddedStore, scheduler: PoolScheduler) -> None:
    """A fleet scheduled by labels before: its pods stay where they are, and what they use is not given to others."""
    await place(store, keys, "n0", HELLO)
    await place(store, keys, "n1", manifest("db", cpu=3500))
    assert await scheduler.eligible_nodes(HELLO, WEB) == (frozenset({"n0"}), ("n0",))
    assert (await reserved(store, keys))["n1"]["db"].request == Capacity(3500)
    assert await scheduler.allocate_nodes(manifest("api", cpu=1000), WEB, 2) == ["n0"]


async def test_a_pod_that_can_not_be_read_is_left_out(store: EmbeddedStore, scheduler: PoolScheduler) -> None:
    """A broken intent, or a manifest that is missing or broken, costs nobody else its reservation."""
    await place(store, keys, "n0", HELLO)
    await store.put(keys.intent("n0", "broken"), b"{")
    await place(store, keys, "n0", lost := manifest("lost"))
    await store.delete(keys.manifest(await _sha(store, "n0", lost.id)))
    await place(store, keys, "n1", bad := manifest("bad"))
    await store.put(keys.manifest(await _sha(store, "n1", bad.id)), b"launchables: {}")
    await scheduler.sweeper.sweep()
    assert {node: set(pods) for node, pods in (await reserved(store, keys)).items()} == {"n0": {"hello"}}


async def _sha(store: EmbeddedStore, node: str, pod_id: str) -> str:
    entry = await store.get(keys.intent(node, pod_id))
    assert entry is not None
    return entry.value.decode().split('"manifest":"')[1][:64]


async def test_a_new_farm_marks_nothing(store: EmbeddedStore, scheduler: PoolScheduler) -> None:
    """Reservations that another farm has just made are not taken for leaks when a farm asks its first question."""
    await scheduler.allocate_nodes(HELLO, WEB, 1)
    newcomer = PoolScheduler(store, keys, Directory(pool_node("n0")))
    await newcomer.sweeper.sweep()
    await newcomer.eligible_nodes(HELLO, WEB)
    assert not (await reserved(store, keys))["n0"]["hello"].releasing


@pytest.mark.looptime
async def test_running_frees_leaks_in_time_and_stops_cleanly(store: EmbeddedStore) -> None:
    """`run` sweeps about every interval, sees other farms' changes, and cancelling it leaves no task."""
    directory = Directory(pool_node("n0"), pool_node("n1"))
    scheduler = PoolScheduler(store, keys, directory, sweep_interval=300, rng=random.Random(1))
    task = asyncio.create_task(scheduler.run())
    await PoolScheduler(store, keys, directory).allocate_nodes(HELLO, WEB, 2)
    await asyncio.sleep(1)
    assert (await scheduler.eligible_nodes(HELLO, WEB)).placeable == ("n0", "n1")
    await asyncio.sleep(3 * 330)
    assert await reserved(store, keys) == {}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_two_sweepers_do_no_harm(store: EmbeddedStore) -> None:
    """Farms sweep without agreeing on who does: the outcome is that of one."""
    for number in range(40):
        await place(store, keys, f"n{number}", HELLO)
        if number % 2:
            await store.put(keys.reservations(f"m{number}"), encode({"hello": "x"}))
    sweepers = [Sweeper(store, keys, Ledger(store, keys)) for _ in range(3)]
    await asyncio.gather(*(sweeper.sweep() for sweeper in sweepers))
    ledger = Ledger(store, keys)
    await ledger.view.refresh()
    assert sorted(ledger.nodes()) == sorted(f"n{number}" for number in range(40))
