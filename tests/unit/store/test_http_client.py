"""The HTTP client, with servers that answer byte for byte as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from store.http_client import ConnectionLost, HttpClient, NeverSent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def client_of(port: int, **settings: int | float) -> HttpClient:
    """Return a client of a port of this machine."""
    return HttpClient(host="127.0.0.1", port=port, headers={"A": "b"}, **settings)  # type: ignore[arg-type]


class Server:
    """Answers the first request with the first of `answers` and so on, with the last one from then on; None: never.
    An answer that is not followed by another request on its connection ends it if `closes`."""

    def __init__(self, answers: Sequence[bytes | None], *, closes: bool = False) -> None:
        self.requests: list[bytes] = []
        self.connections = self.open = 0
        self._answers, self._closes = answers, closes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        self.connections += 1
        self.open += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                if answer is None:
                    await reader.read()
                    break
                writer.write(answer)
                if self._closes:
                    break
        self.open -= 1
        writer.close()


@asynccontextmanager
async def serving(server: Server, **settings: int | float) -> AsyncIterator[HttpClient]:
    """Yield a client of a server."""
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    client = client_of(listener.sockets[0].getsockname()[1], **settings)
    try:
        yield client
    finally:
        await client.close()
        listener.close()


async def body_of(client: HttpClient, method: str = "GET", body: bytes | None = None) -> bytes:
    """Return the body of one call's answer."""
    return (await client.call(method, "/x?y", body, tls=None, timeout=2.0)).body


@pytest.mark.parametrize(
    ("answer", "body", "stays_open"),
    [
        (OK, b"ok", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length:2\r\n\r\nok", b"ok", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n3;a=b\r\n...\r\n0\r\n\r\n", b"ok...", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nDigest: x\r\n\r\n", b"ok", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
        (b"HTTP/1.1 200\r\nContent-Length: 600000\r\n\r\n" + b"o" * 600_000, b"o" * 600_000, True),
    ],
)
async def test_every_form_of_an_answer(answer: bytes, body: bytes, stays_open: bool) -> None:
    """The body is whole in every form, and the connection is used again exactly where HTTP allows that."""
    server = Server([answer])
    async with serving(server) as client:
        assert [await body_of(client) for _ in range(3)] == [body] * 3
    assert server.connections == (1 if stays_open else 3)


async def test_a_body_that_ends_with_its_connection() -> None:
    """Without a length, the end of the connection is the end of the body."""
    async with serving(Server([b"HTTP/1.1 200 OK\r\n\r\nok"], closes=True)) as client:
        assert await body_of(client) == b"ok"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "the connection was closed$"),
        (b"HTTP/1.1 200 OK\r\nConte", "closed in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "closed in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nok", "closed in the middle"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 yes\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
        (b"x" * 2_000_000, "not HTTP"),
    ],
)
async def test_answers_that_are_none(answer: bytes, message: str) -> None:
    """An answer that is cut short or not HTTP is an error in time, and its connection is closed."""
    server = Server([answer], closes=True)
    async with serving(server) as client:
        with pytest.raises(ConnectionLost, match=message):
            await body_of(client)
    assert server.connections == 1


async def test_a_closed_connection_is_noticed_by_reads_alone() -> None:
    """The server closes kept-alive connections without a word. A read is sent again; a write never is."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            requests.append(head[:4])
            if len(requests) % 2 == 0:  # every second request of all
                writer.transport.abort()
                return
            writer.write(OK)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = client_of(listener.sockets[0].getsockname()[1])
    assert await body_of(client) == b"ok"
    assert await body_of(client) == b"ok"
    assert requests == [b"GET ", b"GET ", b"GET "]
    with pytest.raises(ConnectionLost):
        await body_of(client, "PUT", b"")
    assert requests[3:] == [b"PUT "]
    await client.close()
    listener.close()


async def test_what_is_sent() -> None:
    """Host, the client's headers, the call's own, and the length of a body, of an empty one, too."""
    server = Server([OK])
    async with serving(server) as client:
        await client.call("PUT", "/x?y", b"", {"T": "1"}, tls=None, timeout=1.0)
        await body_of(client)
        with pytest.raises(ValueError, match="end of a line"):
            await client.call("PUT", "/x", b"", {"T": "1\r\nB: 2"}, tls=None, timeout=1.0)
        host = f"Host: 127.0.0.1:{client.port}\r\nA: b\r\n".encode()
    assert server.requests == [
        b"PUT /x?y HTTP/1.1\r\n" + host + b"T: 1\r\nContent-Length: 0\r\n\r\n",
        b"GET /x?y HTTP/1.1\r\n" + host + b"\r\n",
    ]


async def test_a_limit_of_connections() -> None:
    """Calls wait for a connection in the order in which they came, and one that waits in vain was never sent."""
    server = Server([None])
    async with serving(server, limit=2) as client:
        hung = [asyncio.create_task(body_of(client)) for _ in range(2)]
        while len(server.requests) < 2:
            await asyncio.sleep(0)
        with pytest.raises(NeverSent, match=r"no connection within 0\.05 s"):
            await client.call("PUT", "/x", b"", tls=None, timeout=0.05)
        for call in hung:
            call.cancel()
        await asyncio.wait(hung)
        while server.open:  # cancelling a call closes its connection
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await client.call("PUT", "/x", b"", tls=None, timeout=0.05)
    assert len(server.requests) == server.connections == 3


async def test_an_idle_connection_is_kept_for_its_time() -> None:
    """After it, a call opens another one; the old one is closed."""
    server = Server([OK])
    async with serving(server, keepalive=0.0) as client:
        await body_of(client)
        await asyncio.sleep(0.01)
        await body_of(client)
        while server.open > 1:
            await asyncio.sleep(0)
    assert server.connections == 2


async def test_no_server(tmp_path: Path) -> None:
    """A refused connection, and a socket that does not exist: never sent, with the cause alone."""
    with pytest.raises(NeverSent, match=r"^Connection refused$"):
        await body_of(client_of(1))
    client = client_of(1)
    client.socket = str(tmp_path / "socket")
    with pytest.raises(NeverSent, match="No such file"):
        await body_of(client)
