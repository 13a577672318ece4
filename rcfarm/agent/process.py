"""Processes that outlive the agent, and what is known of them for certain.

The model: every process is started in its own session, so that its process group is all that it left behind. It is
known by pid, start time and boot id together; a recycled pid never passes for it. Its end is told by a pidfd, exactly
and at once, whether it is our child or was adopted from an earlier agent.

A new process first waits at a *gate*: a shell that reads one line, which comes only after its identity is on disk.
Should the agent die in between, the gate closes and nothing has run; so no process ever runs unrecorded. The limits
are set on it meanwhile, from outside, because code between fork and exec is not safe in a program with threads.

The end of a leader does not end its group: `reap` kills what is left of it. Until a child is reaped its number can't
be given to anyone else; of an adopted one the start time is compared before its group is signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from rcfarm.agent.errors import StartFailed, describe_os_error

_GATE = 'read -r go && [ "$go" = go ] && exec "$@" </dev/null; exit 125'
_TICKS = os.sysconf("SC_CLK_TCK")


class Credentials(NamedTuple):
    """Whom a process runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class LaunchSpec(NamedTuple):
    """All that is needed to start a process. `limits`: `resource.RLIMIT_*` → value. Output is appended to `log`."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    credentials: Credentials | None = None
    limits: Mapping[int, int] = {}


class Identity(NamedTuple):
    """One process for ever. `start_time` in clock ticks after the boot named by `boot_id`."""

    pid: int
    start_time: int
    boot_id: str


class ExitStatus(NamedTuple):
    """`code` is None when a signal ended the process, or when it can't be known because it was not our child."""

    code: int | None
    signal: str = ""


class Stat(NamedTuple):
    """What /proc/<pid>/stat says."""

    state: str
    group: int
    session: int
    start_time: int

    @property
    def ended(self) -> bool:
        """Whether it waits only to be reaped."""
        return self.state in ("Z", "X")


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Names the present boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat(pid: int) -> Stat | None:
    """The process as it is now, or None when there is none with that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything, even ')'
    return Stat(state=fields[0], group=int(fields[2]), session=int(fields[3]), start_time=int(fields[19]))


def _exists(group: int) -> bool:
    """Whether the group has members, ended ones included; much cheaper than to look for them."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def group_members(group: int) -> Iterator[int]:
    """Processes of the group that have not ended."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := stat(int(entry))) and found.group == group and not found.ended:
            yield int(entry)


class ProcessHandle:
    """One process, running or just ended. `wait` and `terminate` may be cancelled; the process does not notice."""

    def __init__(self, identity: Identity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._status: ExitStatus | None = None
        self._closed = False

    @property
    def pid(self) -> int:
        return self.identity.pid

    def age(self) -> float:
        """Seconds since the process was started."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.identity.start_time / _TICKS)

    async def wait(self) -> None:
        """Until the process has ended. It stays unreaped, so that its number stays its own."""
        if self._status is None:
            await _ended(self._pidfd)

    def reap(self) -> ExitStatus:
        """Take the exit status of a process that has ended, and kill what is left of its group."""
        self.signal_group(signal.SIGKILL)
        status = self._collect()
        self.release()
        return status

    def release(self) -> None:
        """Forget the process; if it has not ended, it goes on."""
        if not self._closed:
            self._closed = True
            os.close(self._pidfd)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it left in its group. Nothing happens when all of it has ended."""
        if self._closed:
            return
        found = stat(self.pid)
        if found is None or found.start_time == self.identity.start_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def terminate(self, number: signal.Signals, timeout: float) -> ExitStatus:
        """Ask the group to stop, give it `timeout` seconds, then kill it."""
        self.signal_group(number)
        try:
            async with asyncio.timeout(timeout):
                await self.wait()
                await self._group_ended()
        except TimeoutError:
            self.signal_group(signal.SIGKILL)
            await self.wait()
        return self.reap()

    def _collect(self) -> ExitStatus:
        """The exit status; from then on, only a group that has other members keeps the number."""
        if self._status is None:
            self._status = _take_status(self._pidfd)
        return self._status

    async def _group_ended(self) -> None:
        """Until nothing runs any more of what an ended process left in its group."""
        self._collect()
        while _exists(self.pid) and (member := next(group_members(self.pid), None)) is not None:
            if (pidfd := _open(member)) is None:
                continue
            try:
                await _ended(pidfd)
            finally:
                os.close(pidfd)


def adopt(identity: Identity) -> ProcessHandle | None:
    """The process that an earlier agent started, or None when it is gone, also when its pid names another by now."""
    if identity.pid <= 0 or identity.boot_id != boot_id():
        return None
    if (pidfd := _open(identity.pid)) is None:
        return None
    found = stat(identity.pid)  # after opening: a process that still matches held the number when it was opened
    if found is None or found.start_time != identity.start_time:
        os.close(pidfd)
        return None
    return ProcessHandle(identity, pidfd)


def _open(pid: int) -> int | None:
    """Return a pidfd of the process, or None when there is no process of that number.

    A number that names a thread of another process by now is refused with ENOENT, or EINVAL by kernels before 6.9.
    In a container that was restarted this is common: numbers are small there and begin at 1 again.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
            return None
        raise


