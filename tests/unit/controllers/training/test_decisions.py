"""Decisions about PyTorchJobs and TFJobs: who makes a job run, succeed and fail; what counts; what is left at the end.

Pure: the pods of a job are moved by hand, and the cluster of the tests takes every action at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controllers.jobs.api import CreatePod, DeletePod, JobView, RunPolicy
from controllers.jobs.decision import decide
from controllers.jobs.replicas import SIZE_ANNOTATION
from controllers.jobs.status import JobStatus, decode_status, status_patch
from controllers.training import PyTorchJobs, TFJobs
from controllers.training.kind import TrainingJobs
from store.kube.api.objects import Object
from store.kube.api.patches import apply_merge_patch
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.decisions import (
    INDEX,
    START,
    TYPE,
    Cluster,
    actions,
    at,
    conditions,
    pod,
    pods,
    services,
    tally,
)
from tests.support.training.manifests import pytorch_job, tf_job

RUNS, DONE, FAILED, WAITS = "Running", "Succeeded", "Failed", "Pending"


def view(kind: type[TrainingJobs], job: Object) -> JobView:
    """Return the kind's view of a job, whose pods carry the labels of the tests."""
    return replace(kind(MemoryKube()).view(job), type_label=TYPE, index_label=INDEX)


def pytorch(*, spec: Object | None = None, **replicas: Any) -> JobView:
    return view(PyTorchJobs, pytorch_job(spec=spec, **replicas))


def tensorflow(*, spec: Object | None = None, **replicas: Any) -> JobView:
    return view(TFJobs, tf_job(spec=spec, **replicas))


def policy(name: str, replicas: int = 1) -> Object:
    return {"replicas": replicas, "restartPolicy": name}


def running(job: JobView) -> Cluster:
    """Return a job all of whose pods run, after the decision that says so."""
    cluster = Cluster(job)
    cluster.settle()
    cluster.run(RUNS)
    cluster.settle()
    return cluster


def set_pod(cluster: Cluster, kind: str, index: int, phase: str, **fields: Any) -> None:
    """Move the pod of a replica to a phase."""
    name = f"train-{kind.lower()}-{index}"
    uid = cluster.pods[name]["metadata"]["uid"]
    cluster.pods[name] = pod(kind, index, phase, uid=uid, **fields)


def order(status: JobStatus) -> list[str]:
    return [condition.type for condition in status.conditions]


def message(status: JobStatus, kind: Any) -> str:
    condition = status.condition(kind)
    assert condition is not None
    assert condition.status == "True"
    return condition.message


# Status


def test_given_all_pods_run_then_created_and_running_are_the_conditions_in_the_original_words() -> None:
    """The last condition is what the State column shows."""
    status = running(pytorch(Master=1, Worker=2)).job.status
    assert [(each.type, each.reason, each.message) for each in status.conditions] == [
        ("Created", "PyTorchJobCreated", "PyTorchJob m is created."),
        ("Running", "PyTorchJobRunning", "PyTorchJob m is running."),
    ]
    alone = running(pytorch(Worker=1)).job.status
    assert message(alone, "Running") == "PyTorchJob default/m is running."
    assert message(running(tensorflow(Worker=1)).job.status, "Running") == "TFJob default/tf is running."


def test_given_a_pytorch_job_then_each_type_reports_the_selector_of_its_pods_and_a_tf_job_none() -> None:
    """Keys in order, no spaces: the scale subresource passes it to autoscalers."""
    job = PyTorchJobs(MemoryKube()).view(pytorch_job(Master=1, Worker=1))
    statuses = decide(job, [], [], START).status.replica_statuses
    stem = "training.kubeflow.org/job-name=m,training.kubeflow.org/operator-name=pytorchjob-controller"
    assert statuses["Worker"].selector == f"{stem},training.kubeflow.org/replica-type=worker"
    assert statuses["Master"].selector == f"{stem},training.kubeflow.org/replica-type=master"
    assert decide(tensorflow(Worker=1), [], [], START).status.replica_statuses["Worker"].selector == ""


def test_given_a_running_master_and_a_pending_worker_then_the_job_runs_and_a_count_of_zero_is_omitted() -> None:
    cluster = running(pytorch(Master=1, Worker=1))
    set_pod(cluster, "Worker", 0, WAITS)
    status = cluster.sync().status
    assert status.has("Running")
    written = msgspec.to_builtins(status)["replicaStatuses"]
    assert written["Master"]["active"] == 1
    assert written["Worker"].keys() == {"selector"}


