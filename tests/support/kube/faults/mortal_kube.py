"""A process that dies at one of its calls to the API server, as the API server and the process see it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from store.kube.api.protocol import KubeApi, WatchEvent

Moment = Literal["before", "after"]
_CALLS = frozenset({"get", "list", "create", "replace", "patch", "delete", "served"})


class MortalKube:
    """A `KubeApi` in front of another. At call number `dies_at`, from 0, the process dies: `before` the call leaves, or
    `after` the server has done what it asks for. Watches don't count.

    A dead process makes no calls and gets no answers: its calls wait for ever, for the test to cancel them.
    """

    def __init__(self, inner: KubeApi, dies_at: float = math.inf, moment: Moment = "before") -> None:
        self.inner = inner
        self.calls = 0
        self.died = asyncio.Event()
        self._dies_at, self._moment = dies_at, moment

    def __getattr__(self, verb: str) -> Any:
        if verb not in _CALLS:
            raise AttributeError(verb)

        async def call(*arguments: Any, **options: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if number == self._dies_at and self._moment == "before":
                self.died.set()
            await self._live()
            answer = await getattr(self.inner, verb)(*arguments, **options)
            if number == self._dies_at:
                self.died.set()
            await self._live()
            return answer

        return call

    @asynccontextmanager
    async def watch(self, *arguments: Any, **options: Any) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        await self._live()
        async with self.inner.watch(*arguments, **options) as events:
            yield self._heard(events)

    async def _heard(self, events: AsyncIterator[WatchEvent]) -> AsyncIterator[WatchEvent]:
        async for event in events:
            await self._live()
            yield event

    async def _live(self) -> None:
        """Return while the process lives, else never."""
        if self.died.is_set():
            await asyncio.get_running_loop().create_future()
