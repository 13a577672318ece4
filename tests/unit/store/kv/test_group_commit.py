"""Group commit: full transactions, and no unit fails because of another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.group_commit import EAGER, MAX_TXN_BYTES, GroupCommit
from store.kv.protocol import (
    MAX_TXN_OPS,
    Denied,
    Invalid,
    Op,
    OwnershipLost,
    SessionSpec,
    TooLarge,
    TxnConflict,
    TxnResult,
    Unavailable,
)
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.waiting import background

pytestmark = pytest.mark.looptime


@pytest.fixture
async def store() -> AsyncIterator[ScriptedStore]:
    scripted = ScriptedStore(EmbeddedStore())
    yield scripted
    await scripted.close()


@contextlib.asynccontextmanager
async def running(store: ScriptedStore, **options: int) -> AsyncIterator[GroupCommit]:
    commits = GroupCommit(store, **options)
    async with background(commits.run()):
        yield commits


def unit(name: str, size: int = 2) -> list[Op]:
    return [ops.put(f"{name}/{number}", name.encode()) for number in range(size)]


async def test_units_that_come_together_travel_together(store: ScriptedStore) -> None:
    """A hundred units of two operations need four transactions of at most 64 operations; each is applied whole."""
    async with running(store) as commits:
        await asyncio.gather(*(commits.commit(unit(f"rc-{number}")) for number in range(100)))
    assert [len(sent) for sent in store.transactions] == [64, 64, 64, 8]
    assert len(await store.keys("rc-")) == 200
    assert (commits.transactions, commits.units, commits.conflicts) == (4, 100, 0)


async def test_units_that_come_one_by_one_collect_while_transactions_are_on_their_way(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones leave at once; the others with the next transaction that may, or as soon as they fill one."""
    apply, sent = store.txn, list[int]()

    async def slow(operations: Sequence[Op]) -> TxnResult:
        sent.append(len(operations))
        await asyncio.sleep(1.0)
        return await apply(operations)

    monkeypatch.setattr(store, "txn", slow)
    async with running(store, concurrency=4) as commits, asyncio.TaskGroup() as group:
        for number in range(EAGER + 3):
            group.create_task(commits.commit(unit(f"rc-{number}")))
            await asyncio.sleep(0.01)
        assert sent == [2] * EAGER
        await asyncio.sleep(1.0)
        assert sent == [*[2] * EAGER, 6]
        for number in range(40):
            group.create_task(commits.commit(unit(f"more-{number}")))
        await asyncio.sleep(0.01)

        assert sent[EAGER + 1] == 64
    assert len(await store.keys("more-")) == 80


async def test_a_unit_is_never_torn_apart(store: ScriptedStore) -> None:
    """A unit that does not fit into the rest of a transaction is sent whole with the next one."""
    async with running(store) as commits:
        await asyncio.gather(commits.commit(unit("a", 40)), commits.commit(unit("b", 40)))
    assert [len(sent) for sent in store.transactions] == [40, 40]


