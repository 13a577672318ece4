"""The decision about a job: its conditions, exclusive and final; its end, limits, clean-up, and suspension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controllers.jobs.api import (
    Backoff,
    BadSpec,
    CreatePod,
    DeleteGang,
    DeleteJob,
    DeletePod,
    DeleteService,
    Gang,
    RunPolicy,
    SchedulingPolicy,
    SyncGang,
    decode,
    decode_replica_specs,
)
from controllers.jobs.decision import (
    decide,
)
from controllers.jobs.status import (
    BadStatus,
    Condition,
    JobStatus,
    ReplicaStatus,
    Retry,
    decode_status,
    set_condition,
    status_patch,
)
from tests.support import require
from tests.support.jobs.decisions import (
    START,
    Cluster,
    actions,
    at,
    conditions,
    finished,
    job,
    pod,
    pods,
    service,
    services,
    tally,
)

RUNS, DONE = "Running", "Succeeded"


@pytest.mark.parametrize(
    ("replicas", "policy", "phases", "succeeds"),
    [
        pytest.param({"Worker": 3}, "", {"Worker": [DONE, RUNS, RUNS]}, True, id="worker 0 is the chief"),
        pytest.param({"Worker": 3}, "AllWorkers", {"Worker": [DONE, RUNS, RUNS]}, False, id="all workers"),
        pytest.param({"Worker": 1, "PS": 1}, "AllWorkers", {"Worker": [DONE], "PS": [RUNS]}, True, id="servers run"),
        pytest.param({"Worker": 1, "Chief": 1}, "", {"Worker": [DONE], "Chief": [RUNS]}, False, id="chief runs"),
        pytest.param({"Worker": 1, "Chief": 1}, "", {"Worker": [RUNS], "Chief": [DONE]}, True, id="chief ended"),
        pytest.param({"Worker": 1, "Master": 1}, "", {"Worker": [DONE], "Master": [RUNS]}, False, id="master runs"),
        pytest.param({"Worker": 1, "Master": 1}, "", {"Worker": [RUNS], "Master": [DONE]}, True, id="master ended"),
        pytest.param({"A": 1, "B": 1}, "", {"A": [DONE], "B": [RUNS]}, False, id="unknown types count alike"),
        pytest.param({"A": 1, "B": 1}, "", {"A": [DONE], "B": [DONE]}, True, id="all of unknown types"),
    ],
)
def test_who_decides_about_success(
    replicas: dict[str, int], policy: Any, phases: dict[str, list[str]], succeeds: bool
) -> None:
    """Chiefs, and without them the first worker or all; without workers every replica. The others do not delay it."""
    present = [pod(kind, index, phase) for kind, found in phases.items() for index, phase in enumerate(found)]
    status = decide(job(**replicas, success_rule=policy or "FirstWorker"), present, [], START).status
    assert status.has("Succeeded") is succeeds
    assert status.has("Running") is not succeeds


def test_a_job_without_replicas_has_not_succeeded() -> None:
    """No pod ran; it waits to be scaled up."""
    decision = decide(job(Worker=0), [], [], START)
    assert conditions(decision.status) == {"Created": "True"}


def test_success_wins_over_failure() -> None:
    """One decision covers all types, so a job never ends both ways."""
    present = [pod("PS", 0, "Failed", code=1), pod("Worker", 0, "Succeeded", code=0)]
    for order in (present, present[::-1]):
        status = decide(job(PS=1, Worker=1), order, [], START).status
        assert (status.has("Succeeded"), status.has("Failed")) == (True, False)


def test_what_still_runs_at_success_counts_as_succeeded() -> None:
    """Active pods are folded into the succeeded ones, and nothing is active any more."""
    present = [pod("Chief", 0, "Succeeded"), *pods("Worker", range(3))]
    replicas = decide(job(Chief=1, Worker=3), present, [], START).status.replica_statuses
    assert (replicas["Worker"].active, replicas["Worker"].succeeded) == (0, 3)


@pytest.mark.parametrize("policy", ["All", "Running", "None"])
@pytest.mark.parametrize("phase", ["Running", "Pending", "Succeeded"])
def test_the_clean_up_policy_says_what_is_left(policy: Any, phase: str) -> None:
    """Of 6 running pods All, Running and None delete 6, 6 and 0; of 6 succeeded ones 6, 0 and 0. A service goes with
    its pod.
    """
    view = finished(job(run_policy=RunPolicy(clean_pod_policy=policy), Worker=4, PS=2))
    present = [*pods("Worker", range(4), phase), *pods("PS", range(2), phase)]
    serving = [*services("Worker", range(4)), *services("PS", range(2))]
    deleted = tally(decide(view, present, serving, START))
    expected = 6 if policy == "All" or (policy == "Running" and phase != "Succeeded") else 0
    assert (deleted.get("DeletePod", 0), deleted.get("DeleteService", 0)) == (expected, expected)
    alone = tally(decide(view, [], services("Worker", range(2)), START))  # services do not depend on pods
    assert alone == ({} if policy == "None" else {"DeleteService": 2})


def test_a_finished_job_is_quiescent() -> None:
    """Neither its status nor its objects change again, and no timer wakes it."""
    view = finished(job(Worker=2, gang=Gang(exists=False, current=False)))
    left = pods("Worker", range(2), "Succeeded")
    decision = decide(view, left, services("Worker", range(2)), at(1000))
    assert decision.status == view.status
    assert (decision.actions, decision.next_wake, decision.events) == ((), None, ())


def test_pods_that_appear_after_the_end_go() -> None:
    """A creation in flight at the end of the job is cleaned up as well."""
    assert tally(decide(finished(job(Worker=2)), [pod("Worker", 1, "Pending")], [], START)) == {"DeletePod": 1}


@pytest.mark.parametrize("kind", ["Succeeded", "Failed"])
def test_the_time_to_live(kind: Any) -> None:
    """With 0 the job is deleted; with 2 the decision requests a wake-up for the rest, then deletes it."""
    view = finished(job(run_policy=RunPolicy(ttl_seconds_after_finished=0), Worker=1), kind)
    assert decide(view, [], [], START).actions == (DeleteJob(),)
    view = replace(view, run_policy=RunPolicy(ttl_seconds_after_finished=2))
    early = decide(view, [], [], at(0.5))
    assert (early.actions, early.next_wake) == ((), 1.5)
    assert decide(view, [], [], at(2)).actions == (DeleteJob(),)


def test_the_end_is_on_record_before_the_job_is_deleted() -> None:
    """Also with a time to live of 0, the status comes first, then, after an immediate wake-up, the deletion."""
    cluster = Cluster(job(run_policy=RunPolicy(ttl_seconds_after_finished=0), Worker=1))
    cluster.settle()
    cluster.run("Failed", code=1)
    first = cluster.sync()
    assert first.status.has("Failed")
    assert DeleteJob() not in first.actions
    assert first.next_wake == 0
    assert cluster.sync().actions == (DeleteJob(),)


def test_a_missing_completion_time_is_filled_in() -> None:
    """It is the time of the end, so that a time to live works for a status that another controller wrote."""
    ended = Condition(type="Succeeded", status="True", last_transition_time=at(-5))
    view = job(run_policy=RunPolicy(ttl_seconds_after_finished=10), Worker=1, status=JobStatus(conditions=[ended]))
    decision = decide(view, [], [], START)
    assert decision.status.completion_time == at(-5)
    assert decision.next_wake == 5


def test_suspension_takes_everything_and_resumption_starts_over() -> None:
    """All pods and services go, under the policy None, too; the start time and the deadline then count from the
    resumption.
    """
    run_policy = RunPolicy(clean_pod_policy="None", active_deadline_seconds=60)
    cluster = Cluster(job(run_policy=run_policy, Worker=2, PS=1))
    cluster.settle()
    cluster.run("Running")
    cluster.sync()
    cluster.pods["train-worker-1"] = pod("Worker", 1, "Succeeded", code=0)
    cluster.job = replace(cluster.job, run_policy=RunPolicy(clean_pod_policy="None", suspend=True))
    suspended = cluster.sync()
    assert tally(suspended) == {"DeletePod": 3, "DeleteService": 3}
    assert conditions(suspended.status) == {"Created": "True", "Running": "False", "Suspended": "True"}
    assert {status.active for status in cluster.sync().status.replica_statuses.values()} == {0}
    assert cluster.decide().actions == ()
    cluster.sleep(100)
    cluster.job = replace(cluster.job, run_policy=run_policy)
    resumed = cluster.sync()
    assert tally(resumed) == {"CreatePod": 3, "CreateService": 3}
    assert resumed.status.start_time == at(100)
    assert resumed.next_wake == 60
    assert conditions(resumed.status)["Suspended"] == "False"
    assert "JobResumed" in [event.reason for event in resumed.events]


def test_a_job_can_be_created_suspended() -> None:
    """It creates nothing, has no start time, and no time to live counts. A finished job can't be suspended."""
    view = job(run_policy=RunPolicy(suspend=True, ttl_seconds_after_finished=0), Worker=2)
    decision = decide(view, [], [], START)
    assert decision.actions == ()
    assert decision.status.start_time is None
    assert decision.status.has("Suspended")
    view = finished(job(run_policy=RunPolicy(suspend=True), Worker=1))
    assert decide(view, [], [], START).status == view.status


