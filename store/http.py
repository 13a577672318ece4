"""Shared by all clients that use aiohttp: a write is sent once.

aiohttp repeats a PUT or DELETE on its own when a kept-alive connection turns out to be closed. The first request may
have been applied: only the caller can know whether a repetition is safe.
"""

from __future__ import annotations

import os

import aiohttp

NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class ConnectionLost(Exception):
    """The connection ended under a write."""


async def send_writes_once(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Raise `ConnectionLost` for the errors after which aiohttp would repeat a write; a middleware of a session."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if request.method == "GET":
            raise
        raise ConnectionLost(str(error) or "the connection was closed") from error


def cause_of(error: Exception) -> str:
    """Return the reason why there is no answer, in words, without the address."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionError):
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__
