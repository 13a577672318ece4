"""The operations of a transaction: a constructor per verb of Consul's transaction API, limits, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from store.kv import (
    MAX_TXN_OPS,
    MAX_VALUE_BYTES,
    Entry,
    Invalid,
    Op,
    OpFailure,
    OwnershipLost,
    SessionExpired,
    StoreError,
    TooLarge,
    TxnConflict,
)

_OP_OVERHEAD = 192  # bytes of JSON around key and value: member names, index, flags, session
_WRITES = frozenset({"set", "cas", "lock", "unlock"})
_NO_SESSION = ("invalid session", "failed session lookup")


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
    """The fence: refuse unless `session` holds the key."""
    return Op("check-session", key, session=session)


def check_not_exists(key: str) -> Op:
    """Refuse if the key exists."""
    return Op("check-not-exists", key)


def delete(key: str) -> Op:
    """Remove the key if it is there."""
    return Op("delete", key)


def delete_tree(prefix: str) -> Op:
    """Remove everything under `prefix`."""
    return Op("delete-tree", prefix)


def delete_cas(key: str, index: int) -> Op:
    """Remove the key if its modify index is still `index`."""
    return Op("delete-cas", key, index=index)


def encoded_size(op: Op) -> int:
    """Bytes that the operation takes of a request, at most: Consul bounds the request, in which values are base64."""
    return _OP_OVERHEAD + 2 * len(op.key.encode(errors="surrogatepass")) + 4 * ((len(op.value) + 2) // 3)


def check_limits(ops: Iterable[Op]) -> None:
    """Raise `TooLarge` for what Consul would not take as one transaction."""
    sizes = [encoded_size(op) for op in ops]
    if len(sizes) > MAX_TXN_OPS:
        raise TooLarge(f"{len(sizes)} operations; a transaction holds at most {MAX_TXN_OPS}")
    if sum(sizes) > MAX_VALUE_BYTES:
        raise TooLarge(f"a transaction of {sum(sizes)} bytes (values as base64); at most {MAX_VALUE_BYTES} are taken")


def refusal(ops: Sequence[Op], failures: Sequence[OpFailure]) -> StoreError:
    """The error that tells of a refused transaction: a lost fence first, then a lost session, then the rest."""
    if any(ops[failure.op_index].verb == "check-session" for failure in failures):
        return OwnershipLost(failures)
    text = "; ".join(f"operation {failure.op_index}: {failure.reason}" for failure in failures)
    if any(failure.reason.startswith(_NO_SESSION) for failure in failures):
        return SessionExpired(text)
    if any(failure.reason == "Must provide key" for failure in failures):
        return Invalid(text)
    return TxnConflict(failures)


def written_index(ops: Sequence[Op], entries: Sequence[Entry]) -> int:
    """`TxnResult.index` from what a transaction answered: the highest modify index of a key that it wrote, else 0."""
    written = {op.key for op in ops if op.verb in _WRITES}
    return max((entry.modify_index for entry in entries if entry.key in written), default=0)
