"""Real processes: started behind a gate, watched by pidfd, stopped as a group, adopted by identity."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rcfarm.agent.errors import StartFailed
from rcfarm.agent.process import (
    ExitStatus,
    LaunchSpec,
    ProcessHandle,
    ProcessIdentity,
    adopt,
    boot_id,
    group_members,
    kill_remains,
    spawn,
    stat,
)
from rcfarm.daemon.daemon import catch_ignored_signals
from tests.support import require
from tests.support.agent.agents import alive, kill_started_under
from tests.support.waiting import until

SLEEP = "sleep 1000"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_started_under(tmp_path)


def shell(directory: Path, script: str, **fields: object) -> LaunchSpec:
    """Return a launch of `sh -c script`, with the mark by which a leaked process would be found and killed."""
    env = {"PATH": os.environ["PATH"], "RCFARM_DIR": f"{directory}/"}
    spec = LaunchSpec(["sh", "-c", script], env, directory, directory / "out.log")
    return spec._replace(**fields)  # type: ignore[arg-type]


async def ended(handle: ProcessHandle) -> ExitStatus:
    async with asyncio.timeout(10):
        await handle.wait()
    return handle.reap()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 0", ExitStatus(0)),
        ("exit 7", ExitStatus(7)),
        ("kill -KILL $$", ExitStatus(None, "SIGKILL")),
        ("kill -40 $$", ExitStatus(None, "signal 40")),
    ],
)
async def test_the_end_of_a_child_is_known_exactly(directory: Path, script: str, status: ExitStatus) -> None:
    """Exit codes and signals are distinguished, and no zombie is left."""
    handle = spawn(shell(directory, script)).open()
    assert await ended(handle) == status
    assert stat(handle.pid) is None


async def test_output_goes_to_the_end_of_the_log(directory: Path) -> None:
    """Both outputs are appended to the log file; its former content stays."""
    (directory / "out.log").write_text("before\n")
    await ended(spawn(shell(directory, "echo out; echo err >&2")).open())
    assert (directory / "out.log").read_text() == "before\nout\nerr\n"


async def test_nothing_runs_before_the_gate_opens(directory: Path) -> None:
    """A process that is not recorded yet has not run, and never will if its gate is aborted."""
    gated = spawn(shell(directory, "touch ran"))
    assert alive(gated.handle.pid)
    await asyncio.sleep(0.05)
    gated.abort()
    assert stat(gated.handle.pid) is None
    assert not (directory / "ran").exists()


async def test_a_gate_closes_when_the_agent_dies(directory: Path) -> None:
    """Were the agent killed between starting and recording a process, the process ends without having run."""
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from rcfarm.agent.process import LaunchSpec, spawn\n"
        "d = Path(sys.argv[1])\n"
        "gated = spawn(LaunchSpec(['touch', 'ran'], {'PATH': os.environ['PATH']}, d, d / 'out.log'))\n"
        "print(gated.handle.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    agent = subprocess.run([sys.executable, "-c", script, directory], stdout=subprocess.PIPE, check=False)
    assert agent.returncode == -signal.SIGKILL
    await eventually_dead(int(agent.stdout))
    assert not (directory / "ran").exists()


async def test_stopping_reaches_the_whole_group(directory: Path) -> None:
    """The stop signal goes to the process and its children, and stopping ends when all of them have ended."""
    child = f"sh -c 'echo up; exec {SLEEP}'"  # it reports itself: right after the fork it still has its parent's trap
    handle = spawn(shell(directory, f"trap 'exit 0' TERM; {child} & wait")).open()
    await logged(directory, "up")
    members = list(group_members(handle.pid))
    assert len(members) == 2
    assert await handle.terminate(signal.SIGTERM, 10) == ExitStatus(0)
    assert not any(alive(pid) for pid in members)


async def test_children_get_their_time_after_their_parent(directory: Path) -> None:
    """A leader that ends at once does not cut short the children that still clean up."""
    child = "trap 'sleep 0.2; touch cleaned; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    handle = spawn(shell(directory, f"( {child} ) & trap 'exit 0' TERM; while :; do sleep 0.01; done")).open()
    await logged(directory, "up")
    await handle.terminate(signal.SIGTERM, 10)
    assert (directory / "cleaned").exists()


async def test_what_does_not_stop_is_killed(directory: Path) -> None:
    """After the timeout the group is killed, also processes that are stopped (SIGSTOP) or ignore signals."""
    handle = spawn(shell(directory, f"trap '' TERM; {SLEEP} & echo up; kill -STOP $$")).open()
    await logged(directory, "up")
    members = list(group_members(handle.pid))
    before = time.monotonic()
    assert await handle.terminate(signal.SIGTERM, 0.2) == ExitStatus(None, "SIGKILL")
    assert time.monotonic() - before < 5
    await eventually_dead(*members)


async def test_a_crash_takes_its_children_along(directory: Path) -> None:
    """The rest of a process's group is killed when it is reaped, so it can't hold ports."""
    handle = spawn(shell(directory, f"{SLEEP} & echo $!; exit 1")).open()
    assert (await ended(handle)).code == 1
    await eventually_dead(int((directory / "out.log").read_text()))


async def test_adoption_is_exact(directory: Path) -> None:
    """An adopted process is watched and stopped like a child, by an agent that did not start it."""
    gated = spawn(shell(directory, SLEEP))
    identity = gated.handle.identity
    gated.open().release()
    adopted = require(adopt(identity))
    assert adopted.age() < 60
    assert (await adopted.terminate(signal.SIGTERM, 10)).signal == "SIGTERM"


async def test_a_foreign_process_can_be_waited_for(directory: Path) -> None:
    """A process that is not our child ends with an unknown status, and is noticed at once."""
    spec = ["sh", "-c", f"setsid {SLEEP} >/dev/null & echo $!"]
    pid = int(
        subprocess.run(
            spec, stdout=subprocess.PIPE, check=True, env=os.environ | {"RCFARM_DIR": f"{directory}/"}
        ).stdout
    )
    found = require(stat(pid))
    handle = require(adopt(ProcessIdentity(pid, found.start_time, boot_id())))
    waiting = asyncio.create_task(ended(handle))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    assert await waiting == ExitStatus(None)


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another"}, {"pid": 0}])
async def test_a_recycled_pid_is_not_adopted(directory: Path, change: dict[str, object]) -> None:
    """The same number with another start time, or of another boot, is another process: not adopted, not killed."""
    handle = spawn(shell(directory, SLEEP)).open()
    other = handle.identity._replace(**change)  # type: ignore[arg-type]
    assert adopt(other) is None
    kill_remains(other)
    assert alive(handle.pid)
    await handle.terminate(signal.SIGKILL, 10)


async def test_a_pid_that_is_a_thread_by_now_is_not_adopted() -> None:
    """In a restarted container, the recorded number may be that of a thread of the new agent: the process is gone."""
    asked = threading.Event()
    thread = threading.Thread(target=asked.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        identity = ProcessIdentity(thread.native_id, 1, boot_id())
        assert adopt(identity) is None
        kill_remains(identity)
        assert thread.is_alive()
    finally:
        asked.set()
        thread.join()


@pytest.mark.parametrize("code", [errno.ESRCH, errno.ENOENT, errno.EINVAL])
async def test_whatever_the_kernel_says_of_a_number_without_a_process(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels differ in how they refuse a thread's number; each answer means that the process is gone."""

    def refuse(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert adopt(ProcessIdentity(os.getpid(), 1, boot_id())) is None


@pytest.mark.parametrize("call", ["pipe", "pidfd_open"])
async def test_without_free_descriptors_nothing_starts(
    call: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is refused, so that it is retried, and leaves no descriptor and no process behind."""

    def exhausted(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, call, exhausted)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(os.listdir("/proc/self/fd")), children.read_text()
    with pytest.raises(StartFailed, match="Too many open files"):
        spawn(shell(directory, "touch ran"))
    assert (set(os.listdir("/proc/self/fd")), children.read_text()) == before
    assert not (directory / "ran").exists()


async def test_remains_of_a_leader_that_ended_unseen_are_killed(directory: Path) -> None:
    """Children of a process that ended while no agent was there are found by its group."""
    spec = ["setsid", "sh", "-c", f"{SLEEP} & echo $$ $!"]
    env = os.environ | {"RCFARM_DIR": f"{directory}/"}
    with subprocess.Popen(spec, stdout=subprocess.PIPE, env=env) as leader:
        group, child = map(int, require(leader.stdout).readline().split())
    kill_remains(ProcessIdentity(group, 1, boot_id()))
    await eventually_dead(child)


async def test_waiting_may_be_cancelled(directory: Path) -> None:
    """Cancelling a wait leaves the process running, and it can be waited for again."""
    handle = spawn(shell(directory, SLEEP)).open()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await handle.wait()
    assert alive(handle.pid)
    await handle.terminate(signal.SIGTERM, 10)


async def test_limits_are_set_before_it_runs(directory: Path) -> None:
    """Limits hold from the first instruction of the program on."""
    limits = {resource.RLIMIT_NOFILE: 123, resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: 1 << 30}
    await ended(spawn(shell(directory, "ulimit -n; ulimit -c; ulimit -v", limits=limits)).open())
    assert (directory / "out.log").read_text().split() == ["123", "0", str(1 << 20)]


def test_a_limit_that_is_not_allowed_is_named(directory: Path) -> None:
    """A limit above what the machine allows fails the start with its name, and leaves no process."""
    with pytest.raises(StartFailed, match="RLIMIT_NOFILE"):
        spawn(shell(directory, SLEEP, limits={resource.RLIMIT_NOFILE: 1 << 40}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cwd": Path("/nowhere")}, "/nowhere: No such file"),
        ({"log": Path("/proc/nowhere/out.log")}, "its log file can't be opened"),
        ({"argv": ["a\0b"]}, "null byte"),
    ],
)
def test_what_can_not_be_started_says_why(directory: Path, fields: dict[str, object], message: str) -> None:
    """A start that fails names what is wrong, for an operator."""
    with pytest.raises(StartFailed, match=message):
        spawn(shell(directory, SLEEP, **fields))


@pytest.fixture
def ignoring() -> Iterator[None]:
    """Ignore signals as for an agent started by nohup, or by a shell as a background job."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.usefixtures("ignoring")
async def test_signals_go_back_to_their_defaults(directory: Path) -> None:
    """Nothing that the agent ignores or blocks is inherited: a pod's SIGPIPE works as its author expects, and so do the
    signals that the agent itself was started to ignore."""
    catch_ignored_signals()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.raise_signal(number)
    await ended(spawn(shell(directory, "grep -E 'Sig(Blk|Ign)' /proc/self/status")).open())
    masks = [int(line.split()[1], 16) for line in (directory / "out.log").read_text().splitlines()]
    # Signals 32 and 33 are the C library's own: they may be inherited from the parent, and can't be reset.
    assert [mask & ~(0b11 << 31) for mask in masks] == [0, 0]


async def logged(directory: Path, text: str) -> None:
    """Wait until the log shows `text`."""
    await until(lambda: text in (directory / "out.log").read_text())


async def eventually_dead(*pids: int) -> None:
    await until(lambda: not any(alive(pid) for pid in pids))
