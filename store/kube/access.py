"""How the API server is reached at this moment, and keeping that true while credentials rotate.

The model: every call asks `Credentials.current()`. Every `CHECK_EVERY` seconds the first call that comes looks whether
the files behind the access changed, and if so reads them again; the calls beside it go on with what there is. A 401
makes them be read at once. What can't be read leaves the old access in place: whether it still counts is the server's
to say.

A TLS context is made anew only when its files hold something else, and a connection is reused only under the context
that it was made with: so a new client certificate means new connections, and the old ones idle away.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from store.kube.errors import NoConfig
from store.tls import file_state

CHECK_EVERY = 30.0  # seconds; tokens of service accounts are replaced many minutes before they end
REREAD_AFTER_REFUSAL = 10.0  # seconds between two readings that 401s may cause


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is and who we are to it.

    `server`: its URL without a slash at the end. `authorization`: the header's value, "" to send none. `tls`: for
    https. `server_name`: what the server's certificate must name, when that is not the URL's host.
    """

    server: str
    authorization: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)  # may carry a password


class AccessSource(Protocol):
    """Where access is read from."""

    async def read(self, *, anew: bool) -> Access:
        """Read it. `anew`: trust nothing that an earlier reading left behind. Raises `NoConfig`."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that the last reading depended on."""

    @property
    def short_lived(self) -> bool:
        """Whether the access ends by itself, though no file changes, and must be read again in time."""


class FixedAccess:
    """Access that never changes."""

    files: Sequence[Path] = ()
    short_lived = False

    def __init__(self, access: Access) -> None:
        self._access = access

    async def read(self, *, anew: bool) -> Access:
        return self._access


class Credentials:
    """The access that counts now. Made by `open`; used from one event loop."""

    def __init__(self, source: AccessSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._access = Access("")
        self._seen: dict[Path, object] = {}
        self._check_at = 0.0
        self._reread_at = float("-inf")
        self._reading = asyncio.Lock()

    @classmethod
    async def open(cls, source: AccessSource, clock: Callable[[], float] = time.monotonic) -> Credentials:
        """Read for the first time. Raises `NoConfig`."""
        credentials = cls(source, clock)
        await credentials._read(anew=True)
        return credentials

    @property
    def server(self) -> str:
        """The server's URL, for messages."""
        return self._access.server

    async def current(self) -> Access:
        """The access for the next call."""
        if self._clock() >= self._check_at and not self._reading.locked():
            async with self._reading:
                changed = _states(self._source.files) != self._seen
                if changed or self._source.short_lived:
                    await self._try_to_read(anew=changed)
                self._check_at = self._clock() + CHECK_EVERY
        return self._access

    async def renewed(self, refused: Access) -> bool:
        """After the server did not accept `refused`: whether there is another access to try."""
        async with self._reading:
            if self._access == refused and self._clock() >= self._reread_at + REREAD_AFTER_REFUSAL:
                self._reread_at = self._clock()
                await self._try_to_read(anew=True)
        return self._access != refused

    async def _try_to_read(self, *, anew: bool) -> None:
        try:
            await self._read(anew=anew)
        except NoConfig as error:
            import structlog

            structlog.get_logger(__name__).warning("The old credentials stay in use", error=str(error))

    async def _read(self, *, anew: bool) -> None:
        before = _states(self._source.files)  # taken before, so that a change during the reading is found later
        self._access = await self._source.read(anew=anew)
        self._seen = _states(self._source.files) | before
        self._check_at = self._clock() + CHECK_EVERY


def _states(files: Iterable[Path]) -> dict[Path, object]:
    return {path: file_state(path) for path in files}