@pytest.mark.parametrize(
    ("job", "phases", "runs"),
    [
        pytest.param(pytorch(Master=1, Worker=1), {"Master": WAITS, "Worker": RUNS}, False, id="the master is pending"),
        pytest.param(pytorch(Worker=2), {"Worker": RUNS}, True, id="a worker without master"),
        pytest.param(tensorflow(Chief=1, Worker=1), {"Chief": WAITS, "Worker": RUNS}, False, id="the chief is pending"),
        pytest.param(tensorflow(Worker=1, PS=1), {"Worker": WAITS, "PS": RUNS}, False, id="only a server runs"),
        pytest.param(tensorflow(PS=1), {"PS": RUNS}, False, id="neither chief nor worker"),
    ],
)
def test_a_job_runs_when_its_master_runs_or_without_one_a_worker(
    job: JobView, phases: dict[str, str], runs: bool
) -> None:
    cluster = Cluster(job)
    cluster.settle()
    for kind, phase in phases.items():
        set_pod(cluster, kind, 0, phase)
    assert cluster.sync().status.has("Running") is runs


def test_given_running_then_restarting_then_running_each_replaces_the_other_and_is_the_last() -> None:
    """No condition says that pods are pending."""
    cluster = running(pytorch(Master=1, Worker=1))
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    cluster.settle()
    assert order(cluster.job.status) == ["Created", "Restarting"]
    said = message(cluster.job.status, "Restarting")
    assert said == "PyTorchJob m is restarting because 1 Worker replica(s) failed."
    cluster.sleep(60)
    cluster.settle()
    cluster.run(RUNS)
    cluster.settle()
    assert order(cluster.job.status) == ["Created", "Running"]


def test_given_a_master_that_was_deleted_by_hand_then_its_successor_is_pending_and_the_state_stays() -> None:
    """Nothing is counted, and no condition is added: the original has none for a pending pod."""
    cluster = running(pytorch(Master=1))
    del cluster.pods["train-master-0"]
    assert actions(cluster.sync(), CreatePod) == [CreatePod("Master", 0)]
    assert order(cluster.job.status) == ["Created", "Running"]
    assert cluster.job.status.replica_statuses["Master"].retries == {}


def test_given_a_worker_that_failed_once_when_it_is_deleted_by_hand_then_the_job_is_not_restarting_again() -> None:
    """That failure is past."""
    cluster = running(pytorch(Master=1, Worker=1))
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    cluster.settle()
    cluster.sleep(60)
    cluster.settle()
    cluster.run(RUNS)
    cluster.settle()
    del cluster.pods["train-worker-0"]
    assert order(cluster.sync().status) == ["Created", "Running"]


def test_given_success_then_running_is_false_succeeded_is_last_and_active_pods_are_folded() -> None:
    cluster = running(pytorch(Master=1, Worker=2))
    set_pod(cluster, "Master", 0, DONE, code=0)
    status = cluster.sync().status
    assert conditions(status) == {"Created": "True", "Running": "False", "Succeeded": "True"}
    assert order(status)[-1] == "Succeeded"
    assert message(status, "Succeeded") == "PyTorchJob m is successfully completed."
    assert status.completion_time == START
    assert (status.replica_statuses["Worker"].active, status.replica_statuses["Worker"].succeeded) == (0, 2)


def test_only_the_end_the_restart_and_the_suspension_of_a_job_are_events() -> None:
    """Created and Running are conditions only; a job that stays as it is records nothing again."""
    cluster = Cluster(pytorch(Worker=1))
    assert cluster.sync().events == ()
    cluster.run(RUNS)
    assert cluster.sync().events == ()
    set_pod(cluster, "Worker", 0, FAILED, code=143)
    events = cluster.sync().events
    assert [(event.type, event.reason) for event in events] == [
        ("Warning", "ExitedWithCode"),
        ("Warning", "PyTorchJobRestarting"),
    ]
    assert events[0].message == "Pod: default.train-worker-0 exited with code 143"
    assert cluster.sync().events == ()


# Taking over


