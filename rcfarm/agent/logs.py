"""Log files of launchables: bounded although the process that writes them never gives up its descriptor.

Processes append to `<launchable>.log`, both of their outputs, straight from the kernel: an agent that is away or slow
loses no line and blocks no process. A file that has grown over its size is copied to `.1` (the older ones move up) and
then truncated; with O_APPEND the writer goes on at the new end. What is written between the last byte copied and the
truncation would be lost, so the copy goes on until the file stands still or `_CATCH_UP` rounds have passed.

What is kept of a file is what would be kept had each of its bytes been rotated in time: the last `size * files` bytes,
in as many files. So the writer's speed decides neither how much is copied nor how much stays on the disk, and a file
that has outgrown its size is looked at again after a moment. Holes (a process may make its file as long as it likes)
are not copied; blocks behind the end of a file count as its size.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import structlog

from rcfarm.agent.errors import describe_os_error
from rcfarm.agent.trash import TRASH

log = structlog.get_logger(__name__)

_CATCH_UP = 5
_CHUNK = 1024 * 1024
_EXTENTS = 10_000  # pieces between holes that are looked at
_SOON = 0.1  # seconds until the next look after one that found a file too large
_RESERVED = 64 * 1024 * 1024  # bytes that file systems allocate ahead of a growing file, for its good


class LogKeeper:
    """Bounds the log files under `root`: `<root>/<pod_id>/<launchable>.log`. `size` in bytes, times in seconds."""

    def __init__(self, root: Path, *, size: int, files: int, keep: float) -> None:
        self._root = root
        self._size = size
        self._files = files
        self._keep = keep

    async def run(self, interval: float) -> None:
        """Look every `interval` seconds until cancelled, and more often while a file grows fast."""
        thread = ThreadPoolExecutor(1, "logs")
        try:
            while True:
                rotated = await asyncio.get_running_loop().run_in_executor(thread, self.rotate_all)
                await asyncio.sleep(min(interval, _SOON) if rotated else interval)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def rotate_all(self) -> int:
        """Rotate every file that is too large; returns how many were. One that can't be is reported and tried again."""
        rotated = 0
        for path in (*self._root.glob("*/*.log"), *self._root.glob("*/*.check")):
            try:
                if not self._is_too_large(path.stat()):
                    continue
                rotated += 1
                if path.suffix == ".log":
                    rotate(path, self._size, self._files)
                else:
                    os.truncate(path, 0)  # the output of a check, of which only the beginning is read
            except FileNotFoundError:  # removed in between
                continue
            except OSError as error:
                log.warning("A log file can't be rotated", file=str(path), reason=describe_os_error(error, path))
        return rotated

    def _is_too_large(self, found: os.stat_result) -> bool:
        return found.st_size > self._size or found.st_blocks * 512 > 4 * self._size + _RESERVED

    def expired(self, pods: Collection[str]) -> list[Path]:
        """The directories of pods that are not among `pods` and wrote nothing there for the time to keep."""
        known = {*pods, TRASH}
        return [
            directory
            for directory in self._root.iterdir()
            if directory.name not in known and time.time() - _last_write(directory) > self._keep
        ]


def rotate(path: Path, size: int, files: int) -> None:
    """Move the end of `path`, at most `size * files` bytes, to `path.1`, … and keep at most `files` such files.

    Raises `OSError`; then `path` is as it was, unless that is more than may be kept and the disk is full.
    """
    with open(path, "r+b", buffering=0) as source:
        end = os.fstat(source.fileno()).st_size
        parts = max(1, min(files, end // size))
        written: list[Path] = []
        try:
            for number, (first, last) in enumerate(_ranges(max(0, end - size * files), end, parts)):
                part = path.with_name(f"{path.name}.new{number}")
                written.append(part)
                _copy(source, first, last, part, follow=last == end)
        except OSError as error:
            for part in written:
                part.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and end > size * (files + 1):
                _cut(source, path, size)
            raise
        os.ftruncate(source.fileno(), 0)
    for part in written:
        if part.stat().st_size:
            _shift(path, files)
            os.replace(part, _numbered(path, 1))
        else:
            part.unlink()


def _ranges(first: int, end: int, parts: int) -> Iterator[tuple[int, int]]:
    step = -(-(end - first) // parts)
    for number in range(parts):
        yield first + number * step, min(end, first + (number + 1) * step)


def _copy(source: BinaryIO, first: int, last: int, target: Path, *, follow: bool) -> None:
    """Copy what lies between two places; with `follow` also what is written meanwhile."""
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640), "wb", buffering=0) as file:
        for _ in range(_CATCH_UP if follow else 1):
            length = last - first
            for start, end in _data(source.fileno(), first, last):
                source.seek(start)
                while start < end and (chunk := source.read(min(_CHUNK, end - start))):
                    file.write(chunk)
                    start += len(chunk)
            first, last = last, os.fstat(source.fileno()).st_size
            if not 0 < last - first < length:  # it stands still, or the writer is faster than we are
                break


def _data(file: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The parts between two places that are no holes."""
    for _ in range(_EXTENTS):
        try:
            start = os.lseek(file, first, os.SEEK_DATA)
            end = min(last, os.lseek(file, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        if start >= last:
            return
        yield start, end
        first = end


def _cut(source: BinaryIO, path: Path, size: int) -> None:
    """Keep the last bytes of a file that has outgrown everything, where there is no room for a copy."""
    end = os.fstat(source.fileno()).st_size
    source.seek(max(0, end - min(size, _CHUNK)))
    last = source.read(_CHUNK)
    os.ftruncate(source.fileno(), 0)
    _numbered(path, 1).write_bytes(last)


def _shift(path: Path, files: int) -> None:
    for number in range(files - 1, 0, -1):
        older = _numbered(path, number)
        if older.exists():
            os.replace(older, _numbered(path, number + 1))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _last_write(directory: Path) -> float:
    times = [entry.stat().st_mtime for entry in directory.iterdir()]
    return max(times, default=directory.stat().st_mtime)
