"""The transaction builder: its limit, its single use, and what is retried."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.ops import AlreadyCommitted, Transaction
from store.kv.protocol import Op, TooLarge, TxnConflict, TxnResult, Unavailable
from tests.support.waiting import loop_time


class Flaky(EmbeddedStore):
    """An embedded store of which the first answers are lost, before or after the request was applied."""

    def __init__(self, lost: int, *, applied: bool = False) -> None:
        super().__init__()
        self.lost = lost
        self.applied = applied
        self.attempts = 0

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        self.attempts += 1
        if self.attempts <= self.lost:
            if self.applied:
                await super().txn(ops)
            raise Unavailable("the connection was lost")
        return await super().txn(ops)


def _numbered(count: int) -> list[Op]:
    return [ops.put(f"k/{number}", b"") for number in range(count)]


async def test_the_65th_operation_is_refused() -> None:
    """A transaction takes 64 operations; what would not fit whole is not added at all."""
    txn = Transaction(_numbered(63))
    with pytest.raises(TooLarge, match="65 operations"):
        txn.add(*_numbered(2))
    txn.add(ops.put("last", b""))
    with pytest.raises(TooLarge):
        txn.add(ops.put("one more", b""))
    await txn.commit(store := EmbeddedStore())
    assert len(await store.keys("")) == 64


def test_a_child_inherits_and_never_changes_its_parent() -> None:
    """Trying one decision on top of another leaves the first as it was."""
    parent = Transaction([ops.put("a", b"")])
    child = parent.child()
    child.add(ops.put("b", b""))
    assert [op.key for op in child.ops] == ["a", "b"]
    assert [op.key for op in parent.ops] == ["a"]


async def test_a_transaction_is_committed_once() -> None:
    """A second commit is refused, also after a refusal by the store, and so is a late operation."""
    store = EmbeddedStore()
    txn = Transaction([ops.create("a", b"1")])
    await txn.commit(store)
    for commit in (txn.commit, txn.commit_with_retries):
        with pytest.raises(AlreadyCommitted):
            await commit(store)
    with pytest.raises(AlreadyCommitted):
        txn.add(ops.put("b", b""))
    refused = txn.child()
    with pytest.raises(TxnConflict):
        await refused.commit(store)
    with pytest.raises(AlreadyCommitted):
        await refused.commit(store)


async def test_an_empty_commit_succeeds() -> None:
    """Nothing to do is no error and asks the store nothing."""
    store = Flaky(lost=1)
    assert await Transaction().commit(store) == TxnResult([], 0)
    assert store.attempts == 0


@pytest.mark.looptime
async def test_retries_while_the_store_is_away_and_gives_up_in_time() -> None:
    """`commit_with_retries` sends again after Unavailable, with bounded pauses, for the time given at most."""
    store, away = Flaky(lost=8), Flaky(lost=10_000)
    await Transaction([ops.create("a", b"1")]).commit_with_retries(store)
    assert store.attempts == 9
    assert (started := loop_time()) <= 8 * 10
    with pytest.raises(Unavailable):
        await Transaction([ops.put("a", b"")]).commit_with_retries(away, within=60)
    assert loop_time() - started <= 60


@pytest.mark.looptime
async def test_a_refusal_is_never_retried() -> None:
    """A refused transaction is not retried: its conditions refer to a state that has changed."""
    store = Flaky(lost=0)
    await store.put("a", b"1")
    with pytest.raises(TxnConflict):
        await Transaction([ops.create("a", b"2")]).commit_with_retries(store)
    assert store.attempts == 1


@pytest.mark.looptime
async def test_a_refusal_after_a_lost_answer_says_so() -> None:
    """The write may have been our own: the conflict carries a note, so that the caller blames no other process."""
    store = Flaky(lost=1, applied=True)
    with pytest.raises(TxnConflict) as caught:
        await Transaction([ops.create("a", b"1")]).commit_with_retries(store)
    assert "may have been applied" in caught.value.__notes__[0]
