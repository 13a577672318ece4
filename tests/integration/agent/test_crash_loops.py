"""Programs that die, as an operator sees them: a real `rcfarm dev`, its commands and its metrics."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.support.programs.dev import Fleet, fleet

__all__ = ["fleet"]

SERVE = "exec python3 -m http.server ${RCFARM_PORT_HTTP} --bind ${RCFARM_ADDRESS}"
CHECKED: dict[str, Any] = {"ports": {"http": 0}, "health": {"http": {}, "interval": 0.3, "timeout": 2}}


@pytest.mark.parametrize("check", [False, True], ids=["without-a-check", "with-a-check"])
def test_a_program_that_lives_a_second_is_seen_everywhere(fleet: Fleet, check: bool) -> None:
    """A program passes for a moment and dies: `apply` does not report success, and every view of the operator names the
    RC, the exit code and the restarts."""
    command = ["sh", "-c", SERVE.replace("exec", "timeout 2") + "; exit 3" if check else "sleep 1; exit 3"]
    try:
        applied = fleet.apply("crashes", command, **(CHECKED if check else {}))
        assert applied.code == 2, applied.out
        assert "crashes created, but not complete" in applied.out
        assert "run exited with code 3" in applied.out
        explained = fleet("rc", "explain", "crashes")
        assert "rc crashes is unhealthy" in explained.out
        assert "1 of 1 pod crashes: node-1: run exited with code 3" in explained.out
        assert "no known problem" not in explained.out
        status = fleet("rc", "status", "crashes", "--output", "json").json
        assert (status["rc"]["state"], status["rc"]["reasons"][0]["code"]) == ("unhealthy", "crashing")
        assert status["pods"][0]["restarts"] >= 2
        (detail,) = (line for line in fleet("rc", "status", "crashes").out.splitlines() if line.startswith("node-1 "))
        assert detail.count("exited with code 3") == 1
        doctor = fleet("doctor")
        assert doctor.code == 1
        assert "rc crashes is unhealthy: 1 of 1 pod crashes" in doctor.out
        glance = fleet("status").out
        assert "1 unhealthy" in glance
        assert re.search(r"^crashes +unhealthy .* exited with code 3", glance, re.MULTILINE)
        assert fleet.metric('rcfarm_rcs{state="unhealthy"}') == 1
        assert fleet.metric('rcfarm_rcs{state="converged"}') == 0
        assert fleet.metric('rcfarm_agent_process_restarts_total{node="node-1",pod="crashes"}') >= 2
        assert fleet.metric('rcfarm_agent_unhealthy_pods{node="node-1"}') == 1
    finally:
        fleet("rc", "delete", "crashes", "--yes")


def test_work_that_is_done_and_work_that_failed(fleet: Fleet) -> None:
    """A one-off that succeeded is completed and done, one that failed is not: neither looks like a service."""
    try:
        assert fleet.apply("succeeds", ["true"], restart="never").code == 0
        failed = fleet.apply("fails", ["sh", "-c", "exit 4"], restart="never")
        assert failed.code == 2
        assert "node-1: failed, health critical, run exited with code 4" in failed.out
        listed = {rc["id"]: rc["state"] for rc in fleet("rc", "list", "--output", "json").json}
        assert listed == {"succeeds": "completed", "fails": "failed"}
        assert fleet("rc", "status", "succeeds", "--output", "json").json["pods"][0]["state"] == "completed"
        explained = fleet("rc", "explain", "fails").out
        assert "1 of 1 pod has failed and is not restarted: node-1: run exited with code 4" in explained
        assert fleet.metric('rcfarm_rcs{state="failed"}') == fleet.metric('rcfarm_rcs{state="completed"}') == 1
    finally:
        for rc_id in ("succeeds", "fails"):
            fleet("rc", "delete", rc_id, "--yes")


def test_a_change_that_can_not_start_names_what_stops_it(fleet: Fleet) -> None:
    """The service continues with its old manifest, in the same process; the node's refusal is shown by `apply`,
    `explain` and `doctor`."""
    try:
        assert fleet.apply("shop", ["sh", "-c", SERVE], "--wait-healthy", "1", **CHECKED).code == 0
        pid = fleet("rc", "status", "shop", "--output", "json").json["pods"][0]["launchables"]["run"]["pid"]
        changed = fleet.apply("shop", ["./bin/nope"], **CHECKED)
        assert changed.code == 2
        for shown in (changed.out, fleet("rc", "explain", "shop").out, fleet("doctor").out):
            assert "'./bin/nope' is not an executable file" in shown
        assert "the pods run revision 1 again" in changed.out
        os.kill(pid, 0)
    finally:
        fleet("rc", "delete", "shop", "--yes")


def test_a_service_that_stays_healthy_is_done(fleet: Fleet) -> None:
    """It is watched for the requested time; applied again, it has been healthy for long enough and is done at once."""
    try:
        created = fleet.apply("hello", ["sh", "-c", SERVE], "--wait-healthy", "2", **CHECKED)
        assert (created.code, created.out) == (0, "rc hello created: 1 of 1 placed, 1 healthy\n")
        assert "waiting until healthy for 2.0s" in created.err
        again = fleet.apply("hello", ["sh", "-c", SERVE], "--wait-healthy", "2", **CHECKED)
        assert "waiting until" not in again.err
        assert again.code == 0
    finally:
        fleet("rc", "delete", "hello", "--yes")
