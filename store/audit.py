"""The audit log: who changed what, written in the very transaction that it records.

An event is one key, `audit/<day>/<ulid>`. A ULID sorts by time; within one process each is greater than the one before,
even within a millisecond or after the clock was set back, so that listing a day gives its events in the order in which
this process wrote them. The event's `timestamp` is the wall clock as it was; the ULID's is only for the order.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from store import ops
from store.keys import Keys
from store.kv import Entry, Op, Store
from store.records import AuditEvent, BadRecord, decode, encode
from store.turns import in_turns

log = structlog.get_logger(__name__)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS = 80
_MOST_DAYS = 31  # further back, one listing of everything costs less than one per day


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


_generate = UlidGenerator()


def new_ulid(now: datetime | None = None) -> str:
    """A ULID, greater than every earlier one of this process."""
    return _generate(now or datetime.now(UTC))


def event_op(keys: Keys, event_type: str, details: dict[str, Any], *, actor: str, now: datetime | None = None) -> Op:
    """The operation that records an event; add it to the transaction that does what it says.

    `event_type` in upper case as in REPLICATION_CONTROLLER_RETARGET; `details` names the RC it is about as "rc";
    `actor` is the farm, or the user, who did it.
    """
    at = (now or datetime.now(UTC)).astimezone(UTC)
    timestamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    event = AuditEvent(event_type=event_type, event_details=details, timestamp=timestamp, actor=actor)
    return ops.put(keys.audit_event(_day(at), new_ulid(at)), encode(event))


async def events(
    store: Store, keys: Keys, *, since: datetime | None = None, rc: str | None = None, now: datetime | None = None
) -> list[AuditEvent]:
    """The events, oldest first: those from `since` on, and those about one RC, if asked for.

    An event that can't be decoded is logged and left out.
    """
    found: list[AuditEvent] = []
    for prefix in _prefixes(keys, since, now or datetime.now(UTC)):
        listing = await store.list(prefix)
        async for entry in in_turns(listing.entries):
            event = _decoded(entry)
            if event is not None and _is_asked_for(event, since, rc):
                found.append(event)
    return found


def _prefixes(keys: Keys, since: datetime | None, now: datetime) -> list[str]:
    """What to list: each day from `since` to one past today (clocks differ), or the whole log."""
    if since is None:
        return [keys.audit]
    first = since.astimezone(UTC).date()
    days = (now.astimezone(UTC).date() - first).days + 2
    if days > _MOST_DAYS:
        return [keys.audit]
    return [f"{keys.audit}{first + timedelta(days=number)}/" for number in range(days)]


def _decoded(entry: Entry) -> AuditEvent | None:
    try:
        event = decode(AuditEvent, entry.key, entry.value)
        _time(event)
    except BadRecord as error:
        log.warning("Skipped an audit event that can't be read", key=error.key, reason=error.reason)
    except ValueError as error:
        log.warning("Skipped an audit event that can't be read", key=entry.key, reason=f"timestamp: {error}")
    else:
        return event
    return None


def _is_asked_for(event: AuditEvent, since: datetime | None, rc: str | None) -> bool:
    if rc is not None and event.event_details.get("rc") != rc:
        return False
    return since is None or _time(event) >= since


def _time(event: AuditEvent) -> datetime:
    return datetime.fromisoformat(event.timestamp).astimezone(UTC)


def _day(at: datetime) -> str:
    return at.date().isoformat()
