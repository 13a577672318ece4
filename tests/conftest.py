"""Fixtures for all tests. The environment of the user who runs the tests never leaks into them."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

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


@pytest.fixture(autouse=True)
def _no_environment_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(_CLUSTERS)]:
        monkeypatch.delenv(name)
