"""The servers of the test suite end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.kube.control_plane import until


def test_servers_never_outlive_their_tests(tmp_path: Path) -> None:
    """The servers end also when the process that started them is killed."""
    script = (
        "import sys, signal\nfrom pathlib import Path\n"
        "from tests.support.programs.server_process import Lifeline, ServerProcess\n"
        "directory = Path(sys.argv[1])\nlifeline = Lifeline(directory)\n"
        "server = ServerProcess('sleep', directory, lambda: ['sleep', '600'])\nserver.start()\n"
        "print(server.pid, flush=True)\nsignal.pause()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    assert psutil.pid_exists(server)
    os.kill(starter.pid, signal.SIGKILL)
    starter.communicate()
    until(lambda: not psutil.pid_exists(server), "killed")
