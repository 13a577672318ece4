"""What a reflector does next: pure decisions, after client-go's reflector, with our amendments.

A list starts from any cached state ("0"), later from the last version seen, and reads with quorum once that version is
no longer, or not yet, known to the server. A watch that ends goes on from the last version seen, unless the server
says, or behaves as if, it could not: only then everything is listed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from store.kube.errors import (
    Expired,
    KubeError,
    ServerError,
    TooManyRequests,
    Unreachable,
    is_too_large_resource_version,
)

SHORT_WATCH = 1.0  # seconds: a watch that ends sooner, and told nothing, is suspicious

EndOfWatch: TypeAlias = Literal["closed", "broken", "refused", "short-watch", "expired", "failed"]


class AfterWatch(NamedTuple):
    """How to go on. `reason` labels the next list or watch; `backs_off`: pause first."""

    lists: bool
    reason: EndOfWatch
    backs_off: bool


def forgets(error: KubeError) -> bool:
    """Whether the server does not know our resource version, any more or yet."""
    return isinstance(error, Expired) or is_too_large_resource_version(error)


def after_watch(error: KubeError | None, *, opened: bool, lived: float, progressed: bool) -> AfterWatch:
    """What follows a watch that lived for `lived` seconds and ended by `error`, or None for a clean close.

    `opened`: the server answered with a stream. `progressed`: the stream brought a newer resource version.
    A server that is away or sheds load is asked for the same watch again, never for a list, which costs it more.
    """
    in_vain = lived < SHORT_WATCH and not progressed
    if error is None:
        return AfterWatch(lists=in_vain, reason="short-watch" if in_vain else "closed", backs_off=in_vain)
    if isinstance(error, Unreachable):
        return AfterWatch(lists=False, reason="broken", backs_off=in_vain)
    if forgets(error):
        return AfterWatch(lists=True, reason="expired", backs_off=True)
    if not opened and isinstance(error, TooManyRequests | ServerError):
        return AfterWatch(lists=False, reason="refused", backs_off=True)
    return AfterWatch(lists=True, reason="failed", backs_off=True)


class Cursor:
    """How far the server's history has been seen, and from where to list.

    `page_size`: objects per page; 0 for everything at once.
    """

    def __init__(self, page_size: int) -> None:
        self.version = ""
        self._page_size = page_size
        self._quorum = False
        self._paginated = False

    def distrust(self) -> None:
        """The server does not know our version: lists read with quorum until one succeeds."""
        self._quorum = True

    @property
    def list_version(self) -> str:
        """The resource version to list at."""
        return "" if self._quorum else self.version or "0"

    def limit(self, version: str) -> int:
        """The page size for a list at `version`. A limit keeps a server from answering out of its watch cache, so a
        list at a known version goes unpaginated, unless this server was seen to have no such cache."""
        return self._page_size if version in ("", "0") or self._paginated else 0

    def listed(self, asked: str, version: str, *, paginated: bool) -> None:
        """A list that was asked for at `asked` succeeded at `version`."""
        self.version = version
        self._quorum = False
        self._paginated = self._paginated or (paginated and asked == "0")


class Backoff:
    """Pauses that double from `initial` to `cap` seconds, each uniform in [d, 2d); afresh after `reset` quiet seconds.

    Source: client-go's exponential backoff manager, with its reflector's figures as defaults.
    """

    def __init__(
        self,
        *,
        initial: float = 0.8,
        cap: float = 30.0,
        reset: float = 120.0,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._initial, self._cap, self._reset = initial, cap, reset
        self._clock, self._rng = clock, rng
        self._next = initial
        self._asked = clock()

    def pause(self, retry_after: float | None = None) -> float:
        """Seconds to wait now; at least what the server asked for."""
        now = self._clock()
        if now - self._asked > self._reset:
            self._next = self._initial
        self._asked = now
        pause = self._next * (1.0 + self._rng.random())
        self._next = min(2.0 * self._next, self._cap)
        return max(pause, retry_after or 0.0)
