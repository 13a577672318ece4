"""The protocol: Consul's key/value semantics, sessions, the cached view."""

from store.kv.ops import AlreadyCommitted, Transaction
from store.kv.protocol import (
    BadRecord,
    Denied,
    Entry,
    Invalid,
    Listing,
    Op,
    OwnershipLost,
    Session,
    SessionExpired,
    SessionSpec,
    Store,
    StoreError,
    TooLarge,
    TxnConflict,
    TxnResult,
    Unavailable,
)
from store.kv.session import SessionKeeper
from store.kv.view import TreeView

__all__ = [
    "AlreadyCommitted",
    "BadRecord",
    "Denied",
    "Entry",
    "Invalid",
    "Listing",
    "Op",
    "OwnershipLost",
    "Session",
    "SessionExpired",
    "SessionKeeper",
    "SessionSpec",
    "Store",
    "StoreError",
    "TooLarge",
    "Transaction",
    "TreeView",
    "TxnConflict",
    "TxnResult",
    "Unavailable",
]