def original_status(**more: Any) -> Object:
    """Return the status of a running PyTorchJob as the training-operator writes it."""
    moment = "2024-05-01T11:00:00Z"
    times = {"lastUpdateTime": moment, "lastTransitionTime": moment}
    entries = [("Created", "PyTorchJob m is created."), ("Running", "PyTorchJob m is running.")]
    stem = "training.kubeflow.org/job-name=m,training.kubeflow.org/operator-name=pytorchjob-controller"
    return {
        "conditions": [
            {"type": name, "status": "True", "reason": f"PyTorchJob{name}", "message": text, **times}
            for name, text in entries
        ],
        "replicaStatuses": {
            "Master": {"active": 1, "selector": f"{stem},training.kubeflow.org/replica-type=master"},
            "Worker": {"active": 2, "selector": f"{stem},training.kubeflow.org/replica-type=worker"},
        },
        "startTime": moment,
        **more,
    }


def taken_over(job: Object, present: list[Object], serving: list[Object]) -> Any:
    """Return the first decision about a job that ran under the original, and what it writes."""
    found = PyTorchJobs(MemoryKube()).view(job)
    for obj in (*present, *serving):
        labels = obj["metadata"]["labels"]
        obj["metadata"]["labels"] = {found.type_label: labels[TYPE], found.index_label: labels[INDEX]}
    decision = decide(found, present, serving, START)
    return decision.actions, status_patch(found.status, decision.status, pruned=True), decision.events


def test_given_a_job_that_ran_under_the_original_then_the_first_decision_does_and_writes_nothing() -> None:
    """No pod is touched, no condition rewritten; start time and counts stay."""
    job = pytorch_job(Master=1, Worker=2) | {"status": original_status()}
    present = [pod("Master", 0), *pods("Worker", range(2))]
    assert taken_over(job, present, [*services("Master", [0]), *services("Worker", range(2))]) == ((), {}, ())


def test_given_a_finished_or_suspended_job_of_the_original_then_nothing_is_done_or_written() -> None:
    job = pytorch_job(Master=1, Worker=2)
    times = {"lastUpdateTime": "2024-05-01T11:59:00Z", "lastTransitionTime": "2024-05-01T11:59:00Z"}
    ended = original_status(completionTime="2024-05-01T11:59:00Z")
    ended["conditions"] += [{"type": "Failed", "status": "True", "reason": "PyTorchJobFailed", "message": "x", **times}]
    left = [pod("Master", 0, FAILED, code=1), *pods("Worker", range(2))]
    assert taken_over(job | {"status": ended}, left, services("Worker", range(2))) == ((), {}, ())

    suspended = original_status()
    suspended["conditions"][1] |= {"status": "False", "reason": "PyTorchJobSuspended"}
    suspended["conditions"] += [
        {"type": "Suspended", "status": "True", "reason": "PyTorchJobSuspended", "message": "x", **times}
    ]
    for entry in suspended["replicaStatuses"].values():
        del entry["active"]
    job = pytorch_job(Master=1, Worker=2, spec={"runPolicy": {"suspend": True}}) | {"status": suspended}
    assert taken_over(job, [], []) == ((), {}, ())


# Success


def test_given_a_master_that_succeeds_then_the_job_does_and_running_workers_stay() -> None:
    """The default policy keeps pods and services."""
    cluster = running(pytorch(Master=1, Worker=2))
    set_pod(cluster, "Master", 0, DONE, code=0)
    decision = cluster.sync()
    assert decision.status.has("Succeeded")
    assert decision.actions == ()


@pytest.mark.parametrize("elastic", [False, True])
def test_given_workers_alone_when_one_succeeds_then_only_an_elastic_job_does(elastic: bool) -> None:
    spec = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 3}} if elastic else {}
    cluster = running(pytorch(Worker=3, spec=spec))
    set_pod(cluster, "Worker", 1, DONE, code=0)
    status = cluster.sync().status
    assert status.has("Succeeded") is elastic
    assert status.has("Running") is not elastic


@pytest.mark.parametrize(("success_policy", "succeeds"), [("", True), ("AllWorkers", False)])
def test_given_no_chief_when_worker_0_succeeds_then_the_policy_decides(success_policy: str, succeeds: bool) -> None:
    cluster = running(tensorflow(Worker=2, PS=1, spec={"successPolicy": success_policy}))
    set_pod(cluster, "Worker", 0, DONE, code=0)
    assert cluster.sync().status.has("Succeeded") is succeeds


def test_given_a_chief_then_neither_worker_0_nor_the_policy_decides() -> None:
    cluster = running(tensorflow(Chief=1, Worker=1, spec={"successPolicy": "AllWorkers"}))
    set_pod(cluster, "Worker", 0, DONE, code=0)
    assert cluster.sync().status.has("Running")
    set_pod(cluster, "Chief", 0, DONE, code=0)
    assert cluster.sync().status.has("Succeeded")


