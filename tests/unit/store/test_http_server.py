"""Listeners under attack: bounds of time and number, foreign web pages, requests that are no HTTP."""

from __future__ import annotations

import asyncio
import resource
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from store import http_server
from store.http_server import Bounds, listening, read_body
from store.tls import TlsFiles
from tests.support.kube.certificates import Authority, Certificate
from tests.support.raw_http import exchange, request, status_of


@asynccontextmanager
async def listener(bounds: Bounds, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A listener whose `/` answers at once, whose `/slow` never does, and whose `/body` gives the body back."""

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def slow(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def body(request: web.Request) -> web.Response:
        return web.Response(body=await read_body(request, 0.3))

    async def defective(_: web.Request) -> web.Response:
        raise KeyError("a defect")

    app = web.Application(client_max_size=1000)
    app.add_routes([web.get("/", quick), web.get("/slow", slow), web.post("/body", body), web.get("/bug", defective)])
    async with listening(app, host, 0, bounds) as address:
        yield f"127.0.0.1:{address.rpartition(':')[2]}"


async def connections(address: str, number: int, sent: bytes) -> list[asyncio.StreamWriter]:
    """Connections that each have sent something and stay open."""
    host, _, port = address.rpartition(":")
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        writers.append(writer)
    return writers


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"GE", request("/", close=False)[:-2]])
async def test_a_header_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    """A connection without a whole header is dropped once its time limit has passed."""
    async with listener(Bounds(header_seconds=0.5)) as address, asyncio.timeout(10):
        assert await exchange(address, sent, seconds=8.0) == b""


async def test_a_header_that_drips_ends_the_connection_as_well() -> None:
    """A byte now and then does not extend the time of a header."""
    async with listener(Bounds(header_seconds=0.5)) as address, asyncio.timeout(10):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        while not reader.at_eof():
            writer.write(b"x")
            try:
                async with asyncio.timeout(0.1):
                    await reader.read(1)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        writer.close()


async def test_an_idle_connection_is_kept_for_the_next_request() -> None:
    """The time of a header begins with its first byte, not with the end of the request before."""
    async with listener(Bounds(header_seconds=0.2)) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(request("/", close=False))
            assert b"200 OK" in await reader.readuntil(b"ok")
            await asyncio.sleep(1.5)
        writer.close()


async def test_a_flood_of_connections_does_not_keep_a_request_out() -> None:
    """A connection without a request gives way, the oldest first; one that is kept alive comes last."""
    async with listener(Bounds(connections=8)) as address:
        host, _, port = address.rpartition(":")
        reader, kept = await asyncio.open_connection(host, int(port))
        kept.write(request("/", close=False))
        await reader.readuntil(b"ok")
        flood = await connections(address, 50, b"GET / HTTP/1.1\r\nX: ")
        assert status_of(await exchange(address, request("/"))) == 200
        kept.write(request("/", close=False))
        assert b"200 OK" in await reader.readuntil(b"ok")
        for writer in [*flood, kept]:
            writer.close()


async def test_requests_that_are_served_are_replaced_only_after_a_while() -> None:
    """Where all connections serve requests, a new one is refused; after `drop_after` the oldest of them gives way."""
    async with listener(Bounds(connections=4, drop_after=0.5)) as address, asyncio.timeout(10):
        held = await connections(address, 4, request("/slow"))
        await asyncio.sleep(0.1)
        assert status_of(await exchange(address, request("/"))) == 503
        await asyncio.sleep(0.5)
        assert status_of(await exchange(address, request("/"))) == 200
        for writer in held:
            writer.close()


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
async def test_a_listener_leaves_file_descriptors_for_the_work() -> None:
    """Its connections take at most a quarter of the files that the process may open."""
    async with listener(Bounds(connections=100_000)) as address:
        for writer in await connections(address, 64, b"G"):
            writer.close()
        flood = await connections(address, 80, b"GET")
        assert status_of(await exchange(address, request("/"))) == 200
        for writer in flood:
            writer.close()


async def test_a_request_is_bounded_in_time() -> None:
    """A handler that does not come to an end is answered for with 503."""
    async with listener(Bounds(request_seconds=0.2)) as address:
        answer = await exchange(address, request("/slow"))
    assert status_of(answer) == 503
    assert b"no answer within 0.2 s" in answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("/body", method="POST", body=b"x" * 1000), 200),
        (request("/body", method="POST", body=b"x" * 1001), 413),
        (request("/body", "Content-Length: 10", method="POST"), 408),
        (request("/body", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n", 400),
        (request("/body", "Content-Encoding: gzip", method="POST", body=b"\x1f\x8b bomb"), 200),
    ],
)
async def test_a_body_is_bounded_in_size_and_time(sent: bytes, status: int) -> None:
    """A body that is too large, too slow or malformed is refused; none is unpacked."""
    async with listener(Bounds()) as address:
        assert status_of(await exchange(address, sent)) == status


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Host: localhost:9701", 200),
        ("Host: 127.0.0.1", 200),
        ("Host: [::1]:80", 200),
        ("Host: evil.example", 403),
        ("Host: 127.0.0.1.evil.example:9701", 403),
        ("Host: [::1", 400),
        ("Host: 127.0.0.1:99999", 400),
        ("Host: localhost@evil.example", 403),
        ("Origin: http://evil.example", 403),
        ("Origin: null", 403),
        ("Origin: http://127.0.0.1", 200),
        ("Origin: http://127.0.0.1:9", 403),
    ],
)
async def test_web_pages_of_other_places_are_refused(header: str, status: int) -> None:
    """On loopback only loopback's names are served, and no request with another place's Origin."""
    async with listener(Bounds()) as address:
        assert status_of(await exchange(address, request("/", header))) == status


async def test_beyond_loopback_any_host_name_is_served() -> None:
    """A listener on all addresses accepts any name: other machines use names that it does not know."""
    async with listener(Bounds(), host="0.0.0.0") as address:
        assert status_of(await exchange(address, request("/", "Host: node-1.example"))) == 200
        assert status_of(await exchange(address, request("/", "Host: a", "Origin: http://b"))) == 403


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(100)) + b"\r\n",
        request("/\udcff"),
        request("/", "Expect: \udcff"),
    ],
)
async def test_what_is_no_http_is_refused_without_a_traceback(sent: bytes) -> None:
    """A malformed request, which any client can send, is answered with 400 and is no error in the log."""
    with capture_logs() as logs:
        async with listener(Bounds()) as address:
            assert status_of(await exchange(address, sent)) == 400
    assert not [entry for entry in logs if entry["log_level"] not in ("debug", "info")]


async def test_a_defect_is_answered_and_logged() -> None:
    """An error that nothing expects is a 500, and the log has its traceback."""
    with capture_logs() as logs:
        async with listener(Bounds()) as address:
            assert status_of(await exchange(address, request("/bug"))) == 500
    assert [entry["path"] for entry in logs if "exc_info" in entry] == ["/bug"]


async def test_tls_asks_clients_for_a_certificate_and_follows_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of another authority are refused; a replaced certificate counts, a half-replaced one does not."""
    monkeypatch.setattr(http_server, "REREAD_EVERY", 0.05)
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "stranger")
    first, second = authority.issue("first"), authority.issue("second")
    files = TlsFiles(tmp_path / "crt", tmp_path / "key", authority.own.certificate)
    files.certificate.write_bytes(first.certificate.read_bytes())
    files.key.write_bytes(first.key.read_bytes())
    client = authority.issue("client", user="kube-scheduler")
    app = web.Application()
    app.router.add_get("/", _hello)
    async with listening(app, "127.0.0.1", 0, Bounds(), tls=files) as address:
        served = await certificate_of(address, authority, client)
        for bad in (None, stranger.issue("client", user="kube-scheduler")):
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await certificate_of(address, authority, bad)
        files.key.write_bytes(second.key.read_bytes())
        await asyncio.sleep(0.3)
        assert await certificate_of(address, authority, client) == served
        files.certificate.write_bytes(second.certificate.read_bytes())
        async with asyncio.timeout(10):
            while await certificate_of(address, authority, client) == served:
                await asyncio.sleep(0.05)


async def _hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def certificate_of(address: str, authority: Authority, client: Certificate | None) -> object:
    """The serial number of the listener that answers a client with this certificate. Raises `ConnectionError`."""
    context = ssl.create_default_context(cafile=str(authority.own.certificate))
    if client is not None:
        context.load_cert_chain(*client)
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        writer.write(request("/"))
        if not (await reader.read()).endswith(b"hello"):
            raise ConnectionError("no answer")
        return writer.get_extra_info("peercert")["serialNumber"]
    finally:
        writer.transport.abort()
