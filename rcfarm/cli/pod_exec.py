"""Run a command in a pod, and pass its streams on: the client's end of `rcfarm rc exec`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import tty as terminals
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.cli.pod_logs import Place, listener
from rcfarm.operations.pod_client import AgentAway, ListenerError, open_exec
from rcfarm.operations.pod_wire import (
    END_OF_INPUT,
    EXEC_EVENT,
    MAX_COMMAND,
    MAX_MESSAGE,
    RESIZE,
    RESULT,
    STDERR,
    STDIN,
    STDOUT,
    ExecResult,
    TerminalSize,
    exec_details,
)
from store.schema.audit import event_op

if TYPE_CHECKING:
    import aiohttp

_UNSENT = 16  # messages of input that may wait


async def run_in(
    cli: Cli, place: Place, command: Sequence[str], *, rc: str, launchable: str, stdin: bool, tty: bool
) -> int:
    """Run the command. Return its exit code, 128 + N after signal N. Raises `ListenerError`, `UsageProblem`."""
    if tty and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageProblem("--tty: standard input and output are not a terminal; leave it out")
    size = os.get_terminal_size() if tty else os.terminal_size((80, 24))  # COLUMNS may say what does not hold
    request: dict[str, object] = {
        "argv": list(command),
        "launchable": launchable,
        "tty": tty,
        "rows": size.lines,
        "columns": size.columns,
        "term": os.environ.get("TERM", "") if tty else "",
    }
    if sum(map(len, command)) > MAX_COMMAND:
        raise UsageProblem(
            f"the command has more than the {MAX_COMMAND} characters that the audit log keeps; pass a script with -i"
        )
    target = await listener(cli, place.node)
    details = {"rc": rc, **exec_details(place.node, place.pod, launchable, command)}
    event = event_op(cli.keys, EXEC_EVENT, details, actor=cli.actor)
    await cli.store.txn([event])
    request["event"] = event.key
    async with open_exec(target, place.pod, request) as socket:
        before = termios.tcgetattr(0) if tty else None
        try:
            if tty:
                terminals.setraw(0)  # passes every key on, Ctrl-C too
            result = await _converse(socket, stdin=stdin, tty=tty)
        finally:
            if before is not None:
                termios.tcsetattr(0, termios.TCSADRAIN, before)
    if result is None:
        raise AgentAway(f"the agent of node {place.node} has closed the connection; the command is killed")
    if result.error:
        raise ListenerError(f"node {place.node}: {result.error}")
    if result.code is not None:
        return result.code
    return 128 + getattr(signal, result.signal, 0)


async def _converse(socket: aiohttp.ClientWebSocketResponse, *, stdin: bool, tty: bool) -> ExecResult | None:
    """Pass the streams on until the command has ended. Return its result; None when the connection was lost."""
    loop = asyncio.get_running_loop()

    resized = asyncio.Event()
    if tty:
        loop.add_signal_handler(signal.SIGWINCH, resized.set)
    resizing = asyncio.create_task(_send_sizes(socket, resized))
    sending = asyncio.create_task(_send_input(socket) if stdin else socket.send_bytes(bytes([END_OF_INPUT])))
    try:
        async for message in socket:
            if not isinstance(message.data, bytes) or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == RESULT:
                return msgspec.json.decode(data, type=ExecResult)
            if channel in (STDOUT, STDERR):
                stream = (sys.stdout if channel == STDOUT else sys.stderr).buffer
                try:
                    stream.write(data)
                    stream.flush()
                except BrokenPipeError:  # as a program in a pipe whose reader has gone
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    return ExecResult(signal="SIGPIPE")
        return None
    finally:
        if tty:
            loop.remove_signal_handler(signal.SIGWINCH)
        sending.cancel()
        resizing.cancel()
        await asyncio.gather(sending, resizing, return_exceptions=True)


async def _send_sizes(socket: aiohttp.ClientWebSocketResponse, resized: asyncio.Event) -> None:
    """Send the terminal's size whenever it has changed, until cancelled."""
    while await resized.wait():
        resized.clear()
        size = os.get_terminal_size()
        await socket.send_bytes(bytes([RESIZE]) + msgspec.json.encode(TerminalSize(size.lines, size.columns)))


async def _send_input(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Send standard input, of any kind, which a thread reads: nothing can interrupt a read, so nobody waits for it."""
    loop = asyncio.get_running_loop()
    read: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(_UNSENT)

    def reading() -> None:
        data = b"-"
        while data:
            room.acquire()
            try:
                data = os.read(0, MAX_MESSAGE)
            except OSError:
                data = b""
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(read.put_nowait, data)

    threading.Thread(target=reading, daemon=True).start()
    while data := await read.get():
        await socket.send_bytes(bytes([STDIN]) + data)
        room.release()
    await socket.send_bytes(bytes([END_OF_INPUT]))
