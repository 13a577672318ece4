"""An embedded store whose session calls can be made to fail, as a network between would."""

from __future__ import annotations

import asyncio

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Session, SessionSpec, StoreError


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
        await self._arrive("create")
        session = await super().create_session(spec)
        await self._answer()
        return session

    async def renew_session(self, session_id: str) -> None:
        await self._arrive("renew")
        await super().renew_session(session_id)
        await self._answer()

    async def destroy_session(self, session_id: str) -> None:
        await self._arrive("destroy")
        await super().destroy_session(session_id)
        await self._answer()

    def has_session(self, session_id: str) -> bool:
        """Return whether the session lives in the store, without a call."""
        self._expire_due()
        return session_id in self.state.sessions

    async def _arrive(self, verb: str) -> None:
        self.calls.append((verb, asyncio.get_running_loop().time()))
        if self.request_delay:
            await asyncio.sleep(self.request_delay)
        if self.fault is not None:
            raise self.fault

    async def _answer(self) -> None:
        if self.answer_delay:
            await asyncio.sleep(self.answer_delay)
