"""The init containers that wait: the barrier of a whole job, and the one for a PyTorchJob's master. Their scripts run
here, with a name server that the test controls.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controllers.jobs.api import BadSpec
from controllers.training.options import InitContainers, TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.training.manifests import built_pod, pytorch_job, tf_job


def asking(job: Object, seconds: str = "600") -> Object:
    """Return the job with the annotation that asks for a barrier."""
    job["metadata"]["annotations"] = {"rcfarm.dev/barrier": seconds}
    return job


def operator(**options: Any) -> PyTorchJobs:
    return PyTorchJobs(MemoryKube(), options=TrainingOptions(**options))


class NameServer:
    """Programs of the names `nslookup` and `sleep`: a name is known once it was asked for often enough."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self.program("sleep", "exit 0")
        self.know()

    def program(self, name: str, text: str) -> None:
        file = self.path / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def know(self, *names: str, after: int = 0) -> None:
        """Let lookups of these names succeed after this number of failures; those of others never."""
        known = "|".join(names) or "nothing"
        self.program(
            "nslookup",
            f'echo "$1" >> {self.path}/asked\n'
            f'case "$1" in {known}) [ "$(grep -cx "$1" {self.path}/asked)" -gt {after} ];; *) exit 1;; esac',
        )

    def run(self, container: Object) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{self.path}{os.pathsep}{os.environ['PATH']}"}
        command = [*container["command"], *container.get("args", ())]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def names(tmp_path: Path) -> NameServer:
    return NameServer(tmp_path)


def barrier(job: Object, replica_type: str = "Worker") -> Object:
    (found,) = built_pod(operator(), job, replica_type)["spec"]["initContainers"]
    return dict(found)


def test_all_pods_wait_for_all_replicas_in_place_of_the_master() -> None:
    """The barrier follows the init containers of the template; the one that waits for the master alone is left out."""
    job = asking(pytorch_job(Master=1, Worker=2))
    job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["initContainers"] = [{"name": "own", "image": "x"}]
    own, waiting = built_pod(operator(), job, "Master")["spec"]["initContainers"]
    assert (own["name"], waiting["name"]) == ("own", "barrier")
    assert waiting["args"] == ["m-master-0", "m-worker-0", "m-worker-1"]
    assert (waiting["image"], waiting["imagePullPolicy"]) == ("alpine:3.10", "IfNotPresent")
    assert barrier(job) == waiting


def test_jobs_of_any_kind_may_ask() -> None:
    job = asking(tf_job(PS=1, Worker=1))
    (found,) = built_pod(TFJobs(MemoryKube()), job, "PS")["spec"]["initContainers"]
    assert found["args"] == ["tf-ps-0", "tf-worker-0"]


def test_nothing_waits_for_replicas_that_have_completed() -> None:
    """Their pods have no address any more."""
    job = asking(pytorch_job(Worker=3))
    job["status"] = {"replicaStatuses": {"Worker": {"succeeded": 1, "completed": [1]}}}
    assert barrier(job)["args"] == ["m-worker-0", "m-worker-2"]


def test_the_barrier_passes_when_every_name_has_an_address(names: NameServer) -> None:
    names.know("m-worker-0", "m-worker-1", after=2)
    ended = names.run(barrier(asking(pytorch_job(Worker=2))))
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "all 2 replicas have addresses")


def test_the_barrier_gives_up_with_a_code_that_asks_for_a_retry(names: NameServer) -> None:
    """The log names the replica that is missing."""
    names.know("m-worker-0")
    ended = names.run(barrier(asking(pytorch_job(Worker=2), "1")))
    assert ended.returncode == 201
    assert ended.stdout.splitlines() == [
        "waiting for the address of m-worker-1",
        "m-worker-1 has no address after 1 s: giving up with 201",
    ]


def test_jobs_that_block_each_other_give_up_at_different_times() -> None:
    """At the earliest after the seconds of the annotation, and at most half of them later; always the same for one."""

    def limit(name: str) -> int:
        script: str = barrier(asking(pytorch_job(name, Worker=1), "600"))["command"][2]
        return int(script.partition("+ ")[2].partition(" ")[0])

    limits = {limit(f"m{number}") for number in range(10)}
    assert len(limits) > 5
    assert all(600 <= each <= 900 for each in limits)
    assert limit("m1") == limit("m1")


@pytest.mark.parametrize("text", ["", "true", "0", "-1", "1.5", "1234567", "6\n"])
def test_another_value_than_seconds_is_refused(text: str) -> None:
    with pytest.raises(BadSpec, match=r"^metadata\.annotations\[rcfarm\.dev/barrier\]: "):
        operator().view(asking(pytorch_job(Worker=1), text))


def test_a_barrier_needs_an_image() -> None:
    with pytest.raises(BadSpec, match=r"jobs\.init_container_image is none"):
        operator(init_containers=None).view(asking(pytorch_job(Worker=1)))


def test_a_policy_under_which_the_kubelet_waits_again_is_a_warning() -> None:
    job = asking(pytorch_job(Master=1, Worker={"restartPolicy": "ExitCode"}))
    (warning,) = operator().check(job, operator().replicas(job))
    assert warning.startswith("spec.pytorchReplicaSpecs.Master.restartPolicy: under OnFailure a pod whose barrier")


def waiting_for_master(tries: int) -> Object:
    (found,) = InitContainers("alpine:3.10", tries).render("m-master-0")
    return found


def test_a_worker_waits_until_its_master_has_an_address(names: NameServer) -> None:
    names.know("m-master-0", after=2)
    assert names.run(waiting_for_master(3)).returncode == 0


def test_a_worker_gives_up_after_its_tries(names: NameServer) -> None:
    ended = names.run(waiting_for_master(3))
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "try 3 of 3: m-master-0 has no address yet"
