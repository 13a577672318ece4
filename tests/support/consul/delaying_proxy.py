"""A TCP proxy before a Consul that can hold back what clients write, and deliver it later: a network with delays.

What is held is delivered on `release`, also when the client has given up and closed its connection. Reads and
everything that the server sends are passed on at once, always.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK = 65536


class HoldingProxy:
    """`address` is where clients connect to. `held`: what each connection holds back, by the connection's number."""

    def __init__(self, host: str, port: int) -> None:
        self.address = ""
        self.held: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self._upstream = host, port
        self._open = asyncio.Event()
        self._open.set()
        self._connections = 0

    def hold(self) -> None:
        """From now on, hold back what clients write (PUT)."""
        self._open.clear()

    def release(self) -> None:
        """Deliver what was held back, and pass everything on again. From now on `answers` collects the answers."""
        self.answers.clear()
        self._open.set()

    def holding(self, text: bytes) -> list[int]:
        """Return the connections that hold back something that contains `text`."""
        return [number for number, held in self.held.items() if text in held]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a client."""
        self._connections += 1
        number = self._connections
        from_server, to_server = await asyncio.open_connection(*self._upstream)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(number, reader, to_server))
            group.create_task(self._return(number, from_server, writer))

    async def _forward(self, number: int, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        # A client's end is not passed on: the server must not drop held writes because their sender is gone.
        while chunk := await _read(reader):
            if chunk.startswith(b"PUT ") and not self._open.is_set():
                chunk = await self._keep(number, reader, chunk)
            to_server.write(chunk)

    async def _keep(self, number: int, reader: asyncio.StreamReader, first: bytes) -> bytes:
        """Hold a write back, and what the client sends after its first part. Return all of it, once released."""
        self.held[number] = first
        opened = asyncio.create_task(self._open.wait())
        while True:
            reading = asyncio.create_task(_read(reader))
            await asyncio.wait({opened, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return self.held[number]
            self.held[number] += reading.result()
            if not reading.result():  # the client has given up
                await opened
                return self.held[number]

    async def _return(self, number: int, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await _read(from_server):
            self.answers[number] = self.answers.get(number, b"") + chunk
            if not writer.is_closing():
                writer.write(chunk)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_CHUNK)
    except OSError:
        return b""


@contextlib.asynccontextmanager
async def holding_proxy(address: str) -> AsyncIterator[HoldingProxy]:
    """Yield a proxy before `HOST:PORT`, on a free port of the loopback interface."""
    host, _, port = address.rpartition(":")
    proxy = HoldingProxy(host, int(port))
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
