"""Log files of launchables: bounded although the process that writes them never closes its descriptor.

Processes append stdout to `<launchable>.log` and stderr to `<launchable>.stderr.log` directly: an agent that is down or
slow loses no line and blocks no process. The whole blocks of a file above its size are copied to `.1` (the older ones
move up), and then cut from its beginning in one step (`FALLOC_FL_COLLAPSE_RANGE`), so that no line is lost while the
process writes.

Where a file system can't do that (tmpfs, btrfs), and for files with holes or reserved blocks, the file is copied and
then truncated; with O_APPEND the writer continues at the new end. Bytes written between the copy and the truncation
would be lost, so the copy continues until the file stops growing or `_CATCH_UP` rounds have passed.

The last `size * files` bytes of a file are kept, in `files` files, as if it had been rotated in time. So neither the
size of the copy nor the space on disk depends on the writer's speed, and a file that was too large is checked again
after a moment. Holes (a process may extend its file at will) are not copied; blocks allocated behind the end of a file
count as its size.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import structlog

from rcfarm.agent.errors import describe_os_error
from rcfarm.agent.log_files import LogRecord, LogRecords
from rcfarm.agent.state import TRASH

log = structlog.get_logger(__name__)

_CATCH_UP = 5
_CHUNK = 1024 * 1024
_EXTENTS = 10_000  # data pieces between holes that are copied at most
_SOON = 0.1  # seconds until the next check after one that found a file too large
_RESERVED = 64 * 1024 * 1024  # bytes that file systems preallocate for a growing file
_COLLAPSE_RANGE = 0x08  # FALLOC_FL_COLLAPSE_RANGE
_can_not_collapse: set[int] = set()  # devices whose file systems can't


class LogKeeper:
    """Bounds the log files under `root`: `<root>/<pod_id>/<launchable>.log`. `size` in bytes, times in seconds.

    `records`: in which it notes how the files grow.
    """

    def __init__(self, root: Path, *, size: int, files: int, keep: float, records: LogRecords | None = None) -> None:
        self._root = root
        self._records = records or LogRecords(root)
        self._size = size
        self._files = files
        self._keep = keep

    async def run(self, interval: float) -> None:
        """Check every `interval` seconds until cancelled, and more often while a file grows fast."""
        thread = ThreadPoolExecutor(1, "logs")
        try:
            while True:
                rotated = await asyncio.get_running_loop().run_in_executor(thread, self.rotate_all)
                await asyncio.sleep(min(interval, _SOON) if rotated else interval)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def rotate_all(self) -> int:
        """Rotate every file that is too large. Return how many were; a failure is logged and retried."""
        rotated = 0
        for path in (*self._root.glob("*/*.log"), *self._root.glob("*/*.check")):
            try:
                found = path.stat()
                if path.suffix == ".log":
                    self._records.of(path).observe()
                if found.st_size <= self._size and found.st_blocks * 512 <= 4 * self._size + _RESERVED:
                    continue
                rotated += 1
                if path.suffix == ".log":
                    rotate(path, self._size, self._files, self._records.of(path))
                else:
                    os.truncate(path, 0)  # the output of a check, of which only the beginning is read
            except FileNotFoundError:  # removed in between
                continue
            except OSError as error:
                log.warning("A log file could not be rotated", file=str(path), reason=describe_os_error(error, path))
        return rotated

    def expired(self, pods: Collection[str]) -> list[Path]:
        """Return the directories of pods that are not in `pods` and whose last write is older than the time to keep."""
        known = {*pods, TRASH}
        found = []
        for directory in self._root.iterdir():
            if directory.name not in known:
                times = [entry.stat().st_mtime for entry in directory.iterdir()]
                if time.time() - max(times, default=directory.stat().st_mtime) > self._keep:
                    found.append(directory)
        return found


def rotate(path: Path, size: int, files: int, record: LogRecord | None = None) -> None:
    """Move the end of `path`, at most `size * files` bytes, to `path.1`, … and keep at most `files` such files.

    Raises `OSError`; then `path` is as it was, unless that is more than may be kept and the disk is full.
    """
    record = record or LogRecord(path)
    with open(path, "r+b", buffering=0) as source:
        end = os.fstat(source.fileno()).st_size
        try:
            if whole := _whole_blocks(source.fileno()):
                parts, _ = _copy_parts(source, path, whole, size, files, follow=False)
                with record.lock:
                    if _collapse(source.fileno(), whole):
                        record.moved(whole)
                        _install(path, parts, files)
                        return
                for part in parts:
                    part.unlink(missing_ok=True)
            parts, copied = _copy_parts(source, path, end, size, files, follow=True)
            with record.lock:
                os.ftruncate(source.fileno(), 0)
                record.moved(copied)
                _install(path, parts, files)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and end > size * (files + 1):
                # Keep only the last bytes of a file far above its size when the disk has no room for a copy
                with record.lock:
                    end = os.fstat(source.fileno()).st_size
                    source.seek(max(0, end - min(size, _CHUNK)))
                    remains = source.read(_CHUNK)
                    os.ftruncate(source.fileno(), 0)
                    record.moved(end)
                    _numbered(path, 1).write_bytes(remains)
            raise


def _whole_blocks(file: int) -> int:
    """Return how many bytes, in whole blocks, may be cut from the beginning of the file; 0 for one that is to be
    truncated: with holes, with reserved blocks, or where the file system can't cut."""
    found = os.fstat(file)
    allocated = found.st_blocks * 512
    if found.st_dev in _can_not_collapse or not found.st_size // 2 <= allocated <= found.st_size + _RESERVED:
        return 0
    block = os.fstatvfs(file).f_bsize
    return (found.st_size - 1) // block * block


