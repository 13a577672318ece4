"""A real rcfarm process for tests, watched as a service manager and a prober would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from tests.support.consul.server import free_ports
from tests.support.programs.server_process import Program

PATIENCE = 30.0  # seconds that a condition may take before the test fails


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and text; status 0 while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as answer:
        return answer.code, answer.read().decode()
    except OSError:
        return 0, ""


class DaemonProcess(Program):
    """`rcfarm ARGS --listen 127.0.0.1:PORT` under a notification socket. `notifications`: the messages received so
    far."""

    def __init__(self, directory: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_ports(1)[0]
        self.notifications: list[str] = []
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(directory / "notify"))
        self._manager.setblocking(False)
        super().__init__(directory.name, directory / "log")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RCFARM_", "CONSUL_"))}
        variables = {"NOTIFY_SOCKET": str(directory / "notify"), "WATCHDOG_USEC": "1500000", **(environ or {})}
        variables.setdefault("RCFARM_AGENT_DEFAULT_USER", str(os.geteuid()))  # nobody can't enter a test's folders
        options = ("--listen", f"127.0.0.1:{self.port}", "--log-format", "json")
        self.run([sys.executable, "-m", "rcfarm", *arguments, *options], env=inherited | variables)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text; status 0 while nothing listens."""
        return get(self.port, path)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition; fail with the log when it does not come."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"not {what}; the log: {self.log()}"
            time.sleep(0.02)

    def until_ready(self) -> None:
        self.until(lambda: self.get("/readyz")[0] == 200, "ready")

    def until_notified(self, message: str) -> None:
        """Wait until the service manager has received `message`."""
        self.until(lambda: message in self.receive(), f"notified of {message}")

    def receive(self) -> list[str]:
        """Return all messages received since `notifications` was cleared."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.notifications.append(self._manager.recv(4096).decode())
        return self.notifications

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait. Return the exit code."""
        os.kill(self.pid, number)
        return self.wait()

    def wait(self, within: float = PATIENCE) -> int:
        """Wait until the process has ended. Return the exit code."""
        assert self._process is not None
        return self._process.wait(within)

    def close(self) -> None:
        self.kill()
        self._manager.close()


class DaemonLives:
    """A daemon that tests kill and start again, each time as a new process, with its own folder."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory, self._arguments = directory, arguments
        self._lives: list[DaemonProcess] = []

    @property
    def process(self) -> DaemonProcess:
        """The process that was started last."""
        return self._lives[-1]

    @property
    def is_running(self) -> bool:
        return bool(self._lives) and self.process.is_running

    def start(self) -> None:
        """Start a new process, unless one runs."""
        if not self.is_running:
            self._lives.append(DaemonProcess(self.directory / str(len(self._lives)), *self._arguments))

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        if self._lives:
            self.process.close()

    def log(self) -> str:
        """Return what all its processes wrote."""
        return "".join(life.log() for life in self._lives)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextlib.contextmanager
def running(directory: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Iterator[DaemonProcess]:
    """Yield a daemon that is ended afterwards in any case."""
    daemon = DaemonProcess(directory, *arguments, environ=environ)
    try:
        yield daemon
    finally:
        daemon.close()
