"""Small texts: times, counts, labels, amounts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from store.schema.records import Capacity, Reason

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def ago(timestamp: str, now: datetime | None = None) -> str:
    """Return `3m ago` for an RFC 3339 time, "-" for "", and any other text unchanged."""
    if not timestamp:
        return "-"
    try:
        at = datetime.fromisoformat(timestamp)
    except ValueError:
        return timestamp
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    if seconds < 1:
        return "now"
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    return f"{int(seconds // size)}{unit} ago"


def ahead(timestamp: str, now: datetime | None = None) -> str:
    """Return `in 20s` for a time in the future, else ""."""
    try:
        at = datetime.fromisoformat(timestamp)
    except ValueError:
        return ""
    left = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - (now or datetime.now(UTC))).total_seconds()
    return f"in {seconds(round(left))}" if left >= 1 else ""


def times(reason: Reason) -> str:
    """Return ` (since 40s ago, acted on in 20s)`: when the reason was noticed, and when the owner acts on it."""
    parts = [f"since {ago(reason.since)}"] if reason.since else []
    parts += [f"acted on {left}"] if (left := ahead(reason.until)) else []
    return f" ({', '.join(parts)})" if parts else ""


def distinct(phrases: Iterable[str]) -> list[str]:
    """Return the phrases in order, without empty ones and without those contained in another."""
    given = [phrase for phrase in phrases if phrase]
    found: list[str] = []
    for phrase in sorted(given, key=len, reverse=True):
        if not any(phrase in other for other in found):
            found.append(phrase)
    return sorted(found, key=given.index)


def seconds(duration: float) -> str:
    """Return `0.4s`, `12s` or `3m 5s`."""
    if duration < 10:
        return f"{duration:.1f}s"
    minutes, rest = divmod(round(duration), 60)
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return `1 pod` or `3 pods`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def placed(number: int, desired: int) -> str:
    """Return `2 of 3 placed`, or `3 placed, 1 desired` while pods are still to be removed."""
    return f"{number} of {desired} placed" if number <= desired else f"{number} placed, {desired} desired"


def labels(pairs: Mapping[str, str]) -> str:
    """Return `a=1,b=2`, or "-" for none."""
    return ",".join(f"{key}={value}" for key, value in sorted(pairs.items())) or "-"


def capacity(amount: Capacity) -> str:
    """Return `4 cores, 8.0 GiB, 2 gpu`, or "-" for nothing."""
    parts = []
    if amount.cpu:
        parts.append(f"{amount.cpu / 1000:g} {'core' if amount.cpu == 1000 else 'cores'}")
    if amount.memory:
        parts.append(
            f"{amount.memory / 2**30:.1f} GiB" if amount.memory >= 2**30 else f"{amount.memory / 2**20:.0f} MiB"
        )
    parts += [f"{number} {kind}" for kind, number in sorted(amount.devices.items())]
    return ", ".join(parts) or "-"
