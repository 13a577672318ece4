"""One control plane, with the original's definitions, and one `rcfarm jobs` under the shipped rights."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from controllers.training.kinds import KINDS
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.etcd_history import FLAGS
from tests.support.programs.daemon import DaemonLives
from tests.support.training.real import (
    SHORT_LEASE,
    SYSTEM,
    TrainingCluster,
    grant,
    operator_arguments,
    original_crd,
    refused,
    training_cluster,
)


@pytest.fixture(scope="package")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of these tests' own: its definitions are the original's."""
    flags = ["--enable-admission-plugins=OwnerReferencesPermissionEnforcement", *FLAGS]
    with ControlPlane(tmp_path_factory.mktemp("training"), apiserver_flags=flags) as plane:
        plane.install(*map(original_crd, KINDS))
        grant(plane)
        yield plane


@pytest.fixture(scope="package")
def operator(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonLives]:
    """All kinds that are served, in every namespace. Tests may kill and start it. It lacks no right in the end."""
    directory = tmp_path_factory.mktemp("operator")
    arguments = operator_arguments(plane, directory, "--lease", f"{SYSTEM}/rcfarm-jobs", *SHORT_LEASE)
    with DaemonLives(directory, *arguments) as lives:
        lives.process.until_ready()
        yield lives
        assert refused(lives.process) == []


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    name = f"t{secrets.token_hex(4)}"
    plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def cluster(plane: ControlPlane, namespace: str, operator: DaemonLives) -> AsyncIterator[TrainingCluster]:
    """A namespace whose jobs the operator runs."""
    assert operator.is_running
    async with training_cluster(plane, namespace) as cluster:
        yield cluster
