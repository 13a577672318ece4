"""Leases and lock-delays, which expire exactly when they are due.

One timer is armed for the earliest deadline; nothing is polled. A renewal only moves a deadline: when the timer finds
that a lease was renewed in the meantime, it is armed again for the new deadline. Times come from one injected clock
(by default the event loop's, so that everything works on virtual time). Everything due is also ended before
each request is answered (`expire_due`), so that a late timer never makes an ended lease look alive.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

RETRY_SECONDS = 1.0
_TICK = 0.001  # seconds; timers coarser than the clock may fire early, which must not cause a busy loop


class Leases:
    """Deadlines of sessions.

    `expire(session_id)` is called when a lease is due; it returns False when the session can't be ended now, and is
    called again after `RETRY_SECONDS`.
    """

    def __init__(self, expire: Callable[[str], bool], clock: Callable[[], float] | None = None) -> None:
        self._expire = expire
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._deadlines: dict[str, float] = {}
        self._queue: list[tuple[float, str]] = []
        self._queued_for: dict[str, float] = {}
        self._unstarted: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0

    def now(self) -> float:
        """Return the seconds on the clock of the leases."""
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def restore(self, session_id: str, seconds: float) -> None:
        """Restore a lease from before a restart; its full time starts with the first request."""
        self._seconds[session_id] = seconds
        self._unstarted.append(session_id)

    def start(self, session_id: str, seconds: float) -> None:
        """Start a lease that ends `seconds` from now unless it is renewed."""
        self._seconds[session_id] = seconds
        self._deadlines[session_id] = self.now() + seconds
        self._enqueue(session_id, self._deadlines[session_id])
        self._arm()

    def renew(self, session_id: str) -> None:
        """Start the lease's time again; nothing happens for a session without one."""
        if session_id in self._deadlines:
            self._deadlines[session_id] = self.now() + self._seconds[session_id]

    def drop(self, session_id: str) -> None:
        """Forget the lease of a session that ended for another reason."""
        self._seconds.pop(session_id, None)
        self._deadlines.pop(session_id, None)
        self._queued_for.pop(session_id, None)

    def expire_due(self) -> None:
        """End every lease that is due."""
        while self._unstarted:
            session_id = self._unstarted.pop()
            self.start(session_id, self._seconds[session_id])
        if not self._queue:
            return
        now = self.now()
        while self._queue and self._queue[0][0] <= now:
            queued_for, session_id = heapq.heappop(self._queue)
            if self._queued_for.get(session_id) != queued_for:
                continue
            if (deadline := self._deadlines[session_id]) > now:
                self._enqueue(session_id, deadline)
            elif self._expire(session_id):
                self.drop(session_id)
            else:
                self._enqueue(session_id, now + RETRY_SECONDS)

    def is_due(self, session_id: str) -> bool:
        """Return whether the lease has expired, although its session could not be ended yet."""
        deadline = self._deadlines.get(session_id)
        return deadline is not None and deadline <= self.now()

    def close(self) -> None:
        """Stop the timer; no lease ends any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _enqueue(self, session_id: str, at: float) -> None:
        self._queued_for[session_id] = at
        heapq.heappush(self._queue, (at, session_id))

    def _arm(self) -> None:
        if not self._queue:
            return
        earliest = self._queue[0][0]
        if self._timer is not None:
            if self._armed_for <= earliest:
                return
            self._timer.cancel()
        self._armed_for = earliest
        self._timer = asyncio.get_running_loop().call_later(max(_TICK, earliest - self.now()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.expire_due()
        self._arm()


class LockDelays:
    """Keys that were freed by the end of a session and must not be locked for a while."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: dict[str, float] = {}

    def add(self, key: str, seconds: float) -> None:
        """Refuse locks on `key` for `seconds`."""
        self._until[key] = self._now() + seconds

    def delays(self, key: str) -> bool:
        """Return whether `key` must not be locked yet."""
        until = self._until.get(key)
        if until is None:
            return False
        if until > self._now():
            return True
        del self._until[key]
        return False
