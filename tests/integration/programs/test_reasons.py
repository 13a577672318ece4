"""A crash loop, a failed task, a stuck rollout and a full disk, made to happen: every view names the same code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.agent.agents import kill_started_under
from tests.support.programs.daemon import DaemonProcess
from tests.support.programs.dev import Fleet, fleet
from tests.support.programs.disk import small_file_system

__all__ = ["fleet"]

DEPLOY = Path(__file__).parents[3] / "deploy"


@contextmanager
def agent_of(fleet: Fleet, node: str, directory: Path) -> Iterator[DaemonProcess]:
    """Run a further agent of the fleet, with its state below `directory` and the label `own` with its name."""
    options = ["--node", node, "--state-dir", str(directory / "agent"), "-l", f"own={node}"]
    options += ["--set", "agent.artifact_sources=file:///"]
    agent = DaemonProcess(fleet.directory / f"agent-{node}", "agent", *options, environ=fleet.environ)
    try:
        agent.until_ready()
        yield agent
    finally:
        agent.kill()
        agent.close()
        kill_started_under(directory)


def apply(fleet: Fleet, rc_id: str, node: str, launchable: dict[str, Any], **fields: Any) -> None:
    """Apply an RC with one pod, on that node, and do not wait."""
    manifest = {"id": rc_id, "launchables": {"run": launchable}}
    path = fleet.directory / f"{rc_id}.json"
    path.write_text(
        json.dumps({"id": rc_id, "replicas": 1, "node_selector": f"own={node}", "manifest": manifest, **fields})
    )
    assert fleet("rc", "apply", "-f", str(path), "--yes", "--detach").code == 0


def metric_of(daemon: DaemonProcess, name: str, code: str) -> float:
    """Return the value of a metric for a code, 0 where it is absent."""
    page = daemon.get("/metrics")[1]
    found = re.findall(rf'^{name}\{{[^}}]*\bcode="{code}"[^}}]*\}} (\S+)$', page, re.MULTILINE)
    return max(map(float, found), default=0.0)


def codes(fleet: Fleet, name: str) -> list[str]:
    return [reason["code"] for reason in fleet("explain", name, "-o", "json").json["reasons"]]


def all_views_name(fleet: Fleet, name: str, code: str, metric: str, daemon: DaemonProcess | None = None) -> None:
    """Wait until `explain` names the code, then require it of every other view."""
    daemon = daemon or fleet.daemon
    fleet.daemon.until(lambda: code in codes(fleet, name), f"{code} of {name}")
    reason: dict[str, Any] = next(
        each for each in fleet("explain", name, "-o", "json").json["reasons"] if each["code"] == code
    )
    assert reason["detail"]
    assert reason["act"]
    assert reason["blocking"] is True
    assert f"{code}: " in fleet("explain", name).out
    fleet.daemon.until(lambda: f"{code}: " in fleet("status").out, f"{code} in the status")
    found = [each for each in fleet("doctor", "-o", "json").json if code in each["codes"]]
    assert [each["message"] for each in found if name.rpartition("/")[2] in each["message"]] != []
    assert re.search(rf"\({code}|, {code}", fleet("doctor").out)
    fleet.daemon.until(lambda: metric_of(daemon, metric, code) >= 1, f"{code} in {metric}")
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    rules = [rule["expr"] for group in groups for rule in group["rules"]]
    assert any(re.search(rf'\bcode=~?"(\w+\|)*{code}["|]', rule) for rule in rules)
    assert f"{metric}{{" in (DEPLOY / "grafana" / "rcfarm.json").read_text()


def test_a_crash_loop(fleet: Fleet) -> None:
    """Without a health check the pod passes between its crashes; it is a crash loop all the same."""
    try:
        applied = fleet.apply("crashes", ["sh", "-c", "sleep 1; exit 3"])
        assert applied.code == 2, applied.out
        assert "run exited with code 3" in applied.out
        all_views_name(fleet, "rc/crashes", "crashing", "rcfarm_rc_reasons")
        assert codes(fleet, "pod/node-1/crashes") == ["crashing"]
    finally:
        fleet("rc", "delete", "crashes", "--yes")


def test_a_failed_task(fleet: Fleet) -> None:
    path = fleet.directory / "task.yaml"
    path.write_text(json.dumps({"task": "fails", "process": {"command": ["sh", "-c", "echo no; exit 4"]}}))
    assert fleet("task", "run", "-f", str(path)).code != 0
    all_views_name(fleet, "task/fails", "task_failed", "rcfarm_executions_ended_total")
    assert codes(fleet, "fails") == ["task_failed"]
    assert "fails" in fleet("status").out


def test_a_stuck_rollout(fleet: Fleet, tmp_path: Path) -> None:
    """The canary's agent is away, so that the rollout can neither go on nor be blamed on its pods."""
    update = {"min_healthy_time": 0.2, "healthy_deadline": 0.5, "progress_deadline": 1}
    try:
        with agent_of(fleet, "away", tmp_path) as agent:
            apply(fleet, "stuck", "away", {"command": ["sleep", "1001"]}, update=update)
            status = ("rc", "status", "stuck", "-o", "json")
            fleet.daemon.until(lambda: fleet(*status).json["rc"]["state"] == "converged", "converged")
            agent.kill()
            fleet.daemon.until(lambda: codes(fleet, "away") == ["node_dead"], "dead")
            assert re.search(r"^away +node_dead: ", fleet("status").out, re.MULTILINE)
            assert "(node_dead)" in fleet("doctor").out
            apply(fleet, "stuck", "away", {"command": ["sleep", "1002"]}, update=update)
            all_views_name(fleet, "rc/stuck", "rollout_stuck", "rcfarm_rc_reasons")
            assert fleet("rollout", "abort", "stuck").code == 0
            fleet.daemon.until(lambda: "rollout_stuck" not in codes(fleet, "stuck"), "aborted")
    finally:
        fleet("rc", "delete", "stuck", "--yes", "--detach")


def test_a_full_disk(fleet: Fleet, tmp_path: Path) -> None:
    """It is a reason of the RC, of its pod and of the node; the agent's own metric names the node."""
    large = tmp_path / "large"
    large.write_bytes(os.urandom(1_000_000))
    artifact = {"url": f"file://{large}", "sha256": hashlib.sha256(large.read_bytes()).hexdigest()}
    with small_file_system(tmp_path / "disk", "256k") as disk, agent_of(fleet, "small", disk) as agent:
        try:
            apply(fleet, "big", "small", {"command": ["./run"], "artifact": artifact})
            all_views_name(fleet, "rc/big", "disk_full", "rcfarm_rc_reasons")
            all_views_name(fleet, "node/small", "disk_full", "rcfarm_agent_reasons", agent)
            assert codes(fleet, "pod/small/big") == ["disk_full"]
            assert re.search(r"^small +disk_full: .*no space left on the disk", fleet("status").out, re.MULTILINE)
        finally:
            fleet("rc", "delete", "big", "--yes")
