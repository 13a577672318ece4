"""The HTTP client of analyses: GETs of HTTP servers, and queries to Prometheus.

RC files are written by tenants. So no redirect is followed, no proxy, cookie or credential is used, an answer is read
up to `MOST_READ` bytes, and nothing of it is kept but the number or status (`rcfarm.operations.analysis`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from rcfarm.operations.analysis import Measured, is_allowed, of_prometheus, of_status
from store.schema.records import Analysis

MOST_READ = 1024 * 1024  # bytes of an answer
LOOKUPS = 8  # of names at once


class _Resolver(AbstractResolver):
    """Looks names up in threads of its own: a name server that hangs must not delay the farm's own connections."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUPS, "analysis-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        lookup = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, lookup)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=flags)
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class AnalysisHttp:
    """The connections of a farm's analyses, open within its context; at most `limit`. `hosts`: those that are allowed,
    as in the farm's settings."""

    def __init__(self, hosts: Sequence[str], limit: int) -> None:
        self._hosts = hosts
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, force_close=True, resolver=_Resolver()),
            timeout=aiohttp.ClientTimeout(),  # each run has its own
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "rcfarm-analysis", "Accept-Encoding": "identity"},
            auto_decompress=False,
        )

    async def __aenter__(self) -> AnalysisHttp:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def measure(self, analysis: Analysis) -> Measured:
        """Run an analysis that is a request, once. An error of HTTP is an outcome; raises `OSError` for others."""
        try:
            return await self._get(analysis)
        except aiohttp.ClientConnectorDNSError:
            return Measured("error", "the host's name is not known")
        except (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError):
            return Measured("error", "no trusted TLS connection")
        except aiohttp.ClientConnectorError as error:
            return Measured("error", os.strerror(error.os_error.errno) if error.os_error.errno else "no connection")
        except (aiohttp.ClientError, ValueError):  # their texts may quote the answer
            return Measured("error", "not a valid HTTP answer")

    async def _get(self, analysis: Analysis) -> Measured:
        http, prometheus = analysis.http, analysis.prometheus
        if http is not None:
            url = URL(http.url)
        elif prometheus is not None:
            url = URL(f"{prometheus.url.rstrip('/')}/api/v1/query").with_query(query=prometheus.query)
        else:  # written by another client
            return Measured("error", "there is nothing to run")
        if not is_allowed(url.host or "", url.port, self._hosts):
            return Measured("error", f"farm.analysis_hosts does not allow {url.host}:{url.port}")
        async with self._session.get(url, allow_redirects=False) as response:
            if prometheus is None:
                assert http is not None
                return of_status(http, response.status)
            body = b""
            async for part in response.content.iter_any():
                body += part
                if len(body) > MOST_READ:
                    return Measured("error", f"an answer of more than {MOST_READ // 1024} KiB")
            return of_prometheus(prometheus, response.status, body)
