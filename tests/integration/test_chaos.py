"""A few rounds of chaos on three Consul servers; `python -m tests.chaos` plays as many as one likes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import network
from tests.support.consul import consul_binary

SEED = 3
ROUNDS = 3
_REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # a busy machine takes its time; alone it takes less than a minute
def test_what_is_promised_holds_through_faults_and_rewinds(tmp_path: Path) -> None:
    """Servers, farms and agents are hurt, and Consul's data is taken back, while operators change the fleet: nothing
    that is promised is broken, and after each round the fleet converges."""
    consul = consul_binary()
    if reason := network.missing():
        if os.environ.get("RCFARM_REQUIRE_SERVERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "tests.chaos", "--seed", str(SEED), "--rounds", str(ROUNDS)),
            *("--seconds", "40", "--rewinds", "0.5", "--directory", str(tmp_path)),
        ],
        cwd=_REPOSITORY,
        env=os.environ | {"RCFARM_SERVERS": str(consul.resolve().parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert summary["rounds"] >= 1
    assert summary["snapshots"] > 0
