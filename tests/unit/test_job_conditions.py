"""Conditions and status of a job: exclusive, final, and readable by kubeflow's tools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controllers.job_conditions import set_condition
from controllers.job_status import (
    BadStatus,
    Condition,
    JobStatus,
    ReplicaStatus,
    Retry,
    decode_status,
    encode_status,
    status_patch,
)
from controllers.job_types import Backoff, BadSpec, decode_replica_specs, decode_run_policy
from tests.support.jobs import START, Cluster, at, conditions, job


def test_conditions_exclude_each_other_through_a_job_s_life() -> None:
    """Scenario 55: Running, Restarting, Running, Failed: never both of Running and Restarting, and Running is False at
    the end."""
    cluster = Cluster(job("ExitCode", Worker=2, backoff=Backoff(base=0)))
    cluster.settle()
    seen = []
    for phase, code in (("Running", None), ("Failed", 137), ("Running", None), ("Failed", 1)):
        cluster.run(phase, code=code)
        cluster.settle()
        seen.append(conditions(cluster.job.status))
    assert seen == [
        {"Created": "True", "Running": "True"},
        {"Created": "True", "Restarting": "True"},
        {"Created": "True", "Running": "True"},
        {"Created": "True", "Running": "False", "Failed": "True"},
    ]


def test_a_restarting_job_that_ends_is_not_restarting_any_more() -> None:
    """And Running says False, though it was not there."""
    cluster = Cluster(job("ExitCode", Worker=2))
    cluster.settle()
    cluster.run("Failed", code=137)
    cluster.sync()
    cluster.sleep(60)
    cluster.settle()
    cluster.run("Failed", code=1)
    cluster.sync()
    assert conditions(cluster.job.status) == {"Created": "True", "Running": "False", "Failed": "True"}


def test_an_end_unblocks() -> None:
    """A job that was blocked when it ended waits for nobody."""
    cluster = Cluster(job(Worker=1))
    cluster.settle()
    blocked = set_condition(cluster.job.status, "Blocked", "True", "NameTaken", "", START)
    cluster.job = replace(cluster.job, status=blocked)
    cluster.run("Succeeded", code=0)
    assert conditions(cluster.sync().status) == {"Created": "True", "Blocked": "False", "Succeeded": "True"}


def test_a_job_whose_pods_all_left_is_not_running() -> None:
    """Until one runs again."""
    cluster = Cluster(job(Worker=1))
    cluster.settle()
    cluster.run("Running")
    cluster.sync()
    cluster.pods.clear()
    assert conditions(cluster.sync().status) == {"Created": "True", "Running": "False"}
    cluster.run("Running")
    assert cluster.sync().status.has("Running")


def test_each_transition_is_announced_once() -> None:
    """Events say what became true, not what is."""
    cluster = Cluster(job(Worker=1))
    reasons = [event.reason for event in cluster.sync().events]
    for phase in ("Running", "Running", "Succeeded"):
        cluster.run(phase)
        reasons += [event.reason for event in (*cluster.sync().events, *cluster.sync().events)]
    assert reasons == ["JobCreated", "JobRunning", "JobSucceeded"]


def test_nothing_changes_when_status_and_reason_are_the_same() -> None:
    """Not even the message or the update time, so there is nothing to write."""
    status = set_condition(JobStatus(), "Running", "True", "JobRunning", "it runs", START)
    assert set_condition(status, "Running", "True", "JobRunning", "it still runs", at(9)) is status


def test_the_transition_time_changes_with_the_status_only() -> None:
    """A new reason is an update, not a transition."""
    status = set_condition(JobStatus(), "Running", "True", "A", "", START)
    status = set_condition(status, "Running", "True", "B", "", at(5))
    condition = status.condition("Running")
    assert condition is not None
    assert (condition.last_transition_time, condition.last_update_time) == (START, at(5))
    changed = set_condition(status, "Running", "False", "B", "", at(7)).condition("Running")
    assert changed is not None
    assert changed.last_transition_time == at(7)


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_after_the_end_no_condition_changes(end: str) -> None:
    """The end is final."""
    status = JobStatus(conditions=[Condition(type=end, status="True")])
    assert set_condition(status, "Running", "True", "JobRunning", "", START) is status


def test_the_status_on_the_wire() -> None:
    """Kubeflow's field names and times; zeros and absent fields are left out; it comes back as it was."""
    status = JobStatus(
        conditions=[
            Condition(
                type="Running", status="True", reason="JobRunning", message="it runs",
                last_update_time=at(1), last_transition_time=START,
            )
        ],
        replica_statuses={
            "PS": ReplicaStatus(),
            "Worker": ReplicaStatus(
                active=2, failed=1, retries={"0": Retry(failures=1, last_failure_time=at(1), counted=["u1"])}
            ),
        },
        start_time=START,
        last_reconcile_time=at(1),
    )  # fmt: skip
    wire = {
        "conditions": [
            {
                "type": "Running",
                "status": "True",
                "reason": "JobRunning",
                "message": "it runs",
                "lastUpdateTime": "2024-05-01T12:00:01Z",
                "lastTransitionTime": "2024-05-01T12:00:00Z",
            }
        ],
        "replicaStatuses": {
            "PS": {},
            "Worker": {
                "active": 2,
                "failed": 1,
                "retries": {"0": {"failures": 1, "lastFailureTime": "2024-05-01T12:00:01Z", "counted": ["u1"]}},
            },
        },
        "startTime": "2024-05-01T12:00:00Z",
        "lastReconcileTime": "2024-05-01T12:00:01Z",
    }
    assert encode_status(status) == wire
    assert decode_status(wire | {"observedGeneration": 3}) == status


