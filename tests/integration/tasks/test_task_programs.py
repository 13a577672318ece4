"""`rcfarm task` as its users run it: with `rcfarm dev`, and with two `rcfarm tasks` on a real Consul."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.consul.server import ConsulServer
from tests.support.programs.daemon import running
from tests.support.programs.installation import Daemon, Installation, installation

HELLO = "task: hello\nprocess: {command: [echo, hi]}\n"
ONCE = """
task: flaky
retries: 1
process: {command: [sh, -c, 'echo try $RCFARM_ATTEMPT; test $RCFARM_ATTEMPT = 1']}
"""


def _task(directory: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "RCFARM_STORE": f"embedded:{directory}"}
    command = [sys.executable, "-m", "rcfarm", "task", *arguments]
    return subprocess.run(command, env=environ, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_two_lines_run_in_rcfarm_dev(tmp_path: Path) -> None:
    """A program, one that succeeds at its second attempt, and one that fails; the verdict is the exit code."""
    state = tmp_path / "state"
    with running(tmp_path / "dev", "dev", "--directory", str(state), "--nodes", "2") as dev:
        dev.until_ready()
        hello = _task(state, "run", "-f", "-", stdin=HELLO)
        flaky = _task(state, "run", "-f", "-", stdin=ONCE)
        failed = _task(state, "run", "--", "false")
        metrics = dev.get("/metrics")[1]

    assert hello.returncode == 0, hello.stderr
    assert hello.stdout.startswith("task hello succeeded after ")
    assert "| hi\n" in hello.stdout
    assert flaky.returncode == 0, flaky.stderr
    assert "| try 1\n" in flaky.stdout
    assert "(attempt 2)" in flaky.stderr
    assert failed.returncode == 1
    assert "NonZeroExit" in failed.stdout
    assert 'rcfarm_task_call_duration_seconds_count{outcome="ok",plugin="process",verb="handle"}' in metrics
    assert "rcfarm_engines 1.0" in metrics


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """Two engines and a node on a real Consul."""
    async with installation(consul_server, tmp_path / "site") as found:
        found.agent("node-1")
        for name in ("engine-a", "engine-b"):
            _engine(found, name)
        yield found


def _engine(site: Installation, name: str) -> Daemon:
    data = str(site.directory / "data")
    return site.daemon(name, "tasks", "--name", name, "--data", data, "--set=tasks.handover_interval=0.01")


async def test_tasks_go_on_when_an_engine_dies(site: Installation) -> None:
    """Of two engines on Consul one is killed: the other one takes over its executions, and every program runs once."""
    marks = site.directory / "marks"
    script = f"echo $RCFARM_TASK >> {marks}; sleep 1.5"
    documents = [f"task: t{number}\nprocess: {{command: [sh, -c, '{script}']}}\n" for number in range(6)]
    submitted = await site.cli("task", "submit", "-f", "-", stdin="---\n".join(documents))
    assert submitted.code == 0, submitted.err

    async def runs() -> bool:
        return marks.exists() and len(marks.read_text().splitlines()) == 6

    await site.until(runs, "every program has begun")
    [killed] = [daemon for daemon in site.daemons if "engine-a" in str(daemon.name)]
    killed.kill()

    async def all_succeeded() -> bool:
        listed = await site.cli("task", "list", "-o", "json")
        return [each["state"] for each in listed.json] == ["succeeded"] * 6

    await site.until(all_succeeded, "every task has succeeded")
    assert sorted(marks.read_text().split()) == [f"t{number}" for number in range(6)]
