"""A store wrapper that records the number, durations and errors of calls."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from store.kv.protocol import Entry, Listing, Op, Session, SessionInfo, SessionSpec, Store, TxnResult

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class MeteredStore:
    """Wraps a store. A call in flight is a connection in use; a watch holds one for as long as it waits."""

    def __init__(self, store: Store, registry: CollectorRegistry) -> None:
        self._store = store
        self._duration = Histogram(
            "rcfarm_store_request_duration_seconds",
            "Calls to the store that were answered, by verb, without watches.",
            ["verb"],
            registry=registry,
            buckets=BUCKETS,
        )
        self._errors = Counter(
            "rcfarm_store_errors_total",
            "Calls that ended in an error, by verb and error; TxnConflict and OwnershipLost are refused transactions.",
            ["verb", "error"],
            registry=registry,
        )
        self._connections = Gauge(
            "rcfarm_store_connections_in_use",
            "Calls and watches in flight: a connection each.",
            ["kind"],
            registry=registry,
        )

    @contextmanager
    def _call(self, verb: str, kind: str = "call") -> Iterator[None]:
        in_use = self._connections.labels(kind)
        start = time.perf_counter()
        in_use.inc()
        try:
            yield
        except Exception as error:
            self._errors.labels(verb, type(error).__name__).inc()
            raise
        finally:
            in_use.dec()
        if kind == "call":
            self._duration.labels(verb).observe(time.perf_counter() - start)

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        """See `Store.get`."""
        with self._call("get"):
            return await self._store.get(key, consistent=consistent)

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        """See `Store.list`."""
        with self._call("list"):
            return await self._store.list(prefix, consistent=consistent)

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        """See `Store.keys`."""
        with self._call("keys"):
            return await self._store.keys(prefix, separator=separator, consistent=consistent)

    async def put(self, key: str, value: bytes, *, flags: int = 0) -> None:
        """See `Store.put`."""
        with self._call("put"):
            await self._store.put(key, value, flags=flags)

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._call("delete"):
            await self._store.delete(key)

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        """See `Store.txn`."""
        with self._call("txn"):
            return await self._store.txn(ops)

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        """See `Store.watch`."""
        with self._call("watch", "watch"):
            return await self._store.watch(prefix, index, wait)

    async def create_session(self, spec: SessionSpec) -> Session:
        """See `Store.create_session`."""
        with self._call("create_session"):
            return await self._store.create_session(spec)

    async def renew_session(self, session_id: str) -> None:
        """See `Store.renew_session`."""
        with self._call("renew_session"):
            await self._store.renew_session(session_id)

    async def destroy_session(self, session_id: str) -> None:
        """See `Store.destroy_session`."""
        with self._call("destroy_session"):
            await self._store.destroy_session(session_id)

    async def session_info(self, session_id: str) -> SessionInfo | None:
        """See `Store.session_info`."""
        with self._call("session_info"):
            return await self._store.session_info(session_id)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._store.close()
