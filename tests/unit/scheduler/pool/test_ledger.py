"""The ledger: group commit, conflicts, lost answers and cancellation; arithmetic on capacities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from scheduler.pool.ledger import (
    ATTEMPTS,
    NOTHING,
    Draft,
    Ledger,
    Reservation,
    covers,
    dominant_share,
    fits,
    largest,
    shortfalls,
    total,
    without,
)
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, TxnConflict, TxnResult, Unavailable
from store.schema.keys import Keys
from store.schema.records import Capacity
from tests.support.farm.pool import reserved

keys = Keys()
ONE = Reservation(request=Capacity(1))


class Counting(EmbeddedStore):
    """Counts transactions; `before` runs ahead of each."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions = 0
        self.before: Callable[[], None] = lambda: None

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        self.transactions += 1
        self.before()
        return await super().txn(ops)


def _put(node: str, pod_id: str = "hello", guard: Op | None = None) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.put(node, pod_id, ONE, guard)

    return change


async def test_changes_that_wait_travel_together() -> None:
    """A hundred changes cost about as many round trips as full transactions hold them, and lose nothing."""
    store = Counting()
    ledger = Ledger(store, keys)
    await asyncio.gather(*(ledger.change(_put(f"n{number}")) for number in range(100)))
    assert len(await reserved(store, keys)) == 100
    assert store.transactions <= 4


async def test_changes_of_one_record_build_on_each_other() -> None:
    """Within a process, changes never conflict: each one sees the edits of those before it."""
    store = Counting()
    ledger = Ledger(store, keys)
    await asyncio.gather(*(ledger.change(_put("n0", f"p{number}")) for number in range(50)))
    assert len((await reserved(store, keys))["n0"]) == 50
    assert ledger.used("n0") == Capacity(50)
    assert store.transactions <= 2


async def test_nothing_to_write_writes_nothing() -> None:
    """A change that finds everything done commits nothing and raises no index."""
    store = Counting()
    ledger = Ledger(store, keys)
    await ledger.change(_put("n0"))
    before = (await store.list("")).index
    await ledger.change(_put("n0"))
    assert (await store.list("")).index == before


async def test_a_conflict_is_decided_again_on_what_others_wrote() -> None:
    """Two ledgers that know nothing of each other lose none of their reservations."""
    store = EmbeddedStore()
    ledgers = [Ledger(store, keys) for _ in range(4)]
    await asyncio.gather(
        *(ledger.change(_put(f"n{n}", f"p{i}-{n}")) for i, ledger in enumerate(ledgers) for n in range(8))
    )
    assert {node: len(pods) for node, pods in (await reserved(store, keys)).items()} == {f"n{n}": 4 for n in range(8)}


async def test_a_guard_that_fails_is_named_and_costs_only_its_own_change() -> None:
    """The change whose guard failed sees it in `blocked` and decides otherwise; its companions are committed."""
    store = EmbeddedStore()
    await store.put("taken", b"")
    ledger = Ledger(store, keys)

    def choose(draft: Draft) -> str:
        node = "n1" if "taken" in draft.blocked else "n0"
        draft.put(node, "hello", ONE, ops.check_not_exists("taken" if node == "n0" else "free"))
        return node

    chosen, _ = await asyncio.gather(ledger.change(choose), ledger.change(_put("n2")))
    assert chosen == "n1"
    assert set(await reserved(store, keys)) == {"n1", "n2"}


@pytest.mark.looptime
async def test_gives_up_after_many_conflicts() -> None:
    """A guard that nobody heeds ends in the conflict itself, not in an endless loop; the ledger goes on."""
    store = Counting()
    await store.put("taken", b"")
    ledger = Ledger(store, keys)
    with pytest.raises(TxnConflict):
        await ledger.change(_put("n0", guard=ops.check_not_exists("taken")))
    assert store.transactions == ATTEMPTS
    await ledger.change(_put("n1"))
    assert set(await reserved(store, keys)) == {"n1"}


