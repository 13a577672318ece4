"""SessionKeeper: holds a session for as long as the process lives, and knows when the session is not reliable.

The model: one task (`run`) creates a session and renews it at a third of its lease. Other tasks read `session_id` right
before they act. It is the id only until a deadline that lies `margin` before the earliest moment at which the store
may end the lease, counted from when the last successful renewal was *sent*. Every read compares the clock, so a process
that was stopped and continued finds None at once, before any timer fires or any answer arrives.

A missing answer is not a loss: the keeper tries again, with a bounded back-off, and the deadline decides. It resumes
the same session if that has survived; only an answer of the store ends the session.

A session often survives: while Consul elects a leader no lease ends, and a check on the local Consul agent that is
still passed keeps its session. Therefore the keeper tries twice per lease for `SURVIVAL` seconds after the last good
renewal, and backs off only then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Literal

import structlog

from store.kv.protocol import Denied, Session, SessionExpired, SessionSpec, Store, StoreError, Unavailable
from store.timing import Backoff

log = structlog.get_logger(__name__)

FIRST_BACKOFF = 0.2  # seconds
MAX_BACKOFF = 5.0  # seconds
SHORTEST_PAUSE = 0.1  # seconds between attempts to renew a session that may survive
SURVIVAL = 30.0  # seconds after a good renewal for which it is worth keeping up the pace; elections take up to 15 s
TICK = 1e-6  # seconds; a loop may fire a timer early by its clock's resolution, and must not be asked in a busy loop
END_TIMEOUT = 2.0  # seconds that an orderly exit may spend on destroying the session

State = Literal["seeking", "held", "fenced"]


class SessionKeeper:
    """Keeps one session of `spec` alive.

    `margin`: seconds before the end of the lease at which we stop relying on it; by default a sixth of the lease.
    `renew_interval`: seconds; by default a third. Raises `ValueError` for timings that can't work together.
    `clock`: seconds, monotonic; must advance as the event loop's does.

    For metrics and messages: `state`, `lease` (seconds, of the present session), `renewals` and `losses` (since the
    start), `last_error` and `note` (why the lease is longer than requested), both "" when they do not apply.
    """

    def __init__(
        self,
        store: Store,
        spec: SessionSpec,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        margin: float | None = None,
        renew_interval: float | None = None,
    ) -> None:
        self.spec = spec
        self.renewals = self.losses = 0
        self.last_error = ""
        self._store, self._clock = store, clock
        self._rng = rng or random.Random()
        self._margin, self._renew_interval = margin, renew_interval
        self._session: Session | None = None
        self._renewed_at = 0.0  # when the last good renewal was sent
        self._changed = asyncio.Event()
        interval, margin = self._interval(self.lease), self._safety(self.lease)
        if min(self.lease, interval, margin) <= 0:
            raise ValueError(f"session {spec.name}: lease, renewal interval and margin must be above 0 seconds")
        if interval + margin >= self.lease:
            raise ValueError(
                f"session {spec.name}: renewal interval ({interval:g} s) plus margin ({margin:g} s) must be below the "
                f"lease ({self.lease:g} s: the lower of ttl and check_ttl), else it would be given up between them"
            )

    @property
    def session_id(self) -> str | None:
        """The session's id while it is safe to act under it, else None."""
        if self._session is not None and self._clock() < self._deadline():
            return self._session.id
        return None

    @property
    def state(self) -> State:
        """The keeper's state. `fenced`: there is a session, but it may have ended; nothing may be done under it."""
        if self._session is None:
            return "seeking"
        return "fenced" if self.session_id is None else "held"

    @property
    def lease(self) -> float:
        if self._session is not None:
            return self._session.lease
        return self.spec.ttl if self.spec.check_ttl is None else min(self.spec.ttl, self.spec.check_ttl)

    @property
    def note(self) -> str:
        return "" if self._session is None else self._session.note

    async def held(self) -> str:
        """Wait until a session is held. Return its id."""
        while (session_id := self.session_id) is None:
            await self._changed.wait()
        return session_id

    async def lost(self, session_id: str) -> None:
        """Wait until `session_id` is not held any more: its deadline has passed, or the store has ended it."""
        while self.session_id == session_id:
            try:
                async with asyncio.timeout(max(TICK, self._deadline() - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                continue  # renewed in time, or lost: the loop's condition decides

    async def run(self) -> None:
        """Hold a session until cancelled, then destroy it. Raises `Invalid` for a spec that the store can't take."""
        try:
            while True:
                await self._create()
                await self._keep()
        finally:
            await self._end()

    async def _create(self) -> None:
        backoff = Backoff(FIRST_BACKOFF, MAX_BACKOFF, rng=self._rng)
        while True:
            sent = self._clock()
            try:
                session = await self._store.create_session(self.spec)
            except (Unavailable, Denied) as error:
                self._failed("Could not create a session", error)
                await asyncio.sleep(backoff.pause())
                continue
            self._session, self._renewed_at, self.last_error = session, sent, ""
            self._announce()
            log.info("Session created", session=session.id, holder=self.spec.name, lease=session.lease)
            if session.note:
                log.warning("The session's lease is longer than requested", session=session.id, reason=session.note)
            return

    async def _keep(self) -> None:
        """Renew the session until the store reports that it has ended."""
        assert self._session is not None
        session_id, backoff = self._session.id, Backoff(FIRST_BACKOFF, MAX_BACKOFF, rng=self._rng)
        retry_in: float | None = None
        while True:
            due_in = self._renewed_at + self._interval(self.lease) - self._clock()
            await asyncio.sleep(max(0.0, due_in) if retry_in is None else retry_in)
            sent = self._clock()
            try:
                async with asyncio.timeout(self._interval(self.lease)):
                    await self._store.renew_session(session_id)
            except SessionExpired as error:
                log.warning("Session lost", session=session_id, holder=self.spec.name, error=str(error))
                self.losses += 1
                self.last_error = str(error)
                self._session = None
                self._announce()
                return
            except (Unavailable, Denied, TimeoutError) as error:
                self._failed("Could not renew the session", error)
                retry_in = backoff.pause()
                if self.session_id is not None:  # the lease can still be saved
                    retry_in = min(retry_in, self._interval(self.lease) / 4)
                elif (now := self._clock()) < self._renewed_at + SURVIVAL:  # the session may have survived
                    pace = self._rng.uniform(0.8, 1.0) * self.lease / 2
                    retry_in = min(retry_in, max(SHORTEST_PAUSE, sent + pace - now))
            else:
                backoff.reset()
                was_fenced = self.session_id is None
                self._renewed_at, self.last_error = sent, ""
                self.renewals += 1
                if was_fenced:
                    self._announce()
                retry_in = None

    async def _end(self) -> None:
        """Destroy the session, if there is one, even when this task is cancelled again at the same time."""
        if self._session is None:
            return
        session_id, self._session = self._session.id, None
        self._announce()
        task = asyncio.create_task(asyncio.wait_for(self._store.destroy_session(session_id), END_TIMEOUT))
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # bounded by END_TIMEOUT; the first cancellation continues afterwards
        try:
            task.result()
        except (StoreError, TimeoutError) as error:
            log.warning("Could not destroy the session; its lease will expire", session=session_id, error=_text(error))

    def _failed(self, event: str, error: Exception) -> None:
        if not self.last_error:
            log.warning(event, holder=self.spec.name, error=_text(error))
        self.last_error = _text(error)

    def _announce(self) -> None:
        """Wake the tasks that wait for a session, or for its end."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _deadline(self) -> float:
        return self._renewed_at + self.lease - self._safety(self.lease)

    def _interval(self, lease: float) -> float:
        return lease / 3 if self._renew_interval is None else self._renew_interval

    def _safety(self, lease: float) -> float:
        return lease / 6 if self._margin is None else self._margin


def _text(error: Exception) -> str:
    return str(error) or "no answer in time"
