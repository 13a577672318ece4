"""Transactions: a constructor per verb of Consul's transaction API, limits, refusals, and a builder.

Several parts of one decision contribute operations (a placement, its audit event, the fence) to one `Transaction`,
which the store then applies whole or not at all. It is committed once: a builder that was sent can't be used again,
whatever the answer, because its conditions refer to a state that was read earlier.

`child()` starts from the operations gathered so far, so that one decision can be tried on top of another without
changing the first one.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from store.kv.protocol import (
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    Entry,
    Invalid,
    Op,
    OpFailure,
    OwnershipLost,
    SessionExpired,
    Store,
    StoreError,
    TooLarge,
    TxnConflict,
    TxnResult,
    Unavailable,
)
from store.timing import Backoff, contention, retried

T = TypeVar("T")

_OP_OVERHEAD = 192  # bytes of JSON around key and value: member names, index, flags, session
_WRITES = frozenset({"set", "cas", "lock", "unlock"})
_NO_SESSION = ("invalid session", "failed session lookup")
ATTEMPTS = 8  # of a change that others keep overtaking
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
        """The operations added so far, in order."""
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
        """Return a new transaction that begins with this one's operations; adding to it does not change this one."""
        return Transaction(self._ops)

    async def commit(self, store: Store) -> TxnResult:
        """Send the transaction, once. Without operations it succeeds without a request. Raises as `Store.txn`."""
        self._spend()
        return await self._send(store)

    async def commit_with_retries(self, store: Store, *, within: float = RETRY_FOR) -> TxnResult:
        """Commit like `commit`, but retry for up to `within` seconds while the store is `Unavailable`.

        A refusal is final. An attempt without an answer may have been applied, in which case the next one conflicts
        with its own writes: the `TxnConflict` then carries a note, and the caller must read before it decides.
        """
        self._spend()
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, rng=random.Random(), spread=(0.0, 1.0))
        return await retried(
            lambda: self._send(store, unanswered=backoff.failures), on=Unavailable, backoff=backoff, within=within
        )

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


async def retry_conflicts(
    what: str, attempt: Callable[[], Awaitable[T]], *, rng: random.Random, error: Callable[[str], Exception]
) -> T:
    """Call `attempt`, which reads and then writes, again after each `TxnConflict`, with pauses. After `ATTEMPTS`
    conflicts raise `error`; `what`: the changed object, in words."""
    try:
        return await retried(attempt, on=TxnConflict, backoff=contention(rng), attempts=ATTEMPTS)
    except TxnConflict as conflict:
        raise error(f"{what} was changed by another client during each of {ATTEMPTS} attempts; try again") from conflict


def put(key: str, value: bytes, *, flags: int = 0) -> Op:
    """Write unconditionally (Consul's `set`)."""
    return Op("set", key, value, flags=flags)


def cas(key: str, value: bytes, index: int, *, flags: int = 0) -> Op:
    """Write if the entry's modify index is still `index`; 0 means: only create."""
    return Op("cas", key, value, index=index, flags=flags)


def create(key: str, value: bytes) -> Op:
    """Write only if the key does not exist."""
    return cas(key, value, 0)


def lock(key: str, value: bytes, session: str) -> Op:
    """Write and acquire; refused while another session holds the key."""
    return Op("lock", key, value, session=session)


def unlock(key: str, value: bytes, session: str) -> Op:
    """Write and release; refused unless `session` holds the key."""
    return Op("unlock", key, value, session=session)


def get(key: str) -> Op:
    """Read; refused when the key does not exist."""
    return Op("get", key)


def get_tree(prefix: str) -> Op:
    """Read everything under `prefix`."""
    return Op("get-tree", prefix)


def check_index(key: str, index: int) -> Op:
    """Refuse unless the entry's modify index is `index`."""
    return Op("check-index", key, index=index)


def check_session(key: str, session: str) -> Op:
    """Refuse unless `session` holds the key: the fence."""
    return Op("check-session", key, session=session)


def check_not_exists(key: str) -> Op:
    """Refuse if the key exists."""
    return Op("check-not-exists", key)


def delete(key: str) -> Op:
    """Remove the key if it exists."""
    return Op("delete", key)


def delete_tree(prefix: str) -> Op:
    """Remove everything under `prefix`."""
    return Op("delete-tree", prefix)


def delete_cas(key: str, index: int) -> Op:
    """Remove the key if its modify index is still `index`."""
    return Op("delete-cas", key, index=index)


def encoded_size(op: Op) -> int:
    """Return the most bytes that the operation takes of a request, which Consul bounds; values are base64 in it."""
    key = len(op.key) if op.key.isascii() else len(op.key.encode(errors="surrogatepass"))
    return _OP_OVERHEAD + 2 * key + 4 * ((len(op.value) + 2) // 3)


def check_limits(ops: Iterable[Op]) -> None:
    """Raise `TooLarge` for operations that Consul would not accept as one transaction."""
    sizes = [encoded_size(op) for op in ops]
    if len(sizes) > MAX_TXN_OPS:
        raise TooLarge(f"{len(sizes)} operations; a transaction holds at most {MAX_TXN_OPS}")
    if sum(sizes) > MAX_VALUE_BYTES:
        raise TooLarge(f"a transaction of {sum(sizes)} bytes (values as base64); at most {MAX_VALUE_BYTES} are taken")


def refusal(ops: Sequence[Op], failures: Sequence[OpFailure]) -> StoreError:
    """Return the error for a refused transaction: a lost fence first, then a lost session, then the rest."""
    if any(ops[failure.op_index].verb == "check-session" for failure in failures):
        return OwnershipLost(failures)
    text = "; ".join(f"operation {failure.op_index}: {failure.reason}" for failure in failures)
    if any(failure.reason.startswith(_NO_SESSION) for failure in failures):
        return SessionExpired(text)
    if any(failure.reason == "Must provide key" for failure in failures):
        return Invalid(text)
    return TxnConflict(failures)


def refusals(units: Iterable[Sequence[Op]], failures: Sequence[OpFailure]) -> list[TxnConflict | None]:
    """Return for each unit of a refused transaction the error of its own operations, with their indexes in the unit;
    None for a unit that is not to blame. `units`: the first operations of the transaction, in order."""
    found: list[TxnConflict | None] = []
    start = 0
    for unit in units:
        end = start + len(unit)
        own = [OpFailure(at - start, reason) for at, reason in failures if start <= at < end]
        lost = any(unit[failure.op_index].verb == "check-session" for failure in own)
        found.append((OwnershipLost if lost else TxnConflict)(own) if own else None)
        start = end
    return found


def written_index(ops: Sequence[Op], entries: Sequence[Entry]) -> int:
    """Return `TxnResult.index` from a transaction's answer: the highest modify index of a key that it wrote, else 0."""
    written = {op.key for op in ops if op.verb in _WRITES}
    return max((entry.modify_index for entry in entries if entry.key in written), default=0)
