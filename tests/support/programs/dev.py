"""A running `rcfarm dev`: a store, a farm, an engine and an agent, with real processes, and its command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from store.open import read_endpoint, store_token
from tests.support.agent.agents import kill_started_under
from tests.support.programs.cli import Ran, run_process
from tests.support.programs.daemon import DaemonProcess


class Fleet:
    """A running `rcfarm dev` and its command line."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._state = directory, directory / "state"
        self.daemon = DaemonProcess(directory / "daemon", "dev", "--directory", str(self._state), "--nodes", "1")
        self.daemon.until(lambda: read_endpoint(self._state) is not None, "serving its store")
        self.daemon.until_ready()

    @property
    def environ(self) -> dict[str, str]:
        """The variables that lead another program to its store."""
        endpoint, token = read_endpoint(self._state), store_token(self._state)
        assert endpoint is not None
        return {"RCFARM_STORE": endpoint.url, "CONSUL_HTTP_TOKEN": token}

    def __call__(self, *arguments: str) -> Ran:
        return run_process(*arguments, env={**self.environ, "HOME": "/"})

    def apply(self, rc_id: str, command: list[str], *options: str, restart: str = "always", **fields: Any) -> Ran:
        launchables = {"run": {"command": command, "restart": restart, "stop_timeout": 2}}
        manifest = {"id": rc_id, "launchables": launchables, **fields}
        path = self.directory / f"{rc_id}.yaml"
        path.write_text(json.dumps({"id": rc_id, "replicas": 1, "manifest": manifest}))
        return self("rc", "apply", "-f", str(path), "--yes", *options)

    def metric(self, series: str) -> float:
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.daemon.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("dev")
    fleet = Fleet(directory)
    try:
        yield fleet
    finally:
        fleet.daemon.stop()
        fleet.daemon.close()
        kill_started_under(directory)
