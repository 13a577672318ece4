"""KubeClient against servers that misbehave in ways a real API server can't be made to, and its decoding of answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from aiohttp import web

from store.kube.api.errors import (
    MAX_RETRY_AFTER,
    BadRequest,
    Expired,
    Forbidden,
    KubeError,
    NotFound,
    ServerError,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    Unreadable,
    is_too_large_resource_version,
)
from store.kube.api.objects import PODS, SERVICES, MalformedObject
from store.kube.api.protocol import WatchEvent, before_sending, checked_on_send
from store.kube.client.client import SERVED_FOR, KubeClient, decode_event, decode_object, decode_page, encode
from store.kube.client.credentials import Access, FixedAccess
from store.kube.client.transport import MAX_PAUSES, Credentials, Limits, error_of
from tests.support.hostile import nested
from tests.support.kube.faults.odd_server import Handler, client_of, event, hang_up, serving, status_answer, stream
from tests.support.waiting import until

POD = {"metadata": {"name": "a", "namespace": "ns", "uid": "1", "resourceVersion": "5"}}


def watch_pods(client: KubeClient) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
    return client.watch(PODS, "ns", resource_version="1", timeout=60)


async def events_of(client: KubeClient) -> list[WatchEvent]:
    async with watch_pods(client) as watch:
        return [event async for event in watch]


def answers(*responses: web.Response) -> tuple[Handler, list[str]]:
    """A handler that gives one response after the other, and the methods it was asked with."""
    seen: list[str] = []
    waiting = iter(responses)

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        await request.read()
        return next(waiting)

    return handler, seen


def streams(*chunks: bytes) -> Handler:
    """A handler that answers a watch with these chunks."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, *chunks)

    return handler


@pytest.mark.parametrize("verb", ["create", "replace", "patch", "delete"])
async def test_a_write_is_sent_once(verb: str) -> None:
    """The kept-alive connection ends under a write: it may have been applied, so it is not sent again."""
    seen: Counter[str] = Counter()

    async def handler(request: web.Request) -> web.Response:
        seen[request.method] += 1
        await request.read()
        return web.json_response(POD) if request.method == "GET" else hang_up(request)

    async with client_of(handler) as client:
        await client.get(PODS, "a", "ns")  # the connection is in the pool now
        writes: dict[str, Callable[[], Awaitable[object]]] = {
            "create": lambda: client.create(PODS, POD, "ns"),
            "replace": lambda: client.replace(PODS, POD),
            "patch": lambda: client.patch(PODS, "a", "ns", {}),
            "delete": lambda: client.delete(PODS, "a", "ns"),
        }
        with pytest.raises(Unreachable, match="it may have been applied"):
            await writes[verb]()
    assert seen.total() == 2


async def test_a_write_that_never_left_says_so() -> None:
    """Without a listener the error names the address and says that nothing was applied."""
    async with client_of(answers()[0]) as client:
        pass
    with pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1:\d+: Connection refused .*not applied"):
        await client.create(PODS, POD, "ns")