async def test_a_store_that_is_away_is_told_to_each_caller() -> None:
    """Every waiting change gets the error; none is left behind, and none is tried without its caller."""
    store = Counting()
    ledger = Ledger(store, keys)

    def away() -> None:
        raise Unavailable("cut off")

    store.before = away
    changes = [ledger.change(_put(f"n{number}")) for number in range(3)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 3
    store.before = lambda: None
    await ledger.change(_put("n9"))
    assert set(await reserved(store, keys)) == {"n9"}


async def test_cancelling_one_change_does_not_touch_the_others() -> None:
    """The one who happens to send for all may be cancelled: the others send for themselves."""
    store = Counting()
    ledger = Ledger(store, keys)
    tasks = [asyncio.create_task(ledger.change(_put(f"n{number}"))) for number in range(4)]

    def cancel_the_sender() -> None:
        tasks[0].cancel()

    store.before = cancel_the_sender
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[0].cancelled()
    assert {"n1", "n2", "n3"} <= set(await reserved(store, keys))


async def test_the_last_reservation_takes_its_record_along() -> None:
    """A node without reservations has no key, and unknown names under the prefix are no nodes."""
    store = EmbeddedStore()
    ledger = Ledger(store, keys)
    await store.put(keys.reservations("Not_A_Node"), b"{}")
    await ledger.change(_put("n0"))
    await ledger.change(lambda draft: draft.put("n0", "hello", None))
    await ledger.view.refresh()
    assert await store.keys(keys.pools) == [keys.reservations("Not_A_Node")]
    assert set(ledger.unreadable()) == {"Not_A_Node"}
    assert ledger.nodes_of("hello") == frozenset()


SMALL = Capacity(500, 1024, {"gpu": 1})
LARGE = Capacity(4000, 8 * 1024**3, {"gpu": 4, "fpga": 1})


def test_sums_and_differences_are_inverse() -> None:
    """What is added and taken away again is as before, for every resource."""
    assert total([SMALL, LARGE]) == Capacity(4500, 8 * 1024**3 + 1024, {"gpu": 5, "fpga": 1})
    assert without(total([LARGE, SMALL]), SMALL) == LARGE
    assert total([]) == NOTHING


def test_fits_up_to_the_last_unit() -> None:
    """Exactly full fits; one more of anything does not; asking for nothing always fits."""
    assert fits(LARGE, NOTHING, LARGE)
    assert not fits(Capacity(1), LARGE, LARGE)
    assert not fits(Capacity(0, 1), LARGE, LARGE)
    assert not fits(Capacity(0, 0, {"fpga": 1}), LARGE, LARGE)
    assert not fits(Capacity(0, 0, {"tpu": 1}), NOTHING, LARGE)
    assert fits(Capacity(0, 0, {"gpu": 0}), LARGE, SMALL)


def test_covers_and_largest_go_by_resource() -> None:
    """Growing in one resource is enough to need more; the largest covers both."""
    assert covers(LARGE, SMALL)
    assert not covers(SMALL, Capacity(1, 1, {"gpu": 2}))
    assert not covers(SMALL, Capacity(0, 0, {"tpu": 1}))
    mixed = Capacity(9000, 0, {"tpu": 2})
    assert covers(largest(SMALL, mixed), mixed)
    assert covers(largest(SMALL, mixed), SMALL)


def test_the_dominant_share_is_the_scarcest_resource() -> None:
    """0 when empty, 1 when full, and full as well where a resource is used that the node does not have."""
    assert dominant_share(NOTHING, NOTHING, LARGE) == 0
    assert dominant_share(Capacity(1000, 4 * 1024**3), Capacity(0, 2 * 1024**3), LARGE) == 0.75
    assert dominant_share(NOTHING, Capacity(0, 0, {"fpga": 1}), LARGE) == 1
    assert dominant_share(Capacity(1), NOTHING, NOTHING) == 1
    assert dominant_share(NOTHING, NOTHING, NOTHING) == 0


def test_shortfalls_name_need_free_and_total() -> None:
    """In the units of a manifest; what is overcommitted has none free, never a negative amount."""
    need = Capacity(2000, 3 * 1024**3, {"gpu": 2, "tpu": 1})
    used = Capacity(3500, 9 * 1024**3, {"gpu": 3})
    assert list(shortfalls(need, used, LARGE)) == [
        "needs 2000m cpu, 500m free of 4000m",
        "needs 3 GiB memory, 0 free of 8 GiB",
        "needs 2 gpu, 1 free of 4",
        "needs 1 tpu, 0 free of 0",
    ]
    assert list(shortfalls(SMALL, NOTHING, LARGE)) == []
