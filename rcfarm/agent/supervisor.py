"""The supervisor that keeps the process of one launchable running by its restart policy.

The model: `Supervisor.run` is one task that owns the process. It adopts or starts it, waits for its end, applies the
policy, waits for the back-off, and restarts it. Cancelling `run` leaves the process running, which is how an agent
stops without its pods; `stop` ends the process, after `run` was cancelled. The record on disk is written before a
process runs and after it ended, so another agent can take over at any point.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec
from structlog.typing import FilteringBoundLogger

from rcfarm.agent.cgroups import Group
from rcfarm.agent.errors import AgentError, describe_os_error
from rcfarm.agent.process import (
    ExitStatus,
    LaunchSpec,
    ProcessHandle,
    ProcessIdentity,
    adopt,
    end_group,
    kill_remains,
    recorded,
    spawn,
)
from rcfarm.agent.state import LaunchRecord
from store.kv.protocol import StoreError
from store.schema.manifest import Launchable
from store.schema.records import Exit, Process, ProcessState, Usage
from store.timing import Backoff

_OOM_KILL = 1.0  # seconds within which the kernel kills, after it has reported that memory ran out


class SupervisorHost(Protocol):
    """The pod that a launchable belongs to."""

    async def prepare(self, name: str) -> LaunchSpec:
        """Return the launch of the launchable. Raises `AgentError`, `StoreError` or `OSError` when it can't be started
        now."""

    def save(self, name: str, record: LaunchRecord) -> None:
        """Keep the record on disk. Raises `OSError`."""

    def exit_file(self, name: str) -> Path | None:
        """Return the `LaunchSpec.exit_file` of the launchable."""

    def cgroup(self, name: str) -> Group | None:
        """Return the `LaunchSpec.cgroup` of the launchable."""

    def changed(self) -> None:
        """Notify the pod that the launchable's state has changed."""


