"""Decisions about PyTorchJobs and TFJobs: who makes a job run, succeed and fail; what counts; what is left at the end.

Pure: the pods of a job are moved by hand, and the cluster of the tests takes every action at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controllers.jobs.api import CreatePod, DeletePod, JobView
from controllers.jobs.decision import decide
from controllers.jobs.status import decode_status, status_patch
from controllers.training import PyTorchJobs
from store.kube.api.objects import Object
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.decisions import (
    INDEX,
    START,
    TYPE,
    Cluster,
    actions,
    conditions,
    pod,
    pods,
    services,
    tally,
)
from tests.support.training.decisions import (
    DONE,
    FAILED,
    RUNS,
    WAITS,
    message,
    order,
    policy,
    pytorch,
    running,
    set_pod,
    stored,
    tensorflow,
)
from tests.support.training.manifests import pytorch_job

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
