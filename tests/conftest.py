"""Fixtures for all tests. The environment of the user who runs the tests never leaks into them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from rcfarm.agent.cgroups import find_mounts
from tests.support.consul.server import consul, consul_server, consul_store, root, start_cluster, start_consul
from tests.support.kube.control_plane import control_plane, kube, namespace, own_control_plane, start_control_plane
from tests.support.programs.runtime import engine

__all__ = [
    "consul",
    "consul_server",
    "consul_store",
    "control_plane",
    "engine",
    "kube",
    "namespace",
    "own_control_plane",
    "root",
    "start_cluster",
    "start_consul",
    "start_control_plane",
]


# An example's wall-clock time says how busy the machine is; a property has no opinion on that.
settings.register_profile("rcfarm", deadline=None)
settings.load_profile("rcfarm")

_CLUSTERS = ("CONSUL_", "KUBE", "FC_", "BARRIER_")  # prefixes of variables that lead to a real cluster of the user


def pytest_configure() -> None:
    """A shell makes its background processes ignore SIGINT, which programs under test would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the empty control groups of agents that tests killed; an agent that still runs makes its own again."""
    if hasattr(session.config, "workerinput"):  # other workers of pytest-xdist may not have finished
        return
    for mount in find_mounts(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()):
        for base in mount.own.glob("rcfarm-*-????????????"):
            for directory in sorted(base.rglob("*/"), reverse=True):
                with suppress(OSError):
                    directory.rmdir()
            with suppress(OSError):
                base.rmdir()


_TOGETHER = ("agent", "extender", "kube", "programs")  # of the integration tests, about half of the time


class _InOrder(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Sends each file's tests to one process. The integration tests begin when all others have been sent out, and stay
    in two processes: what shares a container engine is in the same one, and not too many servers run at once."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if not file.startswith("tests/integration/"):
            return file
        return f"integration, {'first' if file.split('/')[2] in _TOGETHER else 'second'} half"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return _InOrder(config, log)


@pytest.fixture(autouse=True)
def _no_environment_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(_CLUSTERS)]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A program that runs in a test's own process configures logging for the whole process. Each module's logger keeps
    that configuration from its first use on, so the tests after it could capture no logs."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    if not structlog.is_configured():
        return
    structlog.reset_defaults()
    root.handlers = handlers
    root.setLevel(level)
    for module in list(sys.modules.values()):
        logger = getattr(module, "log", None)
        if isinstance(logger, type(structlog.get_logger())):
            vars(logger).pop("bind", None)
