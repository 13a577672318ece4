"""HiveD's web server: kube-scheduler's calls, and inspection, on HiveD's paths with HiveD's answers.

The model: each request is handled on the event loop of the scheduler, which is its single writer, so an answer shows
one state of it. Inspection sends a snapshot in small parts and gives way between them: it holds up no other request.

Errors, as HiveD tells them: filter and bind answer status 200 with the field `Error`, for kube-scheduler reads nothing
else; all others answer the status and the message as a JSON string. What is wrong with a request is a user error
(4xx); what is wrong with us is a platform error (500), logged with its stack; what may pass by itself is 503. None of
them ends anything.

There is no token: kube-scheduler can't send one. The listener belongs where only the cluster's control plane reaches
it, or behind a network policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Literal, Protocol, TypeAlias

import msgspec
import structlog
from aiohttp import web

from scheduler.hived.errors import HivedError, NotNow, PlatformError, UserError
from scheduler.hived.extender_types import ExtenderBindingResult, ExtenderFilterResult, ExtenderHandlers
from scheduler.hived.pod_states import ExtenderCall
from scheduler.hived.snapshot import PATH as SNAPSHOT
from scheduler.hived.wire import (
    decode_bind,
    decode_filter,
    decode_preempt,
    encode_bind,
    encode_filter,
    encode_preempt,
    error_message,
    error_text,
)

log = structlog.get_logger(__name__)

MAX_BODY = 64 * 1024 * 1024  # bytes: some thousand whole nodes, where kube-scheduler does not send names
PART = 64 * 1024  # bytes of a snapshot that are sent at once

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
    SNAPSHOT,
)

CallResult: TypeAlias = Literal["ok", "user_error", "platform_error", "not_now"]
Pieces: TypeAlias = Iterable[bytes]
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InspectHandlers(Protocol):
    """Snapshots as JSON, in pieces. Each raises `UserError` for a name that does not exist."""

    async def affinity_groups(self) -> Pieces:
        """All groups that are allocated or preempting."""

    async def affinity_group(self, name: str) -> Pieces:
        """One of them."""

    async def cluster_status(self) -> Pieces:
        """All cells, as of one moment."""

    async def physical_cluster(self) -> Pieces:
        """The physical ones."""

    async def virtual_clusters(self) -> Pieces:
        """The virtual ones, by virtual cluster."""

    async def virtual_cluster(self, name: str) -> Pieces:
        """Those of one virtual cluster."""

    async def snapshot(self) -> Pieces:
        """The whole state, as `snapshot` has it."""


class CallMetrics(Protocol):
    """What is told of kube-scheduler's calls. Durations in seconds."""

    def answered(self, call: ExtenderCall, result: CallResult, seconds: float) -> None:
        """A call was answered, that long after its headers had come."""


class NoCallMetrics:
    """Measures nothing."""

    def answered(self, call: ExtenderCall, result: CallResult, seconds: float) -> None:
        pass


def extender_app(
    handlers: ExtenderHandlers, inspect: InspectHandlers, metrics: CallMetrics | None = None
) -> web.Application:
    """The application. Routes that are added to it later are found before its answer to unknown paths."""
    extender = _Extender(handlers, metrics or NoCallMetrics())
    app = web.Application(client_max_size=MAX_BODY)
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
        (SNAPSHOT, _inspected(lambda _: inspect.snapshot())),
        ("/{path:.*}", _not_found),
    ):
        app.router.add_route("*", path, handler)
    return app


class _Extender:
    """The calls of kube-scheduler."""

    def __init__(self, handlers: ExtenderHandlers, metrics: CallMetrics) -> None:
        self._handlers, self._metrics = handlers, metrics

    async def filter(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            call = decode_filter(await _body(request))
            return encode_filter(await self._handlers.filter(call.args), call)

        def failed(error: HivedError) -> web.Response:
            return _json(encode_filter(ExtenderFilterResult(error=error_text(error))))

        return await self._answer(ExtenderCall.FILTER, answer, failed)

    async def bind(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            return encode_bind(await self._handlers.bind(decode_bind(await _body(request))))

        def failed(error: HivedError) -> web.Response:
            return _json(encode_bind(ExtenderBindingResult(error_text(error))))

        return await self._answer(ExtenderCall.BIND, answer, failed)

    async def preempt(self, request: web.Request) -> web.Response:
        async def answer() -> bytes:
            return encode_preempt(await self._handlers.preempt(decode_preempt(await _body(request))))

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
        except Exception as error:  # whatever it is, kube-scheduler must be told in the form that it reads
            result, response = _told(error, call, failed)
        self._metrics.answered(call, result, time.perf_counter() - started)
        return response


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise UserError(f"the body is larger than {MAX_BODY} bytes; set nodeCacheCapable: true") from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise UserError(f"the body can't be read: {error}") from error


def _told(
    error: Exception, call: ExtenderCall, failed: Callable[[HivedError], web.Response]
) -> tuple[CallResult, web.Response]:
    """In a frame of its own: one that an exception has come through must not keep it, for that would be a circle."""
    known = _known(error, str(call))
    return _result(known), failed(known)


def _known(error: Exception, what: str) -> HivedError:
    """The error as one of ours; logged by whose fault it is."""
    known = error if isinstance(error, HivedError) else PlatformError(str(error) or type(error).__name__)
    if isinstance(known, NotNow) or known.code < 500:
        tell = log.info if known.is_news else log.debug
        tell("A request was refused", request=what, error=str(known))
    else:
        log.error("A request failed", request=what, error=str(known), exc_info=error)
    return known


def _result(error: HivedError) -> CallResult:
    if isinstance(error, NotNow):
        return "not_now"
    return "user_error" if error.code < 500 else "platform_error"


def _inspected(snapshot: Callable[[str], Awaitable[Pieces]]) -> Handler:
    """The handler of an inspection. `snapshot` gets the name in the path."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if request.method != "GET":
                raise UserError(f"NotImplemented: {request.method}: {request.path}")
            pieces = await snapshot(request.match_info.get("name", ""))
        except Exception as error:  # as above
            return _failed(_known(error, request.path))
        return await _send(request, pieces)

    return handle


async def _send(request: web.Request, pieces: Pieces) -> web.StreamResponse:
    """In parts, others having their turn in between; all at once if it is small."""
    parts = _parts(pieces)
    first = next(parts)
    second = next(parts, None)
    if second is None:
        return _json(first)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(first)
    part: bytes | None = second
    while part is not None:
        await asyncio.sleep(0)
        await response.write(part)
        part = next(parts, None)
    await response.write_eof()
    return response


def _parts(pieces: Pieces) -> Iterator[bytes]:
    """The pieces joined to parts of about `PART` bytes."""
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
