"""What a pod's object tells a job's controller."""

from __future__ import annotations

import pytest

from controllers.job_end import describe_failure
from controllers.job_pods import best_of, exit_code, restarts_of, was_disrupted
from controllers.job_restart import is_retryable, judge
from store.kube.objects import Object, uid_of
from tests.support.jobs import at, pod


def ended(name: str, code: int | None) -> Object:
    state = {"terminated": {"exitCode": code}} if code is not None else {"waiting": {"reason": "PodInitializing"}}
    return {"name": name, "state": state, "restartCount": 1}


def failed(*containers: Object, init: tuple[Object, ...] = ()) -> Object:
    """A failed pod whose spec names `main` first."""
    found = pod("Worker", 0, "Failed")
    found["spec"]["containers"] = [{"name": "main"}, {"name": "sidecar"}]
    found["status"] |= {"containerStatuses": list(containers), "initContainerStatuses": list(init)}
    return found


@pytest.mark.parametrize("code", [1, 2, 126, 127, 128, 139, 3, 100])
def test_errors_of_the_program_are_permanent(code: int) -> None:
    """tf-operator's list, and what is below the signals."""
    assert not is_retryable(code)


@pytest.mark.parametrize("code", [130, 137, 138, 143, 129, 134, 255])
def test_signals_are_worth_a_retry(code: int) -> None:
    """tf-operator's list, and kubeflow's rule for what that does not name."""
    assert is_retryable(code)


def test_a_pod_that_never_reported_a_code_is_retried() -> None:
    """It says nothing about the program; and it counts, so the limit ends it."""
    assert judge(failed(), "ExitCode") == "retryable"


def test_the_default_container_decides_wherever_it_is_listed() -> None:
    """Statuses are not in the order of the spec."""
    found = failed(ended("sidecar", 137), ended("main", 1))
    assert exit_code(found) == 1
    assert exit_code(found, "sidecar") == 137


def test_the_container_that_failed_speaks_when_the_default_one_did_not() -> None:
    """An init container that failed kept it from starting; a sidecar may fail after it succeeded."""
    assert exit_code(failed(ended("main", None), init=(ended("init", 2),))) == 2
    assert exit_code(failed(ended("main", 0), ended("sidecar", 137))) == 137
    assert exit_code(failed(ended("main", 0))) == 0
    assert exit_code(failed()) is None


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "NodeLost", "NodeShutdown", "OutOfcpu", "OutOfpods"])
def test_what_the_cluster_does_to_a_pod_is_a_disruption(reason: str) -> None:
    """Whatever code its program ended with."""
    assert was_disrupted(pod("Worker", 0, "Failed", code=1, reason=reason))


def test_a_disruption_target_is_a_disruption() -> None:
    """As newer clusters say it, for pods whose status has no reason."""
    found = pod("Worker", 0, "Failed", code=137)
    found["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    assert was_disrupted(found)
    found["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "False"}]
    assert not was_disrupted(found)


def test_restarts_of_init_containers_count() -> None:
    """A replica that can't get through its initialization uses up its retries too."""
    assert restarts_of(failed(ended("main", None), init=(ended("init", 2),))) == 2


def test_which_of_two_pods_is_kept() -> None:
    """One that succeeded, even if it leaves, then one that runs, then a scheduled one, then the oldest."""
    ranked = [
        pod("Worker", 0, "Succeeded", deleting=at(30), uid="done"),
        pod("Worker", 0, "Running", uid="running"),
        pod("Worker", 0, "Pending", uid="scheduled"),
        pod("Worker", 0, "Pending", uid="old"),
        pod("Worker", 0, "Pending", uid="new"),
        pod("Worker", 0, "Failed", uid="failed"),
        pod("Worker", 0, "Running", deleting=at(30), uid="leaving"),
    ]
    ranked[2]["spec"]["nodeName"] = "node1"
    ranked[3]["metadata"]["creationTimestamp"] = "2024-05-01T12:00:00Z"
    ranked[4]["metadata"]["creationTimestamp"] = "2024-05-01T12:00:01Z"
    for better in range(len(ranked) - 1):
        assert uid_of(best_of(ranked[better:][::-1])) == uid_of(ranked[better])


def test_a_failure_is_described_in_one_phrase() -> None:
    """With the pod, the code, and what the kubelet says."""
    found = pod("Worker", 3, "Failed", code=137, reason="Evicted")
    found["status"]["message"] = "The node was low on memory"
    assert describe_failure(found) == "pod train-worker-3 exited with code 137 (Evicted: The node was low on memory)"
