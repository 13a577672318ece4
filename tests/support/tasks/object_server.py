"""A small object server: PUT, GET, HEAD and DELETE of any path, and S3's listing, as far as a data store needs them."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from xml.sax.saxutils import escape, unescape

from aiohttp import web
from aiohttp.test_utils import TestServer


class ObjectServer:
    """`objects` by path; `authorizations` and `queries` that came.

    While `status` is set, every request is answered with it; while `hangs`, none is answered; while `is_endless`, each
    gets a body without end, of which `sent` bytes have left.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.authorizations: list[str] = []
        self.queries: list[str] = []
        self.status = 0
        self.hangs = False
        self.is_endless = False
        self.sent = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.authorizations.append(request.headers.get("Authorization", ""))
        self.queries.append(request.query_string)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.status:
            return web.Response(status=self.status, text="of the server")
        if self.is_endless:
            return await self._endless(request)
        if request.method == "PUT":
            self.objects[request.path] = await request.read()
            return web.Response(headers=self._headers(request.path))
        if request.query.get("list-type"):
            return self._listing(request)
        if request.method == "POST" and "delete" in request.query:
            keys = re.findall("<Key>(.*?)</Key>", await request.text())
            for key in keys:
                self.objects.pop(f"{request.path.rstrip('/')}/{unescape(key)}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return web.Response(text=f"<DeleteResult>{deleted}</DeleteResult>", content_type="application/xml")
        if request.method == "DELETE":
            self.objects.pop(request.path, None)
            return web.Response(status=204)
        if request.path not in self.objects:
            return web.Response(status=404)
        content = self.objects[request.path]
        headers = {**self._headers(request.path), "Content-Length": str(len(content))}
        return web.Response(body=content, headers=headers)

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"ETag": '"x"', "Last-Modified": email.utils.formatdate(0, usegmt=True)})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            self.sent += 65536

    def _headers(self, path: str) -> dict[str, str]:
        digest = hashlib.md5(self.objects[path]).hexdigest()
        return {"ETag": f'"{digest}"', "Last-Modified": email.utils.formatdate(0, usegmt=True)}

    def _listing(self, request: web.Request) -> web.Response:
        bucket, prefix = f"{request.path.rstrip('/')}/", request.query.get("prefix", "")
        keys = sorted(path[len(bucket) :] for path in self.objects if path.startswith(bucket + prefix))
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(self.objects[bucket + key])}</Size></Contents>"
            for key in keys
        )
        return web.Response(
            text=f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>",
            content_type="application/xml",
        )


@asynccontextmanager
async def object_server() -> AsyncIterator[ObjectServer]:
    """Serve on a free port of the loopback interface; `url` has it."""
    served = ObjectServer()
    application = web.Application(client_max_size=2**28)
    application.router.add_route("*", "/{path:.*}", served.answer)
    async with TestServer(application) as server:
        served.url = str(server.make_url("/")).rstrip("/")
        yield served
