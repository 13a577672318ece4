"""Reads a decision log, and decides its decisions once more with the running code.

A decision that was written by former code is compared by what the running code's types make of its plan: a field that
was added since counts with its default.
"""

from __future__ import annotations

import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rcfarm.farm.decisions import (
    APART,
    DICTIONARY,
    FRAME,
    MAGIC,
    PATCHED_FROM,
    SUFFIX,
    Entry,
    Header,
    Nodes,
    canonical,
    digest_of,
    entries_decoder,
    id_of,
    patched,
    plain,
    unpacked,
)
from rcfarm.farm.planner import Plan, PlanInput, plan
from store.errors import RcfarmError

WHERE = "name the folder of a farm's with --log: it is the farm's setting `farm.decision_log`"


class CannotReplay(RcfarmError):
    """A log, or a decision in it, can't be read; the message names it and says why."""


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as it was logged. `at`: Unix seconds. `inputs`: the digest of its input. `index`: of the transaction
    that wrote it, 0: nothing was written. `given` and `decision`: plain data."""

    id: str
    at: float
    farm: str
    version: str
    rc: str
    inputs: str
    index: int
    given: dict[str, Any]
    decision: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A decision, typed, and what the running code decides. `differs`: the fields of the plan whose values differ,
    with the logged value and the present one, as plain data."""

    given: PlanInput
    decision: Plan
    now: Plan
    differs: Mapping[str, tuple[Any, Any]]


def segments(directory: Path) -> list[Path]:
    """Return the segments, oldest first. Raises `CannotReplay`."""
    try:
        found = sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    except OSError as error:
        raise CannotReplay(f"{directory}: the decision log can't be read: {error.strerror}; {WHERE}") from error
    if not found:
        raise CannotReplay(f"{directory}: there is no decision log; {WHERE}")
    return found


def read(
    path: Path, damaged: Callable[[str], None], wanted: Callable[[Entry], bool] = lambda entry: True
) -> Iterator[Logged]:
    """Yield the wanted decisions of a segment, oldest first. `damaged` is called with each part that can't be restored.

    Raises `CannotReplay` if the file can't be read at all.
    """
    segment = _Segment(path.name)
    for entry in _entries(path, damaged):
        if isinstance(entry, Header):
            segment.header = entry
        elif isinstance(entry, Nodes):
            segment.add_nodes(entry)
        elif wanted(entry) or entry.base or len(bytes(entry.content)) > PATCHED_FROM:  # a later one may need it
            try:
                found = segment.restored(entry)
            except CannotReplay as error:
                damaged(str(error))
            else:
                if wanted(entry):
                    yield found


def replayed(logged: Logged) -> Replayed:
    """Decide once more. Raises `CannotReplay` if the running code can't read the decision."""
    try:
        given = msgspec.convert(logged.given, PlanInput)
        decision = msgspec.convert(logged.decision, Plan)
    except msgspec.ValidationError as error:
        raise CannotReplay(
            f"decision {logged.id}: this version can't read what version {logged.version} has logged: {error}"
        ) from error
    now = plan(given)
    if canonical(now) == canonical(decision):
        return Replayed(given, decision, now, {})
    before, after = (msgspec.msgpack.decode(canonical(one)) for one in (decision, now))
    differs = {name: (before[name], value) for name, value in after.items() if before[name] != value}
    return Replayed(given, decision, now, differs)


@dataclass(slots=True)
class _Segment:
    """What was read of a segment so far. `nodes`: the eligibilities, by digest; `last`: of each RC with a large
    decision, the id and the content of the last one. Both as plain data."""

    name: str
    header: Header = field(default_factory=lambda: Header("", "", ()))
    nodes: dict[str, Any] = field(default_factory=dict)
    last: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add_nodes(self, entry: Nodes) -> None:
        """Restore an eligibility; if that fails, the decisions that refer to it will miss it."""
        content = msgspec.msgpack.decode(entry.content)
        if entry.base:
            content = patched(self.nodes[entry.base], content) if entry.base in self.nodes else None
        if digest_of(plain(content)) == entry.digest:
            self.nodes[entry.digest] = content

    def restored(self, entry: Entry) -> Logged:
        """Return the next decision. Raises `CannotReplay`."""
        content = msgspec.msgpack.decode(entry.content)
        if entry.base:
            base, value = self.last.get(entry.rc, ("", None))
            changes = content if base == entry.base else ()
            content = [patched(*pair) for pair in zip(value or (), changes, strict=False)]
        is_whole = len(content) == 2 and entry.id == id_of(entry.nodes, entry.base, bytes(entry.content))
        if entry.nodes not in self.nodes or not is_whole:
            raise CannotReplay(f"{self.name}: decision {entry.id} of rc {entry.rc} needs a part that is damaged")
        if entry.base or len(bytes(entry.content)) > PATCHED_FROM:
            self.last[entry.rc] = entry.id, content
        values, decision = content
        return Logged(
            id=entry.id,
            at=entry.at,
            farm=self.header.farm,
            version=self.header.version,
            rc=entry.rc,
            inputs=digest_of(entry.nodes.encode() + plain(values)),
            index=entry.index,
            given={**dict(zip(self.header.inputs, values, strict=True)), APART: self.nodes[entry.nodes]},
            decision=decision,
        )


def _entries(path: Path, damaged: Callable[[str], None]) -> Iterator[Header | Nodes | Entry]:
    """Yield the entries of a segment's whole frames."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CannotReplay(f"{path}: can't be read: not a file")
        raw = path.read_bytes()
    except OSError as error:
        raise CannotReplay(f"{path}: can't be read: {error.strerror}") from error
    if not raw.startswith(MAGIC):
        raise CannotReplay(f"{path}: not a decision log of this version")
    at, dictionary = len(MAGIC), b""
    while at < len(raw):
        length, checksum = FRAME.unpack_from(raw, at) if at + FRAME.size <= len(raw) else (len(raw), 0)
        packed = raw[at + FRAME.size : at + FRAME.size + length]
        if len(packed) < length:
            damaged(f"{path.name}: its end, from byte {at}, is cut off")
            return
        if not length:  # zeros, which a file system leaves where data was not written before a loss of power
            damaged(f"{path.name}: from byte {at} on it is damaged")
            return
        try:
            if zlib.crc32(packed) != checksum:
                raise zlib.error
            content = unpacked(packed, dictionary)
            entries = entries_decoder.decode(content)
        except (zlib.error, msgspec.DecodeError):
            damaged(f"{path.name}: the part at byte {at} is damaged")
            if not dictionary:
                return
        else:
            dictionary = dictionary or content[:DICTIONARY]
            yield from entries
        at += FRAME.size + length