def test_given_servers_and_evaluators_alone_then_the_job_never_succeeds() -> None:
    cluster = running(tensorflow(PS=1, Evaluator=1))
    cluster.run(DONE, code=0)
    status = cluster.sync().status
    assert conditions(status) == {"Created": "True"}


def test_given_the_chief_succeeded_and_a_worker_failed_at_once_then_the_job_succeeded_only() -> None:
    cluster = running(tensorflow(Chief=1, Worker=1))
    set_pod(cluster, "Chief", 0, DONE, code=0)
    set_pod(cluster, "Worker", 0, FAILED, code=1)
    status = cluster.sync().status
    assert (status.has("Succeeded"), status.has("Failed")) == (True, False)


# Failure


def test_given_an_evaluator_under_never_when_it_fails_then_the_job_fails() -> None:
    cluster = running(tensorflow(Chief=1, Evaluator=1))
    set_pod(cluster, "Evaluator", 0, FAILED, code=1)
    decision = cluster.sync()
    said = message(decision.status, "Failed")
    assert said.startswith("TFJob default/tf has failed because 1 Evaluator replica(s) failed.")
    assert "exited with code 1" in said
    assert decision.status.completion_time == START
    assert decision.actions == ()


def test_given_dynamic_workers_when_one_fails_for_good_then_the_job_runs_on_and_the_pod_stays() -> None:
    """Its failure is recorded once, and not judged again. A failed server still ends the job."""
    cluster = running(tensorflow(Chief=1, PS=1, Worker=2, spec={"enableDynamicWorker": True}))
    set_pod(cluster, "Worker", 1, FAILED, code=1)
    decision = cluster.sync()
    assert decision.status.has("Running")
    assert [event.reason for event in decision.events] == ["ExitedWithCode"]
    assert decision.actions == ()
    assert cluster.sync().events == ()
    assert cluster.job.status.replica_statuses["Worker"].failed == 1
    set_pod(cluster, "PS", 0, FAILED, code=1)
    assert cluster.sync().status.has("Failed")


def test_given_a_type_that_tensorflow_does_not_know_when_its_pod_fails_then_the_job_runs_on() -> None:
    cluster = running(tensorflow(Worker=1, Watcher=1))
    set_pod(cluster, "Watcher", 0, FAILED, code=1)
    decision = cluster.sync()
    assert decision.status.has("Running")
    assert decision.actions == ()


def test_given_never_when_a_worker_is_evicted_then_it_is_replaced_and_not_counted() -> None:
    """The original fails the job."""
    cluster = running(tensorflow(Worker=2, spec={"runPolicy": {"backoffLimit": 0}}))
    set_pod(cluster, "Worker", 1, FAILED, reason="Evicted")
    cluster.settle()
    cluster.sleep(10)
    cluster.settle()
    assert "train-worker-1" in cluster.pods
    assert not cluster.job.status.finished
    assert cluster.job.status.replica_statuses["Worker"].retries["1"].failures == 0


@pytest.mark.parametrize(("code", "ends"), [(128, False), (137, False), (139, False), (1, True), (127, True)])
def test_given_exit_codes_when_a_worker_ends_then_128_and_above_are_retried(code: int, ends: bool) -> None:
    """A job that failed for good has its time of completion, so its time to live passes."""
    spec = {"runPolicy": {"ttlSecondsAfterFinished": 30}}
    cluster = running(pytorch(Master=1, Worker=policy("ExitCode"), spec=spec))
    set_pod(cluster, "Worker", 0, FAILED, code=code)
    decision = cluster.sync()
    assert decision.status.has("Failed") is ends
    assert decision.status.has("Restarting") is not ends
    if ends:
        said = message(decision.status, "Failed")
        assert said.startswith("PyTorchJob m is failed because 1 Worker replica(s) failed.")
        assert decision.next_wake == 30
        cluster.sleep(30)
        assert tally(cluster.sync()) == {"DeleteJob": 1}
    else:
        assert [action.reason for action in actions(decision, DeletePod)] == ["restart"]


