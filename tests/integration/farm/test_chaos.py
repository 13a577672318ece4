"""A few rounds of chaos on three Consul servers; `python -m tests.chaos` plays any number of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import network
from tests.support.consul.server import consul_binary

SEED = 3
ROUNDS = 3
_REPOSITORY = Path(__file__).parents[3]


@pytest.mark.timeout(300)  # on a busy machine; on an idle one it takes less than a minute
def test_what_is_promised_holds_through_faults_and_rewinds(tmp_path: Path) -> None:
    """While operators change the fleet, faults hit servers, farms and agents, and Consul's data is rewound: no
    invariant is violated, and the fleet converges after each round."""
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
