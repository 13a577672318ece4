"""A failed replica gets another pod when its restart policy and its exit code allow it, and no sooner than it may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controllers.job_decision import decide
from controllers.job_types import (
    Backoff,
    CreatePod,
    DeletePod,
    RunPolicy,
)
from tests.support.jobs import (
    START,
    Cluster,
    actions,
    at,
    conditions,
    job,
    pod,
    services,
)


def test_a_retryable_code_restarts() -> None:
    """Scenario 48: ExitCode with 130 deletes the pod, and the job is Restarting."""
    failed = pod("Worker", 0, "Failed", code=130)
    decision = decide(job("ExitCode", Worker=2), [failed, pod("Worker", 1)], services("Worker", range(2)), START)
    assert [a.reason for a in actions(decision, DeletePod)] == ["restart"]
    assert conditions(decision.status) == {"Created": "True", "Restarting": "True"}
    assert decision.status.replica_statuses["Worker"].retries["0"].failures == 1
    assert "ExitedWithCode" in [event.reason for event in decision.events]


def test_a_permanent_code_fails_the_job() -> None:
    """Scenario 48: ExitCode with 1 is Failed; the message names the pod and the code."""
    present = [pod("Worker", 0, "Failed", code=1), pod("Worker", 1)]
    decision = decide(job("ExitCode", Worker=2), present, [], START)
    failed = decision.status.condition("Failed")
    assert failed is not None
    assert failed.status == "True"
    assert "train-worker-0 exited with code 1" in failed.message
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-1"]


def test_never_means_never() -> None:
    """Also for a code that is worth a retry."""
    decision = decide(job("Never", Worker=1), [pod("Worker", 0, "Failed", code=137)], [], START)
    assert decision.status.has("Failed")


@pytest.mark.parametrize("policy", ["Always", "OnFailure"])
def test_pods_that_fail_under_a_kubelet_that_restarts_are_replaced(policy: Any) -> None:
    """Whatever their code."""
    decision = decide(job(policy, Worker=1), [pod("Worker", 0, "Failed", code=1)], [], START)
    assert [a.reason for a in actions(decision, DeletePod)] == ["restart"]


@pytest.mark.parametrize("policy", ["Never", "ExitCode", "OnFailure", "Always"])
def test_an_evicted_pod_has_a_successor_under_every_policy(policy: Any) -> None:
    """Disruptions are nobody's fault: retried, recorded, and not held against the back-off limit."""
    view = job(policy, run_policy=RunPolicy(backoff_limit=0), Worker=1)
    decision = decide(view, [pod("Worker", 0, "Failed", code=137, reason="Evicted")], [], START)
    assert [a.reason for a in actions(decision, DeletePod)] == ["restart"]
    retry = decision.status.replica_statuses["Worker"].retries["0"]
    assert (retry.failures, retry.disruptions) == (0, 1)


def test_a_failure_counts_once() -> None:
    """By its UID: deciding again before the pod is gone changes nothing in the status, and says nothing again."""
    failed = pod("Worker", 0, "Failed", code=130)
    view = job("ExitCode", Worker=1)
    first = decide(view, [failed], services("Worker", [0]), START)
    again = decide(replace(view, status=first.status), [failed], services("Worker", [0]), at(5))
    assert again.status == first.status
    assert again.actions == first.actions
    assert again.events == ()


def test_a_pod_that_somebody_deleted_is_no_failure() -> None:
    """A drain kills with SIGTERM; the replica is created again as soon as the pod is gone, without a delay."""
    cluster = Cluster(job("Never", Worker=1))
    cluster.settle()
    cluster.pods["train-worker-0"] = pod("Worker", 0, "Failed", code=143, deleting=at(30))
    assert not cluster.sync().actions
    cluster.pods.clear()
    assert cluster.sync().actions == (CreatePod("Worker", 0),)


def test_the_successor_waits_twice_as_long_each_time() -> None:
    """10 s, 20 s, 40 s after each failure; the wake-up is exact."""
    cluster = Cluster(job("OnFailure", Worker=1))
    cluster.settle()
    for delay in (10, 20, 40):
        cluster.run("Failed", code=1)
        cluster.sync()
        assert cluster.pods == {}
        assert cluster.decide().next_wake == delay
        cluster.sleep(delay - 1)
        assert cluster.decide().next_wake == 1
        assert not cluster.sync().actions
        cluster.sleep(1)
        assert cluster.sync().actions == (CreatePod("Worker", 0),)


def test_the_delay_has_a_cap() -> None:
    """However often a replica failed."""
    backoff = Backoff(base=10, cap=360)
    assert [backoff.delay(n) for n in (0, 1, 2, 6, 7, 10**6)] == [0, 10, 20, 320, 360, 360]


def test_a_restarted_controller_remembers() -> None:
    """Section 12: retries are in the status, so a controller that knows nothing else goes on counting."""
    view = job("OnFailure", run_policy=RunPolicy(backoff_limit=1), Worker=1)
    for expected in ("Restarting", "Failed"):
        decision = decide(view, [pod("Worker", 0, "Failed", code=1)], [], START)
        assert decision.status.has(expected)
        view = replace(view, status=decision.status)


def test_a_lost_node_holds_a_replica_up_unless_the_job_gives_it_up() -> None:
    """Opt-in: past its deletion time by `force_delete_after`, the pod is removed by force, once, at that moment."""
    stuck = pod("Worker", 0, deleting=at(30))
    assert decide(job(Worker=1), [stuck], services("Worker", [0]), at(10_000)).actions == ()
    view = job(Worker=1, force_delete_after=60.0)
    view = replace(view, status=decide(view, [stuck], [], START).status)
    waiting = decide(view, [stuck], services("Worker", [0]), at(20))
    assert (waiting.actions, waiting.next_wake) == ((), 70)
    forced = decide(view, [stuck], services("Worker", [0]), at(90)).actions
    assert forced == (DeletePod("train-worker-0", stuck["metadata"]["uid"], "node lost", force=True),)
    stuck["metadata"]["deletionGracePeriodSeconds"] = 0
    assert decide(view, [stuck], services("Worker", [0]), at(91)).actions == ()
