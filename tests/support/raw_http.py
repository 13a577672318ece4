"""Bytes to a listener and bytes back: for requests that no HTTP client would send."""

from __future__ import annotations

import asyncio


async def exchange(address: str, sent: bytes, *, seconds: float = 5.0) -> bytes:
    """Return what the listener answers before it ends the connection, or `seconds` after its last byte."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(sent)
        await writer.drain()
        while True:
            async with asyncio.timeout(seconds):
                part = await reader.read(65536)
            if not part:
                return answer
            answer += part
    except (TimeoutError, ConnectionError):
        return answer
    finally:
        writer.close()


def request(target: str, *headers: str, method: str = "GET", body: bytes = b"", close: bool = True) -> bytes:
    """Return a request that is well-formed except for the given parts. `headers`: whole lines."""
    lines = [f"{method} {target} HTTP/1.1", *headers]
    if not any(header.lower().startswith("host:") for header in headers):
        lines.append("Host: 127.0.0.1")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    if close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


def status_of(answer: bytes) -> int:
    """Return the status of the first answer; 0 when there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0
