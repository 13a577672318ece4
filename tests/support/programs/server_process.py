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

START_TIMEOUT = 120.0  # seconds; a busy machine starts an API server in 10 to 20
_PORT_TAKEN = "address already in use"


class ServerProcess:
    """One program. `command`: its arguments, called at each start. `ready`: returns True once it serves."""

    def __init__(
        self, name: str, directory: Path, command: Callable[[], Sequence[str]], ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.name = name
        self.directory = directory
        self._command = command
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Return what the program wrote since its first start."""
        return (self.directory / f"{self.name}.log").read_text(errors="replace")

    def spawn(self) -> None:
        """Start without waiting."""
        assert not self.running, f"{self.name} runs already"
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                list(self._command()), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (self.directory / f"{self.name}.pid").write_text(str(self.pid))

    def start(self) -> None:
        """Start and wait until it serves. Retries, because a client's closing connection may hold its port for a
        moment."""
        deadline = time.monotonic() + START_TIMEOUT
        self.spawn()
        while not self._ready():
            if not self.running:
                assert self.port_was_taken(), f"{self.name} ended; the end of its log:\n{self.log()[-2000:]}"
                time.sleep(0.2)
                self.spawn()
            assert time.monotonic() < deadline, f"{self.name} does not serve; its log:\n{self.log()[-2000:]}"
            time.sleep(0.05)

    def port_was_taken(self) -> bool:
        return _PORT_TAKEN in self.log()[-4000:]

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end; does nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            (self.directory / f"{self.name}.pid").unlink(missing_ok=True)
            self._process = None

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open, and nothing answers until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


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
