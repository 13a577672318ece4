"""How long the first event of a gang's pod waits for the others.

What happens to the pods of a gang happens together, and each sync costs a write of the whole status. So an event waits
for as long as a few writes take at present: next to nothing where the API server is quick, and long enough to take
its siblings along where it is busy, which then has less to do.
"""

from __future__ import annotations

LEAST = 0.05  # seconds
MOST = 1.0  # seconds
WRITES = 6.0  # how many writes' time
_WEIGHT = 0.1  # of the newest write in the average


class Patience:
    """Learns from writes."""

    def __init__(self) -> None:
        self._average = 0.0

    def observe(self, seconds: float) -> None:
        """A write took so long."""
        self._average += _WEIGHT * (seconds - self._average)

    @property
    def seconds(self) -> float:
        """How long an event may wait now."""
        return min(MOST, max(LEAST, WRITES * self._average))
