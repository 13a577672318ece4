"""The unreliable network of one process to its API server, and the death of that process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from store.kube.api.errors import Conflict, KubeError, ServerError, ServerTimeout, TooManyRequests, Unreachable
from store.kube.api.protocol import KubeApi, WatchEvent

REFUSALS: list[KubeError] = [
    ServerError("500", status=500),
    TooManyRequests("429", status=429),
    Unreachable("connection refused"),
]
LOSSES: list[KubeError] = [Unreachable("answer lost"), ServerTimeout("504", status=504)]
_CALLS = frozenset({"get", "list", "create", "replace", "patch", "delete", "served"})


class FlakyKube:
    """A `KubeApi` in front of another. Of all calls, the share `refused` fails before anything is done (patches by a
    conflict, too), the share `lost` afterwards. `dead`: no call leaves any more.
    """

    def __init__(self, inner: KubeApi, rng: random.Random, *, refused: float, lost: float) -> None:
        self.inner, self.rng, self.refused, self.lost = inner, rng, refused, lost
        self.dead = False

    def __getattr__(self, verb: str) -> Any:
        if verb not in _CALLS:
            raise AttributeError(verb)

        async def call(*arguments: Any, **options: Any) -> Any:
            self._strike(self.refused, [*REFUSALS, Conflict("409", status=409)] if verb == "patch" else REFUSALS)
            answer = await getattr(self.inner, verb)(*arguments, **options)
            self._strike(self.lost, LOSSES)
            return answer

        return call

    def _strike(self, share: float, errors: list[KubeError]) -> None:
        if self.dead:
            raise Unreachable("this process is dead")
        if self.rng.random() < share:
            raise self.rng.choice(errors)

    @asynccontextmanager
    async def watch(self, *arguments: Any, **options: Any) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        self._strike(self.refused, REFUSALS)
        async with self.inner.watch(*arguments, **options) as events:
            yield events
