"""The audit log: who changed what, written in the very transaction that it records.

The log may be large, so it is read in pages: the keys of one day, cut into prefixes that hold at most `PAGE` of them.

An event is one key, `audit/<day>/<ulid>`. A ULID sorts by time; within one process each is greater than the one before,
even within a millisecond or after the clock was set back, so that listing a day gives its events in the order in which
this process wrote them. The event's `timestamp` is the wall clock's time; the time in the ULID only serves the order.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import structlog

from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store
from store.schema.keys import Keys
from store.schema.records import AuditEvent, decode, encode
from store.turns import in_turns

log = structlog.get_logger(__name__)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [high + low for high in _CROCKFORD for low in _CROCKFORD]
_RANDOM_BITS = 80
_TIME_CHARS = 10  # of a ULID
PAGE = 5000  # events read, or removed, at once


class UlidGenerator:
    """Monotonic ULIDs. Not for several threads at once; `randbits(n)` gives n random bits."""

    def __init__(self, randbits: Callable[[int], int] = secrets.randbits) -> None:
        self._randbits = randbits
        self._last = 0

    def __call__(self, now: datetime) -> str:
        """Return a ULID for `now` that is greater than all earlier ones."""
        fresh = int(now.timestamp() * 1000) << _RANDOM_BITS | self._randbits(_RANDOM_BITS)
        in_order = fresh >> _RANDOM_BITS > self._last >> _RANDOM_BITS
        self._last = fresh if in_order else self._last + 1
        return "".join([_PAIRS[self._last >> shift & 1023] for shift in range(120, -1, -10)])


class Actor(NamedTuple):
    """The identity under which a person's changes are recorded. `name`: as the person claims; `uid`: on the machine
    where the command ran; `accessor`: of the Consul token, "" where there is none. The store verifies none of them, but
    only the holder of a token learns its accessor."""

    name: str
    uid: int
    accessor: str = ""


_generate = UlidGenerator()


def new_ulid(now: datetime | None = None) -> str:
    """Return a ULID, greater than every earlier one of this process."""
    return _generate(now or datetime.now(UTC))


def event_op(
    keys: Keys, event_type: str, details: dict[str, Any], *, actor: str | Actor, now: datetime | None = None
) -> Op:
    """Return the operation that records an event; add it to the transaction that makes the change.

    `event_type` in upper case as in REPLICATION_CONTROLLER_RETARGET; `details` names the RC concerned as "rc";
    `actor` is the farm, or the person, who did it.
    """
    at = (now or datetime.now(UTC)).astimezone(UTC)
    timestamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    event = AuditEvent(event_type=event_type, event_details=details, timestamp=timestamp, actor=str(actor))
    if isinstance(actor, Actor):
        accessor = actor.accessor or msgspec.UNSET
        event = msgspec.structs.replace(event, actor=actor.name, uid=actor.uid, accessor=accessor)
    return ops.put(keys.audit_event(at.date().isoformat(), new_ulid(at)), encode(event))


class Logged(NamedTuple):
    """An event and its key."""

    key: str
    event: AuditEvent


async def events(store: Store, keys: Keys, *, since: datetime | None = None, rc: str | None = None) -> list[AuditEvent]:
    """Return the events, oldest first, from `since` on and about one RC, if given."""
    return [one.event async for page in pages(store, keys, since=since, rc=rc) for one in page]


async def pages(
    store: Store,
    keys: Keys,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    rc: str | None = None,
    newest_first: bool = False,
) -> AsyncGenerator[list[Logged], None]:
    """Yield the events from `since` to before `until`, about one RC if given, some thousand at a time and in order.

    An event that can't be decoded is logged and left out.
    """
    # A ULID's time is that of its event, or later after a clock was set back.
    earliest = ""
    if since is not None:
        milliseconds = max(0, int(since.timestamp() * 1000))
        earliest = "".join(_CROCKFORD[milliseconds >> shift & 31] for shift in range(5 * _TIME_CHARS - 5, -1, -5))
    for day in sorted(await days(store, keys), reverse=newest_first):
        if not _overlaps(day, since, until):
            continue
        names = [
            name
            for name in await store.keys(f"{keys.audit}{day}/")
            if name.rpartition("/")[2][:_TIME_CHARS] >= earliest
        ]
        for prefix, _ in sorted(page_prefixes(f"{keys.audit}{day}/", names), reverse=newest_first):
            asked: list[Logged] = []
            async for entry in in_turns((await store.list(prefix)).entries):
                if rc is not None and rc.encode() not in entry.value:
                    continue  # not worth decoding
                one = _decoded(entry)
                if one is not None and _is_asked_for(one.event, since, until, rc):
                    asked.append(one)
            yield asked[::-1] if newest_first else asked


async def days(store: Store, keys: Keys) -> list[str]:
    """Return the days that have events, as yyyy-mm-dd, in order."""
    names = await store.keys(keys.audit, separator="/")
    return [keys.parse_audit(name).day for name in names if name.endswith("/")]


def page_prefixes(prefix: str, names: Sequence[str], most: int = PAGE) -> Iterator[tuple[str, int]]:
    """Yield the shortest prefixes, from `prefix` on, that each cover at most `most` of the sorted names under it, and
    together all of them, in order, each with the number of names; a name that begins others is covered with them."""
    if len(names) <= most or len(prefix) >= len(names[0]):
        if names:
            yield prefix, len(names)
        return
    start = 0
    while start < len(names):
        longer = names[start][: len(prefix) + 1]
        end = bisect_right(names, longer, lo=start, key=lambda name: name[: len(longer)])
        yield from page_prefixes(longer, names[start:end], most)
        start = end


def _overlaps(day: str, since: datetime | None, until: datetime | None) -> bool:
    """Return whether events of that day may match; a clock may have been a day off."""
    try:
        date = datetime.fromisoformat(day).date()
    except ValueError:
        return False  # no day of ours
    if since is not None and date < since.astimezone(UTC).date():
        return False
    return until is None or date <= until.astimezone(UTC).date()


def _decoded(entry: Entry) -> Logged | None:
    try:
        event = decode(AuditEvent, entry.key, entry.value)
        _time(event)
    except BadRecord as error:
        log.warning("Skipped an audit event that can't be read", key=error.key, reason=error.reason)
    except (ValueError, OverflowError) as error:
        log.warning("Skipped an audit event that can't be read", key=entry.key, reason=f"timestamp: {error}")
    else:
        return Logged(entry.key, event)
    return None


def _is_asked_for(event: AuditEvent, since: datetime | None, until: datetime | None, rc: str | None) -> bool:
    if rc is not None and event.event_details.get("rc") != rc:
        return False
    return (since is None or _time(event) >= since) and (until is None or _time(event) < until)


def _time(event: AuditEvent) -> datetime:
    return datetime.fromisoformat(event.timestamp).astimezone(UTC)
