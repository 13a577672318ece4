"""The store protocol: Consul's key/value semantics, and nothing more.

Three implementations share it: `EmbeddedStore` (in process), `ConsulStore` (a Consul agent) and, through the HTTP
façade, an embedded store seen from another process. One conformance suite checks that they behave alike.

The model: every write raises one global index. An entry remembers the index of its creation and of its last
modification. A *session* is a lease; while it lives it can hold *locks* on keys, and when it ends every key that it
held is released (the value stays). A transaction is atomic: all of its operations or none. `watch` answers as soon
as anything under a prefix has an index above the one that the caller has seen.

The error tree:

    StoreError
    ├── Unavailable       no usable answer; the write may or may not have been applied: read again, then retry
    ├── Denied            the token does not allow it
    ├── Invalid           the request itself is wrong; retrying can't help
    ├── TooLarge          over 64 operations, or over 512 KiB, in one transaction or value
    ├── SessionExpired    the session named by the request does not exist any more
    └── TxnConflict       nothing was applied: some operation's condition did not hold
        └── OwnershipLost  … and one of them was `check-session`: the caller no longer holds the lock
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from store.errors import RcfarmError

MAX_TXN_OPS = 64
MAX_VALUE_BYTES = 512 * 1024


class StoreError(RcfarmError):
    """The root of every error that a store raises."""


class Unavailable(StoreError):
    """No usable answer came. A write may or may not have been applied."""


class Denied(StoreError):
    """The token lacks a permission. The message names the permission where the server does."""


class Invalid(StoreError):
    """The request is malformed; it will never succeed as it is."""


class TooLarge(StoreError):
    """More than `MAX_TXN_OPS` operations, or more than `MAX_VALUE_BYTES`."""


class SessionExpired(StoreError):
    """The session named by the request is gone."""


class OpFailure(NamedTuple):
    """The reason why one operation of a transaction was refused. `op_index` counts from 0."""

    op_index: int
    reason: str


class TxnConflict(StoreError):
    """A transaction was refused whole; `failures` names every operation that did not hold, in order."""

    def __init__(self, failures: Sequence[OpFailure]) -> None:
        self.failures = tuple(failures)
        super().__init__("; ".join(f"operation {f.op_index}: {f.reason}" for f in self.failures))

    @property
    def op_index(self) -> int:
        return self.failures[0].op_index

    @property
    def reason(self) -> str:
        return self.failures[0].reason


class OwnershipLost(TxnConflict):
    """A `check-session` failed: another holder, or none, has the lock that the writer acted under."""


class BadRecord(RcfarmError, ValueError):
    """A stored value that can't be decoded. `key` names it; the message says which field and why."""

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason
        super().__init__(f"{key}: {reason}")


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One key. `session`: the holder of its lock, or None. `lock_index`: its acquisitions so far, the fencing token."""

    key: str
    value: bytes
    create_index: int
    modify_index: int
    lock_index: int = 0
    flags: int = 0
    session: str | None = None


class Listing(NamedTuple):
    """Entries under a prefix in key order, and the index at which they were seen (never below 1)."""

    entries: list[Entry]
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on a result


Verb = Literal[
    "set", "cas", "lock", "unlock", "get", "get-tree", "check-index", "check-session", "check-not-exists",
    "delete", "delete-tree", "delete-cas",
]  # fmt: skip


class Op(msgspec.Struct, frozen=True, rename="pascal", omit_defaults=True, gc=False):
    """One operation of a transaction; build them with the functions of `store.kv.ops`. Its JSON is Consul's."""

    verb: Verb
    key: str
    value: bytes = b""
    index: int = 0
    session: str = ""
    flags: int = 0


class KeyListing(NamedTuple):
    """The keys under a prefix, in order, and the prefix's index when they were seen (never below 1)."""

    keys: list[str]
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on a result


class TxnResult(NamedTuple):
    """The result of a committed transaction.

    `entries`: for every get, get-tree, check and write, the entry (as Consul does, a written entry's value is not
    echoed and is b"" here), in operation order; deletes answer nothing. `index`: the transaction's own index, or 0
    when no answer shows it (only deletes or reads).
    """

    entries: list[Entry]
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on a result


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The parameters of a new session. All durations in seconds.

    `check_ttl`: a shorter lease kept by a TTL check on the Consul agent, where that is permitted; `ttl` stays as
    backstop. `behavior`: what happens to held keys when the session ends.
    """

    name: str
    ttl: float = 10.0
    check_ttl: float | None = 3.0
    lock_delay: float = 0.0
    behavior: Literal["release", "delete"] = "release"


class Session(NamedTuple):
    """A live session. `lease`: seconds after a renewal was sent until the store may end it. `note`: why the lease is
    longer than requested, or ""."""

    id: str
    lease: float
    note: str = ""


class SessionInfo(NamedTuple):
    """A session as the store knows it."""

    id: str
    name: str
    ttl: float
    behavior: str


@runtime_checkable
class Store(Protocol):
    """Consul's verbs. Every method may raise `Unavailable`, `Denied` or `Invalid`; further errors are named per method.

    All methods are cancellation-safe: a cancelled call leaves no task and no connection behind (a cancelled write may
    have been applied).
    """

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        """Return the entry, or None. `consistent`: verified with a quorum of the servers."""

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> list[str]:
        """Return only the keys under `prefix`, in order.

        With a `separator`, every key is cut after the first one beyond `prefix`, and each result is listed once: with
        "/", the folders and keys directly under `prefix`.
        """

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        """Return every entry whose key starts with `prefix`; the listing is empty when there is none."""

    async def put(self, key: str, value: bytes, *, flags: int = 0) -> None:
        """Write unconditionally. The key's lock, if any, is not touched. Raises `TooLarge`."""

    async def delete(self, key: str) -> None:
        """Remove the key; no error when it does not exist."""

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        """Apply all operations or none. No operations: an empty result.

        Raises `TxnConflict` (and its `OwnershipLost`), `SessionExpired`, `TooLarge`. The store never retries.
        """

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """Return the listing of `prefix` once its index is above `index`, or after `wait` seconds as it is.

        The answer's index may be below `index` when the store was restored: the caller starts again from it.
        """

    async def watch_keys(self, prefix: str, index: int, wait: float, *, separator: str = "") -> KeyListing:
        """Like `watch`, but return only the keys; a change of a value shows in the index alone.

        `separator`: see `keys`. With it the answer is small, however large the tree is.
        """

    async def create_session(self, spec: SessionSpec) -> Session:
        """Create a session."""

    async def renew_session(self, session_id: str) -> None:
        """Extend the lease. Raises `SessionExpired`."""

    async def destroy_session(self, session_id: str) -> None:
        """End the session and release its locks; no error when it is gone already."""

    async def session_info(self, session_id: str) -> SessionInfo | None:
        """Return the session, or None when it does not exist."""

    async def close(self) -> None:
        """Release connections and files. Sessions end with their leases."""