def test_the_gang_comes_first_and_goes_with_the_job() -> None:
    """It requires all replicas, or `minAvailable`; it is not synced again while it is as desired."""
    absent, present = Gang(exists=False, current=False), Gang(exists=True, current=True)
    assert decide(job(Worker=2, PS=1, gang=absent), [], [], START).actions[0] == SyncGang(3)
    wanted = RunPolicy(scheduling_policy=SchedulingPolicy(min_available=2))
    assert decide(job(run_policy=wanted, Worker=3, gang=absent), [], [], START).actions[0] == SyncGang(2)
    assert "SyncGang" not in tally(decide(job(Worker=2, gang=present), [], [], START))
    assert decide(finished(job(Worker=2, gang=present)), [], [], START).actions == (DeleteGang(),)
    suspended = job(run_policy=RunPolicy(suspend=True), Worker=2, gang=present)
    assert decide(suspended, [], [], START).actions == (DeleteGang(),)


def test_pods_wait_for_a_gang_that_holds_them() -> None:
    """Services do not wait."""
    view = job(Worker=2, gang=Gang(exists=True, current=True, holds_creation=True))
    assert tally(decide(view, [], [], START)) == {"CreateService": 2}


def test_conditions_exclude_each_other_through_a_job_s_life() -> None:
    """Running, Restarting, Running, Failed: Running and Restarting are never both present, and Running is False at the
    end.
    """
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
    """Running is False, though it was absent before."""
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
    """A job that was blocked when it ended is not Blocked any more."""
    cluster = Cluster(job(Worker=1))
    cluster.settle()
    blocked = set_condition(cluster.job.status, "Blocked", "True", "NameTaken", "", START)
    cluster.job = replace(cluster.job, status=blocked)
    cluster.run("Succeeded", code=0)
    assert conditions(cluster.sync().status) == {"Created": "True", "Blocked": "False", "Succeeded": "True"}


