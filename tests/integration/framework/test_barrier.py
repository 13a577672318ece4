"""The barrier against a real API server, and as the process that a container runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd
from controllers.framework.barrier import barrier as barrier_module
from controllers.framework.barrier.barrier import Config, Exit, FrameworkBarrier
from store.kube.api.objects import Object
from store.kube.client.client import KubeClient
from tests.support.framework.gangs import compressed, gang, task
from tests.support.kube.control_plane import ControlPlane
from tests.support.waiting import until

READERS = [{"apiGroups": [FRAMEWORKS.group], "resources": [FRAMEWORKS.plural], "verbs": ["get", "list", "watch"]}]
STOPPED = 128 + signal.SIGTERM
PATIENCE = 60.0  # seconds that a condition may take on a busy machine


def waiting() -> Object:
    """Return a gang that lacks one address."""
    return gang(worker=[task("worker", 0), task("worker", 1, ip=None)])


class Pod:
    """The environment of a pod's barrier in this process: a kubeconfig of its service account, and a directory."""

    def __init__(self, kubeconfig: Path, namespace: str, directory: Path) -> None:
        self.kubeconfig, self.namespace, self.directory = kubeconfig, namespace, directory
        self.said: list[str] = []

    async def barrier(self, **settings: Any) -> Exit:
        config = Config(self.namespace, "gang", kube_config_file_path=str(self.kubeconfig), **settings)
        return await FrameworkBarrier(config, output_dir=self.directory, say=self.said.append).run()

    async def says(self, text: str) -> None:
        """Wait until a line contains the text."""
        await until(lambda: any(text in line for line in self.said), within=PATIENCE)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "FC_FRAMEWORK_NAMESPACE": self.namespace,
            "FC_FRAMEWORK_NAME": "gang",
            "KUBECONFIG": str(self.kubeconfig),
        }


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    control_plane.install(crd())
    return control_plane


@pytest.fixture
def pod(plane: ControlPlane, namespace: str, tmp_path: Path) -> Pod:
    return pod_of(plane, namespace, tmp_path)


def pod_of(plane: ControlPlane, namespace: str, tmp_path: Path) -> Pod:
    """Return a pod whose service account may read Frameworks."""
    token = plane.create_user(READERS, namespace=namespace)
    (tmp_path / "gang").mkdir()
    return Pod(plane.write_kubeconfig(tmp_path / "kubeconfig", token=token), namespace, tmp_path / "gang")


async def change(kube: KubeClient, namespace: str, framework: Object) -> None:
    """Write another state."""
    old = await kube.get(FRAMEWORKS, "gang", namespace)
    await kube.replace(FRAMEWORKS, {**framework, "metadata": old["metadata"]})