def test_given_a_limit_of_3_when_a_worker_fails_four_times_then_the_job_fails_whatever_operator_decides() -> None:
    """Each decision starts from the stored status, without the fields that the original's definition prunes."""
    cluster = running(pytorch(Worker=policy("ExitCode"), spec={"runPolicy": {"backoffLimit": 3}}))
    for _ in range(4):
        assert not cluster.job.status.finished
        set_pod(cluster, "Worker", 0, FAILED, code=137)
        cluster.settle()
        cluster.job = replace(cluster.job, status=decode_status(stored(cluster.job.status)))
        cluster.sleep(400)
        cluster.settle()
        cluster.run(RUNS)
    said = message(cluster.job.status, "Failed")
    assert said.startswith("Job m has failed because it has reached the specified backoff limit")
    failed = cluster.job.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "PyTorchJobFailed"


FIELDS = {"active", "succeeded", "failed", "selector", "labelSelector"}


def stored(status: JobStatus) -> Object:
    """Return the status as an API server with the original's definition stores it: unknown fields are gone."""
    written = apply_merge_patch({}, status_patch(JobStatus(), status, pruned=True))
    known = {"conditions", "replicaStatuses", "startTime", "completionTime", "lastReconcileTime"}
    assert written.keys() <= known
    assert all(entry.keys() <= FIELDS for entry in written["replicaStatuses"].values())
    return dict(written)


def test_given_pruned_status_then_our_facts_are_in_one_false_condition_that_is_never_last() -> None:
    cluster = running(pytorch(Master=1, Worker=policy("ExitCode", 2)))
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    set_pod(cluster, "Worker", 1, DONE, code=0)
    status = cluster.sync().status
    found = stored(status)
    assert [(entry["type"], entry["status"]) for entry in found["conditions"]] == [
        ("Record", "False"),
        ("Created", "True"),
        ("Restarting", "True"),
    ]
    assert decode_status(found) == status


def test_given_two_workers_restarted_in_place_when_the_limit_is_reached_then_running_pods_stop_under_none() -> None:
    """Pods that have ended are kept, with their services."""
    cluster = running(pytorch(Master=1, Worker=3, spec={"runPolicy": {"backoffLimit": 3}}))
    set_pod(cluster, "Worker", 2, DONE, code=0)
    set_pod(cluster, "Worker", 0, RUNS, restarts=1)
    assert not cluster.sync().status.finished
    set_pod(cluster, "Worker", 1, RUNS, restarts=2)
    decision = cluster.sync()
    assert decision.status.has("Failed")
    assert {action.name for action in actions(decision, DeletePod)} == {
        "train-master-0",
        "train-worker-0",
        "train-worker-1",
    }
    assert list(cluster.pods) == ["train-worker-2"]


def test_given_a_breach_when_the_operator_dies_before_it_stops_pods_then_the_next_one_stops_them() -> None:
    """The reason and the message are the original's, so neither says it; the status does."""
    cluster = running(pytorch(Worker=1, spec={"runPolicy": {"activeDeadlineSeconds": 5}}))
    cluster.sleep(5)
    cluster.job = replace(cluster.job, status=decode_status(stored(cluster.decide().status)))
    assert [action.name for action in actions(cluster.sync(), DeletePod)] == ["train-worker-0"]


def test_given_restarts_in_place_when_the_pod_is_deleted_by_hand_then_they_stay_counted() -> None:
    cluster = running(pytorch(Worker=1, spec={"runPolicy": {"backoffLimit": 3}}))
    set_pod(cluster, "Worker", 0, RUNS, restarts=2)
    cluster.settle()
    del cluster.pods["train-worker-0"]
    cluster.settle()
    cluster.run(RUNS, restarts=1)
    assert cluster.sync().status.has("Failed")


def test_given_an_init_container_that_crashes_in_a_pending_pod_then_it_counts() -> None:
    """The original counts running pods only."""
    cluster = running(pytorch(Master=1, Worker=1, spec={"runPolicy": {"backoffLimit": 3}}))
    set_pod(cluster, "Worker", 0, WAITS)
    cluster.pods["train-worker-0"]["status"]["initContainerStatuses"] = [{"name": "init-pytorch", "restartCount": 3}]
    assert cluster.sync().status.has("Failed")


def test_given_a_limit_of_0_when_a_pod_fails_then_the_job_fails() -> None:
    cluster = running(pytorch(Worker=1, spec={"runPolicy": {"backoffLimit": 0}}))
    set_pod(cluster, "Worker", 0, FAILED, code=1)
    assert cluster.sync().status.has("Failed")