def test_a_job_whose_pods_all_left_is_not_running() -> None:
    """It is not Running until a pod runs again."""
    cluster = Cluster(job(Worker=1))
    cluster.settle()
    cluster.run("Running")
    cluster.sync()
    cluster.pods.clear()
    assert conditions(cluster.sync().status) == {"Created": "True", "Running": "False"}
    cluster.run("Running")
    assert cluster.sync().status.has("Running")


def test_each_transition_is_announced_once() -> None:
    """Events report changes, not states."""
    cluster = Cluster(job(Worker=1))
    reasons = [event.reason for event in cluster.sync().events]
    for phase in ("Running", "Running", "Succeeded"):
        cluster.run(phase)
        reasons += [event.reason for event in (*cluster.sync().events, *cluster.sync().events)]
    assert reasons == ["JobCreated", "JobRunning", "JobSucceeded"]


def test_the_times_of_a_condition() -> None:
    """With the same status and reason nothing changes, not even the message, so there is nothing to write. A new reason
    is an update, not a transition.
    """
    status = set_condition(JobStatus(), "Running", "True", "A", "it runs", START)
    assert set_condition(status, "Running", "True", "A", "it still runs", at(9)) is status
    status = set_condition(status, "Running", "True", "B", "", at(5))
    condition = require(status.condition("Running"))
    assert (condition.last_transition_time, condition.last_update_time) == (START, at(5))
    changed = require(set_condition(status, "Running", "False", "B", "", at(7)).condition("Running"))
    assert changed.last_transition_time == at(7)


