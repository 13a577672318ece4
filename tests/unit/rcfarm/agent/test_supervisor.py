"""One launchable: restarted by its policy, with a back-off that forgets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from rcfarm.agent.cgroups import Group
from rcfarm.agent.errors import StartFailed
from rcfarm.agent.process import ExitStatus, LaunchSpec, recorded
from rcfarm.agent.state import LaunchRecord
from rcfarm.agent.supervisor import Supervisor
from store.schema.manifest import Launchable
from store.schema.records import Process
from store.timing import Backoff
from tests.support import require
from tests.support.agent.agents import alive, kill_started_under
from tests.support.waiting import background, until


class Host:
    """A pod with one launchable, whose failures the test decides."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failure: Exception | None = None
        self.disk_full = False
        self.saved = LaunchRecord()
        self.recording: Path | None = None
        self.group: Group | None = None
        self.seen: list[Process] = []
        self.supervisor: Supervisor | None = None

    async def prepare(self, name: str) -> LaunchSpec:
        if self.failure is not None:
            raise self.failure
        env = {"PATH": os.environ["PATH"], "RCFARM_DIR": f"{self.directory}/"}
        spec = LaunchSpec(["sh", "-c", "echo run; . ./script"], env, self.directory, self.directory / "log")
        return spec._replace(exit_file=self.recording)

    def save(self, name: str, record: LaunchRecord) -> None:
        if self.disk_full:
            raise OSError(28, "No space left on device", str(self.directory / "pod.json"))
        self.saved = record

    def exit_file(self, name: str) -> Path | None:
        return self.recording

    def cgroup(self, name: str) -> Group | None:
        return self.group

    def changed(self) -> None:
        if self.supervisor is not None:
            self.seen.append(self.supervisor.process)

    async def until(self, condition: Callable[[Process], bool]) -> Process:
        """Wait until the launchable was seen so."""
        async with asyncio.timeout(10):
            while True:
                for process in self.seen:
                    if condition(process):
                        return process
                await asyncio.sleep(0.005)

    def runs(self) -> int:
        log = self.directory / "log"
        return log.read_text().count("run") if log.exists() else 0


@asynccontextmanager
async def supervised(
    host: Host,
    script: str,
    record: LaunchRecord | None = None,
    *,
    backoff: Backoff | None = None,
    proven_after: float = 30,
    release: bool = False,
    **fields: object,
) -> AsyncIterator[Supervisor]:
    """Yield a supervisor running `script`; at the end its process is stopped, or left running by `release`."""
    (host.directory / "script").write_text(script)
    launchable = Launchable(command=["unused"], **fields)  # type: ignore[arg-type]
    log = structlog.get_logger()
    supervisor = Supervisor(
        "main",
        launchable,
        record or LaunchRecord(),
        host,
        backoff or Backoff(0.02, 0.1),
        proven_after=proven_after,
        log=log,
        now=lambda: "now",
    )
    host.supervisor = supervisor
    try:
        async with background(supervisor.run()):
            yield supervisor
    finally:
        if release:
            supervisor.release()
        else:
            await supervisor.stop()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    yield Host(tmp_path)
    kill_started_under(tmp_path)


async def test_a_process_is_recorded_before_it_runs(host: Host) -> None:
    """Its identity is on disk by the time that it does anything; a disk that is full keeps it from running."""
    host.disk_full = True
    async with supervised(host, "sleep 1000"):
        process = await host.until(lambda it: it.state == "backoff")
        assert "no space left on the disk" in process.reason
        assert host.runs() == 0
        host.disk_full = False
        process = await host.until(lambda it: it.state == "running")
        assert host.saved.pid == process.pid


async def test_the_end_of_a_process_is_taken_though_the_disk_is_full(host: Host) -> None:
    """A process that ends while nothing can be written is started again once something can."""
    async with supervised(host, "sleep 1000"):
        process = await host.until(lambda it: it.state == "running")
        assert process.pid is not None
        host.disk_full = True
        os.kill(process.pid, signal.SIGKILL)
        await host.until(lambda it: "no space left" in it.reason)
        host.disk_full = False
        await host.until(lambda it: it.state == "running" and it.restarts == 1)


async def test_a_failing_start_is_tried_again(host: Host) -> None:
    """The error of a failed start is the launchable's reason until it starts; it does not count as a restart."""
    host.failure = StartFailed("the port is taken")
    async with supervised(host, "sleep 1000"):
        assert (await host.until(lambda it: it.state == "backoff")).reason == "the port is taken"
        host.failure = None
        process = await host.until(lambda it: it.state == "running")
        assert (process.restarts, process.reason) == (0, "")


