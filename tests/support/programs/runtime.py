"""A real Docker Engine for the tests of compose.yaml, of the image and of the systemd units.

`.ci/runtime` starts it, in a network namespace of its own, with scripts that $RCFARM_RUNTIME names. Without that
variable the tests are skipped, or fail with `RCFARM_REQUIRE_SERVERS=1`, as in CI.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.consul.server import consul_binary

REPOSITORY = Path(__file__).parents[3]
LAB = Path(os.environ.get("LAB") or Path.home() / ".cache" / "rcfarm-runtime")
PATIENCE = 120.0  # seconds that a condition may take on a busy machine
BUILD = 900.0  # seconds to build everything

T = TypeVar("T")


class Engine:
    """The engine. `scripts`: the folder of the scripts that made it."""

    def __init__(self, scripts: Path) -> None:
        self.scripts = scripts
        self.environ = {**os.environ, "LAB": str(LAB), "REPO": str(REPOSITORY), "CONSUL": str(consul_binary())}
        self._runtime("start")
        output = self._bash(f'eval "$({scripts}/engine.sh env)"; env -0')
        self.environ = dict(line.split("=", 1) for line in output.split("\0") if line)

    def script(self, name: str, *arguments: str, **environ: str) -> str:
        """Run one of the scripts. Return its output."""
        return self._run([str(self.scripts / name), *arguments], BUILD, environ)

    def docker(self, *arguments: str, timeout: float = BUILD, **environ: str) -> str:
        """Run docker. Return its output. Fails the test when docker fails."""
        return self._run(["docker", *arguments], timeout, environ)

    def health(self, container: str) -> str:
        """Return the health check of a container: starting, healthy or unhealthy."""
        return self.docker("inspect", "--format", "{{.State.Health.Status}}", container).strip()

    def stop(self) -> None:
        """Stop the engine with all containers."""
        self._runtime("stop")

    def _runtime(self, command: str) -> None:
        self._run([str(REPOSITORY / ".ci" / "runtime"), command], BUILD, {})

    def _bash(self, script: str) -> str:
        return self._run(["bash", "-c", script], 60, {})

    def _run(self, command: list[str], timeout: float, environ: dict[str, str]) -> str:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def until(read: Callable[[], T], holds: Callable[[T], Any], what: str, *, within: float = PATIENCE) -> float:
    """Poll `read` until its result `holds`. Return the seconds it took. A failed poll counts as not yet."""
    started = time.monotonic()
    last: object = None
    while True:
        try:
            last = found = read()
            if holds(found):
                return time.monotonic() - started
        except (AssertionError, subprocess.TimeoutExpired, ValueError) as error:
            last = error
        assert time.monotonic() - started < within, f"not {what} within {within:g} s: {last}"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine, started for this run unless it runs already."""
    scripts = os.environ.get("RCFARM_RUNTIME")
    if not scripts:
        reason = (
            "no Docker Engine to run it on: set RCFARM_RUNTIME to the folder of the scripts that start one, such as "
            "../shared/runtime (it takes root, Debian, and about 4 GB under ~/.cache)"
        )
        if os.environ.get("RCFARM_REQUIRE_SERVERS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    was_there = (LAB / "docker" / "docker.sock").is_socket()
    engine = Engine(Path(scripts).resolve())
    yield engine
    if not was_there:
        engine.stop()