class Supervisor:
    """One launchable. `record`: the record of an earlier agent. `proven_after`: seconds of running that reset the
    back-off.
    """

    def __init__(
        self,
        name: str,
        launchable: Launchable,
        record: LaunchRecord,
        host: SupervisorHost,
        backoff: Backoff,
        *,
        proven_after: float,
        log: FilteringBoundLogger,
        now: Callable[[], str],
    ) -> None:
        self.name = name
        self.record = record
        self._launchable = launchable
        self._host = host
        self._backoff, self._proven_after = backoff, proven_after
        self._log = log
        self._now = now
        self._handle: ProcessHandle | None = None
        self._cgroup = host.cgroup(name)
        self._state: ProcessState = record.outcome or "starting"
        self._reason = ""
        self.usage: Usage | None = None

    @property
    def process(self) -> Process:
        """The launchable's state, as published in reality."""
        return Process(
            state=self._state,
            pid=self._handle.pid if self._handle else None,
            started_at=self.record.started_at,
            restarts=self.record.restarts,
            last_exit=self.record.last_exit,
            reason=self._reason,
            usage=self.usage if self._handle and self.usage and self.usage.at >= self.record.started_at else None,
        )

    async def run(self) -> None:
        """Run the process by its policy, until its outcome is final. A cancellation leaves the process running."""
        identity = ProcessIdentity(self.record.pid, self.record.start_time, self.record.boot_id)
        if identity.pid != 0:  # of an earlier agent: adopt it, or record its end
            self._handle = adopt(identity, self._cgroup)
            if self._handle is None:
                kill_remains(identity, self._cgroup)
                self._ended(ExitStatus(None))
            else:
                self._log.info("Process adopted", pid=identity.pid)
                self._show("running")
        while not self.record.outcome:
            ran = 0.0
            if self._handle is None:
                await self._cleared()
                await self._start()
            if self._handle is not None:
                with self._ended_whole(self._handle):
                    await self._handle.wait()
                ran = self._handle.age()
                self._ended(self._handle.reap())
            if not self.record.outcome:
                if ran >= self._proven_after:
                    self._backoff.reset()
                self._show("backoff", self._reason)
                await asyncio.sleep(self._backoff.pause())

    async def stop(self) -> None:
        """Stop the process as its manifest says, and all of its tree. Call it only once `run` has ended."""
        if self._handle is None:
            await self._cleared()
            return
        self._show("stopping")
        number = signal.Signals[self._launchable.stop_signal]
        status = await self._handle.terminate(number, self._launchable.stop_timeout, self._left)
        self._handle = None
        self._save(msgspec.structs.replace(self.record, pid=0, last_exit=self._exit(status)))
        self._log.info("Process stopped", code=status.code, signal=status.signal)
        self._show("stopped")

    def release(self) -> None:
        """Stop tracking the process; it keeps running."""
        if self._handle is not None:
            self._handle.release()
            self._handle = None

    async def _cleared(self) -> None:
        """Wait until nothing is left of the tree of a process that has ended."""
        if (cgroup := self._cgroup) is not None and next(cgroup.members(), None) is not None:
            await end_group(cgroup, self._left)

    def _left(self, pids: list[int]) -> None:
        shown = ", ".join(map(str, pids[:5])) + (", …" if len(pids) > 5 else "")
        self._show(self._state, f"the kernel has not ended what it was asked to kill: pid {shown}")

    @contextlib.contextmanager
    def _ended_whole(self, handle: ProcessHandle) -> Iterator[None]:
        """Within it: have the whole tree end when the kernel kills one process of it for lack of memory, as it does in
        cgroup v2. A program that lost one of its processes unnoticed may be worse off than one that restarts."""
        event = self._cgroup.oom_event() if self._cgroup else None
        if event is None:
            yield
            return
        loop, watching = asyncio.get_running_loop(), True

        def look(times: int) -> None:
            if watching and self._cgroup is not None and self._cgroup.oom_kills() > self.record.oom_kills:
                handle.signal_tree(signal.SIGKILL)
            elif watching and times:  # the event comes before the kill, or without one
                loop.call_later(_OOM_KILL / 20, look, times - 1)

        def noticed() -> None:
            os.read(event, 8)
            look(20)

        loop.add_reader(event, noticed)
        try:
            yield
        finally:
            watching = False
            loop.remove_reader(event)
            os.close(event)

    async def _start(self) -> None:
        try:
            gated = spawn(await self._host.prepare(self.name))
            identity = gated.handle.identity
            record = msgspec.structs.replace(
                self.record,
                pid=identity.pid,
                start_time=identity.start_time,
                boot_id=identity.boot_id,
                started_at=self._now(),
                restarts=self.record.restarts + bool(self.record.started_at),
                oom_kills=self._cgroup.oom_kills() if self._cgroup else 0,
            )
            try:
                self._host.save(self.name, record)
            except OSError:
                gated.abort()
                raise
            self.record = record
        except (AgentError, StoreError) as error:
            self._reason = str(error)
        except OSError as error:
            self._reason = describe_os_error(error, "the state directory")
        else:
            self._handle = gated.open()
            self._log.info("Process started", pid=self._handle.pid)
            self._show("running")

    def _ended(self, status: ExitStatus) -> None:
        self._handle = None
        if (exit_file := self._host.exit_file(self.name)) is not None:
            status = recorded(status, exit_file)
        outcome = after_exit(self._launchable.restart, status)
        end = self._exit(status)
        self._save(msgspec.structs.replace(self.record, pid=0, last_exit=end, outcome=outcome))
        self._reason = end.words
        self._log.info("Process ended", code=status.code, signal=status.signal, cause=end.cause, outcome=outcome)
        if outcome:
            self._show(outcome, "" if outcome == "completed" else self._reason)

    def _save(self, record: LaunchRecord) -> None:
        """Record the end of a process on disk. If that fails, the next agent finds it when it adopts."""
        self.record = record
        try:
            self._host.save(self.name, record)
        except OSError as error:
            self._log.warning("The end of a process could not be recorded", error=str(error))

    def _exit(self, status: ExitStatus) -> Exit:
        end = Exit(at=self._now(), code=status.code, signal=status.signal)
        if self._cgroup is None or self._cgroup.oom_kills() <= self.record.oom_kills:
            return end
        why, limit = "the node ran out of memory", self._launchable.resources.memory
        if limit and self._cgroup.reached_its_limit():
            why = f"over its memory limit of {limit}"
        by_kernel = status.signal == "SIGKILL" or (status.code is None and not status.signal)
        cause = "killed by the kernel" if by_kernel else f"{end.words} after the kernel had killed one of its processes"
        return msgspec.structs.replace(end, cause=f"{cause}: {why}")

    def _show(self, state: ProcessState, reason: str = "") -> None:
        self._state, self._reason = state, reason
        self._host.changed()


def after_exit(
    policy: Literal["always", "on-failure", "never"], status: ExitStatus
) -> Literal["", "completed", "failed"]:
    """Return the outcome of a launchable whose process ended; "" means that it is restarted.

    An unknown exit status (the process ended while no agent ran) counts as a failure.
    """
    if policy == "always":
        return ""
    if status.code == 0:
        return "completed"
    return "" if policy == "on-failure" else "failed"