def test_given_a_deadline_then_it_is_an_exact_wake_up() -> None:
    cluster = running(pytorch(Worker=1, spec={"runPolicy": {"activeDeadlineSeconds": 5}}))
    assert cluster.decide().next_wake == 5
    cluster.sleep(5)
    status = cluster.sync().status
    said = message(status, "Failed")
    assert said.startswith("Job m has failed because it was active longer than specified deadline")
    assert status.replica_statuses["Worker"].active == 0


def test_given_a_worker_that_succeeded_when_its_pod_is_deleted_then_it_does_not_run_again() -> None:
    """It still counts, and its success is the job's when the others have succeeded, too."""
    cluster = running(pytorch(Worker=2))
    set_pod(cluster, "Worker", 0, DONE, code=0)
    cluster.settle()
    cluster.job = replace(cluster.job, status=decode_status(stored(cluster.job.status)))
    del cluster.pods["train-worker-0"]
    decision = cluster.sync()
    assert decision.actions == ()
    assert decision.status.replica_statuses["Worker"].succeeded == 1
    set_pod(cluster, "Worker", 1, DONE, code=0)
    assert cluster.sync().status.has("Succeeded")


def test_given_a_server_is_evicted_while_the_chief_runs_then_restarting_then_running_and_never_failed() -> None:
    cluster = running(tensorflow(Chief=1, PS=policy("OnFailure")))
    set_pod(cluster, "PS", 0, FAILED, reason="Evicted")
    cluster.settle()
    assert order(cluster.job.status) == ["Created", "Restarting"]
    assert message(cluster.job.status, "Restarting") == "job tf is restarting because PS replica(s) failed."
    cluster.sleep(10)
    cluster.settle()
    cluster.run(RUNS)
    cluster.settle()
    assert order(cluster.job.status) == ["Created", "Running"]


# A restart of the whole job


def whole(job: JobView) -> JobView:
    return replace(job, restart_whole=True)


def test_given_restarts_of_the_whole_job_when_two_workers_fail_then_all_pods_restart_and_it_counts_once() -> None:
    """No pod is created while one of the former is left. A replica that had succeeded runs again, too."""
    cluster = running(whole(pytorch(Master=1, Worker=3, spec={"runPolicy": {"backoffLimit": 1}})))
    cluster.graceful = True
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    set_pod(cluster, "Worker", 1, FAILED, code=137)
    set_pod(cluster, "Worker", 2, DONE, code=0)
    decision = cluster.sync()
    assert {action.reason for action in actions(decision, DeletePod)} == {"restart"}
    assert len(actions(decision, DeletePod)) == 4
    cluster.sleep(3600)
    assert cluster.sync().actions == ()  # the master's kubelet has not confirmed its end
    del cluster.pods["train-master-0"]
    decision = cluster.sync()
    assert {(action.type, action.index) for action in actions(decision, CreatePod)} == {
        ("Master", 0),
        ("Worker", 0),
        ("Worker", 1),
        ("Worker", 2),
    }
    retries = decision.status.replica_statuses["Worker"].retries
    assert sum(retry.failures for retry in retries.values()) == 1
    assert not decision.status.restarting_all


def test_given_a_restart_of_the_whole_job_when_the_operator_dies_after_its_write_then_the_next_one_goes_on() -> None:
    cluster = running(whole(pytorch(Master=1, Worker=1)))
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    status = decode_status(stored(cluster.decide().status))
    cluster.job = replace(cluster.job, status=status)
    del cluster.pods["train-worker-0"]  # and the evidence is gone
    assert [action.name for action in actions(cluster.sync(), DeletePod)] == ["train-master-0"]


def test_given_a_restart_of_the_whole_job_then_the_pods_come_back_together_after_the_delay() -> None:
    cluster = running(whole(pytorch(Master=1, Worker=1)))
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    cluster.settle()
    assert cluster.pods == {}
    assert cluster.decide().next_wake == 10
    cluster.sleep(10)
    assert tally(cluster.sync()) == {"CreatePod": 2}


# The end


def test_given_a_time_to_live_of_0_then_the_end_is_stored_before_the_deletion() -> None:
    cluster = running(pytorch(Master=1, spec={"runPolicy": {"ttlSecondsAfterFinished": 0}}))
    set_pod(cluster, "Master", 0, DONE, code=0)
    first = cluster.sync()
    assert first.status.has("Succeeded")
    assert first.actions == ()
    assert first.next_wake == 0
    assert tally(cluster.sync()) == {"DeleteJob": 1}


