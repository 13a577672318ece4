"""One launchable kept as its restart policy says.

The model: `run` is one task that owns one process. It adopts or starts it, waits for its end, decides by the policy,
waits for the back-off, and starts it again. Cancelling `run` leaves the process running, which is how an agent stops
without its pods; `stop` ends the process, after `run` was cancelled. The record on disk is written before a process
runs and after it ended, so another agent can go on at any point.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from signal import Signals
from typing import Protocol

import msgspec
from structlog.typing import FilteringBoundLogger

from controllers.ratelimit import ExponentialRateLimiter
from rcfarm.agent.errors import AgentError, describe_os_error
from rcfarm.agent.plan import after_exit
from rcfarm.agent.process import ExitStatus, Identity, LaunchSpec, ProcessHandle, adopt, kill_remains, spawn
from rcfarm.agent.state import LaunchRecord
from store.manifest import Launchable
from store.records import Exit, Process, ProcessState


class SupervisorHost(Protocol):
    """The pod that a launchable belongs to."""

    def prepare(self, name: str) -> LaunchSpec:
        """How to start the launchable now. Raises `AgentError` or `OSError` when it can't be."""

    def save(self, name: str, record: LaunchRecord) -> None:
        """Keep the record on disk. Raises `OSError`."""

    def changed(self) -> None:
        """Something that others may want to know of has changed."""


class Backoff:
    """Delays between the starts of one process, in seconds; they begin anew once it ran for `reset`."""

    def __init__(self, base: float, cap: float, reset: float) -> None:
        self._limiter: ExponentialRateLimiter[str] = ExponentialRateLimiter(base, cap)
        self._reset = reset

    def delay(self, ran: float) -> float:
        """The delay after a process ran for `ran` seconds (0: it could not be started)."""
        if ran >= self._reset:
            self._limiter.forget("")
        return self._limiter.when("", 0.0)


class Supervisor:
    """One launchable. `record`: what an earlier agent left of it."""

    def __init__(
        self,
        name: str,
        launchable: Launchable,
        record: LaunchRecord,
        host: SupervisorHost,
        backoff: Backoff,
        *,
        log: FilteringBoundLogger,
        now: Callable[[], str],
    ) -> None:
        self.name = name
        self.record = record
        self._launchable = launchable
        self._host = host
        self._backoff = backoff
        self._log = log
        self._now = now
        self._handle: ProcessHandle | None = None
        self._state: ProcessState = record.outcome or "starting"
        self._reason = ""

    @property
    def process(self) -> Process:
        """The launchable as reality shows it."""
        return Process(
            state=self._state,
            pid=self._handle.pid if self._handle else None,
            started_at=self.record.started_at,
            restarts=self.record.restarts,
            last_exit=self.record.last_exit,
            reason=self._reason,
        )

    async def run(self) -> None:
        """Keep the process as the policy says; returns when it has ended for good. Cancelled, it leaves it running."""
        self._adopt()
        while not self.record.outcome:
            ran = 0.0
            if self._handle is None:
                self._start()
            if self._handle is not None:
                await self._handle.wait()
                ran = self._handle.age()
                self._ended(self._handle.reap())
            if not self.record.outcome:
                await self._back_off(ran)

    async def stop(self) -> None:
        """Stop the process as its manifest says. Call it only once `run` has ended."""
        if self._handle is None:
            return
        self._show("stopping")
        signal = Signals[self._launchable.stop_signal]
        status = await self._handle.terminate(signal, self._launchable.stop_timeout)
        self._handle = None
        self._save(msgspec.structs.replace(self.record, pid=0, last_exit=self._exit(status)))
        self._log.info("Process stopped", code=status.code, signal=status.signal)
        self._show("stopped")

    def release(self) -> None:
        """Forget the process; it goes on."""
        if self._handle is not None:
            self._handle.release()
            self._handle = None

    def _adopt(self) -> None:
        """Go on with what an earlier agent left."""
        identity = Identity(self.record.pid, self.record.start_time, self.record.boot_id)
        if identity.pid == 0:
            return
        self._handle = adopt(identity)
        if self._handle is None:
            kill_remains(identity)
            self._ended(ExitStatus(None))
        else:
            self._log.info("Process adopted", pid=identity.pid)
            self._show("running")

    def _start(self) -> None:
        try:
            gated = spawn(self._host.prepare(self.name))
            try:
                self._record_start(gated.handle.identity)
            except OSError:
                gated.abort()
                raise
        except AgentError as error:
            self._reason = str(error)
        except OSError as error:
            self._reason = describe_os_error(error, "the state directory")
        else:
            self._handle = gated.open()
            self._log.info("Process started", pid=self._handle.pid)
            self._show("running")

    def _record_start(self, identity: Identity) -> None:
        record = msgspec.structs.replace(
            self.record,
            pid=identity.pid,
            start_time=identity.start_time,
            boot_id=identity.boot_id,
            started_at=self._now(),
            restarts=self.record.restarts + bool(self.record.started_at),
        )
        self._host.save(self.name, record)
        self.record = record

    def _ended(self, status: ExitStatus) -> None:
        self._handle = None
        outcome = after_exit(self._launchable.restart, status)
        end = self._exit(status)
        self._save(msgspec.structs.replace(self.record, pid=0, last_exit=end, outcome=outcome))
        self._reason = end.words
        self._log.info("Process ended", code=status.code, signal=status.signal, outcome=outcome)
        if outcome:
            self._show(outcome, "" if outcome == "completed" else self._reason)

    def _save(self, record: LaunchRecord) -> None:
        """Keep the end of a process on disk. Unless that works, the next agent finds it out for itself."""
        self.record = record
        try:
            self._host.save(self.name, record)
        except OSError as error:
            self._log.warning("The end of a process can't be recorded", error=str(error))

    async def _back_off(self, ran: float) -> None:
        delay = self._backoff.delay(ran)
        self._show("backoff", self._reason)
        await asyncio.sleep(delay)

    def _exit(self, status: ExitStatus) -> Exit:
        return Exit(at=self._now(), code=status.code, signal=status.signal)

    def _show(self, state: ProcessState, reason: str = "") -> None:
        self._state, self._reason = state, reason
        self._host.changed()
