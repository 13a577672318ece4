"""A process that dies, or loses an answer, at the n-th of its calls: to the store, or to a remote system.

`Fate` numbers the moments before and after each call. At the fatal one the process is dead: that call, and each later
one, never returns, so nothing of it reaches the store any more; its session ends with its lease.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

from store.kv.protocol import (
    Entry,
    KeyListing,
    Listing,
    Op,
    Session,
    SessionInfo,
    SessionSpec,
    Store,
    TxnResult,
    Unavailable,
)

T = TypeVar("T")
Kind = Literal["death", "lost"]


class Fate:
    """`moment`: the number of the moment at which it happens, from 0; None: never. `moments`: those that have passed.

    `kind`: "death", or "lost": only the answer, or the request, of that one call is lost.
    """

    def __init__(self, moment: int | None = None, kind: Kind = "death") -> None:
        self.moments = 0
        self.moment, self.kind = moment, kind
        self.dead = asyncio.Event()
        self.at = ""

    async def passes(self, what: str) -> None:
        """Pass one moment, unless the process is dead, or dies now. Raises `Unavailable` for a lost answer."""
        if self.dead.is_set():
            await asyncio.Event().wait()
        number, self.moments = self.moments, self.moments + 1
        if number != self.moment:
            return
        self.at = what
        if self.kind == "lost":
            raise Unavailable(f"no answer: {what}")
        self.dead.set()
        await asyncio.Event().wait()


async def at_every_moment(
    live: Callable[[Fate], Awaitable[None]], kind: Kind, *, least: int = 11, fate: type[Fate] = Fate
) -> None:
    """Let something live undisturbed, to count its moments, then again for each moment: there, `kind` happens.

    `least`: fewer moments mean that the test sees too little.
    """
    undisturbed = fate()
    await live(undisturbed)
    assert undisturbed.moments >= least
    for moment in range(undisturbed.moments):
        await live(fate(moment, kind))


@asynccontextmanager
async def succession(run: Callable[[str, Fate], Coroutine[Any, Any, None]], fate: Fate) -> AsyncIterator[None]:
    """Run the process `engine-a` under the fate during the block, and `engine-b` once that is dead."""

    async def successor() -> None:
        await fate.dead.wait()
        await run("engine-b", Fate())

    tasks = [asyncio.create_task(run("engine-a", fate)), asyncio.create_task(successor())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


class MortalStore:
    """A `Store` as a process sees it that `fate` ends. Watches and renewals pass no moments: they change nothing."""

    def __init__(self, inner: Store, fate: Fate) -> None:
        self.inner, self.fate = inner, fate

    async def _call(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        await self.fate.passes(f"before {what}")
        answer = await call()
        await self.fate.passes(f"after {what}")
        return answer

    async def _quiet(self, call: Callable[[], Awaitable[T]]) -> T:
        if self.fate.dead.is_set():
            await asyncio.Event().wait()
        answer = await call()
        if self.fate.dead.is_set():
            await asyncio.Event().wait()
        return answer

    async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
        return await self._call(f"get {key}", lambda: self.inner.get(key, consistent=consistent))

    async def keys(self, prefix: str, *, separator: str = "", consistent: bool = False) -> builtins.list[str]:
        return await self._quiet(lambda: self.inner.keys(prefix, separator=separator, consistent=consistent))

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        return await self._quiet(lambda: self.inner.list(prefix, consistent=consistent))

    async def put(self, key: str, value: bytes, *, flags: int = 0) -> None:
        await self._call(f"put {key}", lambda: self.inner.put(key, value, flags=flags))

    async def delete(self, key: str) -> None:
        await self._call(f"delete {key}", lambda: self.inner.delete(key))

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        text = ", ".join(f"{op.verb} {op.key.rpartition('rcfarm/')[2]}" for op in ops)
        return await self._call(f"txn {text}", lambda: self.inner.txn(ops))

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        return await self._quiet(lambda: self.inner.watch(prefix, index, wait))

    async def watch_keys(self, prefix: str, index: int, wait: float, *, separator: str = "") -> KeyListing:
        return await self._quiet(lambda: self.inner.watch_keys(prefix, index, wait, separator=separator))

    async def create_session(self, spec: SessionSpec) -> Session:
        return await self._quiet(lambda: self.inner.create_session(spec))

    async def renew_session(self, session_id: str) -> None:
        await self._quiet(lambda: self.inner.renew_session(session_id))

    async def destroy_session(self, session_id: str) -> None:
        await self._quiet(lambda: self.inner.destroy_session(session_id))

    async def session_info(self, session_id: str) -> SessionInfo | None:
        return await self._quiet(lambda: self.inner.session_info(session_id))

    async def close(self) -> None:
        """The inner store belongs to the test."""
