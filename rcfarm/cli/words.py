"""Small texts: times, counts, labels, amounts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from store.records import Capacity

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


def ago(timestamp: str, now: datetime | None = None) -> str:
    """`3m ago` for an RFC 3339 time; "-" for none, and the text itself when it is not a time."""
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


def seconds(duration: float) -> str:
    """`0.4s`, `12s`, `3m 5s`."""
    if duration < 10:
        return f"{duration:.1f}s"
    minutes, rest = divmod(round(duration), 60)
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 pod`, `3 pods`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def labels(pairs: Mapping[str, str]) -> str:
    """`a=1,b=2`, or "-" for none."""
    return ",".join(f"{key}={value}" for key, value in sorted(pairs.items())) or "-"


def capacity(amount: Capacity) -> str:
    """`4 cores, 8.0 GiB, 2 gpu`, or "-" for nothing."""
    parts = []
    if amount.cpu:
        parts.append(f"{amount.cpu / 1000:g} {'core' if amount.cpu == 1000 else 'cores'}")
    if amount.memory:
        parts.append(
            f"{amount.memory / 2**30:.1f} GiB" if amount.memory >= 2**30 else f"{amount.memory / 2**20:.0f} MiB"
        )
    parts += [f"{number} {kind}" for kind, number in sorted(amount.devices.items())]
    return ", ".join(parts) or "-"
