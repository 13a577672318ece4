"""What every HTTP client here shares: a write is sent once.

aiohttp sends a PUT or DELETE again by itself when a kept-alive connection turns out to be closed. The first one may
have been applied: only the caller can know whether it may be tried again.
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
    """Middleware of a session: `ConnectionLost` instead of the errors upon which aiohttp would send a write again."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        if request.method == "GET":
            raise
        raise ConnectionLost(str(error) or "the connection was closed") from error


def cause_of(error: Exception) -> str:
    """Why there is no answer, in words, without the address."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionError):
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__
