"""The audit log: who changed what, written in the very transaction that it records.

The log may be large, so it is read by pages: the keys of one day, cut into prefixes that hold at most `PAGE` of them.

An event is one key, `audit/<day>/<ulid>`. A ULID sorts by time; within one process each is greater than the one before,
even within a millisecond or after the clock was set back, so that listing a day gives its events in the order in which
this process wrote them. The event's `timestamp` is the wall clock as it was; the ULID's is only for the order.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import structlog

from store import ops
from store.keys import Keys
from store.kv import Entry, Op, Store
from store.records import AuditEvent, BadRecord, decode, encode
from store.turns import in_turns

log = structlog.get_logger(__name__)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80
_TIME_CHARS = 10  # of a ULID
PAGE = 5000  # events read, or removed, at once


class UlidGenerator:
    """Monotonic ULIDs. Not for several threads at once; `randbits(n)` gives n random bits."""

    def __init__(self, randbits: Callable[[int], int] = secrets.randbits) -> None:
        self._randbits = randbits
        self._last = 0

    def __call__(self, now: datetime) -> str:
        """A ULID for `now` that is greater than every one before it."""
        fresh = int(now.timestamp() * 1000) << _RANDOM_BITS | self._randbits(_RANDOM_BITS)
        in_order = fresh >> _RANDOM_BITS > self._last >> _RANDOM_BITS
        self._last = fresh if in_order else self._last + 1
        return "".join(_CROCKFORD[self._last >> shift & 31] for shift in range(125, -1, -5))


class Actor(NamedTuple):
    """Who a person's changes are recorded as. `name`: as the person claims; `uid`: on the machine where the command
    ran; `accessor`: of the Consul token, "" where there is none. The name and the uid are the writer's word; the
    accessor is, too, but only its token's holder learns it."""

    name: str
    uid: int
    accessor: str = ""


_generate = UlidGenerator()


def new_ulid(now: datetime | None = None) -> str:
    """A ULID, greater than every earlier one of this process."""
    return _generate(now or datetime.now(UTC))


def event_op(
    keys: Keys, event_type: str, details: dict[str, Any], *, actor: str | Actor, now: datetime | None = None
) -> Op:
    """The operation that records an event; add it to the transaction that does what it says.

    `event_type` in upper case as in REPLICATION_CONTROLLER_RETARGET; `details` names the RC it is about as "rc";
    `actor` is the farm, or the person, who did it.
    """
    at = (now or datetime.now(UTC)).astimezone(UTC)
    timestamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    event = AuditEvent(event_type=event_type, event_details=details, timestamp=timestamp, actor=str(actor))
    if isinstance(actor, Actor):
        accessor = actor.accessor or msgspec.UNSET
        event = msgspec.structs.replace(event, actor=actor.name, uid=actor.uid, accessor=accessor)
    return ops.put(keys.audit_event(_day(at), new_ulid(at)), encode(event))


class Logged(NamedTuple):
    """An event and the key that it is kept under."""

    key: str
    event: AuditEvent


async def events(store: Store, keys: Keys, *, since: datetime | None = None, rc: str | None = None) -> list[AuditEvent]:
    """The events, oldest first: those from `since` on, and those about one RC, if asked for."""
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
    """Yield the events from `since` to before `until`, about one RC if asked for, some thousand at a time and in order.

    An event that can't be decoded is logged and left out.
    """
    for day in sorted(await days(store, keys), reverse=newest_first):
        if not _overlaps(day, since, until):
            continue
        names = [
            name for name in await store.keys(f"{keys.audit}{day}/") if since is None or _may_be_since(name, since)
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
    """The days that have events, as yyyy-mm-dd, in order."""
    names = await store.keys(keys.audit, separator="/")
    return [name.removeprefix(keys.audit)[:-1] for name in names if name.endswith("/")]


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
    """Whether events of that day may be asked for; a clock may have been a day off."""
    try:
        date = datetime.fromisoformat(day).date()
    except ValueError:
        return False  # no day of ours
    if since is not None and date < since.astimezone(UTC).date():
        return False
    return until is None or date <= until.astimezone(UTC).date()


def _may_be_since(name: str, since: datetime) -> bool:
    """Whether the time in a key's ULID lets its event be asked for: it is that of the event, or later after a clock was
    set back."""
    return name.rpartition("/")[2][:_TIME_CHARS] >= _encoded_time(since)


def _encoded_time(at: datetime) -> str:
    milliseconds = max(0, int(at.timestamp() * 1000))
    return "".join(_CROCKFORD[milliseconds >> shift & 31] for shift in range(5 * _TIME_CHARS - 5, -1, -5))


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


def _day(at: datetime) -> str:
    return at.date().isoformat()
