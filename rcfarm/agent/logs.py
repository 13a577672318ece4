"""Log files of launchables: rotated by size although the process that writes them never lets go of its descriptor.

Processes append to `<launchable>.log`, both of their outputs, straight from the kernel: an agent that is away or slow
loses no line and blocks no one. A file that has grown over its size is copied to `.1` (the older ones move up) and then
truncated; with O_APPEND the writer goes on at the new end. What is written between the last byte copied and the
truncation would be lost, so the copy goes on until the file stands still or `_CATCH_UP` more rounds are over.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

import structlog

from rcfarm.agent.errors import describe_os_error

log = structlog.get_logger(__name__)

_CATCH_UP = 5
_CHUNK = 1024 * 1024


class LogKeeper:
    """Bounds the log files under `root`: `<root>/<pod_id>/<launchable>.log`. `size` in bytes, times in seconds."""

    def __init__(self, root: Path, *, size: int, files: int, keep: float) -> None:
        self._root = root
        self._size = size
        self._files = files
        self._keep = keep

    async def run(self, interval: float) -> None:
        """Look every `interval` seconds until cancelled."""
        while True:
            await asyncio.to_thread(self.rotate_all)
            await asyncio.sleep(interval)

    def rotate_all(self) -> None:
        """Rotate every file that is too large. One that can't be is reported and tried again the next time."""
        for path in self._root.glob("*/*.log"):
            try:
                if path.stat().st_size > self._size:
                    rotate(path, self._files)
            except FileNotFoundError:  # pruned meanwhile
                continue
            except OSError as error:
                log.warning("A log file can't be rotated", file=str(path), reason=describe_os_error(error, path))

    def prune(self, pods: Collection[str]) -> None:
        """Remove the logs of pods that are not among `pods` once nothing was written there for the time to keep."""
        for directory in self._root.iterdir():
            if directory.name not in pods and time.time() - _last_write(directory) > self._keep:
                shutil.rmtree(directory, ignore_errors=True)


def rotate(path: Path, files: int) -> None:
    """Move what `path` holds to `path.1` and keep at most `files` such files. Raises `OSError`; `path` is whole."""
    for number in range(files - 1, 0, -1):
        older = _numbered(path, number)
        if older.exists():
            os.replace(older, _numbered(path, number + 1))
    newest = _numbered(path, 1)
    with open(path, "r+b") as source:
        try:
            with open(os.open(newest, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "wb", buffering=0) as target:
                for _ in range(_CATCH_UP):
                    shutil.copyfileobj(source, target, _CHUNK)
                    if os.fstat(source.fileno()).st_size == source.tell():
                        break
        except OSError:
            newest.unlink(missing_ok=True)
            raise
        os.ftruncate(source.fileno(), 0)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _last_write(directory: Path) -> float:
    times = [entry.stat().st_mtime for entry in directory.iterdir()]
    return max(times, default=directory.stat().st_mtime)