def test_a_huge_message_is_cut_once() -> None:
    """A mistake of a megabyte, quoted in the message, would make a status that the API server can't store."""
    status = set_condition(JobStatus(), "Blocked", "True", "A", "x" * 1_000_000, START)
    condition = require(status.condition("Blocked"))
    assert condition.message == "x" * 4095 + "…"
    assert set_condition(status, "Blocked", "True", "A", "x" * 1_000_000, at(5)) is status


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_after_the_end_no_condition_changes(end: str) -> None:
    """The end is final."""
    status = JobStatus(conditions=[Condition(type=end, status="True")])
    assert set_condition(status, "Running", "True", "JobRunning", "", START) is status


def test_the_status_on_the_wire() -> None:
    """It has kubeflow's field names and times, without zeros and absent fields, and decodes to the same status."""
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
    assert msgspec.to_builtins(status) == wire
    assert decode_status(wire | {"observedGeneration": 3}) == status


def test_times_are_whole_seconds() -> None:
    """As `metav1.Time` has them."""
    cluster = Cluster(job(Worker=1))
    cluster.sleep(0.75)
    assert cluster.sync().status.start_time == START


def test_a_patch_names_only_what_changes() -> None:
    """Fields of other clients survive; removed fields are null."""
    old = JobStatus(start_time=START, replica_statuses={"Worker": ReplicaStatus(active=1), "PS": ReplicaStatus()})
    new = JobStatus(replica_statuses={"Worker": ReplicaStatus(succeeded=1), "PS": ReplicaStatus()})
    assert status_patch(old, new) == {
        "startTime": None,
        "replicaStatuses": {"Worker": {"active": None, "succeeded": 1}},
    }
    assert status_patch(new, new) == {}


def test_a_status_of_another_writer() -> None:
    """Times may be in any zone; the error about an invalid field names it."""
    assert decode_status({"startTime": "2024-05-01T14:00:00+02:00"}).start_time == START
    assert decode_status(None) == JobStatus()
    with pytest.raises(BadStatus, match="startTime"):
        decode_status({"startTime": "yesterday"})


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
    """The error names the field."""
    with pytest.raises(BadSpec, match=message):
        decode_replica_specs(raw, "spec.replicas")


def test_a_bad_run_policy_is_refused_with_its_field() -> None:
    """Without one, running pods are cleaned up, and there are no limits."""
    policy = decode({}, RunPolicy, "spec.runPolicy")
    assert (policy.clean_pod_policy, policy.backoff_limit, policy.suspend) == ("Running", None, False)
    with pytest.raises(BadSpec, match=r"spec\.runPolicy\.backoffLimit"):
        decode({"backoffLimit": "3"}, RunPolicy, "spec.runPolicy")


@pytest.mark.parametrize(
    ("workers", "restarts", "limit", "fails"), [(4, 1, 4, True), (3, 1, 4, False), (1, 0, 0, False), (1, 1, 0, True)]
)
def test_restarts_in_place_use_up_the_limit(workers: int, restarts: int, limit: int, fails: bool) -> None:
    """With OnFailure, 4 workers with one restart each and a limit of 4, the job is Failed and all 6 pods are deleted.
    One restart less is within the limit. A limit of 0 allows none; a job that never restarted does not fail.
    """
    present = [*pods("Worker", range(workers), restarts=restarts), *pods("PS", range(2))]
    view = job("OnFailure", run_policy=RunPolicy(backoff_limit=limit), Worker=workers, PS=2)
    decision = decide(view, present, [], START)
    assert decision.status.has("Failed" if fails else "Running")
    assert len(actions(decision, DeletePod)) == (workers + 2 if fails else 0)


def test_failed_pods_are_allowed_up_to_the_limit() -> None:
    """The third failure exceeds a limit of 2."""
    cluster = Cluster(job("OnFailure", run_policy=RunPolicy(backoff_limit=2), Worker=1, backoff=Backoff(base=0)))
    for fails in (False, False, True):
        cluster.settle()
        cluster.run("Failed", code=1)
        assert cluster.sync().status.has("Failed") is fails


