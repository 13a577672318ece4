"""The record of a log file: where a byte stands in all that was ever written, and when it came.

The model: a *position* counts the bytes that a process has written since its log began. Rotation moves bytes into
older files and changes no position, so a reader that knows how far it has read continues there, whatever was rotated
under it. `LogRecord` maps positions to files (`base`: the position of the first byte of the current file). It has a
*mark* for each moment at which the agent saw the file longer than before, which gives lines their times, and one for
each start of the process. The marks are in a file `.times` beside the log: one `m POSITION MILLISECONDS` per line, `s`
for a start and `b` for the base.

The agent looks once per `agent.log_interval`, so a time is that much later than its line was written, at most. A record
is used by the thread that rotates and by those that read; its lock is held for the moment in which files change places.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_left, bisect_right
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

STDOUT, STDERR = "stdout", "stderr"
SUFFIXES = {STDOUT: ".log", STDERR: ".stderr.log"}  # a launchable's name has no dot

_MARKS = 4096  # kept of one file; of more, the older half is thinned out
_STARTS = 256
_BLOCK = 64 * 1024
_LONGEST_LINE = 1024 * 1024  # bytes that are searched for the beginning of a line


class Mark(NamedTuple):
    """At `time`, in milliseconds since 1970, the log had this many bytes."""

    position: int
    time: int


class Chunk(NamedTuple):
    """Bytes of a log. `position`: of the first one; greater than asked for where older bytes are no longer kept."""

    position: int
    data: bytes


def now_ms() -> int:
    """Return the wall clock's time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class LogRecord:
    """The record of one log file. Its methods may be called in any thread; they block on disk I/O."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()  # held while files change places
        self._times = path.with_suffix(".times")
        self._base = 0
        self._marks: list[Mark] = []
        self._starts: list[Mark] = []
        self._lines = 0  # of the file of marks
        self._load()

    def moved(self, count: int) -> None:
        """Note that the first `count` bytes of the current file were moved to an older one. The caller holds `lock`."""
        self._base += count
        self._write(f"b {self._base} 0\n")

    def observe(self, now: int | None = None) -> bool:
        """Note how long the file is. Return whether it has grown."""
        with self.lock:
            end, last = self._end(), self._marks[-1].position if self._marks else 0
            if end == last:
                return False
            if end < last:  # another program cut it, or an agent was killed while it rotated: the numbers go on
                self._base += last - end
                self._write(f"b {self._base} 0\n")
                return False
            mark = Mark(end, now if now is not None else now_ms())
            self._marks.append(mark)
            self._write(f"m {mark.position} {mark.time}\n")
            if len(self._marks) > _MARKS or self._lines > 2 * _MARKS:
                self._compact()
            return True

    def started(self) -> None:
        """Note that the process is about to be started."""
        with self.lock:
            self.observe()
            mark = Mark(self._end(), now_ms())
            self._starts = [*self._starts, mark][-_STARTS:]
            self._write(f"s {mark.position} {mark.time}\n")

    def bounds(self) -> tuple[int, int]:
        """Return the positions of the first byte that is kept and of the end."""
        with self.lock:
            return self._chain()[0][0], self._end()

    def starts(self) -> list[Mark]:
        """Return the starts of the process, oldest first."""
        with self.lock:
            return list(self._starts)

    def read(self, position: int, most: int) -> Chunk:
        """Return up to `most` bytes from `position` on, or from the first byte that is kept. Raises `OSError`."""
        with self.lock:
            chain = self._chain()
            position = max(position, chain[0][0])
            start, path = chain[bisect_right(chain, position, key=lambda each: each[0]) - 1]
            try:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:  # nothing was written yet
                return Chunk(position, b"")
            try:
                following = [each[0] for each in chain if each[0] > position]
                wanted = min(most, following[0] - position) if following else most
                return Chunk(position, os.pread(file, wanted, position - start))
            finally:
                os.close(file)

    def time_at(self, position: int) -> tuple[int, int | None]:
        """Return the time at which the byte at `position` was seen, and the position up to which that holds; None for
        bytes that were not seen yet, whose time is now."""
        with self.lock:
            number = bisect_right(self._marks, position, key=lambda mark: mark.position)
            if number == len(self._marks):
                return now_ms(), None
            return self._marks[number].time, self._marks[number].position

    def since(self, when: int) -> int:
        """Return the position of the first line that was seen at `when` or later."""
        with self.lock:
            number = bisect_left(self._marks, when, key=lambda mark: mark.time)
            position = self._marks[number - 1].position if number else 0
            first, end = self._chain()[0][0], self._end()
            if position <= first or position >= end or self.read(position - 1, 1).data == b"\n":
                return max(position, first)
            searched = position  # in the middle of a line: the next one is wanted
            while searched < min(end, position + _LONGEST_LINE):
                chunk = self.read(searched, _BLOCK)
                if not chunk.data:
                    break
                if (found := chunk.data.find(b"\n")) >= 0:
                    return chunk.position + found + 1
                searched = chunk.position + len(chunk.data)
            return position

    def tail(self, lines: int, first: int, end: int) -> int:
        """Return the position of the last `lines` lines between two positions, not before `first`."""
        first = max(first, self.bounds()[0])
        position, left = end, lines
        while position > first and left >= 0:
            begin = max(first, position - _BLOCK)
            data = self.between(begin, position)
            if position == end and data.endswith(b"\n"):
                left += 1  # the line feed that ends the last line begins no further one
            found = len(data)
            while left > 0 and (found := data.rfind(b"\n", 0, found)) >= 0:
                left -= 1
                if left == 0:
                    return begin + found + 1
            position = begin
            if lines == 0:
                return end
        return first

    def between(self, begin: int, end: int) -> bytes:
        """Return the bytes between two positions, which may be in several files. Raises `OSError`."""
        found = b""
        while begin + len(found) < end and (chunk := self.read(begin + len(found), end - begin - len(found))).data:
            found += chunk.data
        return found

    def _end(self) -> int:
        return self._base + _size(self.path)

    def _chain(self) -> list[tuple[int, Path]]:
        """Return the first position and the path of each file that is kept, oldest first; the last is the current."""
        found, start, number = [(self._base, self.path)], self._base, 1
        while (size := _size(older := self.path.with_name(f"{self.path.name}.{number}"))) > 0:
            start -= size
            found.append((start, older))
            number += 1
        return found[::-1]

    def _write(self, line: str) -> None:
        """Append to the file of marks. Without it only times and former runs are lost, so a full disk is no error."""
        with contextlib.suppress(OSError):
            with open(os.open(self._times, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640), "w") as file:
                file.write(line)
            self._lines += 1

    def _compact(self) -> None:
        first = self._chain()[0][0]
        kept = [mark for mark in self._marks if mark.position > first]
        if len(kept) > _MARKS // 2:
            half = len(kept) // 2
            kept = kept[:half:2] + kept[half:]
        self._marks = kept or self._marks[-1:]
        self._starts = [mark for mark in self._starts if mark.position >= first] or self._starts[-1:]
        lines = [f"b {self._base} 0\n", *(f"s {mark.position} {mark.time}\n" for mark in self._starts)]
        lines += [f"m {mark.position} {mark.time}\n" for mark in self._marks]
        temporary = self._times.with_name(f"{self._times.name}.new")
        with contextlib.suppress(OSError):
            temporary.write_text("".join(lines))
            os.replace(temporary, self._times)
            self._lines = len(lines)

    def _load(self) -> None:
        try:
            with self._times.open("rb") as file:
                lines = file.read(8 * _MARKS * 64).split(b"\n")
        except OSError:
            lines = []
        for line in lines:
            kind, _, rest = line.partition(b" ")
            position, _, moment = rest.partition(b" ")
            if not (position.isdigit() and moment.isdigit() and len(rest) < 64):
                continue  # cut by a crash
            mark = Mark(int(position), int(moment))
            if kind == b"b":
                self._base = mark.position
            elif kind == b"m" and (not self._marks or mark > self._marks[-1]):
                self._marks.append(mark)
            elif kind == b"s":
                self._starts.append(mark)
        self._lines = len(lines)
        if not self._marks and not self._base:  # a log of an agent that wrote no marks
            self._base = sum(_size(path) for _, path in self._chain()[:-1])


class LogRecords:
    """The records of all log files under `root`: `<root>/<pod>/<launchable>.log` and `.stderr.log`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._records: dict[Path, LogRecord] = {}
        self._lock = threading.Lock()

    def of(self, path: Path) -> LogRecord:
        """Return the record of a file."""
        with self._lock:
            if (found := self._records.get(path)) is None:
                found = self._records[path] = LogRecord(path)
            return found

    def sources(self, pod_id: str) -> dict[tuple[str, str], LogRecord]:
        """Return the logs that there are of a pod, by launchable and stream. `pod_id` must be a DNS label."""
        found = {}
        for path in sorted((self._root / pod_id).glob("*.log")):
            name, _, rest = path.name.partition(".")
            stream = STDERR if rest == "stderr.log" else STDOUT
            if path.name == name + SUFFIXES[stream]:
                found[name, stream] = self.of(path)
        return found

    def started(self, *paths: Path) -> None:
        """Note that the process that writes these files is about to be started."""
        for path in paths:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self.of(path).started()

    def forget(self, directory: Path) -> None:
        """Drop the records of a directory that is removed."""
        with self._lock:
            for path in [path for path in self._records if path.parent == directory]:
                del self._records[path]


def _size(path: Path) -> int:
    """Return the size of a regular file, 0 of anything else."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if S_ISREG(found.st_mode) else 0
