"""`rcfarm agent` as a process."""

from __future__ import annotations

import subprocess
import sys

ASK = (
    "import ctypes; from rcfarm.roles import agent; from rcfarm.config.settings import Settings; "
    "agent.run_role = lambda *_: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0); "
    "print(agent.run_agent(Settings()))"
)


def test_pods_of_the_agents_own_user_can_not_read_its_memory() -> None:
    """The kernel counts the agent's process as not dumpable (PR_GET_DUMPABLE), so only root may look into it."""
    ran = subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=True, text=True)
    assert ran.stdout == "0\n"