@pytest.mark.parametrize(
    ("policy", "script", "state"),
    [("never", "exit 0", "completed"), ("never", "exit 4", "failed"), ("on-failure", "exit 0", "completed")],
)
async def test_what_has_ended_for_good_stays_so(host: Host, policy: str, script: str, state: str) -> None:
    """A final outcome is on disk, and the next agent does not run the launchable again."""
    async with supervised(host, script, restart=policy):
        process = await host.until(lambda it: it.state == state)
    assert require(process.last_exit).code == (4 if state == "failed" else 0)
    assert host.saved.outcome == state
    async with supervised(host, script, host.saved, restart=policy) as following:
        await asyncio.sleep(0.05)
        assert following.process.state == state
    assert host.runs() == 1


async def test_on_failure_runs_until_it_succeeds(host: Host) -> None:
    """A launchable with `restart: on-failure` is started again until it exits with 0."""
    async with supervised(host, "test $(grep -c run log) -ge 3", restart="on-failure"):
        process = await host.until(lambda it: it.state == "completed")
    assert process.restarts == 2
    assert host.runs() == 3


async def test_stopping_follows_the_manifest(host: Host) -> None:
    """The stop signal is the manifest's; the exit is recorded."""
    async with supervised(host, "trap 'exit 5' USR1; echo up; while :; do sleep 0.01; done", stop_signal="SIGUSR1"):
        await host.until(lambda it: it.state == "running" and "up" in (host.directory / "log").read_text())
    assert host.seen[-1].state == "stopped"
    assert require(host.saved.last_exit).code == 5


async def test_a_released_process_goes_on(host: Host) -> None:
    """An agent that stops releases the process, and the next one adopts it unchanged."""
    async with supervised(host, "sleep 1000", release=True):
        pid = (await host.until(lambda it: it.state == "running")).pid
    assert alive(pid)
    host.seen.clear()
    async with supervised(host, "sleep 1000", host.saved):
        process = await host.until(lambda it: it.state == "running")
        assert (process.pid, process.restarts) == (pid, 0)
    assert not alive(pid)


@pytest.mark.parametrize(("proven_after", "grows"), [(0.0, False), (30.0, True)])
async def test_a_run_that_was_long_enough_resets_the_back_off(host: Host, proven_after: float, grows: bool) -> None:
    """The failure after it counts as the first one."""
    backoff = Backoff(0.001, 0.001)
    async with supervised(host, "exit 1", backoff=backoff, proven_after=proven_after):
        await host.until(lambda it: it.restarts == 4)
        assert (backoff.failures > 1) is grows


@pytest.mark.parametrize(
    ("script", "code", "ended_by"),
    [("exit 0", 0, ""), ("exit 7", 7, ""), ("exit 255", 255, ""), ("kill -KILL $$", None, "SIGKILL")],
)
@pytest.mark.parametrize("unseen", [False, True])
async def test_a_recorded_exit_is_known_also_if_no_agent_saw_it(
    host: Host, script: str, code: int | None, ended_by: str, unseen: bool
) -> None:
    """Neither does the process run again."""
    host.recording = host.directory / "code"
    async with supervised(host, f"while [ ! -e go ]; do sleep 0.01; done; {script}", restart="never", release=True):
        running = await host.until(lambda it: it.state == "running")
        if not unseen:
            (host.directory / "go").touch()
            await host.until(lambda it: it.last_exit is not None)
    if unseen:
        (host.directory / "go").touch()
        await until(lambda: not alive(running.pid))
    later = Host(host.directory)
    later.recording = host.recording
    async with supervised(later, script, host.saved, restart="never") as supervisor:
        await until(lambda: supervisor.record.outcome)
        end = require(supervisor.process.last_exit)
        assert (end.code, end.signal) == (code, ended_by)
    assert host.runs() == 1


async def test_a_recorded_process_is_stopped_by_its_signal(host: Host) -> None:
    """The shell that records waits for the program, which ends in its own way."""
    host.recording = host.directory / "code"
    async with supervised(host, "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done", stop_timeout=5.0):
        await until(lambda: "ready" in (host.directory / "log").read_text() if host.runs() else False)
    assert require(host.saved.last_exit).code == 9


@pytest.mark.parametrize("content", [b"", b"1", b"1234\n", b"x\n", None])
def test_a_record_that_is_none_is_an_unknown_exit(tmp_path: Path, content: bytes | None) -> None:
    """The program's user can write it: a link or a pipe in its place harms nothing."""
    file = tmp_path / "code"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    assert recorded(ExitStatus(None), file) == ExitStatus(None)
    link = tmp_path / "link"
    (tmp_path / "target").write_text("0\n")
    link.symlink_to(tmp_path / "target")
    assert recorded(ExitStatus(None), link) == ExitStatus(None)