def test_api_errors_are_no_retries() -> None:
    """Repeated decisions do not use up the limit."""
    view = job("OnFailure", run_policy=RunPolicy(backoff_limit=0), Worker=2)
    for _ in range(5):
        decision = decide(view, [pod("Worker", 0)], services("Worker", range(2)), START)
        view = replace(view, status=decision.status)
    assert not view.status.finished


def test_the_deadline_needs_no_event() -> None:
    """With a deadline of 2 s the decision requests a wake-up after 2 s, and then fails the job. The wake-up follows the
    current spec. A controller that was away does not fail a job that has succeeded.
    """
    cluster = Cluster(job(run_policy=RunPolicy(active_deadline_seconds=100), Worker=1))
    assert cluster.sync().next_wake == 100
    cluster.job = replace(cluster.job, run_policy=RunPolicy(active_deadline_seconds=2))
    assert cluster.sync().next_wake == 2
    succeeded = decide(cluster.job, [pod("Worker", 0, "Succeeded", code=0)], [], at(60))
    assert succeeded.status.has("Succeeded")
    cluster.run("Running")
    cluster.sleep(2)
    decision = cluster.sync()
    failed = require(decision.status.condition("Failed"))
    assert failed.reason == "DeadlineExceeded"
    assert decision.status.completion_time == at(2)
    assert cluster.pods == {}


@pytest.mark.parametrize(
    "run_policy", [RunPolicy(active_deadline_seconds=0), RunPolicy(backoff_limit=1)], ids=["deadline", "back-off limit"]
)
def test_a_limit_stops_pods_under_every_clean_up_policy(run_policy: RunPolicy) -> None:
    """With `None`, too, running pods are stopped; ended ones stay, with their services."""
    view = job("OnFailure", run_policy=msgspec.structs.replace(run_policy, clean_pod_policy="None"), Worker=2, PS=1)
    present = [pod("Worker", 0, restarts=2), pod("Worker", 1, "Succeeded", code=0), pod("PS", 0, "Pending")]
    serving = [*services("Worker", range(2)), service("PS", 0)]
    decision = decide(view, present, serving, START)
    assert decision.status.has("Failed")
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-0", "train-ps-0"]
    assert [a.name for a in actions(decision, DeleteService)] == ["train-worker-0", "train-ps-0"]
    assert decision.status.replica_statuses["Worker"].active == 0


@pytest.mark.parametrize("seconds", [10**11, 10**12, 2**63 - 1])
def test_a_limit_of_thousands_of_years_is_none(seconds: int) -> None:
    """The API server accepts any 64-bit number; the calendar ends with the year 9999."""
    policy = RunPolicy(active_deadline_seconds=seconds, ttl_seconds_after_finished=seconds)
    cluster = Cluster(job(Worker=1, run_policy=policy))
    cluster.settle()
    cluster.run("Running")
    cluster.settle()
    cluster.run("Succeeded")
    cluster.settle()
    assert cluster.job.status.has("Succeeded")
    assert not cluster.job.deleting


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
def test_a_pod_whose_node_is_given_for_ever_is_never_forced(seconds: float) -> None:
    gone = pod("Worker", 0, deleting=at(30))
    decision = decide(job(Worker=1, force_delete_after=seconds), [gone], services("Worker", [0]), at(10**6))
    assert (decision.actions, decision.next_wake) == ((), None)


def test_a_clock_that_is_set_back_neither_holds_a_replica_up_nor_lets_it_spin() -> None:
    """A start and a failure in the future are taken as of now: the successor waits as long as ever."""
    cluster = Cluster(job("OnFailure", Worker=1, run_policy=RunPolicy(active_deadline_seconds=600)))
    cluster.settle()
    cluster.run("Running")
    cluster.settle()
    cluster.run("Failed", code=1)
    cluster.sync()
    cluster.sleep(-3600)
    decision = cluster.sync()
    assert (decision.actions, decision.next_wake) == ((), 10)
    assert decision.status.start_time == cluster.now
    assert not cluster.sync().actions
    cluster.sleep(10)
    assert actions(cluster.sync(), CreatePod) == [CreatePod("Worker", 0)]
    cluster.run("Failed", code=1)
    cluster.sync()
    cluster.sleep(-3600)
    assert cluster.sync().next_wake == 20, "the second failure, after a second change of the clock"