def test_times_are_whole_seconds() -> None:
    """As `metav1.Time` has them."""
    cluster = Cluster(job(Worker=1))
    cluster.sleep(0.75)
    assert cluster.sync().status.start_time == START


def test_a_patch_names_only_what_changes() -> None:
    """So that fields of others survive; what vanished is written as null."""
    old = JobStatus(start_time=START, replica_statuses={"Worker": ReplicaStatus(active=1), "PS": ReplicaStatus()})
    new = JobStatus(replica_statuses={"Worker": ReplicaStatus(succeeded=1), "PS": ReplicaStatus()})
    assert status_patch(old, new) == {
        "startTime": None,
        "replicaStatuses": {"Worker": {"active": None, "succeeded": 1}},
    }
    assert status_patch(new, new) == {}


def test_a_status_that_makes_no_sense_is_refused() -> None:
    """With the field that is wrong."""
    with pytest.raises(BadStatus, match="startTime"):
        decode_status({"startTime": "yesterday"})
    assert decode_status(None) == JobStatus()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"Worker": {"template": {}, "replicas": -1}}, r"spec\.replicas\.Worker\.replicas: .*>= 0"),
        ({"Worker": {"template": {}, "restartPolicy": "Sometimes"}}, r"spec\.replicas\.Worker\.restartPolicy"),
        ({"Worker": {}}, r"spec\.replicas\.Worker: .*template"),
        ({}, r"spec\.replicas: "),
        (None, r"spec\.replicas: "),
    ],
)
def test_a_bad_spec_is_refused_with_its_field(raw: object, message: str) -> None:
    """So that whoever wrote the job finds it."""
    with pytest.raises(BadSpec, match=message):
        decode_replica_specs(raw, "spec.replicas")


def test_an_absent_run_policy_has_the_defaults() -> None:
    """Clean up what runs; no limits."""
    policy = decode_run_policy(None, "spec.runPolicy")
    assert (policy.clean_pod_policy, policy.backoff_limit, policy.suspend) == ("Running", None, False)
    with pytest.raises(BadSpec, match=r"spec\.runPolicy\.backoffLimit"):
        decode_run_policy({"backoffLimit": "3"}, "spec.runPolicy")


def test_times_of_other_zones_are_understood() -> None:
    """Whoever wrote them."""
    assert decode_status({"startTime": "2024-05-01T14:00:00+02:00"}).start_time == START