@pytest.mark.parametrize("headers", [False, True])
async def test_a_hanging_server_costs_one_timeout(headers: bool) -> None:
    """A call to a server that never answers ends after the call's timeout; headers alone are no answer to a call."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if headers:
            await stream(request, b'{"metadata":')
        await asyncio.Event().wait()
        raise AssertionError

    async with client_of(handler, call_timeout=0.2) as client:
        with pytest.raises(Unreachable, match=r"waited 0\.2 s"):
            await client.get(PODS, "a", "ns")
        if not headers:
            with pytest.raises(Unreachable, match=r"waited 0\.2 s"):
                await events_of(client)


@pytest.mark.parametrize(
    ("pauses", "then", "sent"),
    [
        (["0"], POD, 2),  # the server did not process what it sheds, so even a creation is sent again
        (["0"] * (MAX_PAUSES + 1), None, MAX_PAUSES + 1),  # their number is bounded, even if there is time left
        (["60"], 60.0, 1),  # a pause that does not fit into the call's time is the caller's, with its length
        ([""], None, 1),  # evictions are refused without a pause, and the caller decides what to do
    ],
)
async def test_429_is_waited_for_with_every_verb(pauses: list[str], then: object, sent: int) -> None:
    """The client makes the pauses that the server asks for, within bounds; otherwise the error is the caller's."""
    headers = ({"Retry_After": pause} if pause else {} for pause in pauses)
    refusals = [status_answer(429, "TooManyRequests", **each) for each in headers]
    handler, seen = answers(*refusals, web.json_response(POD))
    async with client_of(handler, call_timeout=5.0) as client:
        if then is POD:
            assert await client.create(PODS, POD, "ns") == POD
        else:
            with pytest.raises(TooManyRequests) as caught:
                await client.create(PODS, POD, "ns")
            assert caught.value.retry_after == (then if then else 0.0 if pauses[0] else None)
    assert seen == ["POST"] * sent


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (status_answer(404, "NotFound", 'pods "a" not found'), NotFound, '^pods "a" not found$'),
        (status_answer(403, "Forbidden", "no"), Forbidden, "^no$"),
        (status_answer(401, "Unauthorized", "who?"), Unauthorized, "who"),
        (web.Response(status=502, text="<html>nginx"), ServerError, "GET /api/v1/.*/a: HTTP 502: <html>nginx"),
        (web.Response(status=403, body=b"\xff\xfe"), Forbidden, "HTTP 403"),
        (web.Response(status=404), NotFound, "HTTP 404: no reason"),
        (web.Response(status=302, headers={"Location": "/login"}), KubeError, "HTTP 302"),
        (web.Response(text="<html>"), Unreachable, "what answers is not the Kubernetes API: .* in: <html>"),
        (web.Response(text="[]"), Unreachable, "what answers is not the Kubernetes API"),
    ],
)
async def test_refusals_have_types_and_keep_their_words(
    response: web.Response, kind: type[KubeError], message: str
) -> None:
    """A Status keeps the server's message; whatever else answers is quoted, and never taken for an object."""
    handler, _ = answers(response)
    async with client_of(handler) as client:
        with pytest.raises(kind, match=message):
            await client.get(PODS, "a", "ns")


async def test_lines_longer_than_any_buffer() -> None:
    """A watch event of 5 MiB arrives whole, and so does the one behind it."""
    big = {"metadata": {"name": "big"}, "data": {"x": "y" * (5 << 20)}}
    async with client_of(streams(event("ADDED", big) + event("DELETED", POD))) as client:
        assert await events_of(client) == [("ADDED", big), ("DELETED", POD)]


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_watch_cut_into_chunks_anywhere(size: int) -> None:
    """Where the network cuts the stream makes no difference, nor do empty lines in it."""
    lines = event("ADDED", POD) + b"\n" + event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    async with client_of(streams(*(lines[at : at + size] for at in range(0, len(lines), size)))) as client:
        assert [event.type for event in await events_of(client)] == ["ADDED", "BOOKMARK"]


EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


@pytest.mark.parametrize(
    ("then", "error", "message"),
    [
        (event("DELETED", POD)[:30], Unreachable, "inside an event"),
        (event("ERROR", EXPIRED), Expired, "too old"),
        (b"<html>\n" + event("DELETED", POD), Unreadable, r"no event of a watch.*<html>"),
    ],
)
async def test_a_watch_that_goes_wrong(then: bytes, error: type[KubeError], message: str) -> None:
    """The events before are whole; half an event at the end, an ERROR event, and what is no event are errors."""
    async with client_of(streams(event("ADDED", POD), then)) as client, watch_pods(client) as watch:
        assert (await anext(watch)).type == "ADDED"
        with pytest.raises(error, match=message):
            await anext(watch)


async def test_a_watch_whose_connection_breaks() -> None:
    """The connection is reset in the middle of a chunk."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await stream(request, event("ADDED", POD))
        hang_up(request)
        return response

    async with client_of(handler) as client:
        with pytest.raises(Unreachable, match="the stream broke"):
            await events_of(client)


async def test_a_silent_watch_is_dead() -> None:
    """A connection that a router forgot delivers nothing for ever; after the silence that is allowed it counts as
    broken."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = await stream(request, event("ADDED", POD))
        await asyncio.Event().wait()
        return response

    async with client_of(handler, stream_silence=0.2) as client, watch_pods(client) as watch:
        assert (await anext(watch)).type == "ADDED"
        with pytest.raises(Unreachable, match=r"nothing came for 0\.2 s"):
            await anext(watch)