def kill_remains(identity: Identity) -> None:
    """Kill the group of a leader that ended unseen, unless its number has been given to another process since."""
    if identity.pid > 0 and identity.boot_id == boot_id() and stat(identity.pid) is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(identity.pid, signal.SIGKILL)


class GatedProcess:
    """A process that waits at its gate: it has a number and its limits, and runs nothing of its own yet."""

    def __init__(self, handle: ProcessHandle, gate: int) -> None:
        self.handle = handle
        self._gate = gate

    def open(self) -> ProcessHandle:
        """Let it run."""
        with contextlib.suppress(BrokenPipeError):  # killed at the gate: its end will be seen as any other
            os.write(self._gate, b"go\n")
        os.close(self._gate)
        return self.handle

    def abort(self) -> None:
        """Let it end without having run."""
        os.close(self._gate)
        self.handle.signal_group(signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.handle._pidfd, os.WEXITED | os.WNOWAIT)
        self.handle.reap()


def spawn(spec: LaunchSpec) -> GatedProcess:
    """Start a process up to its gate. It takes a few milliseconds and never yields. Raises `StartFailed`."""
    log = _open_log(spec)
    outside, gate = os.pipe()
    try:
        handle = _start(spec, stdin=outside, output=log)
    except BaseException:
        os.close(gate)
        raise
    finally:
        os.close(outside)
        os.close(log)
    process = GatedProcess(handle, gate)
    try:
        _limit(handle.pid, spec.limits)
        _make_killable(handle.pid)
    except BaseException:
        process.abort()
        raise
    return process


def _open_log(spec: LaunchSpec) -> int:
    try:
        spec.log.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        return os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise StartFailed(f"its log file can't be opened: {describe_os_error(error, spec.log)}") from error


def _start(spec: LaunchSpec, *, stdin: int, output: int) -> ProcessHandle:
    user = spec.credentials
    try:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "rcfarm-gate", *spec.argv],
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=stdin,
            stdout=output,
            stderr=output,
            start_new_session=True,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=user.groups if user else None,
        )
    except OSError as error:
        raise StartFailed(describe_os_error(error, spec.argv[0])) from error
    except ValueError as error:  # a NUL byte in the command or its environment
        raise StartFailed(f"{spec.argv[0]}: {error}") from error
    child.returncode = 0  # it is reaped through its pidfd; Popen must never do that behind our back
    found = stat(child.pid)
    assert found is not None, "an unreaped child has a stat"
    return ProcessHandle(Identity(child.pid, found.start_time, boot_id()), os.pidfd_open(child.pid))


def _limit(pid: int, limits: Mapping[int, int]) -> None:
    for which, value in limits.items():
        try:
            resource.prlimit(pid, which, (value, value))
        except (OSError, ValueError) as error:
            raise StartFailed(
                f"can't set {_limit_name(which)} to {value}: {error}; lower it in resources, or allow the agent "
                "CAP_SYS_RESOURCE"
            ) from error


def _make_killable(pid: int) -> None:
    """Undo what protects the agent from the kernel's out-of-memory killer; a pod must not inherit that."""
    score = Path(f"/proc/{pid}/oom_score_adj")
    with contextlib.suppress(PermissionError):  # it belongs to another user, and we may not change theirs
        if int(score.read_text()) < 0:
            score.write_text("0")


def _limit_name(which: int) -> str:
    return next(name for name in dir(resource) if name.startswith("RLIMIT_") and getattr(resource, name) == which)


def _take_status(pidfd: int) -> ExitStatus:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:  # adopted: its parent, init, took the status
        return ExitStatus(None)
    if result is None:
        return ExitStatus(None)
    if result.si_code == os.CLD_EXITED:
        return ExitStatus(result.si_status)
    return ExitStatus(None, _signal_name(result.si_status))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return f"signal {number}"


async def _ended(pidfd: int) -> None:
    """Until the process of the pidfd has ended. Only one waiter per pidfd."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, _finish, ended)
    try:
        await ended
    finally:
        loop.remove_reader(pidfd)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
