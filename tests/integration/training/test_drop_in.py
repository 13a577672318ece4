"""The training-operator's Deployment with another image: its command, flags, listeners and rights."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.kube.api.objects import Object
from tests.support.consul.server import free_ports
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.programs.daemon import DaemonLives, get
from tests.support.programs.server_process import Program
from tests.support.training.real import example, training_cluster

PROGRAM = "from rcfarm.cli.daemons.drop_in import training_operator; training_operator()"
JOBS = ["pytorchjobs", "tfjobs"]
RIGHTS: list[Object] = [  # those that the original's role has and we use: no patch of services, no Leases
    {"apiGroups": ["kubeflow.org"], "resources": JOBS, "verbs": ["get", "list", "watch", "delete", "patch", "update"]},
    {
        "apiGroups": ["kubeflow.org"],
        "resources": [f"{job}/status" for job in JOBS],
        "verbs": ["get", "patch", "update"],
    },
    {"apiGroups": ["kubeflow.org"], "resources": [f"{job}/finalizers" for job in JOBS], "verbs": ["update"]},
    {
        "apiGroups": [""],
        "resources": ["pods"],
        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
    },
    {"apiGroups": [""], "resources": ["services"], "verbs": ["create", "delete", "get", "list", "watch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
]


@pytest.fixture
def without_ours(operator: DaemonLives) -> Iterator[None]:
    operator.kill()
    yield
    operator.start()
    operator.process.until_ready()


@pytest.mark.usefixtures("without_ours")
async def test_only_the_image_is_another(plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """Probes answer at their port without a token, metrics at theirs; a job succeeds under the original's rights."""
    token = plane.create_user(RIGHTS, namespace=namespace, everywhere=True)
    kubeconfig = plane.write_kubeconfig(tmp_path / "kubeconfig", token=token)
    probes, metrics = free_ports(2)
    flags = [
        "--enable-scheme=pytorchjob", f"--metrics-bind-address=127.0.0.1:{metrics}", "--zap-log-level=2",
        f"--health-probe-bind-address=127.0.0.1:{probes}", "--webhook-server-port=9443", f"--kubeconfig={kubeconfig}",
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RCFARM_")}
    process = Program("training-operator", tmp_path / "log")
    process.run([sys.executable, "-c", PROGRAM, *flags], env=environ | {"KUBEFLOW_NAMESPACE": namespace})
    try:
        await until(lambda: asyncio.to_thread(lambda: get(probes, "/readyz")[0] == 200), "ready")
        assert get(probes, "/healthz") == (200, "ok\n")
        assert get(probes, "/metrics")[0] == 401
        async with training_cluster(plane, namespace) as cluster:
            done = {"exit_code": 0, "run_seconds": 0.3}
            job = await cluster.create(example("pytorch", Master=done, Worker=done))
            await cluster.until(job, "Succeeded")
        _, text = await asyncio.to_thread(get, metrics, "/metrics")
        assert f'training_operator_jobs_successful_total{{framework="pytorch",job_namespace="{namespace}"}} 1.0' in text
        assert 'rest_client_requests_total{code="403"' not in text
    finally:
        process.kill()