async def test_leaving_a_watch_closes_its_connection() -> None:
    """The server notices at once, and other calls continue."""
    closed = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response(POD)
        response = await stream(request, event("ADDED", POD))
        try:
            while request.transport is not None:
                await asyncio.sleep(0.01)
        finally:
            closed.set()
        return response

    async with client_of(handler, max_connections=1) as client:
        async with watch_pods(client) as watch:
            await anext(watch)
            assert await client.get(PODS, "a", "ns") == POD
        async with asyncio.timeout(10):
            await closed.wait()


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    """Cancelling ends the request; the client goes on with a connection of its own."""
    arrived = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        if not arrived.is_set():
            arrived.set()
            await asyncio.Event().wait()
        return web.json_response(POD)

    async with client_of(handler, max_connections=1) as client:
        call = asyncio.create_task(client.get(PODS, "a", "ns"))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await client.get(PODS, "a", "ns") == POD


async def test_connections_are_bounded() -> None:
    """However many calls are made at once, the server sees no more than `max_connections`."""
    inside = peak = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal inside, peak
        inside += 1
        peak = max(peak, inside)
        await asyncio.sleep(0.005)
        inside -= 1
        return web.json_response(POD)

    async with client_of(handler, max_connections=3) as client:
        await asyncio.gather(*(client.get(PODS, "a", "ns") for _ in range(20)))
    assert peak == 3