async def test_large_values_are_spread(store: ScriptedStore) -> None:
    """Transactions stay below the store's limit of bytes."""
    large = b"x" * (MAX_TXN_BYTES // 2)
    async with running(store) as commits:
        await asyncio.gather(*(commits.commit([ops.put(f"k{number}", large)]) for number in range(4)))
    assert [len(sent) for sent in store.transactions] == [2, 2]


async def test_each_unit_gets_its_own_answer(store: ScriptedStore) -> None:
    """A unit's result has the entries of its own operations, in order, nothing for deletions, and the index."""
    await store.put("b/gone", b"")
    session = (await store.create_session(SessionSpec("s"))).id
    async with running(store) as commits:
        one, locked, two = await asyncio.gather(
            commits.commit([ops.put("a", b"x")]),
            commits.commit([ops.lock("m", b"", session), ops.put("x", b""), ops.delete("m")]),
            commits.commit([ops.put("b", b"y"), ops.delete("b/gone"), ops.create("c", b"z")]),
        )
    assert [entry.key for entry in one.entries] == ["a"]
    assert [entry.key for entry in locked.entries] == ["m", "x"]
    assert [entry.key for entry in two.entries] == ["b", "c"]
    assert one.index == two.index == two.entries[0].modify_index


async def test_one_conflict_delays_no_other(store: ScriptedStore) -> None:
    """The units that did nothing wrong are applied one round trip later, together; the guilty one learns which of its
    own operations failed."""
    await store.put("taken", b"")
    async with running(store) as commits:
        guilty = [*unit("guilty"), ops.create("taken", b"mine")]
        outcomes = await asyncio.gather(
            *(commits.commit(unit(f"rc-{number}")) for number in range(5)),
            commits.commit(guilty),
            *(commits.commit(unit(f"rc-{number}")) for number in range(5, 10)),
            return_exceptions=True,
        )
    assert len(store.transactions) == 2
    assert isinstance(outcomes[5], TxnConflict)
    assert [failure.op_index for failure in outcomes[5].failures] == [2]
    assert len(await store.keys("rc-")) == 20
    assert await store.keys("guilty") == []


async def test_a_lost_fence_fails_only_its_unit(store: ScriptedStore) -> None:
    """A unit whose check-session fails learns `OwnershipLost`; one that conflicts otherwise does not."""
    session = await store.create_session(SessionSpec("s"))
    await store.put("taken", b"")
    async with running(store) as commits:
        lost, conflict, good = await asyncio.gather(
            commits.commit([ops.check_session("owner", session.id), ops.put("a", b"")]),
            commits.commit([ops.create("taken", b"")]),
            commits.commit([ops.put("b", b"")]),
            return_exceptions=True,
        )
    assert isinstance(lost, OwnershipLost)
    assert isinstance(conflict, TxnConflict)
    assert not isinstance(conflict, OwnershipLost)
    assert not isinstance(good, BaseException)
    assert await store.get("a") is None


async def test_of_two_units_that_create_the_same_key_one_is_refused(store: ScriptedStore) -> None:
    """Of two units that create one key, the first gets it, the second is refused."""
    async with running(store) as commits:
        first, second = await asyncio.gather(
            commits.commit([ops.create("k", b"1")]), commits.commit([ops.create("k", b"2")]), return_exceptions=True
        )
    assert not isinstance(first, BaseException)
    assert isinstance(second, TxnConflict)


async def test_a_unit_that_is_too_long_is_refused_at_once(store: ScriptedStore) -> None:
    """More operations than a transaction takes never reach the store."""
    async with running(store) as commits:
        with pytest.raises(TooLarge, match="65 operations"):
            await commits.commit(unit("a", MAX_TXN_OPS + 1))
    assert store.transactions == []


class Picky(ScriptedStore):
    """A store that raises `error` for every transaction with the key `poison`."""

    error: Exception = Invalid("")

    async def txn(self, ops: Sequence[Op]):  # type: ignore[no-untyped-def]
        if any(op.key == "poison" for op in ops):
            self.transactions.append(list(ops))
            raise self.error
        return await super().txn(ops)


@pytest.mark.parametrize("error", [TooLarge("too large"), Invalid("not understood"), Denied("not allowed")])
async def test_an_error_of_the_whole_transaction_is_pinned_on_its_unit(error: Exception) -> None:
    """When the store refuses a transaction because of one unit, each is tried alone: only that one fails."""
    store = Picky(EmbeddedStore())
    store.error = error
    async with running(store) as commits:
        before, poison, after = await asyncio.gather(
            commits.commit(unit("a")),
            commits.commit([ops.put("poison", b"")]),
            commits.commit(unit("b")),
            return_exceptions=True,
        )
    assert poison is error
    assert not isinstance(before, BaseException)
    assert not isinstance(after, BaseException)
    assert len(store.transactions) == 4


async def test_a_store_that_is_away_fails_all_without_a_retry(store: ScriptedStore) -> None:
    """Every unit of the transaction gets `Unavailable`: only a read can show whether it was applied."""
    store.faults["txn"] = Unavailable("away")
    async with running(store) as commits:
        outcomes = await asyncio.gather(
            *(commits.commit(unit(f"rc-{number}")) for number in range(3)), return_exceptions=True
        )
        assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
        assert len(store.transactions) == 1
        store.faults.clear()
        await commits.commit(unit("again"))


async def test_the_number_of_transactions_in_flight_is_bounded(store: ScriptedStore) -> None:
    """`concurrency` bounds the load on the store; waiting units are sent as answers come."""
    store.keep_back("txn")
    async with running(store, concurrency=2) as commits:
        tasks = [asyncio.create_task(commits.commit(unit(f"rc-{number}", 64))) for number in range(5)]
        await asyncio.sleep(1.0)
        assert len(store.transactions) == 2
        store.deliver("txn")
        await asyncio.gather(*tasks)
    assert len(store.transactions) == 5


async def test_a_unit_whose_writer_gave_up_waiting_is_not_sent(store: ScriptedStore) -> None:
    """A commit that is cancelled before its turn writes nothing."""
    store.keep_back("txn")
    async with running(store, concurrency=1) as commits:
        first = asyncio.create_task(commits.commit(unit("first")))
        await store.kept("txn")
        second = asyncio.create_task(commits.commit(unit("second")))
        third = asyncio.create_task(commits.commit(unit("third")))
        await asyncio.sleep(0)
        second.cancel()
        store.deliver("txn")
        await asyncio.gather(first, third)
        assert second.cancelled()
    assert await store.keys("second") == []


async def test_a_writer_that_gives_up_while_its_unit_is_on_its_way_harms_no_other(store: ScriptedStore) -> None:
    """The others in the same transaction get their answers."""
    store.keep_back("txn")
    async with running(store) as commits:
        gives_up = asyncio.create_task(commits.commit(unit("a")))
        stays = asyncio.create_task(commits.commit(unit("b")))
        await store.kept("txn")
        gives_up.cancel()
        await asyncio.sleep(0)
        store.deliver("txn")
        assert [entry.key for entry in (await stays).entries] == ["b/0", "b/1"]


async def test_the_end_of_the_sender_ends_every_commit(store: ScriptedStore) -> None:
    """When `run` is cancelled, commits in flight and waiting ones are cancelled, too: no caller is left hanging."""
    store.keep_back("txn")
    async with running(store, concurrency=1) as commits:
        on_its_way = asyncio.create_task(commits.commit(unit("a")))
        await store.kept("txn")
        waiting = asyncio.create_task(commits.commit(unit("b")))
        await asyncio.sleep(0)
    async with asyncio.timeout(1.0):
        outcomes = await asyncio.gather(on_its_way, waiting, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
