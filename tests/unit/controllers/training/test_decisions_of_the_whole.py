"""Decisions about whole PyTorchJobs and TFJobs: restarts of all replicas, the end, suspension, scaling, lost nodes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from controllers.jobs.api import CreatePod, DeletePod, JobView, RunPolicy
from controllers.jobs.decision import decide
from controllers.jobs.replicas import SIZE_ANNOTATION
from controllers.jobs.status import decode_status
from tests.support.jobs.decisions import (
    START,
    Cluster,
    actions,
    at,
    conditions,
    pod,
    tally,
)
from tests.support.training.decisions import (
    DONE,
    FAILED,
    RUNS,
    WAITS,
    order,
    policy,
    pytorch,
    running,
    set_pod,
    stored,
    tensorflow,
)

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
