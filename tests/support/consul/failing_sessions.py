"""An embedded store whose session calls can be made to fail, as a network between would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Session, SessionSpec, StoreError
from store.kv.session import SessionKeeper
from tests.support.waiting import background

T = TypeVar("T")


class FaultyStore(EmbeddedStore):
    """`fault`: raised instead of an answer. `request_delay`, `answer_delay`: seconds a call is under way, each way.

    `calls` records when (loop time) each session call was sent, as (verb, time).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fault: StoreError | None = None
        self.request_delay = self.answer_delay = 0.0
        self.calls: list[tuple[str, float]] = []

    def times(self, verb: str) -> list[float]:
        """Return when calls of `verb` were sent."""
        return [at for called, at in self.calls if called == verb]

    async def create_session(self, spec: SessionSpec) -> Session:
        return await self._send("create", super().create_session, spec)

    async def renew_session(self, session_id: str) -> None:
        await self._send("renew", super().renew_session, session_id)

    async def destroy_session(self, session_id: str) -> None:
        await self._send("destroy", super().destroy_session, session_id)

    def has_session(self, session_id: str) -> bool:
        """Return whether the session lives in the store, without a call."""
        self._expire_due()
        return session_id in self.state.sessions

    async def _send(self, verb: str, call: Callable[..., Awaitable[T]], about: object) -> T:
        self.calls.append((verb, asyncio.get_running_loop().time()))
        if self.request_delay:
            await asyncio.sleep(self.request_delay)
        if self.fault is not None:
            raise self.fault
        answer = await call(about)
        if self.answer_delay:
            await asyncio.sleep(self.answer_delay)
        return answer


@asynccontextmanager
async def running(keeper: SessionKeeper) -> AsyncIterator[asyncio.Task[None]]:
    """Run the keeper while the context lasts."""
    async with background(keeper.run()) as task:
        yield task
