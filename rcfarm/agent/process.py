"""Processes that outlive the agent: started, adopted, waited for, and ended with all of their tree.

The model: every process is started in its own session and, where there are control groups, in one of those: then its
*tree* is whatever is in that group, processes that left the session included, and else its process group. It is
identified by pid, start time and boot id together; a recycled pid never matches. A pidfd reports its end, exactly and
at once, whether it is a child or was adopted from an earlier agent.

A new process first waits at a *gate*: a shell that reads one line, which comes only after its identity is on disk. If
the agent dies in between, the gate closes and nothing has run; so no process ever runs unrecorded. While it waits, its
limits and its control group are set from outside, because code between fork and exec is not safe in a program with
threads.

A process that must not run twice has a shell as its parent, which records its exit code in a file. The shell is the
process that is identified and waited for; it outlives the signals that are sent to the group to stop the program. So
the exit code is known even if no agent was running at the end.

The end of a leader does not end its tree: `reap` kills the rest, and nothing is started in its place, or called
stopped, before all of it has ended. The kernel does not reuse a child's pid until it is reaped; for an adopted process
the start time is compared before its process group is signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from rcfarm.agent.cgroups import Group
from rcfarm.agent.errors import StartFailed, describe_os_error

_GATE = 'read -r go && [ "$go" = go ] && exec "$@" </dev/null; exit 125'
_RECORDING_GATE = (
    'file=$1; shift; read -r go && [ "$go" = go ] || exit 125; trap : HUP INT QUIT ALRM TERM USR1 USR2; '
    '"$@" </dev/null; code=$?; echo "$code" >"$file"; exit "$code"'
)
# A shell reads a line byte by byte, so the rest of its input is the program's. The first terminal that the leader of a
# session opens becomes its controlling terminal.
_INPUT_GATE = 'read -r go && [ "$go" = go ] && exec "$@"; exit 125'
_TERMINAL_GATE = 'tty=$1; shift; read -r go && [ "$go" = go ] && exec "$@" <"$tty" >"$tty" 2>&1; exit 125'
_TICKS = os.sysconf("SC_CLK_TCK")
_KILL_AGAIN = 1.0  # seconds
_LOOK_AGAIN = 0.001  # seconds until a list of processes that can't be waited for is read again
ENDED = ("Z", "X")  # states of a process that only waits to be reaped
_SIGNAL_NAMES: dict[int, str] = {number.value: number.name for number in signal.Signals}


class Credentials(NamedTuple):
    """The user and groups that a process runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class LaunchSpec(NamedTuple):
    """The parameters of a process to start. `limits`: `resource.RLIMIT_*` → value. Output is appended to `log`; what is
    written on stderr, to `error_log`, if given.

    `exit_file`: where the exit code is recorded; its directory is writable for the process's user. None: nowhere.
    `cgroup`: an existing one, which it enters before it executes its program.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    credentials: Credentials | None = None
    limits: Mapping[int, int] = {}
    exit_file: Path | None = None
    cgroup: Group | None = None
    error_log: Path | None = None


class Streams(NamedTuple):
    """The output of a process that is not logged; its input is the gate. The descriptors stay the caller's.

    `terminal`: the path of a terminal that becomes the controlling one, and all three streams.
    """

    stdout: int
    stderr: int
    terminal: str = ""


class ProcessIdentity(NamedTuple):
    """Identifies one process uniquely. `start_time` in clock ticks after the boot named by `boot_id`."""

    pid: int
    start_time: int
    boot_id: str


class ExitStatus(NamedTuple):
    """`code` is None when a signal ended the process, or when it is unknown because the process was not our child."""

    code: int | None
    signal: str = ""


class Stat(NamedTuple):
    """The fields of /proc/<pid>/stat."""

    state: str
    group: int
    session: int
    start_time: int


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat(pid: int) -> Stat | None:
    """Return the process's present state, or None when no process has that pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything, even ')'
    return Stat(state=fields[0], group=int(fields[2]), session=int(fields[3]), start_time=int(fields[19]))


def group_members(group: int) -> Iterator[int]:
    """Yield processes of the group that have not ended."""
    try:
        os.killpg(group, 0)  # much cheaper than a search, for a group that has no members at all
    except ProcessLookupError:
        return
    except PermissionError:
        pass
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := stat(int(entry))) and found.group == group and found.state not in ENDED:
            yield int(entry)


