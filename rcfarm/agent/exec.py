"""Runs one command for a client in a pod: with the environment, the user, the working directory and the limits of one
of its processes.

The model: the command's process is started behind the gate of every process (`rcfarm.agent.process.spawn`), in a
session of its own. Its streams are pipes, or a terminal, and go over the client's WebSocket. It is killed, with its
group, when the client goes away, when the pod stops, and when the agent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import termios
from typing import Any

import msgspec
from aiohttp import WSMsgType, web

from rcfarm.agent.errors import ExecRefused
from rcfarm.agent.process import LaunchSpec, ProcessHandle, Streams, end_group, spawn
from rcfarm.operations.pod_wire import (
    END_OF_INPUT,
    MAX_MESSAGE,
    RESIZE,
    STDERR,
    STDIN,
    STDOUT,
    ExecResult,
    TerminalSize,
)

_DRAIN = 1.0  # seconds in which the rest of the output is read after the command has ended


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for. `launchable` "": the pod's first. `event`: the key of the event in the audit log. `term`:
    the kind of the client's terminal."""

    argv: list[str]
    launchable: str = ""
    tty: bool = False
    rows: int = 24
    columns: int = 80
    term: str = ""
    event: str = ""


async def run_command(
    client: web.WebSocketResponse, guests: list[ProcessHandle], spec: LaunchSpec, asked: ExecRequest
) -> ExecResult:
    """Run the command to its end, or until the client goes away. Its control group, if it has one, is removed.
    `guests`: the processes that the pod kills when it stops; it is one of them while it runs. Raises `ExecRefused`,
    `StartFailed`."""
    try:
        running = _started(spec, asked)
        try:
            guests.append(running.handle)
            return await running.converse(client)
        finally:
            guests.remove(running.handle)
            await running.end()
    finally:
        if (group := spec.cgroup) is not None:
            await end_group(group)
            group.remove()


class _Running:
    """A command's process, with our ends of its streams."""

    def __init__(self, handle: ProcessHandle, stdin: int, outputs: dict[int, int], *, is_terminal: bool) -> None:
        self.handle = handle
        self._stdin, self._outputs, self._is_terminal = stdin, outputs, is_terminal
        self._transports: list[Any] = []
        self._reaped = False

    async def converse(self, client: web.WebSocketResponse) -> ExecResult:
        """Pass the streams on until the command has ended or the client has gone."""
        loop = asyncio.get_running_loop()
        readers: list[asyncio.Task[None]] = []
        for channel, descriptor in self._outputs.items():
            reader = asyncio.StreamReader(limit=MAX_MESSAGE)
            transport, _ = await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader),  # type: ignore[misc]
                os.fdopen(os.dup(descriptor), "rb", 0),
            )
            self._transports.append(transport)
            readers.append(asyncio.create_task(_pass_on(reader, client, channel)))
        receiving = asyncio.create_task(self._receive(client))
        ending = asyncio.create_task(self.handle.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():  # the client has gone
                return ExecResult(error="the client has gone")
            status = self.handle.reap()
            self._reaped = True
            await asyncio.wait(readers, timeout=_DRAIN)
            return ExecResult(code=status.code, signal=status.signal)
        finally:
            for task in (receiving, ending, *readers):
                task.cancel()
            await asyncio.wait([receiving, ending, *readers])

    async def _receive(self, client: web.WebSocketResponse) -> None:
        """Take the client's messages until it goes away."""
        os.set_blocking(self._stdin, False)
        async for message in client:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == STDIN:
                await self._write(data)
            elif channel == END_OF_INPUT and self._is_terminal:
                await self._write(b"\x04")
            elif channel == END_OF_INPUT:
                self._close_input()
            elif channel == RESIZE and self._is_terminal:
                with contextlib.suppress(msgspec.DecodeError, OSError, struct.error):
                    size = msgspec.json.decode(data, type=TerminalSize)
                    _resize(self._stdin, size.rows, size.columns)

    async def _write(self, data: bytes) -> None:
        """Write to the command's input; wait while it reads nothing. Its end is no error."""
        loop, view = asyncio.get_running_loop(), memoryview(data)
        while view and self._stdin >= 0:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                free: asyncio.Future[None] = loop.create_future()
                loop.add_writer(self._stdin, lambda: None if free.done() else free.set_result(None))  # noqa: B023
                try:
                    await free
                finally:
                    loop.remove_writer(self._stdin)
            except OSError:
                self._close_input()

    def _close_input(self) -> None:
        if self._stdin >= 0 and not self._is_terminal:
            os.close(self._stdin)
            self._stdin = -1

    async def end(self) -> None:
        """Kill what is left of the command, and close its streams."""
        if not self._reaped:
            self.handle.signal_tree(signal.SIGKILL)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self.handle.wait())
            self.handle.reap()
        for transport in self._transports:
            transport.close()
        for descriptor in {*self._outputs.values(), self._stdin} - {-1}:
            os.close(descriptor)


def _started(spec: LaunchSpec, asked: ExecRequest) -> _Running:
    """Start the command, on a terminal or with pipes. Raises `ExecRefused`, `StartFailed`."""
    with contextlib.ExitStack() as unless_started, contextlib.ExitStack() as theirs:
        try:
            pairs = [pty.openpty()] if asked.tty else [os.pipe(), os.pipe()]
            for our_end, their_end in pairs:
                unless_started.callback(os.close, our_end)
                theirs.callback(os.close, their_end)
            (ours, stdout), (_, stderr) = pairs[0], pairs[-1]
            if asked.tty and spec.credentials:
                os.fchown(stdout, spec.credentials.uid, -1)  # its user opens it by its path
            if asked.tty:
                _resize(ours, asked.rows, asked.columns)
            streams = Streams(stdout, stderr, os.ttyname(stdout) if asked.tty else "")
        except OSError as error:
            raise ExecRefused(f"no pipe or terminal: {error.strerror}") from error
        handle, stdin = spawn(spec, streams).open_input()
        unless_started.pop_all()
    if asked.tty:
        os.close(stdin)  # the gate, which is open
        stdin = ours
    outputs = {channel: our_end for channel, (our_end, _) in zip((STDOUT, STDERR), pairs, strict=False)}
    return _Running(handle, stdin, outputs, is_terminal=asked.tty)


def _resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


async def _pass_on(reader: asyncio.StreamReader, client: web.WebSocketResponse, channel: int) -> None:
    """Send the output to its end. A client that has gone, and a terminal without a process, end it."""
    with contextlib.suppress(OSError):
        while data := await reader.read(MAX_MESSAGE):
            await client.send_bytes(bytes([channel]) + data)