async def test_a_burst_then_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of requests goes at once, later ones wait in order, watches too; a pause earns the burst back."""
    now, waits = 0.0, []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(POD)

    async with serving(handler) as url:
        credentials = await Credentials.open(FixedAccess(Access(url)))
        async with KubeClient(credentials, limits=Limits(qps=10.0, burst=3), clock=lambda: now) as client:
            monkeypatch.setattr(asyncio, "sleep", wait)
            for _ in range(4):
                await client.get(PODS, "a", "ns")
            async with watch_pods(client):
                pass
            now = 100.0
            await client.get(PODS, "a", "ns")
            monkeypatch.undo()
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.1, 0.2, 0.0])


async def test_what_is_sent() -> None:
    """Paths, queries, content types and bodies are those of the API; nothing that was not asked for is in them."""
    seen: list[tuple[str, str, str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        body = (await request.read()).decode()
        seen.append((request.method, request.raw_path, request.headers.get("Content-Type", ""), body))
        return web.json_response(POD)

    async with client_of(handler, call_timeout=20) as client:
        await client.get(PODS, "a", "ns")
        await client.patch(PODS, "a", "ns", {"metadata": {"labels": None}}, subresource="status")
        await client.patch(PODS, "a", "ns", {"x": 1}, patch_type="strategic")
        await client.patch(PODS, "a", "ns", [{"op": "remove", "path": "/x"}], patch_type="json")
        await client.delete(PODS, "a", "ns")
        await client.delete(PODS, "a", "ns", uid="1", grace_period=0, propagation="Foreground")
    path = "/api/v1/namespaces/ns/pods/a"
    options = '{"preconditions":{"uid":"1"},"gracePeriodSeconds":0,"propagationPolicy":"Foreground"}'
    assert seen == [
        ("GET", f"{path}?timeout=20s", "", ""),
        ("PATCH", f"{path}/status?timeout=20s", "application/merge-patch+json", '{"metadata":{"labels":null}}'),
        ("PATCH", f"{path}?timeout=20s", "application/strategic-merge-patch+json", '{"x":1}'),
        ("PATCH", f"{path}?timeout=20s", "application/json-patch+json", '[{"op":"remove","path":"/x"}]'),
        ("DELETE", f"{path}?timeout=20s", "", ""),
        ("DELETE", f"{path}?timeout=20s", "application/json", options),
    ]


async def test_discovery_is_remembered_for_a_while() -> None:
    """A served resource is checked again after ten minutes, a missing one each time: it may be installed."""
    seen: list[str] = []
    now = 0.0

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.json_response({"resources": [{"name": "pods"}]})

    async with serving(handler) as url:
        credentials = await Credentials.open(FixedAccess(Access(url)))
        async with KubeClient(credentials, clock=lambda: now) as client:
            assert await client.served(PODS)
            assert await client.served(PODS)
            assert seen == ["/api/v1"]
            assert not await client.served(SERVICES)
            assert not await client.served(SERVICES)
            assert len(seen) == 3
            now = SERVED_FOR
            assert await client.served(PODS)
    assert len(seen) == 4


async def test_requests_are_measured() -> None:
    """Every request is recorded with its status, also a retried one, and with 0 when no answer came."""
    recorded: list[tuple[str, str, int]] = []

    class Metrics:
        def request(self, verb: str, resource: str, status: int, seconds: float) -> None:
            assert seconds >= 0
            recorded.append((verb, resource, status))

    handler, _ = answers(status_answer(429, "TooManyRequests", Retry_After="0"), web.json_response(POD))
    async with serving(handler) as url:
        client = KubeClient(await Credentials.open(FixedAccess(Access(url))), metrics=Metrics())
        await client.get(PODS, "a", "ns")
        await client.close()
    with pytest.raises(Unreachable):
        await client.get(PODS, "a", "ns")
    await client.close()
    assert recorded == [("get", "pods", 429), ("get", "pods", 200), ("get", "pods", 0)]


def page(items: bytes) -> bytes:
    return b'{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"more"},"items":' + items + b"}"


def test_a_page_holds_its_items_as_they_are() -> None:
    """They behave as a list of objects, unknown fields and all."""
    items = decode_page(page(b'[{"metadata":{"name":"a"},"x":[null]},{"y":12345678901234567890123},3]')).items
    expected = [{"metadata": {"name": "a"}, "x": [None]}, {"y": 12345678901234567890123}, 3]
    assert list(items) == items == expected
    assert items != expected[:2]
    assert (len(items), items[0], items[-1], items[1:]) == (3, expected[0], 3, expected[1:])


@pytest.mark.parametrize("items", [b"[]", b"null"])
def test_a_page_may_be_empty(items: bytes) -> None:
    """Go writes an empty list as null, too."""
    decoded = decode_page(page(items))
    assert (decoded.items, decoded.resource_version, decoded.continue_token) == ([], "7", "more")


@pytest.mark.parametrize("item", [b'{"a":tru}', b'{"a" 1}'])
def test_an_item_that_is_no_json_is_no_answer(item: bytes) -> None:
    """An item that is not JSON raises, at once or when it is read, the error for a server that is no API server."""
    with pytest.raises(Unreachable, match="not the Kubernetes API"):
        list(decode_page(page(b"[%b]" % item)).items)


def item(name: str, **fields: bytes) -> bytes:
    """One object of a list, with these texts as fields."""
    metadata = b'{"name":"%b","namespace":"ns","uid":"uid-%b","resourceVersion":"5"%b}' % (
        name.encode(),
        name.encode(),
        b',"managedFields":%b' % fields.pop("managed") if "managed" in fields else b"",
    )
    return b'{"metadata":%b%b}' % (metadata, b"".join(b',"%b":%b' % (key.encode(), fields[key]) for key in fields))


IDENTITY = {"name": "bad", "namespace": "ns", "uid": "uid-bad", "resourceVersion": "5"}
DEEP_FIELDS = b'[{"fieldsV1":%b}]' % nested()


@pytest.mark.parametrize(
    "bad",
    [item("bad", spec=nested(levels)) for levels in (200, 500, 950, 1_500, 9_999)]
    + [item("bad", spec=b'{"x":"}]\\"{[","y":%b}' % nested(), status=b"[" * 2_000 + b"]" * 2_000)]
    + [item("bad", managed=DEEP_FIELDS, status=nested()), item("bad", spec=b'"\xff"')],
    ids=range(8),
)
def test_an_item_that_cannot_be_decoded_is_known_by_its_key(bad: bytes) -> None:
    """On a page, in a watch and alone. Nothing of it but its identity is shown, and its neighbours are whole."""
    first, found, last = decode_page(page(b"[%b,%b,%b]" % (item("a"), bad, item("b")))).items
    assert [first["metadata"]["name"], last["metadata"]["name"]] == ["a", "b"]
    event = decode_event(b'{"type":"MODIFIED","object":%b}' % bad)
    assert event.type == "MODIFIED"
    for seen in (found, event.object):
        assert isinstance(seen, MalformedObject)
        assert seen == {"metadata": IDENTITY}
        assert "nested more than 200 levels" in seen.reason or "utf-8" in seen.reason
    with pytest.raises(Unreadable, match=r"can't be understood: (nested more than 200|.*utf-8)"):
        decode_object(bad)


def test_managed_fields_cannot_hide_an_object() -> None:
    """No controller reads them: an object that is deep there alone is like any other, without them."""
    good = item("bad", managed=DEEP_FIELDS, spec=b'{"a":[1]}')
    whole = {"metadata": IDENTITY, "spec": {"a": [1]}}
    assert decode_page(page(b"[%b]" % good)).items == [whole]
    assert decode_event(b'{"type":"ADDED","object":%b}' % good).object == whole
    assert decode_object(good) == whole


@pytest.mark.parametrize("line", [b"<html>", b'{"type":"ADDED"}', b'{"type":', nested(), b"\xff", b"[" * 70_000])
def test_what_is_no_event_is_an_error_of_its_own(line: bytes) -> None:
    """So the reflector lists, which survives any object, instead of asking for the same event for ever."""
    with pytest.raises(Unreadable, match="no event of a watch"):
        decode_event(line)


@pytest.mark.parametrize(
    "status",
    [
        b'{"kind":"Status","code":"x","details":[1]}',
        b'{"kind":"Status","details":{"retryAfterSeconds":"soon","causes":{"a":1}}}',
        b'{"kind":"Status","details":{"causes":[7,{"reason":{}}],"retryAfterSeconds":1e300}}',
        b'{"kind":"Status","details":%b}' % nested(),
    ],
)
def test_a_strange_status_is_an_error_like_others(status: bytes) -> None:
    """The wait is bounded, whatever the fields hold."""
    error = error_of("GET /x", 503, status, "9" * 400)
    assert isinstance(error, ServerError)
    assert not is_too_large_resource_version(error)
    assert error.retry_after == MAX_RETRY_AFTER
    with pytest.raises(KubeError):
        decode_event(b'{"type":"ERROR","object":%b}' % status)


def test_what_cannot_be_written_is_refused_before_it_is_sent() -> None:
    """A body with user input that is nested too deep, or is not valid Unicode."""
    deep: object = 1
    for _ in range(5_000):
        deep = [deep]
    for body in ({"a": deep}, {"a": "\ud800"}):
        with pytest.raises(BadRequest, match="can't be written as JSON"):
            encode(body)


class Lost(Exception):
    """Leadership, say."""


class Leader:
    """Leads until the test ends the leadership."""

    leads = True

    def check(self) -> None:
        if not self.leads:
            raise Lost

    async def create(self, client: KubeClient) -> object:
        with checked_on_send(self.check):
            return await client.create(PODS, POD, "ns")


async def test_a_write_that_waits_for_our_own_rate_is_not_sent_any_more() -> None:
    """The lease is lost while the client's own limit holds a write back."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        return web.json_response(POD)

    leader = Leader()
    async with client_of(handler, qps=20, burst=1) as client:
        writes = [asyncio.create_task(leader.create(client)) for _ in range(5)]
        await until(lambda: seen)
        leader.leads = False
        sent = len(seen)
        answers = await asyncio.gather(*writes, return_exceptions=True)
    assert len(seen) == sent
    assert [type(answer) for answer in answers[sent:]] == [Lost] * (5 - sent)


