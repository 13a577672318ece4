"""An embedded store behind a network that a test controls: answers come late, calls fail, or hang, on demand.

Whatever happens to an answer, the call itself was carried out by the real store at the moment when it arrived there.
"""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Entry, KeyListing, Listing, Op, Session, SessionInfo, SessionSpec, StoreError, TxnResult

T = TypeVar("T")


class ScriptedStore:
    """A `Store` over `inner`. Verbs are named by their methods: "list", "watch", "txn", …

    `faults`: the error that the verb's next calls raise before they reach the store. `calls`: how many calls of the
    verb were made. `transactions`: the operations of every transaction that was sent.
    """

    def __init__(self, inner: EmbeddedStore) -> None:
        self.inner = inner
        self.faults: dict[str, StoreError] = {}
        self.calls: Counter[str] = Counter()
        self.transactions: list[builtins.list[Op]] = []
        self.before_txn: Callable[[Sequence[Op]], Awaitable[None]] | None = None
        self._cut: asyncio.Event | None = None
        self._answers: dict[str, asyncio.Event] = {}
        self._kept: Counter[str] = Counter()

    def keep_back(self, verb: str) -> None:
        """From now on, hold back the verb's answers."""
        self._answers[verb] = asyncio.Event()

    def deliver(self, verb: str) -> None:
        """Deliver the verb's answers that were held back, and later ones."""
        self._answers.pop(verb).set()

    async def kept(self, verb: str, count: int = 1) -> None:
        """Wait until the store has answered the verb this number of times, and the answers are held back."""
        while self._kept[verb] < count:
            await asyncio.sleep(0)

    def cut(self) -> None:
        """Make callers wait before the store gets their calls: the process is stopped, or its network is."""
        self._cut = asyncio.Event()

    def reconnect(self) -> None:
        """Let waiting calls continue."""
        assert self._cut is not None
        self._cut.set()
        self._cut = None

    async def _passes(self) -> None:
        while self._cut is not None:
            await self._cut.wait()

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls[verb] += 1
        await self._passes()
        if fault := self.faults.get(verb):
            raise fault
        answer = await call()
        await self._passes()
        if arrival := self._answers.get(verb):
            self._kept[verb] += 1
            try:
                await arrival.wait()
            finally:
                self._kept[verb] -= 1
        return answer

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        return await self._call("get", lambda: self.inner.get(key, consistent=consistent))

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        return await self._call("keys", lambda: self.inner.keys(prefix, separator=separator, consistent=consistent))

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        return await self._call("list", lambda: self.inner.list(prefix, consistent=consistent))

    async def put(self, key: str, value: bytes, *, flags: int = 0) -> None:
        await self._call("put", lambda: self.inner.put(key, value, flags=flags))

    async def delete(self, key: str) -> None:
        await self._call("delete", lambda: self.inner.delete(key))

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        self.transactions.append(list(ops))
        if self.before_txn is not None:
            await self.before_txn(ops)
        return await self._call("txn", lambda: self.inner.txn(ops))

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        return await self._call("watch", lambda: self.inner.watch(prefix, index, wait))

    async def watch_keys(self, prefix: str, index: int, wait: float, *, separator: str = "") -> KeyListing:
        return await self._call("watch_keys", lambda: self.inner.watch_keys(prefix, index, wait, separator=separator))

    async def create_session(self, spec: SessionSpec) -> Session:
        return await self._call("create_session", lambda: self.inner.create_session(spec))

    async def renew_session(self, session_id: str) -> None:
        await self._call("renew_session", lambda: self.inner.renew_session(session_id))

    async def destroy_session(self, session_id: str) -> None:
        await self._call("destroy_session", lambda: self.inner.destroy_session(session_id))

    async def session_info(self, session_id: str) -> SessionInfo | None:
        return await self._call("session_info", lambda: self.inner.session_info(session_id))

    async def close(self) -> None:
        await self.inner.close()