@pytest.mark.parametrize(
    ("clean_up", "pods_left", "services_left"),
    [
        ("All", set(), 0),
        ("Running", {"train-worker-1", "train-worker-2"}, 2),
        ("None", {"train-worker-0", "train-worker-1", "train-worker-2", "train-worker-3"}, 4),
    ],
)
def test_given_pods_in_every_phase_then_the_policy_says_what_is_left(
    clean_up: str, pods_left: set[str], services_left: int
) -> None:
    cluster = running(tensorflow(Chief=1, Worker=4, spec={"runPolicy": {"cleanPodPolicy": clean_up}}))
    set_pod(cluster, "Worker", 1, DONE, code=0)
    set_pod(cluster, "Worker", 2, FAILED, code=1)
    set_pod(cluster, "Worker", 3, WAITS)
    set_pod(cluster, "Chief", 0, DONE, code=0)
    cluster.sync()
    assert cluster.job.status.has("Succeeded")
    assert {name for name in cluster.pods if "worker" in name} == pods_left
    assert len([name for name in cluster.services if "worker" in name]) == services_left


# Suspension


SUSPENDED = RunPolicy(clean_pod_policy="None", suspend=True)


def test_given_a_job_born_suspended_with_a_time_to_live_then_no_pods_no_start_and_no_deletion() -> None:
    spec = {"runPolicy": {"suspend": True, "ttlSecondsAfterFinished": 0}}
    decision = decide(pytorch(Master=1, Worker=1, spec=spec), [], [], START)
    assert decision.actions == ()
    assert order(decision.status) == ["Created", "Suspended"]
    assert decision.status.start_time is None
    assert decision.next_wake is None


def test_given_a_suspension_then_active_is_zero_only_when_the_pods_have_ended() -> None:
    """A quota system frees the job's share when it reads zero. The counts of ended pods and the start time stay."""
    cluster = running(pytorch(Master=1, Worker=2))
    cluster.graceful = True
    cluster.job = replace(cluster.job, run_policy=SUSPENDED)
    decision = cluster.sync()
    assert [event.reason for event in decision.events] == ["PyTorchJobSuspended"]
    cluster.settle()
    assert cluster.job.status.replica_statuses["Worker"].active == 2
    assert conditions(cluster.job.status) == {"Created": "True", "Running": "False", "Suspended": "True"}
    assert cluster.services == {}
    cluster.pods.clear()
    decision = cluster.sync()
    assert decision.events == ()
    assert {status.active for status in decision.status.replica_statuses.values()} == {0}
    assert decision.status.start_time == START


def test_given_a_resumption_then_start_deadline_and_back_off_begin_anew_and_the_record_stays() -> None:
    limits = RunPolicy(clean_pod_policy="None", backoff_limit=5, active_deadline_seconds=60)
    cluster = running(replace(pytorch(Worker=policy("ExitCode")), run_policy=limits))
    set_pod(cluster, "Worker", 0, FAILED, code=137)
    cluster.sync()
    cluster.job = replace(cluster.job, run_policy=SUSPENDED)
    cluster.settle()
    cluster.sleep(3)
    cluster.job = replace(cluster.job, run_policy=limits)
    decision = cluster.sync()
    assert tally(decision) == {"CreatePod": 1, "CreateService": 1}
    assert decision.status.start_time == at(3)
    assert decision.next_wake == 60
    assert decision.status.replica_statuses["Worker"].retries["0"].failures == 1
    resumed = decision.status.condition("Suspended")
    assert resumed is not None
    assert (resumed.status, resumed.reason, resumed.message) == (
        "False",
        "PyTorchJobResumed",
        "PyTorchJob m is resumed.",
    )
    assert order(decision.status)[-1] == "Suspended"


def test_given_a_succeeded_job_when_it_is_suspended_then_nothing() -> None:
    cluster = running(pytorch(Master=1))
    set_pod(cluster, "Master", 0, DONE, code=0)
    cluster.settle()
    cluster.job = replace(cluster.job, run_policy=SUSPENDED)
    decision = cluster.sync()
    assert (decision.status, decision.actions, decision.events) == (cluster.job.status, (), ())


# Scaling


def scaled(cluster: Cluster, replicas: int) -> None:
    """Change the number of workers, as the scale subresource does."""
    specs = dict(cluster.job.replica_specs)
    specs["Worker"] = msgspec.structs.replace(specs["Worker"], replicas=replicas)
    cluster.job = replace(cluster.job, replica_specs=specs)


