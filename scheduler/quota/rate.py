"""Rate limits by the generic cell rate algorithm (GCRA, ITU-T I.371): one number per limit, and no clock.

The number is the theoretical arrival time of the next grant, in seconds since the epoch. It is kept in a record that is
changed by compare-and-swap, so that any number of processes share one exact limit.

The number can be far in the future only if a clock was set back since it was written. Such a number is ignored, because
it would refuse every grant until the clock reaches that time again.
"""

from __future__ import annotations

from store.schema.quota import Rate

CLOCKS_APART = 60.0  # seconds by which the clocks of two processes may differ


def due(rate: Rate, tat: float, now: float) -> float:
    """Return the earliest time at which the limit permits the next grant."""
    return _known(rate, tat, now) - (_burst(rate) - 1) * _interval(rate)


def taken(rate: Rate, tat: float, now: float) -> float:
    """Return the theoretical arrival time after a grant at `now`, which `due` has permitted."""
    return max(_known(rate, tat, now), now) + _interval(rate)


def _known(rate: Rate, tat: float, now: float) -> float:
    """Return the arrival time, or 0 if none that a grant has left can be so late."""
    return tat if tat <= now + _burst(rate) * _interval(rate) + CLOCKS_APART else 0.0


def _interval(rate: Rate) -> float:
    return rate.per / rate.count


def _burst(rate: Rate) -> int:
    return rate.count if rate.burst is None else rate.burst
