"""What an agent's listener and its clients exchange, and how both know whose loopback they are on.

Logs are a stream of frames: a `LogFrame` as one line of JSON, and `size` bytes of a log after it. Frames end anywhere,
also within a line. A command's streams are messages of a WebSocket, whose first byte names the channel, as those of
Kubernetes' `v5.channel.k8s.io`.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from store.decoding import from_json, json_decoder

LOGS_PATH = "/v1/nodes/{node}/pods/{pod}/logs"
EXEC_PATH = "/v1/nodes/{node}/pods/{pod}/exec"
HEARTBEAT = 15.0  # seconds between two frames of a log in which nothing happens
SILENCE = 3 * HEARTBEAT  # seconds after which a client takes the agent for lost
MAX_FRAME = 1 << 20  # bytes
MAX_MESSAGE = 64 * 1024  # bytes of one channel that are sent at once

STDIN, STDOUT, STDERR, RESULT, RESIZE, END_OF_INPUT = range(6)  # channels


EXEC_EVENT = "POD_EXEC"  # in the audit log
MAX_COMMAND = 8192  # characters, which the audit log keeps


def exec_details(node: str, pod: str, launchable: str, argv: Sequence[str]) -> dict[str, object]:
    """Return the details of a command's event in the audit log, without its RC, which the agent does not check."""
    return {"node": node, "pod": pod, "launchable": launchable, "command": shlex.join(argv)}


class LogFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`size` bytes of a source, LAUNCHABLE/STREAM, from `position` on, which were seen at `time` (milliseconds since
    1970); or an event: `started` (the process was started again), `skipped` (`text`: how many bytes, and why), `end`
    (nothing more comes; `text`: why), `alive` (nothing has happened)."""

    source: str = ""
    time: int = 0
    position: int = 0
    size: int = 0
    event: str = ""
    text: str = ""

    def encoded(self, data: bytes = b"") -> bytes:
        """Return the frame as it is sent, with its data."""
        return _encode(self) + b"\n" + data


_LISTENS = "0A"  # of the states of a TCP socket
_encode = msgspec.json.Encoder().encode


class FrameReader:
    """Cuts a stream into frames."""

    def __init__(self) -> None:
        self._rest = b""
        self._header: LogFrame | None = None
        self._decoder = json_decoder(LogFrame)

    def feed(self, data: bytes) -> list[tuple[LogFrame, bytes]]:
        """Return the frames that are complete with this data. Raises `Undecodable`, `ValueError`."""
        rest, at, found = self._rest + data, 0, []
        while True:
            if self._header is None:
                if (end := rest.find(b"\n", at)) < 0:
                    if len(rest) - at > MAX_FRAME:
                        raise ValueError("a frame without end")
                    break
                self._header = from_json(self._decoder, rest[at:end])
                at = end + 1
                if not 0 <= self._header.size <= MAX_FRAME:
                    raise ValueError("a frame of no possible size")
            size = self._header.size
            if len(rest) - at < size:
                break
            found.append((self._header, rest[at : at + size]))
            self._header, at = None, at + size
        self._rest = rest[at:]
        return found


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command: its exit code, or the signal that ended it; or why it was not run to its end."""

    code: int | None = None
    signal: str = ""
    error: str = ""


class TerminalSize(msgspec.Struct, frozen=True):
    """The size of a client's terminal, in characters."""

    rows: int
    columns: int


def loopback_id() -> str:
    """Return an id of the loopback that this process has: of this boot of the machine and this network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot}/{namespace}".encode()).hexdigest()[:16]


def owner_of_listener(address: tuple[str, int]) -> int | None:
    """Return the uid of the process that listens there on this machine, None if there is none."""
    host, port = address
    family, table = (socket.AF_INET6, "tcp6") if ":" in host else (socket.AF_INET, "tcp")
    try:
        lines = Path("/proc/net", table).read_text().splitlines()[1:]
        packed = socket.inet_pton(family, host)
    except (OSError, ValueError):
        return None
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    wanted = "".join(f"{word:08X}" for word in words) + f":{port:04X}"
    for line in lines:
        fields = line.split()
        if fields[1] == wanted and fields[3] == _LISTENS:
            return int(fields[7])
    return None
