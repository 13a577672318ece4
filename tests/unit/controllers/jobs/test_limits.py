"""A job that exceeds its back-off limit or its deadline fails, and all its pods are stopped."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from controllers.jobs.api.types import Backoff, DeletePod, DeleteService, RunPolicy
from controllers.jobs.decision import decide
from tests.support.jobs.decisions import START, Cluster, actions, at, job, pod, pods, service, services


def test_restarts_in_place_use_up_the_limit() -> None:
    """With OnFailure, 4 workers with one restart each and a limit of 4, the job is Failed and all 6 pods are
    deleted.
    """
    present = [*pods("Worker", range(4), restarts=1), *pods("PS", range(2))]
    decision = decide(job("OnFailure", run_policy=RunPolicy(backoff_limit=4), Worker=4, PS=2), present, [], START)
    assert decision.status.has("Failed")
    assert len(actions(decision, DeletePod)) == 6


def test_one_restart_less_is_within_the_limit() -> None:
    """The job runs."""
    present = pods("Worker", range(3), restarts=1)
    decision = decide(job("OnFailure", run_policy=RunPolicy(backoff_limit=4), Worker=3), present, [], START)
    assert decision.status.has("Running")


@pytest.mark.parametrize(("restarts", "fails"), [(0, False), (1, True)])
def test_a_limit_of_zero_allows_no_restart(restarts: int, fails: bool) -> None:
    """A job that never restarted does not fail."""
    view = job("OnFailure", run_policy=RunPolicy(backoff_limit=0), Worker=1)
    decision = decide(view, [pod("Worker", 0, restarts=restarts)], [], START)
    assert decision.status.has("Failed") is fails


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
    """With a deadline of 2 s the decision requests a wake-up after 2 s, and then fails the job."""
    cluster = Cluster(job(run_policy=RunPolicy(active_deadline_seconds=2), Worker=1))
    assert cluster.sync().next_wake == 2
    cluster.run("Running")
    cluster.sleep(2)
    decision = cluster.sync()
    failed = decision.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "DeadlineExceeded"
    assert decision.status.completion_time == at(2)
    assert cluster.pods == {}


def test_a_job_past_its_deadline_that_has_succeeded_has_succeeded() -> None:
    """A controller that was away does not fail a successful job."""
    view = job(run_policy=RunPolicy(active_deadline_seconds=2), Worker=1)
    view = replace(view, status=decide(view, [], [], START).status)
    assert decide(view, [pod("Worker", 0, "Succeeded", code=0)], [], at(60)).status.has("Succeeded")


@pytest.mark.parametrize(
    "run_policy",
    [RunPolicy(active_deadline_seconds=0), RunPolicy(backoff_limit=1)],
    ids=["deadline", "back-off limit"],
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


def test_a_changed_limit_changes_the_wake_up() -> None:
    """The wake-up follows the current spec."""
    view = job(run_policy=RunPolicy(active_deadline_seconds=100), Worker=1)
    view = replace(view, status=decide(view, [], [], START).status)
    view = replace(view, run_policy=RunPolicy(active_deadline_seconds=50))
    assert decide(view, [pod("Worker", 0)], [], at(20)).next_wake == 30
