"""The events of one watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self

from store.kube import wire
from store.kube.api import WatchEvent
from store.kube.errors import Unreachable


class Chunks(Protocol):
    """A stream of bytes, cut anywhere."""

    async def chunk(self) -> bytes:
        """The next bytes, b"" at the end."""


class Watch:
    """Iterates over the events in a stream, each decoded when it is asked for. One whose object can't be understood
    carries a `MalformedObject`."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._splitter = wire.LineSplitter()
        self._lines: Iterator[bytes] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while not (line := next(self._lines, b"")):
            chunk = await self._chunks.chunk()
            if chunk:
                self._lines = filter(None, self._splitter.feed(chunk))
            elif self._splitter.is_inside_line:
                raise Unreachable("the watch ended inside an event")
            else:
                raise StopAsyncIteration
        return wire.decode_event(line)
