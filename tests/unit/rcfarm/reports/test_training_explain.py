"""Why a training job and its replicas do not progress, from the objects alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from controllers.training.kind import TrainingJobs
from controllers.training.options import TrainingOptions
from controllers.training.pytorch import PyTorchJobs
from rcfarm.reports.jobs import LeaseInfo, ObservedObjects
from rcfarm.reports.training import replica_infos, training_info
from rcfarm.reports.training_explain import explain
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from store.schema.reasons import FRAMEWORK
from tests.support.training.manifests import pytorch_job

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
HELD = LeaseInfo("system/rcfarm-jobs", "leader", NOW, NOW)


@pytest.fixture
def kind() -> TrainingJobs:
    return PyTorchJobs(MemoryKube())


def at(clock: str) -> str:
    return f"2026-01-01T{clock}Z"


def job(conditions: dict[str, str] | None = None, *, spec: Object | None = None, **status: Any) -> Object:
    """Return a job with a master and two workers. `conditions`: message of each true one, the newest last."""
    body = pytorch_job("mnist", Master=1, Worker=2, spec=spec)
    body["metadata"]["creationTimestamp"] = at("11:00:00")
    shown = [
        {"type": name, "status": "True", "reason": "R", "message": text, "lastTransitionTime": at("11:30:00")}
        for name, text in (conditions or {}).items()
    ]
    return body | {"status": {"conditions": shown, **status}}


def pod(replica_type: str, index: int, phase: str = "Running", **status: Any) -> Object:
    name = f"mnist-{replica_type}-{index}"
    labels = {"training.kubeflow.org/replica-type": replica_type, "training.kubeflow.org/replica-index": str(index)}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}", "labels": labels},
        "spec": {"containers": [{"name": "pytorch"}], "nodeName": "node-1"},
        "status": {"phase": phase, **status},
    }


def reasons(kind: TrainingJobs, body: Object, *pods: Object, groups: tuple[Object, ...] = ()) -> Any:
    seen = ObservedObjects({each["metadata"]["name"]: each for each in pods}, (), [HELD], NOW)
    found = explain(kind, body, groups, seen)
    assert {each.code for each in found} <= FRAMEWORK.keys()
    return [(each.subject, each.state, each.reason) for each in found]


RUNNING = {"Created": "created", "Running": "runs"}


def test_a_job_that_runs_has_no_obstacle(kind: TrainingJobs) -> None:
    assert reasons(kind, job(RUNNING), pod("master", 0), pod("worker", 0), pod("worker", 1)) == []


def test_a_failed_replica_says_when_it_is_tried_again(kind: TrainingJobs) -> None:
    """The time is that of the decision: the back-off of all its failures."""
    retry = {"failures": 2, "lastFailureTime": at("11:59:50")}
    body = job({"Restarting": "restarts"}, replicaStatuses={"Worker": {"retries": {"1": retry}}})
    found = reasons(kind, body, pod("master", 0), pod("worker", 0))
    assert found == [
        ("worker-1", "Missing", "its pod is created again at 2026-01-01T12:00:10Z, the back-off after 2 failed pods")
    ]
    (info,) = (each for each in replica_infos(kind.view(body), []) if each.replica == "worker-1")
    assert (info.state, info.failures) == ("Missing", 2)


def test_workers_that_wait_for_their_master_say_so() -> None:
    """Without init containers the operator creates them in order."""
    ordered = PyTorchJobs(MemoryKube(), options=TrainingOptions(init_containers=None))
    found = reasons(ordered, job(RUNNING), pod("master", 0, "Pending"))
    assert ("worker-0", "Missing", "its pod is created once master-0 has an address") in found


def test_a_gang_that_is_not_admitted_is_the_reason_of_all(kind: TrainingJobs) -> None:
    group = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": "mnist"},
        "status": {"phase": "Pending"},
    }
    found = reasons(kind, job({"Created": "created"}), groups=(group,))
    assert found[0][2] == "its PodGroup mnist is not admitted by the scheduler: its phase is Pending"
    assert {why for _, _, why in found[1:]} == {"its pod is created once the gang is admitted"}


def test_the_end_and_the_time_to_live_are_told(kind: TrainingJobs) -> None:
    spec = {"runPolicy": {"ttlSecondsAfterFinished": 60}}
    body = job({"Failed": "worker 1 broke"}, spec=spec, completionTime=at("11:59:30"))
    assert [why for _, _, why in reasons(kind, body)] == [
        "it has ended: worker 1 broke",
        "it is deleted at 2026-01-01T12:00:30Z (spec.runPolicy.ttlSecondsAfterFinished)",
    ]


def test_a_time_to_live_beyond_the_calendar_is_none(kind: TrainingJobs) -> None:
    """The operator never deletes such a job, and its explanation does not fail."""
    ended = {"completionTime": at("11:59:30")}
    found = reasons(kind, job({"Succeeded": "done"}, spec={"runPolicy": {"ttlSecondsAfterFinished": 2**40}}, **ended))
    assert [reason for _, _, reason in found] == ["it has ended: done"]


def test_a_job_of_another_controller_is_left_to_it(kind: TrainingJobs) -> None:
    body = job(spec={"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}})
    ((_, _, why),) = reasons(kind, body)
    assert why.startswith("spec.runPolicy.managedBy is kueue.x-k8s.io/multikueue")
    assert training_info(kind, body).managed_by == "kueue.x-k8s.io/multikueue"


def test_pods_that_do_not_run_are_explained_by_their_own_state(kind: TrainingJobs) -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    pulling = {"name": "pytorch", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    leaving = pod("worker", 1)
    leaving["metadata"]["deletionTimestamp"] = at("11:50:00")
    found = reasons(
        kind,
        job(RUNNING),
        pod("master", 0, "Pending", conditions=[unplaced]),
        pod("worker", 0, "Pending", containerStatuses=[pulling]),
        leaving,
    )
    assert found[0] == ("master-0", "Pending", "not scheduled: 0/3 nodes are available")
    assert found[1] == ("worker-0", "Pending", "container pytorch: ErrImagePull: no such image")
    assert found[2][:2] == ("worker-1", "Terminating")
    assert "check node-1" in found[2][2]
    assert "by force only if the operator's jobs.force_delete_after is set" in found[2][2]


def test_a_scheduler_that_does_not_exist_is_named(kind: TrainingJobs) -> None:
    """A pod whose scheduler does not run carries no condition that could say so."""
    forgotten = pod("worker", 1, "Pending")
    forgotten["metadata"]["creationTimestamp"] = at("11:59:00")
    forgotten["spec"] |= {"nodeName": "", "schedulerName": "vulcano"}
    ((subject, _, why),) = reasons(kind, job(RUNNING), pod("master", 0), pod("worker", 0), forgotten)
    assert subject == "worker-1"
    assert "check that vulcano runs" in why


def test_a_spec_that_can_not_be_used_is_named(kind: TrainingJobs) -> None:
    body = job()
    body["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 2
    ((_, state, why),) = reasons(kind, body)
    assert state == "unreadable"
    assert "spec.pytorchReplicaSpecs.Master.replicas" in why
