"""Server programs that tests run beside themselves, in sessions of their own so that Ctrl-C reaches the tests first.

Each program writes its pid to a file in its directory. A `Lifeline` is a child that waits for the end of this process,
however it comes, and then kills whatever those files name: servers never outlive their tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
START_TIMEOUT = 120.0  # seconds; a busy machine starts an API server in 10 to 20
_PORT_TAKEN = "address already in use"


def servers_directory(*programs: str) -> Path:
    """Return where the server programs are. Skips or fails the test when one of these is missing."""
    directory = Path(os.environ.get("RCFARM_SERVERS") or REPOSITORY / ".servers")
    missing = [name for name in programs if not (directory / name).is_file()]
    if missing:
        reason = f"no {missing[0]} in {directory}: run `../shared/servers/unpack .servers`, or set RCFARM_SERVERS"
        if os.environ.get("RCFARM_REQUIRE_SERVERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return directory


class Program:
    """One program, over several lives. `log_file`: what all of them wrote."""

    def __init__(self, name: str, log_file: Path) -> None:
        self.name, self.log_file = name, log_file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def run(self, command: Sequence[str], **options: Any) -> None:
        """Start a process without waiting. `options`: as of `Popen`."""
        assert not self.is_running, f"{self.name} runs already"
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **{"cwd": REPOSITORY, **options}
            )

    def kill(self) -> None:
        """Send SIGKILL, also to a paused process, and wait for its end; does nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Send SIGSTOP: the process does nothing until `resume`, without noticing it, and its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class ServerProcess(Program):
    """A server. `command`: its arguments, called at each start. `ready`: returns True once it serves."""

    def __init__(
        self, name: str, directory: Path, command: Callable[[], Sequence[str]], ready: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(name, directory / f"{name}.log")
        self.directory = directory
        self._command = command
        self._ready = ready

    def spawn(self) -> None:
        """Start without waiting."""
        self.run(list(self._command()), start_new_session=True)
        (self.directory / f"{self.name}.pid").write_text(str(self.pid))

    def start(self) -> None:
        """Start and wait until it serves. Retries, because a client's closing connection may hold its port for a
        moment."""
        deadline = time.monotonic() + START_TIMEOUT
        self.spawn()
        while not self._ready():
            if not self.is_running:
                assert self.port_was_taken(), f"{self.name} ended; the end of its log:\n{self.log()[-2000:]}"
                time.sleep(0.2)
                self.spawn()
            assert time.monotonic() < deadline, f"{self.name} does not serve; its log:\n{self.log()[-2000:]}"
            time.sleep(0.05)

    def port_was_taken(self) -> bool:
        return _PORT_TAKEN in self.log()[-4000:]

    def kill(self) -> None:
        super().kill()
        (self.directory / f"{self.name}.pid").unlink(missing_ok=True)


class Lifeline:
    """Kills the servers of `directory` when this process ends without having done so."""

    def __init__(self, directory: Path) -> None:
        script = 'cat >/dev/null; cat "$0"/*.pid 2>/dev/null | xargs -r -n1 kill -9 2>/dev/null'
        self._waiting = subprocess.Popen(
            ["sh", "-c", script, str(directory)], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """End the lifeline, when the servers are gone."""
        assert self._waiting.stdin is not None
        self._waiting.stdin.close()
        self._waiting.wait()
