"""HiveD's web server: kube-scheduler's calls and inspection, on HiveD's paths with HiveD's answers.

The model: each request is handled on the event loop of the scheduler, which is its single writer, so an answer shows
one state of it. Inspection sends a snapshot in small parts and yields between them: it blocks no other request.

Errors, as in HiveD: filter and bind answer status 200 with the field `Error`, because kube-scheduler reads nothing
else; all others answer the status and the message as a JSON string. An invalid request is a user error (4xx); a defect
of the scheduler is a platform error (500), logged with its stack; a temporary failure is 503. None of them stops the
process.

There is no token: kube-scheduler can't send one. Client certificates (`rcfarm.config.kube`) or a network policy
keep other clients out. Requests are bounded all the same: a body in size, time and number, before it is decoded; a
large one is decoded in a thread, so that the loop continues.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec
import structlog
from aiohttp import web

from controllers.extender.pod_states import ExtenderCall
from controllers.extender.reporting import CallResult, Metrics
from controllers.extender.wire import (
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderHandlers,
    decode_bind,
    decode_filter,
    decode_preempt,
    encode_bind,
    encode_filter,
    encode_preempt,
    error_message,
    error_text,
)
from scheduler.hived.errors import HivedError, NotNow, PlatformError, UserError
from scheduler.hived.inspection import SNAPSHOT_PATH
from scheduler.hived.inspection.inspection import Inspection
from store.http_server import Bounds, RequestRefused, read_body

log = structlog.get_logger(__name__)

CALLS = Bounds(request_seconds=None)  # a decision, once begun, is completed
NAMES_BODY = 1024 * 1024  # bytes: a pod, and the names of ten thousand nodes
NODES_BODY = 64 * 1024 * 1024  # bytes: some thousand whole nodes, if kube-scheduler does not send names
SMALL_BODY = 64 * 1024  # bytes that are read without a limit on their number, and decoded at once
LARGE_AT_ONCE, WHOLE_AT_ONCE = 8, 2  # large bodies that are in memory at the same time
BODY_SECONDS = 5.0  # kube-scheduler's time limit for an answer
ANSWER_SECONDS = 60.0  # for sending an inspection
PART = 64 * 1024  # bytes of a snapshot per write

FILTER = "/v1/extender/filter"
BIND = "/v1/extender/bind"
PREEMPT = "/v1/extender/preempt"
AFFINITY_GROUPS = "/v1/inspect/affinitygroups/"
CLUSTER_STATUS = "/v1/inspect/clusterstatus"
PHYSICAL_CLUSTER = "/v1/inspect/clusterstatus/physicalcluster"
VIRTUAL_CLUSTERS = "/v1/inspect/clusterstatus/virtualclusters/"
PATHS = (
    "/",
    FILTER,
    BIND,
    PREEMPT,
    AFFINITY_GROUPS,
    CLUSTER_STATUS,
    PHYSICAL_CLUSTER,
    VIRTUAL_CLUSTERS,
    SNAPSHOT_PATH,
)

T = TypeVar("T")
Pieces: TypeAlias = Iterable[bytes]
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def extender_app(
    handlers: ExtenderHandlers,
    inspect: Inspection,
    metrics: Metrics | None = None,
    *,
    node_cache_capable: bool = True,
) -> web.Application:
    """Return the application. Routes added to it later take precedence over its answer to unknown paths.

    `node_cache_capable`: the field of that name in kube-scheduler's configuration; false if it sends whole nodes.
    """
    bodies = _Bodies(node_cache_capable)
    extender = _Extender(handlers, metrics or Metrics(), bodies)
    app = web.Application(client_max_size=bodies.most)
    for path, handler in (
        ("/", _root),
        (FILTER, extender.filter),
        (BIND, extender.bind),
        (PREEMPT, extender.preempt),
        (AFFINITY_GROUPS[:-1], _with_slash),
        (AFFINITY_GROUPS, _inspected(lambda _: inspect.affinity_groups())),
        (AFFINITY_GROUPS + "{name:.+}", _inspected(inspect.affinity_group)),
        (CLUSTER_STATUS, _inspected(lambda _: inspect.cluster_status())),
        (PHYSICAL_CLUSTER, _inspected(lambda _: inspect.physical_cluster())),
        (VIRTUAL_CLUSTERS[:-1], _with_slash),
        (VIRTUAL_CLUSTERS, _inspected(lambda _: inspect.virtual_clusters())),
        (VIRTUAL_CLUSTERS + "{name:.+}", _inspected(inspect.virtual_cluster)),
        (SNAPSHOT_PATH, _inspected(lambda _: inspect.snapshot())),
        ("/{path:.*}", _not_found),
    ):
        app.router.add_route("*", path, handler)
    return app


@dataclass(frozen=True, slots=True)
class _Extender:
    """Handlers of kube-scheduler's calls."""

    handlers: ExtenderHandlers
    metrics: Metrics
    bodies: _Bodies

    async def filter(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            call = await self.bodies.decoded(request, decode_filter)
            return encode_filter(await self.handlers.filter(call.args), call)

        return await self._answer(
            ExtenderCall.FILTER,
            answer,
            lambda error: _json(encode_filter(ExtenderFilterResult(error=error_text(error)))),
        )

    async def bind(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            return encode_bind(await self.handlers.bind(await self.bodies.decoded(request, decode_bind)))

        return await self._answer(
            ExtenderCall.BIND, answer, lambda error: _json(encode_bind(ExtenderBindingResult(error_text(error))))
        )

    async def preempt(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            return encode_preempt(await self.handlers.preempt(await self.bodies.decoded(request, decode_preempt)))

        return await self._answer(ExtenderCall.PREEMPT, answer, _failed)

    async def _answer(
        self,
        call: ExtenderCall,
        answer: Callable[[], Awaitable[bytes]],
        failed: Callable[[HivedError], web.Response],
    ) -> web.Response:
        started = time.perf_counter()
        result: CallResult = "ok"
        try:
            response = _json(await answer())
        except Exception as error:  # whatever it is, kube-scheduler needs an answer in its form
            result, response = _answer_to(error, call, failed)
        self.metrics.answered(call, result, time.perf_counter() - started)
        return response


class _Bodies:
    """Reads bodies within their bounds. `most`: bytes of one body."""

    def __init__(self, node_cache_capable: bool) -> None:
        self._node_cache_capable = node_cache_capable
        self.most = NAMES_BODY if node_cache_capable else NODES_BODY
        self._large = asyncio.Semaphore(LARGE_AT_ONCE if node_cache_capable else WHOLE_AT_ONCE)

    async def decoded(self, request: web.Request, decode: Callable[[bytes], T]) -> T:
        """Return the decoded body. Raises `UserError`, and `NotNow` if too many large bodies are being read."""
        size = SMALL_BODY + 1 if request.content_length is None else request.content_length
        if size > self.most and request.content_length is not None:
            raise UserError(self._too_large())
        if size <= SMALL_BODY:
            return decode(await self._read(request))
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._large.acquire()
        except TimeoutError:
            raise NotNow("too many large bodies at once; ask again") from None
        try:
            body = await self._read(request)
            return await asyncio.to_thread(decode, body)
        finally:
            self._large.release()

    async def _read(self, request: web.Request) -> bytes:
        try:
            return await read_body(request, BODY_SECONDS)
        except RequestRefused as refused:
            raise UserError(self._too_large() if refused.status == 413 else str(refused)) from None

    def _too_large(self) -> str:
        advice = "; if kube-scheduler sends whole nodes, set nodeCacheCapable: true in its configuration, or "
        advice += "extender.node_cache_capable = false here"
        return f"the body is larger than {self.most} bytes{advice if self._node_cache_capable else ''}"


def _answer_to(
    error: Exception, call: ExtenderCall, failed: Callable[[HivedError], web.Response]
) -> tuple[CallResult, web.Response]:
    """Return result and response for an error.

    A separate function, so that no frame in the exception's traceback holds the exception (a reference cycle).
    """
    known = _known(error, str(call))
    if isinstance(known, NotNow):
        return "not_now", failed(known)
    return "user_error" if known.code < 500 else "platform_error", failed(known)


def _known(error: Exception, what: str) -> HivedError:
    """Log the error: as information if the request is to blame, else as an error of the extender. Return it as a
    `HivedError`."""
    known = error if isinstance(error, HivedError) else PlatformError(str(error) or type(error).__name__)
    if isinstance(known, NotNow) or known.code < 500:
        write = log.info if known.is_news else log.debug
        write("Request refused", request=what, error=str(known))
    else:
        log.error("Request failed", request=what, error=str(known), exc_info=error)
    return known


def _inspected(snapshot: Callable[[str], Awaitable[Pieces]]) -> Handler:
    """Return the handler of an inspection. `snapshot` gets the name in the path. A large answer is sent in parts, with
    turns of other tasks in between."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if request.method != "GET":
                raise UserError(f"NotImplemented: {request.method}: {request.path}")
            pieces = await snapshot(request.match_info.get("name", ""))
        except Exception as error:  # as above
            return _failed(_known(error, request.path))
        parts = _parts(pieces)
        first = next(parts)
        second = next(parts, None)
        if second is None:
            return _json(first)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        part: bytes | None = second
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await response.prepare(request)
                await response.write(first)
                while part is not None:
                    await asyncio.sleep(0)
                    await response.write(part)
                    part = next(parts, None)
                await response.write_eof()
        except TimeoutError:  # a client that does not read
            if request.transport is not None:
                request.transport.abort()
        return response

    return handle


def _parts(pieces: Pieces) -> Iterator[bytes]:
    """Yield the pieces joined to parts of about `PART` bytes."""
    collected: list[bytes] = []
    size = 0
    for piece in pieces:
        collected.append(piece)
        size += len(piece)
        if size >= PART:
            yield b"".join(collected)
            collected, size = [], 0
    yield b"".join(collected)


async def _root(_: web.Request) -> web.Response:
    return _json(msgspec.json.encode({"paths": PATHS}))


async def _with_slash(request: web.Request) -> web.Response:
    path, _, query = request.raw_path.partition("?")
    return web.Response(status=301, headers={"Location": f"{path}/?{query}" if query else f"{path}/"})


async def _not_found(request: web.Request) -> web.Response:
    error = UserError(f"Path not found: {request.path}")
    return _json(msgspec.json.encode(error_message(error)), status=404)


def _failed(error: HivedError) -> web.Response:
    return _json(msgspec.json.encode(error_message(error)), status=error.code)


def _json(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