def test_given_an_elastic_job_when_it_is_scaled_up_and_down_then_it_is_never_restarting_or_failed() -> None:
    """Pods that are removed fail on their way out; a pod that is pending meanwhile changes nothing."""
    cluster = running(pytorch(Worker=2, spec={"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}}))
    scaled(cluster, 4)
    assert {action.index for action in actions(cluster.sync(), CreatePod)} == {2, 3}
    set_pod(cluster, "Worker", 2, RUNS)
    cluster.graceful = True
    scaled(cluster, 2)
    assert {action.name for action in actions(cluster.sync(), DeletePod)} == {"train-worker-2", "train-worker-3"}
    ending = cluster.pods["train-worker-2"]
    ending["status"] = pod("Worker", 2, FAILED, code=143)["status"]
    decision = cluster.sync()
    assert order(decision.status) == ["Created", "Running"]
    assert decision.events == ()


def test_given_a_surplus_pod_that_still_runs_then_it_is_active() -> None:
    """The autoscaler reads the count."""
    cluster = running(pytorch(Worker=2, spec={"elasticPolicy": {}}))
    scaled(cluster, 1)
    assert cluster.decide().status.replica_statuses["Worker"].active == 2


def test_given_zero_workers_then_there_is_no_pod_no_service_and_no_loop() -> None:
    cluster = Cluster(pytorch(Master=1, Worker=0))
    cluster.settle()
    assert list(cluster.pods) == ["train-master-0"]
    assert list(cluster.services) == ["train-master-0"]
    assert cluster.decide().actions == ()


def stamped(cluster: Cluster, size: str) -> None:
    """Give the pods the numbers under which an operator created them."""
    for found in cluster.pods.values():
        found["metadata"].setdefault("annotations", {}).setdefault(SIZE_ANNOTATION, size)


@pytest.mark.parametrize("replicas", [3, 1])
def test_given_a_job_of_fixed_size_when_it_is_scaled_in_a_run_then_one_event_says_so(replicas: int) -> None:
    cluster = running(pytorch(Master=1, Worker=2))
    stamped(cluster, "Master=1,Worker=2")
    scaled(cluster, replicas)
    event = next(event for event in cluster.sync().events if event.reason == "ReplicasChanged")
    assert f"Worker from 2 to {replicas}" in event.message
    stamped(cluster, f"Master=1,Worker={replicas}")
    assert cluster.sync().events == ()
    cluster.run(RUNS)
    assert "ReplicasChanged" not in [event.reason for event in cluster.sync().events]


def test_given_restarts_of_the_whole_job_when_it_is_scaled_then_all_pods_are_made_again_and_nothing_counts() -> None:
    cluster = running(whole(pytorch(Master=1, Worker=2, spec={"runPolicy": {"backoffLimit": 0}})))
    stamped(cluster, "Master=1,Worker=2")
    scaled(cluster, 3)
    decision = cluster.sync()
    assert [event.reason for event in decision.events] == ["ReplicasChanged"]
    assert len(actions(decision, DeletePod)) == 3
    decision = cluster.sync()
    assert len(actions(decision, CreatePod)) == 4
    assert not decision.status.finished


# Order, lost nodes


def test_given_workers_that_wait_for_their_master_then_they_are_created_once_it_has_an_address() -> None:
    cluster = Cluster(replace(pytorch(Master=1, Worker=2), create_after={"Worker": "Master"}))
    assert actions(cluster.sync(), CreatePod) == [CreatePod("Master", 0)]
    assert cluster.sync().actions == ()
    cluster.pods["train-master-0"]["status"]["podIP"] = "10.0.0.1"
    assert {(action.type, action.index) for action in actions(cluster.sync(), CreatePod)} == {
        ("Worker", 0),
        ("Worker", 1),
    }


def test_given_a_pod_on_a_lost_node_when_its_time_has_passed_then_it_is_forced_replaced_and_not_counted() -> None:
    cluster = running(replace(pytorch(Master=1, Worker=1), force_delete_after=60.0))
    lost = cluster.pods["train-worker-0"]
    lost["metadata"] |= {"deletionTimestamp": at(30).isoformat(), "deletionGracePeriodSeconds": 30}
    decision = cluster.sync()
    assert decision.actions == ()
    assert decision.next_wake == 90
    cluster.sleep(90)
    assert [(action.name, action.force) for action in actions(cluster.sync(), DeletePod)] == [("train-worker-0", True)]
    assert actions(cluster.sync(), CreatePod) == [CreatePod("Worker", 0)]
    assert cluster.job.status.replica_statuses["Worker"].retries == {}
