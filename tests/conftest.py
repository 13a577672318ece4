"""Fixtures that every test may use. The environment of whoever runs the tests never leaks into them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.consul import consul, consul_server, consul_store, root, start_cluster, start_consul
from tests.support.control_plane import control_plane, kube, namespace, own_control_plane, start_control_plane
from tests.support.runtime import engine

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


_CLUSTERS = ("CONSUL_", "KUBE", "FC_", "BARRIER_")  # beginnings of variables that lead to somebody's real cluster


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore SIGINT, and programs under test would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_environment_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(_CLUSTERS)]:
        monkeypatch.delenv(name)
