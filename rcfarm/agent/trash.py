"""Remove directories that pods have filled, however deep they are.

`put` renames a directory into the `.trash` of its area, so that its path is free at once, even if the agent is killed
right after. One thread empties the trash: never recursively, never reading a directory into memory, taking turns
between the directories, and stopping between two files when the agent stops. What can't be removed is logged and
retried later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from rcfarm.agent.errors import describe_os_error

log = structlog.get_logger(__name__)

TRASH = ".trash"
_AGAIN = 3600.0  # seconds until a failed removal is retried
_TURN = 30.0  # seconds for one directory, before the others have their turn
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Trash:
    """The trash of one agent. `areas`: directories, possibly on different file systems."""

    def __init__(self, areas: Sequence[Path]) -> None:
        self._areas = areas
        self._filled = asyncio.Event()
        self._stopped = threading.Event()
        self._numbers = count()

    def put(self, path: Path) -> None:
        """Move `path`, which is below one of the areas, into the trash; does nothing when it does not exist.

        On return `path` is free. Raises `OSError`; then `path` is unchanged.
        """
        area = next(area for area in self._areas if path.is_relative_to(area))
        trash = area / TRASH
        trash.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, trash / f"{time.time_ns()}-{next(self._numbers)}")
        self._filled.set()

    async def run(self) -> None:
        """Empty the trash until cancelled."""
        with ThreadPoolExecutor(1, "trash") as thread:
            try:
                while True:
                    self._filled.clear()
                    while not await asyncio.get_running_loop().run_in_executor(thread, self.empty):
                        pass
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_AGAIN):
                            await self._filled.wait()
            finally:
                self._stopped.set()

    def empty(self) -> bool:
        """Give each entry of the trash a turn. Return whether only entries that can't be removed are left. Blocks."""
        done = True
        for area in self._areas:
            for path in _entries(area / TRASH):
                end = time.monotonic() + _TURN
                try:
                    done &= remove(path, partial(self._is_over, end))
                except OSError as error:
                    report_left(path, error)
        return done or self._stopped.is_set()

    def _is_over(self, end: float) -> bool:
        return self._stopped.is_set() or time.monotonic() > end


def report_left(path: Path, error: OSError) -> None:
    """Log that `path` can't be removed."""
    reason = describe_os_error(error, path)
    log.warning("A directory could not be removed; retrying later", directory=str(path), reason=reason)


def remove(path: Path, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Remove a file or a whole directory. Return False when `is_over` ended it early.

    Raises the first `OSError` when an entry can't be removed. Subdirectories are moved up to the top before they are
    emptied: so no path is ever long, and at most two directories are open. A symbolic link is removed, never followed.
    """
    try:
        top = os.open(path, _DIRECTORY)
    except NotADirectoryError:
        path.unlink()
        return True
    try:
        os.fchmod(top, 0o700)
        if not _Removal(top, is_over).run():
            return False
        path.rmdir()
        return True
    finally:
        os.close(top)


class _Removal:
    """Empties the open directory `top`."""

    def __init__(self, top: int, is_over: Callable[[], bool]) -> None:
        self._top = top
        self._is_over = is_over
        self._numbers = count()
        self._done = 0  # entries removed or moved up
        self._failed: OSError | None = None

    def run(self) -> bool:
        while True:
            before, self._failed = self._done, None
            for entry in self._each(self._top):
                self._remove(entry)
            if self._is_over():
                return False
            if self._done == before:
                break
        if self._failed is not None:
            raise self._failed
        return True

    def _each(self, directory: int) -> Iterator[os.DirEntry[str]]:
        with os.scandir(directory) as entries:
            for entry in entries:
                if self._is_over():
                    return
                yield entry

    def _remove(self, entry: os.DirEntry[str]) -> None:
        """Remove an entry of the top; for a directory, its entries first."""
        if not entry.is_dir(follow_symlinks=False):
            self._try(lambda: os.unlink(entry.name, dir_fd=self._top))
            return
        try:
            try:
                directory = os.open(entry.name, _DIRECTORY, dir_fd=self._top)
            except PermissionError:
                os.chmod(entry.name, 0o700, dir_fd=self._top)
                directory = os.open(entry.name, _DIRECTORY, dir_fd=self._top)
            os.fchmod(directory, 0o700)
            try:
                for inner in self._each(directory):
                    if inner.is_dir(follow_symlinks=False):
                        self._try(partial(self._move_up, inner.name, directory))
                    else:
                        self._try(partial(os.unlink, inner.name, dir_fd=directory))
            finally:
                os.close(directory)
        except OSError as error:
            self._failed = self._failed or error
        self._try(lambda: os.rmdir(entry.name, dir_fd=self._top))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
            self._done += 1
        except OSError as error:
            self._failed = self._failed or error

    def _move_up(self, name: str, directory: int) -> None:
        new = f".{os.getpid()}-{time.monotonic_ns()}-{next(self._numbers)}"  # unique in the top
        try:
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=self._top)
        except PermissionError:  # moving a directory requires write permission in it
            os.chmod(name, 0o700, dir_fd=directory)
            os.rename(name, new, src_dir_fd=directory, dst_dir_fd=self._top)


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