def _collapse(file: int, count: int) -> bool:
    """Cut the first `count` bytes from the file, which has more. Return False where the file system can't."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(file, _COLLAPSE_RANGE, 0, count) == 0:
        return True
    if ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS):
        _can_not_collapse.add(os.fstat(file).st_dev)
    return False


def _copy_parts(
    source: BinaryIO, path: Path, end: int, size: int, files: int, *, follow: bool
) -> tuple[list[Path], int]:
    """Copy what is kept of the bytes before `end` into new files. Return these, oldest first, and how far it came."""
    parts = max(1, min(files, end // size))
    first = max(0, end - size * files)
    step = -(-(end - first) // parts)
    written: list[Path] = []
    copied = end
    try:
        for number in range(parts):
            start, last = first + number * step, min(end, first + (number + 1) * step)
            written.append(part := path.with_name(f"{path.name}.new{number}"))
            copied = _copy(source, start, last, part, follow=follow and last == end)
    except OSError:
        for part in written:
            part.unlink(missing_ok=True)
        raise
    return written, copied


def _install(path: Path, parts: Sequence[Path], files: int) -> None:
    """Number the parts, oldest first, after moving the older files up."""
    for part in parts:
        if part.stat().st_size:
            for number in range(files - 1, 0, -1):
                if (older := _numbered(path, number)).exists():
                    os.replace(older, _numbered(path, number + 1))
            os.replace(part, _numbered(path, 1))
        else:
            part.unlink()


def _copy(source: BinaryIO, first: int, last: int, target: Path, *, follow: bool) -> int:
    """Copy the bytes from `first` to `last`; with `follow` also those appended during the copy. Return the end."""
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640), "wb", buffering=0) as file:
        for _ in range(_CATCH_UP if follow else 1):
            length = last - first
            for start, end in _data(source.fileno(), first, last):
                source.seek(start)
                while start < end and (chunk := source.read(min(_CHUNK, end - start))):
                    file.write(chunk)
                    start += len(chunk)
            first, last = last, os.fstat(source.fileno()).st_size
            if not 0 < last - first < length:  # nothing was appended, or the writer is faster than the copy
                break
    return first


def _data(file: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the parts from `first` to `last` that are not holes."""
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


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
