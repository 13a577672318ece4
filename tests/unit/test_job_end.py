"""How a job ends, what is left of it, and how it is suspended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controllers.job_decision import decide
from controllers.job_status import Condition, JobStatus
from controllers.job_types import (
    DeleteGang,
    DeleteJob,
    Gang,
    RunPolicy,
    SchedulingPolicy,
    SyncGang,
)
from tests.support.jobs import START, Cluster, at, conditions, finished, job, pod, pods, services, tally


@pytest.mark.parametrize("policy", ["", "AllWorkers"])
def test_without_a_chief_the_success_policy_decides(policy: Any) -> None:
    """Scenario 54: worker 0 succeeded and 3 are active: Succeeded by default, Running under AllWorkers."""
    present = [pod("Worker", 0, "Succeeded", code=0), *pods("Worker", [1, 2, 3])]
    status = decide(job(Worker=4, success_policy=policy), present, [], START).status
    assert status.has("Running" if policy else "Succeeded")
    assert status.finished is (policy == "")


def test_all_workers_are_enough_without_the_other_types() -> None:
    """Parameter servers never end by themselves."""
    present = [*pods("Worker", [0, 1], "Succeeded"), pod("PS", 0)]
    assert decide(job(Worker=2, PS=1, success_policy="AllWorkers"), present, [], START).status.has("Succeeded")


@pytest.mark.parametrize("chief", ["Chief", "Master"])
def test_the_chief_decides(chief: str) -> None:
    """Whatever the workers do: they neither make the success nor hold it up."""
    workers = pods("Worker", [0, 1], "Succeeded")
    view = job(Worker=2, **{chief: 1})
    assert not decide(view, [*workers, pod(chief, 0)], [], START).status.finished
    assert decide(view, [*pods("Worker", [0, 1]), pod(chief, 0, "Succeeded")], [], START).status.has("Succeeded")


def test_without_chief_and_workers_every_replica_has_to_succeed() -> None:
    """Types that rcfarm knows nothing of are all alike."""
    view = job(Launcher=1, Evaluator=1)
    assert not decide(view, [pod("Launcher", 0, "Succeeded"), pod("Evaluator", 0)], [], START).status.finished
    assert decide(view, [pod(k, 0, "Succeeded") for k in ("Launcher", "Evaluator")], [], START).status.finished


def test_a_job_without_replicas_has_not_succeeded() -> None:
    """Nothing ran; it waits to be scaled up."""
    decision = decide(job(Worker=0), [], [], START)
    assert conditions(decision.status) == {"Created": "True"}


def test_success_wins_over_failure() -> None:
    """Section 12: one decision over all types, so a job never has both ends."""
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
    """Scenario 49: of 6 running pods All, Running and None delete 6, 6 and 0; of 6 succeeded ones 6, 0 and 0. A
    service goes with its pod."""
    view = finished(job(run_policy=RunPolicy(clean_pod_policy=policy), Worker=4, PS=2))
    present = [*pods("Worker", range(4), phase), *pods("PS", range(2), phase)]
    serving = [*services("Worker", range(4)), *services("PS", range(2))]
    deleted = tally(decide(view, present, serving, START))
    expected = 6 if policy == "All" or (policy == "Running" and phase != "Succeeded") else 0
    assert (deleted.get("DeletePod", 0), deleted.get("DeleteService", 0)) == (expected, expected)


@pytest.mark.parametrize("policy", ["All", "Running"])
def test_services_go_when_there_are_no_pods(policy: Any) -> None:
    """Section 12: clean-up of services depends on no pod."""
    view = finished(job(run_policy=RunPolicy(clean_pod_policy=policy), Worker=2))
    assert tally(decide(view, [], services("Worker", range(2)), START)) == {"DeleteService": 2}


def test_a_finished_job_is_quiescent() -> None:
    """Section 12: neither its status nor its objects change again, and nothing wakes it."""
    view = finished(job(Worker=2, gang=Gang(exists=False, current=False)))
    left = pods("Worker", range(2), "Succeeded")
    decision = decide(view, left, services("Worker", range(2)), at(1000))
    assert decision.status == view.status
    assert (decision.actions, decision.next_wake, decision.events) == ((), None, ())


def test_pods_that_appear_after_the_end_go() -> None:
    """A creation that was on its way when the job ended is cleaned up as well."""
    assert tally(decide(finished(job(Worker=2)), [pod("Worker", 1, "Pending")], [], START)) == {"DeletePod": 1}


@pytest.mark.parametrize("kind", ["Succeeded", "Failed"])
def test_the_time_to_live(kind: Any) -> None:
    """Scenario 53: with 0 the job is deleted; with 2 the decision asks to be woken for the rest, then deletes it."""
    view = finished(job(run_policy=RunPolicy(ttl_seconds_after_finished=0), Worker=1), kind)
    assert decide(view, [], [], START).actions == (DeleteJob(),)
    view = replace(view, run_policy=RunPolicy(ttl_seconds_after_finished=2))
    early = decide(view, [], [], at(0.5))
    assert (early.actions, early.next_wake) == ((), 1.5)
    assert decide(view, [], [], at(2)).actions == (DeleteJob(),)


def test_the_end_is_on_record_before_the_job_is_deleted() -> None:
    """With a time to live of 0 too: first the status, then, woken at once, the deletion."""
    cluster = Cluster(job(run_policy=RunPolicy(ttl_seconds_after_finished=0), Worker=1))
    cluster.settle()
    cluster.run("Failed", code=1)
    first = cluster.sync()
    assert first.status.has("Failed")
    assert DeleteJob() not in first.actions
    assert first.next_wake == 0
    assert cluster.sync().actions == (DeleteJob(),)


def test_a_missing_completion_time_is_filled_in() -> None:
    """From the time of the end, so that a time to live works for a status that another controller wrote."""
    ended = Condition(type="Succeeded", status="True", last_transition_time=at(-5))
    view = job(run_policy=RunPolicy(ttl_seconds_after_finished=10), Worker=1, status=JobStatus(conditions=[ended]))
    decision = decide(view, [], [], START)
    assert decision.status.completion_time == at(-5)
    assert decision.next_wake == 5


def test_suspension_takes_everything_and_resumption_starts_over() -> None:
    """Scenario 50: under the policy None too, all pods and services go; after it, the start time is that of the
    resumption, and the deadline counts from there."""
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
    assert {status.active for status in suspended.status.replica_statuses.values()} == {0}
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
    """It makes nothing, has no start time, and no time to live counts."""
    view = job(run_policy=RunPolicy(suspend=True, ttl_seconds_after_finished=0), Worker=2)
    decision = decide(view, [], [], START)
    assert decision.actions == ()
    assert decision.status.start_time is None
    assert decision.status.has("Suspended")


def test_a_finished_job_can_not_be_suspended() -> None:
    """Its end is final."""
    view = finished(job(run_policy=RunPolicy(suspend=True), Worker=1))
    assert decide(view, [], [], START).status == view.status


def test_the_gang_comes_first_and_goes_with_the_job() -> None:
    """It asks for all replicas, or for `minAvailable`; it is not synced again when it is as it should be."""
    absent, present = Gang(exists=False, current=False), Gang(exists=True, current=True)
    assert decide(job(Worker=2, PS=1, gang=absent), [], [], START).actions[0] == SyncGang(3)
    wanted = RunPolicy(scheduling_policy=SchedulingPolicy(min_available=2))
    assert decide(job(run_policy=wanted, Worker=3, gang=absent), [], [], START).actions[0] == SyncGang(2)
    assert "SyncGang" not in tally(decide(job(Worker=2, gang=present), [], [], START))
    assert decide(finished(job(Worker=2, gang=present)), [], [], START).actions == (DeleteGang(),)
    suspended = job(run_policy=RunPolicy(suspend=True), Worker=2, gang=present)
    assert decide(suspended, [], [], START).actions == (DeleteGang(),)


def test_pods_wait_for_a_gang_that_holds_them() -> None:
    """Services do not."""
    view = job(Worker=2, gang=Gang(exists=True, current=True, holds_creation=True))
    assert tally(decide(view, [], [], START)) == {"CreateService": 2}