class ProcessHandle:
    """One process, running or just ended. `wait` and `terminate` may be cancelled without effect on the process."""

    def __init__(self, identity: ProcessIdentity, pidfd: int, cgroup: Group | None = None) -> None:
        self.identity = identity
        self._cgroup = cgroup
        self._pidfd = pidfd
        self._status: ExitStatus | None = None
        self._closed = False

    @property
    def pid(self) -> int:
        return self.identity.pid

    def age(self) -> float:
        """Return seconds since the process was started."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.identity.start_time / _TICKS)

    async def wait(self) -> None:
        """Wait until the process has ended. It stays unreaped, so that its pid is not reused."""
        if self._status is None:
            await _end_of(self._pidfd)

    def reap(self) -> ExitStatus:
        """Take the exit status of a process that has ended, and kill the rest of its tree."""
        self.signal_tree(signal.SIGKILL)
        status = self._collect()
        self.release()
        return status

    def release(self) -> None:
        """Stop tracking the process; if it has not ended, it keeps running."""
        if not self._closed:
            self._closed = True
            os.close(self._pidfd)

    def signal_tree(self, number: signal.Signals) -> None:
        """Send a signal to the process and its tree. Does nothing when all of it has ended."""
        if self._closed:
            return
        found = stat(self.pid)
        if found is None or found.start_time == self.identity.start_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
        if self._cgroup is not None and number == signal.SIGKILL:
            self._cgroup.kill()
        elif self._cgroup is not None:
            for pid in self._cgroup.members():
                if (member := stat(pid)) is not None and member.group != self.pid:  # the group has it already
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    async def terminate(
        self, number: signal.Signals, timeout: float, on_left: Callable[[list[int]], None] = lambda pids: None
    ) -> ExitStatus:
        """Ask the tree to stop, give it `timeout` seconds, then kill it. Returns once all of it has ended; `on_left` is
        called with processes that can't be killed, again and again."""
        self.signal_tree(number)
        try:
            async with asyncio.timeout(timeout):
                await self._end_of_tree()
        except TimeoutError:
            await killed(lambda: self.signal_tree(signal.SIGKILL), self._end_of_tree, self._members, on_left)
        return self.reap()

    async def _end_of_tree(self) -> None:
        await self.wait()
        self._collect()
        await all_ended(self._members)

    def _members(self) -> Iterator[int]:
        """Yield processes of the tree that have not ended."""
        return group_members(self.pid) if self._cgroup is None else self._cgroup.members()

    def _collect(self) -> ExitStatus:
        """Reap the process. Return its exit status; the pid may be reused unless its group has other members."""
        if self._status is None:
            try:
                result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # adopted: its parent, init, took the status
                result = None
            if result is None:
                self._status = ExitStatus(None)
            elif result.si_code == os.CLD_EXITED:
                self._status = ExitStatus(result.si_status)
            else:
                number = result.si_status  # real-time signals have no name of their own
                self._status = ExitStatus(None, _SIGNAL_NAMES.get(number, f"signal {number}"))
        return self._status


async def all_ended(members: Callable[[], Iterator[int]]) -> None:
    """Wait until `members` yields no process."""
    while (member := next(members(), None)) is not None:
        if (pidfd := _open(member)) is None:
            await asyncio.sleep(_LOOK_AGAIN)
            continue
        try:
            await _end_of(pidfd)
        finally:
            os.close(pidfd)


async def killed(
    kill: Callable[[], None],
    ended: Callable[[], Awaitable[None]],
    members: Callable[[], Iterator[int]],
    on_left: Callable[[list[int]], None],
) -> None:
    """Kill until `ended` returns. A process in an uninterruptible system call can't be killed before that returns."""
    while True:
        kill()
        try:
            async with asyncio.timeout(_KILL_AGAIN):
                return await ended()
        except TimeoutError:
            on_left([*members()])


async def end_group(cgroup: Group, on_left: Callable[[list[int]], None] = lambda pids: None) -> None:
    """Kill what is in a control group until nothing is. `on_left`: see `ProcessHandle.terminate`."""
    await killed(cgroup.kill, lambda: all_ended(cgroup.members), cgroup.members, on_left)


def adopt(identity: ProcessIdentity, cgroup: Group | None = None) -> ProcessHandle | None:
    """Return the process that an earlier agent started, or None when it has ended, even if its pid was reused."""
    if identity.pid <= 0 or identity.boot_id != boot_id():
        return None
    if (pidfd := _open(identity.pid)) is None:
        return None
    found = stat(identity.pid)  # after opening: a process that still matches held the number when it was opened
    if found is None or found.start_time != identity.start_time:
        os.close(pidfd)
        return None
    if cgroup is not None and identity.pid not in cgroup.members():  # an agent without control groups started it
        cgroup = None
    return ProcessHandle(identity, pidfd, cgroup)


