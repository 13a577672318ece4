"""Who waits for a change under which prefix.

A changed key wakes exactly the prefixes that it is under, found by looking its beginnings up: the cost of a write does
not depend on how many watchers there are for other prefixes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from store.kv import Unavailable


class Watchers:
    """Who waits for which prefix. A changed key wakes exactly the prefixes that it is under."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[bool]]] = {}
        self._lengths: Counter[int] = Counter()
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def changed(self, prefix: str, wait: float) -> bool:
        """True as soon as a key under `prefix` changes; False after `wait` seconds, or when all are dismissed.

        Raises `Unavailable` on `close`.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(prefix)
        if waiting is None:
            waiting = self._waiting[prefix] = set()
            self._lengths[len(prefix)] += 1
        waiting.add(future)
        try:
            done, _ = await asyncio.wait([future], timeout=wait)
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(prefix) is waiting:
                self._forget(prefix)
        if self._closed:
            raise Unavailable("the embedded store is closed")
        return bool(done) and future.result()

    def wake(self, keys: Iterable[str]) -> None:
        """The keys changed."""
        if self._waiting:
            for prefix in {key[:length] for key in keys for length in self._lengths if length <= len(key)}:
                self._answer(prefix, changed=True)

    def close(self) -> None:
        """Dismiss everybody, for the last time."""
        self._closed = True
        self.dismiss()

    def dismiss(self) -> None:
        """Nobody shall wait any longer."""
        for prefix in list(self._waiting):
            self._answer(prefix, changed=False)

    def _answer(self, prefix: str, *, changed: bool) -> None:
        waiting = self._waiting.get(prefix)
        if waiting is not None:
            self._forget(prefix)
            for future in waiting:
                if not future.done():
                    future.set_result(changed)

    def _forget(self, prefix: str) -> None:
        del self._waiting[prefix]
        self._lengths[len(prefix)] -= 1
        if not self._lengths[len(prefix)]:
            del self._lengths[len(prefix)]
