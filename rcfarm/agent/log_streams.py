"""Reads the logs of a pod for one client: merged by time as far as they are written, and then as they grow.

The model: a `LogStream` knows, for each log file of the pod, up to which position it was sent. `batch` returns what
came after, a bounded part at a time, and is called in a thread. The file is the only buffer: a client that reads slowly
falls behind in it, and after rotation has removed what it did not read, it gets a note of how much was skipped. The
process and other clients never wait.

`LogWatch` wakes the clients: one inotify instance per agent watches the directories of the pods that are followed, and
is not asked again for `_PAUSE` after an event, so that a process that writes a line at a time costs little.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import structlog

from rcfarm.agent.errors import NoSuchLog
from rcfarm.agent.log_files import STDOUT, LogRecord
from rcfarm.operations.pod_wire import LogFrame

log = structlog.get_logger(__name__)

BATCH = 256 * 1024  # bytes of logs that are read at once
_CHUNK = 64 * 1024
_PAUSE = 0.05  # seconds
_IN_MODIFY, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x100, 0x80
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC

Source = tuple[str, str]


class LogQuery(NamedTuple):
    """What a client asks for. `since`: milliseconds since 1970. `tail`: lines of each stream; None: all. `positions`:
    how far it has read on an earlier connection, by LAUNCHABLE/STREAM."""

    launchable: str = ""
    follow: bool = False
    previous: bool = False
    since: int | None = None
    tail: int | None = None
    positions: Mapping[str, int] = {}


class _Progress:
    """How far one log was sent. `end`: where to stop; None: nowhere. `started`: time and position of the last
    start that was sent."""

    def __init__(self, record: LogRecord, query: LogQuery, name: str, *, is_new: bool) -> None:
        self.record, self.name = record, name
        first, end = record.bounds()
        starts, self.end = record.starts(), None
        if query.previous:
            first, end = max(first, starts[-2].position), starts[-1].position
            self.end = end
        if name in query.positions:
            first = query.positions[name]
        elif not is_new:
            if query.since is not None:
                first = min(end, max(first, record.since(query.since)))
            if query.tail is not None:
                first = record.tail(query.tail, first, end)
        self.position = first
        self.started = max(((mark.time, mark.position) for mark in starts if mark.position <= first), default=(0, -1))


class LogStream:
    """The logs of one pod, as one client has asked for them. `find`: returns the logs that there are."""

    def __init__(self, find: Callable[[], Mapping[Source, LogRecord]], query: LogQuery) -> None:
        self._find, self._query = find, query
        self._logs: dict[Source, _Progress] = {}
        self._is_open = False

    def batch(self) -> bytes:
        """Return the next frames, b"" where there is nothing more for now. Raises `NoSuchLog`, `OSError`."""
        found, query = self._find(), self._query
        if not self._is_open:
            names = sorted({name for name, _ in found})
            if query.launchable and query.launchable not in names:
                has = ", ".join(names) or "none"
                raise NoSuchLog(f"it has no log of a launchable {query.launchable!r}; it has {has}")
            if query.previous:
                wanted = [query.launchable] if query.launchable else names
                wanted = [name for name in wanted if len(found[name, STDOUT].starts()) > 1]
                if not wanted:
                    raise NoSuchLog("it has no earlier run: its processes were started once; leave out --previous")
                found = {source: record for source, record in found.items() if source[0] in wanted}
                found = {source: record for source, record in found.items() if len(record.starts()) > 1}
        elif query.previous:
            found = {}
        for source, record in found.items():
            if source not in self._logs and query.launchable in ("", source[0]):
                self._logs[source] = _Progress(record, query, "/".join(source), is_new=self._is_open)
        self._is_open = True
        sent, size = [], 0
        for _, progress, frame, data in heapq.merge(*map(_frames, self._logs.values()), key=lambda each: each[0]):
            progress.position = frame.position + frame.size
            if frame.event == "started":
                progress.started = frame.time, frame.position
            sent.append(frame.encoded(data))
            size += len(sent[-1])
            if size >= BATCH:
                break
        return b"".join(sent)


def _frames(progress: _Progress) -> Iterator[tuple[int, _Progress, LogFrame, bytes]]:
    """Yield the frames of one log, each with its time, up to its present end."""
    record, position, name = progress.record, progress.position, progress.name
    end = record.bounds()[1] if progress.end is None else progress.end
    starts = record.starts() if name.endswith(STDOUT) and progress.end is None else []
    pending = [mark for mark in starts[1:] if (mark.time, mark.position) > progress.started]
    while True:
        if pending and pending[0].position <= position:
            mark = pending.pop(0)
            yield mark.time, progress, LogFrame(source=name, time=mark.time, position=position, event="started"), b""
            continue
        if position >= end:
            return
        time, until = record.time_at(position)
        stop = min(end, position + _CHUNK, until or end, *(mark.position for mark in pending[:1]))
        chunk = record.read(position, stop - position)
        if chunk.position > position:
            text = f"{chunk.position - position} bytes skipped: the reader is too slow, and they were rotated away"
            position = chunk.position
            yield time, progress, LogFrame(source=name, time=time, position=position, event="skipped", text=text), b""
            continue
        if not chunk.data:
            return
        frame = LogFrame(source=name, time=time, position=position, size=len(chunk.data))
        position += len(chunk.data)
        yield time, progress, frame, chunk.data


class LogWatch:
    """Wakes those who wait for a pod's logs to grow."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file: int | None = None
        self._waiting: dict[Path, list[asyncio.Event]] = {}
        self._watches: dict[int, Path] = {}

    @asynccontextmanager
    async def watch(self, directory: Path) -> AsyncIterator[asyncio.Event]:
        """Yield an event that is set when a file in the directory has changed."""
        event = asyncio.Event()
        self._waiting.setdefault(directory, []).append(event)
        try:
            if len(self._waiting[directory]) == 1:
                self._add(directory)
            yield event
        finally:
            self._waiting[directory].remove(event)
            if not self._waiting[directory]:
                del self._waiting[directory]
                for number in [number for number, path in self._watches.items() if path == directory]:
                    del self._watches[number]
                    self._libc.inotify_rm_watch(self._file, number)
            if not self._waiting:
                self.close()

    def is_exact(self, directory: Path) -> bool:
        """Return whether the kernel gives notice of changes in the directory."""
        return directory in self._watches.values()

    def notify(self, directory: Path) -> None:
        """Wake those who wait for this directory."""
        for event in self._waiting.get(directory, ()):
            event.set()

    def close(self) -> None:
        """Release the inotify instance."""
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = None
            self._watches.clear()

    def _add(self, directory: Path) -> None:
        if self._file is None:
            file = self._libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
            if file < 0:
                log.warning("No inotify instance; logs are looked at once per second", reason=_last_error())
                return
            self._file = file
            asyncio.get_running_loop().add_reader(file, self._read)
        mask = _IN_MODIFY | _IN_CREATE | _IN_MOVED_TO
        number = self._libc.inotify_add_watch(self._file, os.fsencode(directory), mask)
        if number >= 0:
            self._watches[number] = directory
        else:
            log.warning("No inotify watch; this log is looked at once per second", reason=_last_error())

    def _read(self) -> None:
        assert self._file is not None
        changed = set()
        try:
            data = os.read(self._file, 64 * 1024)
        except BlockingIOError:
            return
        at = 0
        while at + 16 <= len(data):
            number, _, _, length = struct.unpack_from("iIII", data, at)
            at += 16 + length
            if number == -1:  # the queue was full
                changed |= set(self._watches.values())
            elif number in self._watches:
                changed.add(self._watches[number])
        for directory in changed:
            self.notify(directory)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._file)
        loop.call_later(_PAUSE, self._resume, self._file)

    def _resume(self, file: int) -> None:
        if file == self._file:
            asyncio.get_running_loop().add_reader(file, self._read)


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
