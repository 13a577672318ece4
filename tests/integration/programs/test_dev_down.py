"""`rcfarm dev --down` stops the pods that an ended `rcfarm dev` left running, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

from tests.support.programs.cli import Ran, run_process
from tests.support.programs.daemon import DaemonProcess, running

STUBBORN = ["sh", "-c", "trap : TERM; sleep 1000 & while :; do wait; done"]


def is_running(pid: int) -> bool:
    """Return whether the process exists, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def group(pid: int) -> list[int]:
    """Return the processes in the group of a leader that run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and is_running(int(entry)):
            try:
                if os.getpgid(int(entry)) == pid:
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found


def test_down_stops_what_dev_left(tmp_path: Path) -> None:
    """While `rcfarm dev` runs it is refused. After Ctrl-C, which reports what keeps running, every process of the pods
    ends, also one that ignores its signal, by its manifest's time limit. The next start runs the pods again."""
    state = tmp_path / "dev"

    def down() -> Ran:
        return run_process("dev", "--directory", str(state), "--down")

    def start(name: str) -> DaemonProcess:
        return daemons.enter_context(running(tmp_path / name, "dev", "--directory", str(state), "--nodes", "2", *apply))

    def pids() -> list[int]:
        records = [json.loads(path.read_bytes()) for path in state.glob("nodes/*/pods/*/pod.json")]
        return [launch["pid"] for record in records for launch in record["launchables"].values()]

    def all_run() -> bool:
        return len(pids()) == 2 and all(len(group(pid)) == 2 for pid in pids())

    nothing = down()
    assert (nothing.code, nothing.out) == (0, f"no pod of `rcfarm dev --directory {state}` runs (looked in {state})\n")
    file = tmp_path / "pod.yaml"
    launchable = {"command": STUBBORN, "stop_timeout": 0.5}
    file.write_text(
        json.dumps({"id": "web", "replicas": 2, "manifest": {"id": "web", "launchables": {"run": launchable}}})
    )
    apply = ("--apply", str(file))
    with contextlib.ExitStack() as daemons:
        daemons.callback(down)
        daemon = start("first")
        daemon.until(all_run, "running both pods")
        refused = down()
        assert (refused.code, refused.out) == (1, "")
        assert f"kill {daemon.pid}" in refused.err
        assert daemon.stop(signal.SIGINT) == 0
        first = pids()
        assert all(map(is_running, first))
        for pid in first:
            assert f"(run: pid {pid})" in daemon.log()
        assert "2 pods keep running: " in daemon.log()

        stopped = down()
        assert (stopped.code, stopped.err) == (0, "")
        assert sorted(map(int, re.findall(r"^stopped: node-\d/web \(run: pid (\d+)\)$", stopped.out, re.M))) == sorted(
            first
        )
        assert [member for pid in first for member in group(pid)] == []
        assert down().out == nothing.out

        daemon = start("second")
        daemon.until(lambda: all_run() and not set(first) & set(pids()), "running both pods again")
        daemon.kill()
        assert down().code == 0
        assert [member for pid in pids() for member in group(pid)] == []


def test_down_and_apply_exclude_each_other(tmp_path: Path) -> None:
    """Nothing is stopped or started."""
    (tmp_path / "rc.yaml").write_text("")
    ran = run_process("dev", "--directory", str(tmp_path / "dev"), "--down", "--apply", str(tmp_path / "rc.yaml"))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: --apply and --down exclude each other")