async def test_a_gang_that_is_whole(kube: KubeClient, pod: Pod) -> None:
    """As a process: exit 0 after one look, the files are written, the script can be sourced."""
    await kube.create(FRAMEWORKS, gang(ps=1, worker=2), pod.namespace)
    ended = await asyncio.to_thread(run, pod.directory, pod.environ)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((pod.directory / "framework.json").read_text())["metadata"]["name"] == "gang"
    script = "source ./injector.sh > /dev/null; echo $FB_WORKER_ADDRESSES"
    shell = subprocess.run(
        ["bash", "-c", script],
        cwd=pod.directory,
        env={"FB_WORKER_PORT": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout == "10.1.6.1:7,10.1.6.2:7\n"
    assert ended.stderr.splitlines()[-1].startswith("frameworkbarrier: exit 0 (passed): 3 tasks are ready")


async def test_the_last_address_comes(kube: KubeClient, pod: Pod) -> None:
    """The barrier passes upon the change, not only at the next interval, which would come after the test."""
    await kube.create(FRAMEWORKS, waiting(), pod.namespace)
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        running = group.create_task(pod.barrier(barrier_check_interval_sec=1000))
        await pod.says("1/2 ready; missing: worker-1 (no address yet)")
        await change(kube, pod.namespace, compressed(gang(worker=2)))
    assert running.result() == Exit.PASSED


async def test_a_service_account_that_may_not(plane: ControlPlane, pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without permission the barrier fails after the grace period (shortened here), and quotes the server."""
    monkeypatch.setattr(barrier_module, "REFUSAL_GRACE", 1.0)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]
    plane.write_kubeconfig(pod.kubeconfig, token=plane.create_user(rules, namespace=pod.namespace))
    assert await pod.barrier() == Exit.FAILED
    assert 'cannot get resource "frameworks"' in pod.said[-1]


async def test_the_server_forgets(own_control_plane: ControlPlane, tmp_path: Path) -> None:
    """The API server restarts without its watch history, so the watch is answered with 410; the barrier lists again and
    sees the next change."""
    own_control_plane.install(crd())
    own_control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": "ns"}})
    pod = pod_of(own_control_plane, "ns", tmp_path)
    async with await KubeClient.connect(str(own_control_plane.kubeconfig)) as kube:
        await kube.create(FRAMEWORKS, waiting(), "ns")
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            running = group.create_task(pod.barrier())
            await pod.says("1/2 ready")
            for number in range(3):  # the history advances without a change of the barrier's own Framework
                await kube.create(FRAMEWORKS, gang(name=f"other{number}", worker=1), "ns")
            await asyncio.to_thread(own_control_plane.restart_apiserver)
            await change(kube, "ns", gang(worker=2))
        assert running.result() == Exit.PASSED


def run(directory: Path, environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `rcfarm barrier` in `directory`, in an environment that holds nothing else."""
    return subprocess.run(
        [sys.executable, "-m", "rcfarm", "barrier", *arguments],
        cwd=directory,
        env=bare(environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def bare(environ: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environ}


NAMES = {"FC_FRAMEWORK_NAMESPACE": "ns", "FC_FRAMEWORK_NAME": "gang"}


@pytest.mark.parametrize(
    ("environ", "code", "message"),
    [
        ({**NAMES, "FC_FRAMEWORK_NAME": ""}, 210, "FC_FRAMEWORK_NAME is not set"),
        ({**NAMES, "BARRIER_CHECK_INTERVAL_SEC": "5s"}, 210, "BARRIER_CHECK_INTERVAL_SEC is '5s'"),
        ({**NAMES, "BARRIER_CHECK_TIMEOUT_SEC": "1201"}, 210, "BARRIER_CHECK_TIMEOUT_SEC is 1201"),
        ({**NAMES, "KUBECONFIG": "/missing"}, 1, "there is no kubeconfig file /missing"),
        (NAMES, 1, "no Kubernetes API server is configured"),
    ],
)
def test_what_the_environment_lacks(environ: dict[str, str], code: int, message: str, tmp_path: Path) -> None:
    """The barrier fails at once with the documented exit code, and its meaning in the last line."""
    ended = run(tmp_path, environ)
    assert ended.returncode == code
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"frameworkbarrier: exit {code} (")
    assert message in last
    assert not list(tmp_path.iterdir())


async def test_stopping_the_process(kube: KubeClient, pod: Pod) -> None:
    """SIGTERM ends it at once, with no file left behind."""
    await kube.create(FRAMEWORKS, waiting(), pod.namespace)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rcfarm", "barrier", cwd=pod.directory, env=bare(pod.environ), stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        while b"1/2 ready" not in await process.stderr.readline():
            pass
    process.terminate()
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == STOPPED
    assert not list(pod.directory.iterdir())


def test_files_go_where_they_should(pod: Pod, tmp_path: Path) -> None:
    """`--output-dir` is used instead of the working directory; a missing one is reported before anything else."""
    ended = run(pod.directory, pod.environ, "--output-dir", str(tmp_path / "missing"))
    assert ended.returncode == 1
    assert f"cannot write to {tmp_path}/missing; set another --output-dir" in ended.stderr


def test_it_starts_lean() -> None:
    """The barrier runs in every pod of a gang, so modules that it does not need in a pod are not imported."""
    modules = "{'kubernetes_asyncio', 'structlog', 'yaml'}"
    script = f"import sys, controllers.framework.barrier.barrier; print({modules} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
