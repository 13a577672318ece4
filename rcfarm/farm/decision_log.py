"""The decision log of a farm: the inputs and the plans of its RCs, in a folder of its own (`rcfarm.farm.decisions`).

The model: `record` encodes a decision in the event loop, as its id goes into the audit event; `written` adds the index
of its transaction. Every `PAUSE` a batch is compressed and appended to the current segment, in a thread. A segment that
is large or old enough is followed by another, and the oldest ones beyond the limits of size and age are removed.

The log never delays or stops a decision. What can't be written (a full disk, a read-only folder) is dropped: one line
in the program's log, a metric that counts it, and another segment as soon as writing works again. Nothing is synced:
a machine that loses power may lose the last seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from rcfarm.farm.decisions import (
    DICTIONARY,
    INPUTS,
    MAGIC,
    PATCHED_FROM,
    SUFFIX,
    Entry,
    Header,
    Nodes,
    canonical,
    digest_of,
    frame,
    id_of,
    inputs_of,
    patch,
    patch_of_items,
)
from rcfarm.farm.planner import Plan, PlanInput
from scheduler.protocol import Eligibility
from store.schema.audit import new_ulid

log = structlog.get_logger(__name__)

PAUSE = 1.0  # seconds between two batches
LONGEST_WAIT = 10.0  # seconds after which a decision is written although its transaction has not been answered
SEGMENTS = 8  # parts of the log's size, and of its age
MOST_PENDING = 16 * 1024 * 1024  # bytes that wait for a slow disk
MOST_PATCHES = 50  # in a row: a damaged entry makes no more unreadable
MOST_DECIDED = 1000  # RCs whose last decision is kept for the next patch
MOST_NODES = 64  # eligibilities that are kept: those of a large fleet take much memory


class _Decided(NamedTuple):
    """A decision in a segment, how many patches it takes to restore it, and the bytes of the whole beneath these."""

    id: str
    inputs: tuple[Any, ...]
    decision: Plan
    depth: int
    size: int


class _Seen(NamedTuple):
    """An eligibility in a segment, and how many patches it takes to restore it."""

    digest: str
    nodes: Eligibility
    depth: int


class Recorded(msgspec.Struct, gc=False):
    """A decision that is about to be written, after its eligibility if that is new. `id` is for its audit event."""

    entry: Entry
    nodes: Nodes | None
    size: int
    is_open: bool = True  # its transaction is under way

    @property
    def id(self) -> str:
        return self.entry.id


@dataclass(slots=True, eq=False)
class _Segment:
    """A file, and what later entries may refer to in it. `began`: Unix seconds; `written`: bytes."""

    path: Path
    began: float
    written: int = 0
    dictionary: bytes = b""
    pending: list[Recorded] = field(default_factory=list)
    pending_size: int = 0
    decided: dict[str, _Decided] = field(default_factory=dict)  # by RC
    seen: dict[str, _Seen] = field(default_factory=dict)  # by selector
    digests: set[str] = field(default_factory=set)  # of all eligibilities


class DecisionLog:
    """Logs the decisions of one farm. Run `run()` once; call the rest in its event loop.

    `max_size` in bytes, `max_age` in seconds. `recorded`, `unrecorded`: decisions since the start; `size`: of all
    segments, in bytes, as of the last one's start. `now()`: Unix seconds.
    """

    def __init__(
        self,
        directory: Path,
        farm: str,
        version: str,
        *,
        max_size: int,
        max_age: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.recorded = self.unrecorded = self.size = 0
        self._directory, self._header = directory, Header(farm, version, INPUTS)
        self._max_size, self._max_age, self._now = max_size, max_age, now
        self._digests: dict[int, tuple[Eligibility, str]] = {}  # by identity: schedulers give equal answers as one
        self._segment = self._begun()
        self._former: list[_Segment] = []  # with decisions that are still to be written
        self._fails = self._has_unencodable = False

    def record(self, rc: str, given: PlanInput, decision: Plan) -> Recorded | None:
        """Log a decision. Call `written` when its transaction has ended, however it ended. Return None if the decision
        can't be encoded, such as a text that is no Unicode."""
        try:
            return self._recorded(rc, given, decision)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            self.unrecorded += 1
            self._former.append(self._segment)  # what was noted of this decision in it is left with it
            self._segment = self._begun()
            if not self._has_unencodable:
                log.warning("A decision can't be logged; the farm goes on", rc=rc, error=str(error))
                self._has_unencodable = True
            return None

    def _recorded(self, rc: str, given: PlanInput, decision: Plan) -> Recorded:
        now, segment = self._now(), self._segment
        if segment.written >= self._max_size / SEGMENTS or now - segment.began >= self._max_age / SEGMENTS:
            self._former.append(segment)
            segment = self._segment = self._begun()
        digest, nodes, size = self._nodes(segment, given)
        inputs, last, content = inputs_of(given), segment.decided.get(rc), b""
        if last and last.depth < MOST_PATCHES:
            content = canonical((patch_of_items(last.inputs, inputs), patch(last.decision, decision)))
        if last and content and 2 * len(content) < last.size:
            base, depth, whole = last.id, last.depth + 1, last.size
        else:
            content, base, depth = canonical((inputs, decision)), "", 0
            whole = len(content)
        entry = Entry(id_of(digest, base, content), now, rc, digest, 0, base, msgspec.Raw(content))
        if base or whole > PATCHED_FROM:
            _keep(segment.decided, rc, _Decided(entry.id, inputs, decision, depth, whole), MOST_DECIDED)
        recorded = Recorded(entry, nodes, size + len(content))
        segment.pending.append(recorded)
        segment.pending_size += recorded.size
        if segment.pending_size > MOST_PENDING:
            self._drop(segment, [], "writing is too slow")
        return recorded

    def written(self, recorded: Recorded, index: int) -> None:
        """Note the index of the decision's transaction; 0: nothing was written."""
        recorded.entry.index, recorded.is_open = index, False

    async def run(self) -> None:
        """Write until cancelled, and then what is left."""
        try:
            while True:
                await asyncio.sleep(PAUSE)
                await self.flush()
        finally:
            for segment in (*self._former, self._segment):
                if batch := self._ready(segment, at_end=True):
                    self._ended(segment, batch, self._append(segment, batch))

    async def flush(self) -> None:
        """Write what is ready."""
        for segment in (*self._former, self._segment):
            batch = self._ready(segment)
            if segment in self._former and not segment.pending:
                self._former.remove(segment)
            if batch:
                writing = asyncio.create_task(asyncio.to_thread(self._append, segment, batch))
                try:
                    await asyncio.shield(writing)
                finally:  # also when cancelled: what is left must come after it
                    self._ended(segment, batch, await writing)

    def _begun(self) -> _Segment:
        return _Segment(self._directory / f"{new_ulid()}{SUFFIX}", self._now())

    def _nodes(self, segment: _Segment, given: PlanInput) -> tuple[str, Nodes | None, int]:
        """Return the digest of the eligibility, and, if the segment does not have it yet, its entry and size."""
        nodes, selector = given.eligibility, given.spec.node_selector
        content = b""
        if (known := self._digests.get(id(nodes))) is None:
            content = canonical(nodes)
            known = nodes, digest_of(content)  # kept alive, as its identity is the key
            _keep(self._digests, id(nodes), known, MOST_NODES)
        digest, last = known[1], segment.seen.get(selector)
        if digest in segment.digests:
            return digest, None, 0
        segment.digests.add(digest)
        content, base, depth = content or canonical(nodes), "", 0
        if len(content) > PATCHED_FROM and last and last.depth < MOST_PATCHES:
            change = canonical(patch(last.nodes, nodes))
            if 2 * len(change) < len(content):
                content, base, depth = change, last.digest, last.depth + 1
        _keep(segment.seen, selector, _Seen(digest, nodes, depth), MOST_NODES)
        return digest, Nodes(digest, base, msgspec.Raw(content)), len(content)

    def _ready(self, segment: _Segment, *, at_end: bool = False) -> list[Recorded]:
        """Take what may be written, in order: what comes before the first decision whose transaction is under way."""
        pending, oldest = segment.pending, self._now() - LONGEST_WAIT
        waits = (number for number, one in enumerate(pending) if one.is_open and one.entry.at > oldest)
        count = len(pending) if at_end else next(waits, len(pending))
        segment.pending = pending[count:]
        segment.pending_size -= sum(one.size for one in pending[:count])
        return pending[:count]

    def _append(self, segment: _Segment, batch: list[Recorded]) -> str:
        """Write a batch; runs in a thread. Return the error, or ""."""
        entries: list[Header | Nodes | Entry] = [] if segment.written else [self._header]
        for one in batch:
            entries += [one.nodes, one.entry] if one.nodes else [one.entry]
        packed, content = frame(entries, segment.dictionary)
        try:
            if not segment.written:
                self._prune()
                packed, segment.dictionary = MAGIC + packed, content[:DICTIONARY]
            with open_for_append(segment.path, not segment.written) as file:
                if file.write(packed) != len(packed):
                    raise OSError("the disk is full")
        except OSError as error:
            with contextlib.suppress(OSError):  # what was begun
                os.truncate(segment.path, segment.written)
                if not segment.written:
                    segment.path.unlink()
            return str(error)
        segment.written += len(packed)
        self.size += len(packed)
        return ""

    def _ended(self, segment: _Segment, batch: list[Recorded], error: str) -> None:
        if error:
            self._drop(segment, batch, error)
            return
        self.recorded += len(batch)
        if self._fails:
            log.info("Decisions are logged again", directory=str(self._directory))
            self._fails = False

    def _drop(self, segment: _Segment, batch: list[Recorded], error: str) -> None:
        """Go on in another segment, as the rest of this one would refer to what is missing in it."""
        self.unrecorded += len(batch) + len(segment.pending)
        segment.pending, segment.pending_size = [], 0
        if segment is self._segment:
            self._segment = self._begun()
        if not self._fails:
            log.warning("Decisions can't be logged; the farm goes on", directory=str(self._directory), error=error)
            self._fails = True

    def _prune(self) -> None:
        """Create the folder, and remove the oldest segments, so that the log with one more stays within its limits."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = sorted(self._directory.glob(f"*{SUFFIX}"), reverse=True)
        room, self.size = self._max_size * (1 - 2 / SEGMENTS), 0  # the last batch of a segment may exceed its part
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if self.size + stat.st_size > room or stat.st_mtime < self._now() - self._max_age:
                    path.unlink()
                else:
                    self.size += stat.st_size


def open_for_append(path: Path, is_new: bool) -> io.FileIO:
    """Open a segment, for this user alone. Raises `OSError`, also if a new one exists."""
    flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if is_new else 0)
    return io.FileIO(os.open(path, flags, 0o600), "wb")


def _keep(kept: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Remember a value, and forget the oldest one when there are too many."""
    kept.pop(key, None)
    if len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value