def _open(pid: int) -> int | None:
    """Return a pidfd of the process, or None when there is no process of that number.

    A pid that is now a thread of another process is refused with ENOENT, or EINVAL by kernels before 6.9. This is
    common in restarted containers, where pids are small and begin at 1 again.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL):
            return None
        raise


def kill_remains(identity: ProcessIdentity, cgroup: Group | None = None) -> None:
    """Kill the tree of a leader that ended unseen; its process group only if its pid has not been reused."""
    if cgroup is not None:
        cgroup.kill()
    if identity.pid > 0 and identity.boot_id == boot_id() and stat(identity.pid) is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(identity.pid, signal.SIGKILL)


class GatedProcess:
    """A process that waits at its gate: it has its pid and limits, and has not executed its program yet."""

    def __init__(self, handle: ProcessHandle, gate: int) -> None:
        self.handle = handle
        self._gate = gate

    def open(self) -> ProcessHandle:
        """Open the gate. Return the running process."""
        handle, gate = self.open_input()
        os.close(gate)
        return handle

    def open_input(self) -> tuple[ProcessHandle, int]:
        """Open the gate of a process with `Streams`. Return it with the descriptor of its input, which the caller
        closes."""
        with contextlib.suppress(BrokenPipeError):  # killed at the gate: its end is handled like any other
            os.write(self._gate, b"go\n")
        return self.handle, self._gate

    def abort(self) -> None:
        """End the process before it has run."""
        os.close(self._gate)
        self.handle.signal_tree(signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.handle._pidfd, os.WEXITED | os.WNOWAIT)
        self.handle.reap()


def spawn(spec: LaunchSpec, streams: Streams | None = None) -> GatedProcess:
    """Start a process up to its gate, with the streams in place of its logs. It takes a few milliseconds and never
    yields. Raises `StartFailed`."""
    logs = [] if streams else _open_logs(spec)
    try:
        outside, gate = os.pipe()
        try:
            handle = _start_gate(spec, outside, streams or Streams(logs[0], logs[-1]), reads_input=streams is not None)
        except BaseException:
            os.close(gate)
            raise
        finally:
            os.close(outside)
    except OSError as error:
        raise StartFailed(describe_os_error(error, spec.argv[0])) from error
    finally:
        for log in logs:
            os.close(log)
    process = GatedProcess(handle, gate)
    try:
        if spec.cgroup is not None:
            spec.cgroup.enter(handle.pid)
        for which, value in spec.limits.items():
            try:
                resource.prlimit(handle.pid, which, (value, value))
            except (OSError, ValueError) as error:
                names = (
                    name for name in dir(resource) if name.startswith("RLIMIT_") and getattr(resource, name) == which
                )
                raise StartFailed(
                    f"can't set {next(names)} to {value}: {error}; lower it in resources, or allow the agent "
                    "CAP_SYS_RESOURCE"
                ) from error
        score = Path(f"/proc/{handle.pid}/oom_score_adj")
        with contextlib.suppress(PermissionError):  # it belongs to another user
            if int(score.read_text()) < 0:  # a pod must not inherit the agent's protection from the OOM killer
                score.write_text("0")
    except BaseException:
        process.abort()
        raise
    return process


def _open_logs(spec: LaunchSpec) -> list[int]:
    """Open the log files. Raises `StartFailed`."""
    opened: list[int] = []
    path = spec.log
    try:
        for path in (spec.log, *([spec.error_log] if spec.error_log else [])):
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            opened.append(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except OSError as error:
        for log in opened:
            os.close(log)
        raise StartFailed(f"its log file can't be opened: {describe_os_error(error, path)}") from error
    return opened


def _start_gate(spec: LaunchSpec, stdin: int, streams: Streams, *, reads_input: bool) -> ProcessHandle:
    """Start the shell that becomes the process. Raises `StartFailed`, `OSError`."""
    user = spec.credentials
    gate = [_GATE, "rcfarm-gate"]
    if streams.terminal:
        gate = [_TERMINAL_GATE, "rcfarm-gate", streams.terminal]
    elif reads_input:
        gate = [_INPUT_GATE, "rcfarm-gate"]
    elif spec.exit_file is not None:
        gate = [_RECORDING_GATE, "rcfarm-gate", str(spec.exit_file)]
    try:
        child = subprocess.Popen(
            ["/bin/sh", "-c", *gate, *spec.argv],
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            start_new_session=True,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=user.groups if user else None,
        )
    except ValueError as error:  # a NUL byte in the command or its environment
        raise StartFailed(f"{spec.argv[0]}: {error}") from error
    try:
        found = stat(child.pid)
        assert found is not None, "an unreaped child has a stat"
        identity = ProcessIdentity(child.pid, found.start_time, boot_id())
        handle = ProcessHandle(identity, os.pidfd_open(child.pid), spec.cgroup)
    except BaseException:
        child.kill()
        child.wait()
        raise
    child.returncode = 0  # it is reaped through its pidfd; Popen must never do it
    return handle


async def _end_of(pidfd: int) -> None:
    """Wait until the process of the pidfd has ended. Only one waiter per pidfd."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(pidfd)


def recorded(status: ExitStatus, exit_file: Path) -> ExitStatus:
    """Return the exit status of a program from that of the shell which records it, or else from the record."""
    code = status.code
    if code is None and not status.signal:
        try:
            file = os.open(exit_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return status
        try:
            text = os.read(file, 8) if S_ISREG(os.fstat(file).st_mode) else b""
        finally:
            os.close(file)
        if re.fullmatch(rb"[0-9]{1,3}\n", text):  # the program's user may have put anything there
            code = int(text)
    if code is None:
        return status
    ended_by = _SIGNAL_NAMES.get(code - 128) if code > 128 else None  # as shells report a signal
    return ExitStatus(None, ended_by) if ended_by else ExitStatus(code)
