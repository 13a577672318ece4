"""The part of a kubelet that serves logs: what an API server asks for when a client reads a pod's log."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

from aiohttp import web

from store.kube.api.objects import NODES, format_micro_time
from store.kube.api.protocol import KubeApi
from tests.support.kube.certificates import Authority


class HollowLogs:
    """The logs of all containers, by pod. `write` appends a line; a follower of a log gets it at once, until `end`."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[str, str]]] = {}
        self._ended: set[str] = set()
        self._changed = asyncio.Condition()
        self._clock = 1_700_000_000.0
        self.broken = 0  # streams that are to be cut after their next line

    async def write(self, pod: str, text: str) -> None:
        """Append a line, one millisecond after the last of all pods."""
        self._clock += 0.001
        async with self._changed:
            self._lines.setdefault(pod, []).append((format_micro_time(self._clock), text))
            self._changed.notify_all()

    async def end(self, *pods: str) -> None:
        """End the streams of these pods' logs."""
        async with self._changed:
            self._ended.update(pods)
            self._changed.notify_all()

    @asynccontextmanager
    async def serving(self, api: KubeApi, directory: Path, *nodes: str) -> AsyncIterator[None]:
        """Serve the logs of the pods on these nodes, for the duration of the block."""
        certificate = Authority(directory).issue("kubelet")
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._read)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        port = runner.addresses[0][1]
        for node in nodes:
            status = {
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            }
            await api.patch(NODES, node, "", {"status": status}, subresource="status")
        try:
            yield
        finally:
            await runner.cleanup()

    async def _read(self, request: web.Request) -> web.StreamResponse:
        pod, query = request.match_info["pod"], request.query
        response = web.StreamResponse()
        await response.prepare(request)
        shown, since = 0, datetime.fromisoformat(query.get("sinceTime") or "1970-01-01T00:00:00Z")
        if tail := query.get("tailLines"):
            shown = max(0, len(self._lines.get(pod, ())) - int(tail))
        while True:
            lines = self._lines.get(pod, [])
            while shown < len(lines):
                time, text = lines[shown]
                shown += 1
                if datetime.fromisoformat(time) >= since:
                    await response.write(f"{time} {text}\n".encode())
                    if self.broken:
                        self.broken -= 1
                        assert request.transport is not None
                        request.transport.abort()
                        return response
            if query.get("follow") != "true" or pod in self._ended:
                return response
            async with self._changed:
                if shown == len(self._lines.get(pod, ())) and pod not in self._ended:
                    await self._changed.wait()
