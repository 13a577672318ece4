"""What one occurrence becomes: an Event of its own, one more count of an Event that exists, or nothing.

The rules are those of client-go's EventCorrelator, in its order.

1. *Aggregate*: from the 10th distinct message about one object with one type and reason, new messages go into one
   combined event. Ten minutes without such an occurrence end that.
2. *Dedup*: an occurrence that is equal to an earlier one, message included, raises that one's count.
3. *Spam filter*: each object has 25 occurrences at once, then one each five minutes. More are counted, but not told.

Everything is kept for the 4096 latest of its kind, so memory is bounded however many objects there are. Nothing here
does I/O or looks at a clock: the caller passes `now`, in Unix seconds. A clock that is set back only delays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from store.kube.objects import Object

CAPACITY = 4096  # series, groups and budgets that are remembered, each
SINGLE_MESSAGES = 9  # distinct messages that get an event of their own
QUIET_GAP = 600.0  # seconds
COMBINED = "(combined from similar events): "  # as client-go and kubectl's users know it
SPAM_BURST = 25.0
SPAM_INTERVAL = 300.0  # seconds until one more occurrence may be told

_NAME_LIMIT = 253 - 17  # a DNS subdomain, without the dot and the sixteen digits that we append
_MESSAGE_LIMIT = 1024  # characters; what `events.k8s.io/v1` takes

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Reference(NamedTuple):
    """The object that an event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    @classmethod
    def to(cls, obj: Object, api_version: str, kind: str) -> Reference:
        """To an object that may be incomplete: telling what happened to it must not fail on it."""
        metadata = obj.get("metadata") or {}
        namespace, name, uid = (str(metadata.get(field) or "") for field in ("namespace", "name", "uid"))
        return cls(api_version, kind, namespace, name, uid)


@dataclass(slots=True, eq=False)
class Series:
    """One Event object: how often it occurred, and as of which count the API server knows it (0: not at all)."""

    name: str
    about: Reference
    type: str
    reason: str
    message: str
    first: float
    last: float
    count: int = 0
    stored: int = 0


class Correlator:
    """Assigns each occurrence to its series. `skipped`: how many the spam filter held back."""

    def __init__(self) -> None:
        self.skipped = 0
        self._groups: _Latest[Hashable, _Group] = _Latest()
        self._series: _Latest[Hashable, Series] = _Latest()
        self._budgets: _Latest[Reference, _Budget] = _Latest()
        self._last_serial = 0

    def observe(self, about: Reference, event_type: str, reason: str, message: str, now: float) -> Series | None:
        """The series that this occurrence was counted in, or None when nobody is to be told."""
        group = (about, event_type, reason)
        if len(message) > _MESSAGE_LIMIT:
            message = message[: _MESSAGE_LIMIT - 1] + "…"
        is_single = self._groups.get(group, _Group).is_single(message, now)
        text = message if is_single else (COMBINED + message)[:_MESSAGE_LIMIT]
        series = self._series.get(
            (group, message if is_single else None),
            lambda: Series(self._new_name(about.name, now), about, event_type, reason, text, first=now, last=now),
        )
        series.count, series.last, series.message = series.count + 1, now, text
        if self._budgets.get(about, lambda: _Budget(updated=now)).take(now):
            return series
        self.skipped += 1
        return None

    def _new_name(self, name: str, now: float) -> str:
        """As client-go names events: the object's name and the nanosecond, here never one twice."""
        self._last_serial = max(self._last_serial + 1, int(now * 1e9))
        return f"{name[:_NAME_LIMIT].rstrip('.-')}.{self._last_serial:016x}"


@dataclass(slots=True)
class _Group:
    """Messages about one object that differ in nothing else."""

    messages: set[str] = field(default_factory=set)
    last: float = 0.0

    def is_single(self, message: str, now: float) -> bool:
        if now - self.last > QUIET_GAP:
            self.messages.clear()
        self.last = now
        if len(self.messages) < SINGLE_MESSAGES:
            self.messages.add(message)
        return message in self.messages


@dataclass(slots=True)
class _Budget:
    """A token bucket: what may still be told about one object."""

    updated: float
    tokens: float = SPAM_BURST

    def take(self, now: float) -> bool:
        self.tokens = min(SPAM_BURST, self.tokens + max(0.0, now - self.updated) / SPAM_INTERVAL)
        self.updated = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


class _Latest(Generic[K, V]):
    """A map that forgets what was not asked for the longest."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = make()
            if len(self._values) > CAPACITY:
                self._values.popitem(last=False)
        return self._values[key]