async def test_a_write_that_the_server_asked_to_come_later_is_not_sent_again() -> None:
    """The lease is lost during the pause of a 429."""
    seen: list[str] = []
    leader = Leader()

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        leader.leads = False
        return status_answer(429, "TooManyRequests", Retry_After="0")

    async with client_of(handler) as client:
        with pytest.raises(Lost):
            await leader.create(client)
    assert seen == ["POST"]


async def test_a_write_that_waits_for_a_connection_is_not_sent_any_more() -> None:
    """All connections were taken; one gets free after the lease was lost. The client goes on to work for others."""
    seen: list[str] = []
    leader, answered = Leader(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        await answered.wait()
        return web.json_response(POD)

    async with client_of(handler, max_connections=1) as client:
        first = asyncio.create_task(leader.create(client))
        await until(lambda: seen)
        second = asyncio.create_task(leader.create(client))
        await asyncio.sleep(0)
        leader.leads = False
        answered.set()
        assert await first == POD
        with pytest.raises(Lost):
            await second
        assert await client.get(PODS, "a", "ns") == POD
    assert seen == ["POST", "GET"]


def test_outside_of_a_block_nothing_is_asked() -> None:
    """A question holds for its own block only, also when that fails."""
    with pytest.raises(Lost), checked_on_send(lambda: None):
        raise Lost
    assert before_sending.get() is None
