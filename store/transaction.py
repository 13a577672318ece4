"""Building a transaction step by step.

Several parts of one decision contribute operations (a placement, its audit event, the fence) to one `Transaction`,
which the store then applies whole or not at all. It is committed once: a builder that was sent is spent, whatever the
answer, because its conditions speak of a state that has been read before.

`child()` starts from the operations gathered so far, so that one decision can be tried on top of another without
changing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from store.kv import MAX_TXN_OPS, Op, Store, TooLarge, TxnConflict, TxnResult, Unavailable

RETRY_FOR = 300.0  # seconds
_FIRST_PAUSE = 0.2  # seconds
_LONGEST_PAUSE = 10.0  # seconds


class AlreadyCommitted(RuntimeError):
    """A transaction was used again after it was sent; build a new one from what the store holds now."""


class Transaction:
    """Operations gathered for one atomic commit."""

    def __init__(self, ops: Iterable[Op] = ()) -> None:
        self._ops: list[Op] = []
        self._sent = False
        self.add(*ops)

    @property
    def ops(self) -> tuple[Op, ...]:
        """What has been added, in order."""
        return tuple(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, *ops: Op) -> None:
        """Append operations: all of them, or none and `TooLarge` if there would be more than `MAX_TXN_OPS`."""
        if self._sent:
            raise AlreadyCommitted("the transaction was committed; it can't take further operations")
        if len(self._ops) + len(ops) > MAX_TXN_OPS:
            raise TooLarge(f"{len(self._ops) + len(ops)} operations; a transaction holds at most {MAX_TXN_OPS}")
        self._ops.extend(ops)

    def child(self) -> Transaction:
        """A new transaction that begins with this one's operations; adding to it leaves this one as it is."""
        return Transaction(self._ops)

    async def commit(self, store: Store) -> TxnResult:
        """Send it, once. No operations: succeeds without asking the store. Raises what `Store.txn` raises."""
        self._spend()
        return await self._send(store)

    async def commit_with_retries(self, store: Store, *, within: float = RETRY_FOR) -> TxnResult:
        """Like `commit`, but sends it again, for up to `within` seconds, while the store is `Unavailable`.

        A refusal is final. An attempt without an answer may have been applied, in which case the next one finds its own
        writes in its way: the `TxnConflict` then carries a note saying so, and the caller must read before it decides.
        """
        from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential  # 8 ms, rarely needed

        self._spend()
        clock = asyncio.get_running_loop().time
        deadline = clock() + within
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
            stop=lambda state: clock() + state.upcoming_sleep > deadline,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._send(store, unanswered=attempt.retry_state.attempt_number - 1)
        raise AssertionError("tenacity ends with a result or an error")

    def _spend(self) -> None:
        if self._sent:
            raise AlreadyCommitted("the transaction was committed already; build a new one from a fresh read")
        self._sent = True

    async def _send(self, store: Store, *, unanswered: int = 0) -> TxnResult:
        if not self._ops:
            return TxnResult([], 0)
        try:
            return await store.txn(self._ops)
        except TxnConflict as conflict:
            if unanswered:
                conflict.add_note(f"{unanswered} earlier attempts got no answer; one of them may have been applied")
            raise
