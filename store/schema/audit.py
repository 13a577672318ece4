"""The audit log (who changed what, written in the very transaction that it records) and the mutation lock of an RC (who
is changing it).

The log may be large, so it is read in pages: the keys of one day, cut into prefixes that hold at most `PAGE` of them.

An event is one key, `audit/<day>/<ulid>`. A ULID sorts by time; within one process each is greater than the one before,
even within a millisecond or after the clock was set back, so that listing a day gives its events in the order in which
this process wrote them. The event's `timestamp` is the wall clock's time; the time in the ULID only serves the order.

The holder of the mutation lock (p2's `LockForMutation`) makes a change that no other may interleave with. A process
that edits an RC's spec adds the operation of `unlocked` to its transaction: the store then refuses the edit when the
lock is taken before it commits. A process that needs more than one transaction holds the lock, under a session of its
own. A holder whose session ends has lost the lock, and its next edit is refused.

A person who locks an RC (`rcfarm rc lock`) has no process that could keep a session alive. That lock is a key of its
own, which stays until it is removed. Each excludes the other: neither is taken while the other is held, and an edit
checks both in its transaction. The lock of a person refuses everybody's edits, also those of the person.
"""

from __future__ import annotations

import contextlib
import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import structlog

from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store, TxnConflict
from store.schema.keys import Keys
from store.schema.records import AuditEvent, Mutation, PersonsLock, decode, encode, utc_now
from store.timing import in_turns

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
        milliseconds = int(now.timestamp() * 1000)
        if milliseconds > self._last >> _RANDOM_BITS:
            self._last = milliseconds << _RANDOM_BITS | self._randbits(_RANDOM_BITS)
        else:
            self._last += 1
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


def ulid_time(at: datetime) -> str:
    """Return the first ten characters of the ULIDs of that millisecond: no earlier ULID is greater."""
    milliseconds = max(0, int(at.timestamp() * 1000))
    return "".join(_CROCKFORD[milliseconds >> shift & 31] for shift in range(5 * _TIME_CHARS - 5, -1, -5))


def event_op(
    keys: Keys, event_type: str, details: dict[str, Any], *, actor: str | Actor, now: datetime | None = None
) -> Op:
    """Return the operation that records an event; add it to the transaction that makes the change.

    `event_type` in upper case as in REPLICATION_CONTROLLER_RETARGET; `details` names the RC concerned as "rc";
    `actor` is the farm, or the person, who did it.
    """
    at = now.astimezone(UTC) if now else datetime.now(UTC)
    timestamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    event = AuditEvent(event_type=event_type, event_details=details, timestamp=timestamp, actor=str(actor))
    if isinstance(actor, Actor):
        accessor = actor.accessor or msgspec.UNSET
        event = msgspec.structs.replace(event, actor=actor.name, uid=actor.uid, accessor=accessor)
    return ops.put(keys.audit_event(timestamp[: len("yyyy-mm-dd")], new_ulid(at)), encode(event))


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
    earliest = ulid_time(since) if since is not None else ""
    for day in sorted(await days(store, keys), reverse=newest_first):
        try:
            date = datetime.fromisoformat(day).date()
        except ValueError:
            continue  # no day of ours
        if since is not None and date < since.astimezone(UTC).date():
            continue
        if until is not None and date > until.astimezone(UTC).date():
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
                try:
                    event = decode(AuditEvent, entry.key, entry.value)
                    at = datetime.fromisoformat(event.timestamp).astimezone(UTC)
                except (BadRecord, ValueError, OverflowError) as error:
                    reason = error.reason if isinstance(error, BadRecord) else f"timestamp: {error}"
                    log.warning("Skipped an audit event that can't be read", key=entry.key, reason=reason)
                    continue
                is_about = rc is None or event.event_details.get("rc") == rc
                if is_about and (since is None or at >= since) and (until is None or at < until):
                    asked.append(Logged(entry.key, event))
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


class ChangeRefused(RcfarmError):
    """The RC can't be changed now; the message says why, and what to do."""


async def unlocked(store: Store, keys: Keys, rc_id: str, session: str = "") -> list[Op]:
    """Return the operations that refuse a transaction when, as it commits, another process or a person holds the lock,
    or when `session`, where it is given, does not hold it. Raises `ChangeRefused` when that is already the case."""
    key, by_person = keys.mutation(rc_id), keys.lock(rc_id)
    entry = await store.get(key, consistent=True)
    if session:
        if entry is None or entry.session != session:
            raise ChangeRefused(f"rc {rc_id}: the mutation lock was lost; take it again, and look at the rc again")
        return [ops.check_session(key, session)]
    if (standing := await store.get(by_person, consistent=True)) is not None:
        raise ChangeRefused(
            f"rc {rc_id} is locked by {locked_by(standing)}; `rcfarm rc unlock {rc_id}` removes the lock"
        )
    free = ops.check_not_exists(by_person)
    if entry is None:
        return [free, ops.check_not_exists(key)]
    if entry.session:
        try:
            mutation = decode(Mutation, key, entry.value)
            holder = f"{mutation.holder} ({mutation.reason})" if mutation.reason else mutation.holder
        except BadRecord:
            holder = f"a process whose record can't be read ({key})"
        raise ChangeRefused(f"rc {rc_id} is being changed by {holder}; try again when that is done")
    return [free, ops.check_index(key, entry.modify_index)]


def locked_by(entry: Entry) -> str:
    """Return who holds the lock of a person, and why, in words."""
    try:
        lock = decode(PersonsLock, entry.key, entry.value)
    except BadRecord:
        return f"a person whose record can't be read ({entry.key})"
    return f"{lock.holder} ({lock.reason})" if lock.reason else lock.holder


@contextlib.asynccontextmanager
async def mutation_lock(
    store: Store, keys: Keys, rc_id: str, session: str, *, holder: str, reason: str
) -> AsyncIterator[None]:
    """Hold the lock under `session`, which the caller keeps alive; the end of the session also releases the lock.

    Raises `ChangeRefused` while another process holds the lock, and when there is no such RC.
    """
    key = keys.mutation(rc_id)
    taking = [
        ops.get(keys.spec(rc_id)),  # a lock creates its key: refused where there is no RC
        *await unlocked(store, keys, rc_id),
        ops.lock(key, encode(Mutation(holder, reason, utc_now())), session),
    ]
    try:
        await store.txn(taking)
    except TxnConflict as error:
        raise ChangeRefused(f"rc {rc_id} is gone, or another process has just locked it; look again") from error
    try:
        yield
    finally:
        with contextlib.suppress(TxnConflict):  # lost already
            await store.txn([ops.check_session(key, session), ops.delete(key)])
