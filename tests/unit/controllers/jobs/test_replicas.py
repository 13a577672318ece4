"""One pod and one service for each replica of the spec, and no other. A failed replica gets another pod if its restart
policy and its exit code allow it, after the back-off.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controllers.jobs.api import (
    Backoff,
    CreatePod,
    CreateService,
    Decision,
    DeletePod,
    DeleteService,
    RunPolicy,
)
from controllers.jobs.decision import (
    decide,
    describe_failure,
)
from controllers.jobs.replicas import best_of, counted, exit_code, final_counts, judge, restarts_of, slots_of
from controllers.jobs.status import (
    JobStatus,
    ReplicaStatus,
    Retry,
)
from store.kube.api.objects import Object, uid_of
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


def test_a_new_job_gets_everything() -> None:
    """4 workers and 2 parameter servers make 6 pods and 6 services, and the job is Created. What exists is not created
    again.
    """
    decision = decide(job(PS=2, Worker=4), [], [], START)
    assert tally(decision) == {"CreatePod": 6, "CreateService": 6}
    everything = [CreatePod("PS", i) for i in range(2)] + [CreatePod("Worker", i) for i in range(4)]
    assert actions(decision, CreatePod) == everything
    assert conditions(decision.status) == {"Created": "True"}
    assert decision.status.start_time == START
    assert [event.reason for event in decision.events] == ["JobCreated"]
    present = [*pods("Worker", [0, 1], "Pending"), pod("PS", 0, "Pending")]
    decision = decide(job(PS=2, Worker=4), present, [], START)
    assert actions(decision, CreatePod) == [CreatePod("PS", 1), CreatePod("Worker", 2), CreatePod("Worker", 3)]


def test_scaling_down_deletes_the_surplus_and_creates_nothing() -> None:
    """With indexes 0, 1, 2 and 1 replica, 1 and 2 are deleted; services likewise."""
    present, serving = pods("Worker", range(3)), services("Worker", range(3))
    decision = decide(job(Worker=1), present, serving, START)
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-1", "train-worker-2"]
    assert [a.name for a in actions(decision, DeleteService)] == ["train-worker-1", "train-worker-2"]
    assert tally(decision) == {"DeletePod": 2, "DeleteService": 2}


def test_odd_indexes_do_no_harm() -> None:
    """ "abc" and "-1" are left alone; 10⁹ is a surplus, and costs nothing; the hole below it is not filled."""
    present = [pod("Worker", 0), *(pod("Worker", index) for index in ("abc", "-1", 10**9))]
    decision = decide(job(Worker=1), present, services("Worker", [0]), START)
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-1000000000"]
    assert tally(decision) == {"DeletePod": 1}


def test_pods_of_a_type_that_the_spec_does_not_have_stay_while_the_job_runs() -> None:
    """They are left alone; the clean-up at the end deletes them."""
    present = [pod("Worker", 0), pod("Evaluator", 0)]
    view = job(Worker=1)
    assert tally(decide(view, present, services("Worker", [0]), START)) == {}
    assert tally(decide(finished(view), present, [], START)) == {"DeletePod": 2}


def test_the_best_of_several_pods_is_kept() -> None:
    """Duplicates of an index are deleted; the running one stays, whatever its age."""
    running, pending = pod("Worker", 0, "Running", uid="good"), pod("Worker", 0, "Pending", uid="spare")
    pending["metadata"]["name"] = "train-worker-0-again"
    decision = decide(job(Worker=1), [pending, running], services("Worker", [0]), START)
    assert actions(decision, DeletePod) == [DeletePod("train-worker-0-again", "spare", "duplicate")]


def test_a_failed_duplicate_is_no_failure_of_the_job() -> None:
    """Only the kept pod counts for its replica."""
    failed = pod("Worker", 0, "Failed", code=1)
    failed["metadata"]["name"] = "train-worker-0-again"
    decision = decide(job(Worker=1), [failed, pod("Worker", 0)], services("Worker", [0]), START)
    assert [a.reason for a in actions(decision, DeletePod)] == ["duplicate"]
    assert decision.status.has("Running")


def test_duplicate_services_go_too() -> None:
    """The older one is kept."""
    new, old = service("Worker", 0, uid="new"), service("Worker", 0, uid="old")
    new["metadata"]["creationTimestamp"] = "2024-05-01T12:00:01Z"
    old["metadata"]["creationTimestamp"] = "2024-05-01T12:00:00Z"
    decision = decide(job(Worker=1), [pod("Worker", 0)], [new, old], START)
    assert [a.uid for a in actions(decision, DeleteService)] == ["new"]


def test_a_pod_on_its_way_out_keeps_its_place() -> None:
    """Its successor has the same name, so it must be gone first."""
    decision = decide(job(Worker=1), [pod("Worker", 0, deleting=at(30))], services("Worker", [0]), START)
    assert tally(decision) == {}
    assert decision.next_wake is None


def test_services_depend_on_the_spec_alone() -> None:
    """`service_types` names the types that have them; a lost one comes back while its pod runs."""
    decision = decide(job(Worker=1, PS=1, service_types={"PS"}), [], [], START)
    assert actions(decision, CreateService) == [CreateService("PS", 0)]
    decision = decide(job(Worker=2), pods("Worker", range(2)), services("Worker", [0]), START)
    assert decision.actions == (CreateService("Worker", 1),)


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    """Neither actions nor a new status."""
    decision = decide(job(Worker=1, deleting=True), [], [], START)
    assert decision == Decision(JobStatus())


def test_a_retryable_code_restarts() -> None:
    """ExitCode with 130 deletes the pod, and the job is Restarting."""
    failed = pod("Worker", 0, "Failed", code=130)
    decision = decide(job("ExitCode", Worker=2), [failed, pod("Worker", 1)], services("Worker", range(2)), START)
    assert [a.reason for a in actions(decision, DeletePod)] == ["restart"]
    assert conditions(decision.status) == {"Created": "True", "Restarting": "True"}
    assert decision.status.replica_statuses["Worker"].retries["0"].failures == 1
    assert "ExitedWithCode" in [event.reason for event in decision.events]


def test_a_permanent_code_fails_the_job() -> None:
    """ExitCode with 1 is Failed; the message names the pod and the code."""
    present = [pod("Worker", 0, "Failed", code=1), pod("Worker", 1)]
    decision = decide(job("ExitCode", Worker=2), present, [], START)
    failed = decision.status.condition("Failed")
    assert failed is not None
    assert failed.status == "True"
    assert "train-worker-0 exited with code 1" in failed.message
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-1"]


@pytest.mark.parametrize(
    ("policy", "code", "kind"),
    [
        ("Never", 137, "permanent"),
        ("Always", 1, "retryable"),
        ("OnFailure", 1, "retryable"),
        ("ExitCode", None, "retryable"),
    ]
    + [("ExitCode", code, "permanent") for code in (1, 2, 126, 127, 128, 139, 3, 100)]
    + [("ExitCode", code, "retryable") for code in (130, 137, 138, 143, 129, 134, 255)],
)
def test_the_policy_and_the_exit_code_decide(policy: Any, code: int | None, kind: str) -> None:
    """Never means never; a kubelet that restarts in place does not look at the code. With ExitCode tf-operator's list
    counts, else kubeflow's rule about signals; a pod that never reported a code is retried.
    """
    found = pod("Worker", 0, "Failed", code=code)
    assert judge(found, policy) == kind
    decision = decide(job(policy, Worker=1), [found], [], START)
    assert decision.status.has("Failed") is (kind == "permanent")
    assert [a.reason for a in actions(decision, DeletePod)] == ([] if kind == "permanent" else ["restart"])


@pytest.mark.parametrize("policy", ["Never", "ExitCode", "OnFailure", "Always"])
def test_an_evicted_pod_has_a_successor_under_every_policy(policy: Any) -> None:
    """Disruptions are retried and recorded, but do not count against the back-off limit."""
    view = job(policy, run_policy=RunPolicy(backoff_limit=0), Worker=1)
    decision = decide(view, [pod("Worker", 0, "Failed", code=137, reason="Evicted")], [], START)
    assert [a.reason for a in actions(decision, DeletePod)] == ["restart"]
    retry = decision.status.replica_statuses["Worker"].retries["0"]
    assert (retry.failures, retry.disruptions) == (0, 1)


def test_a_failure_counts_once() -> None:
    """It counts by its UID: another decision before the pod is gone changes neither status nor Events."""
    failed = pod("Worker", 0, "Failed", code=130)
    view = job("ExitCode", Worker=1)
    first = decide(view, [failed], services("Worker", [0]), START)
    again = decide(replace(view, status=first.status), [failed], services("Worker", [0]), at(5))
    assert again.status == first.status
    assert again.actions == first.actions
    assert again.events == ()


def test_a_deleted_pod_is_no_failure() -> None:
    """A drain kills with SIGTERM; the replica is created again as soon as the pod is gone, without a delay."""
    cluster = Cluster(job("Never", Worker=1))
    cluster.settle()
    cluster.pods["train-worker-0"] = pod("Worker", 0, "Failed", code=143, deleting=at(30))
    assert not cluster.sync().actions
    cluster.pods.clear()
    assert cluster.sync().actions == (CreatePod("Worker", 0),)


def test_the_successor_waits_twice_as_long_each_time() -> None:
    """The delays are 10 s, 20 s, 40 s after each failure; the wake-up is exact."""
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
    """It holds after any number of failures."""
    backoff = Backoff(base=10, cap=360)
    assert [backoff.delay(n) for n in (0, 1, 2, 6, 7, 10**6)] == [0, 10, 20, 320, 360, 360]


def test_a_restarted_controller_remembers() -> None:
    """Retries are in the status, so a controller without other state continues counting."""
    view = job("OnFailure", run_policy=RunPolicy(backoff_limit=1), Worker=1)
    for expected in ("Restarting", "Failed"):
        decision = decide(view, [pod("Worker", 0, "Failed", code=1)], [], START)
        assert decision.status.has(expected)
        view = replace(view, status=decision.status)


def test_a_lost_node_holds_a_replica_up_unless_the_job_gives_it_up() -> None:
    """This is opt-in: `force_delete_after` past its deletion time, the pod is deleted by force, once."""
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


def ended(name: str, code: int | None) -> Object:
    state = {"terminated": {"exitCode": code}} if code is not None else {"waiting": {"reason": "PodInitializing"}}
    return {"name": name, "state": state, "restartCount": 1}


def failed(*containers: Object, init: tuple[Object, ...] = ()) -> Object:
    """Return a failed pod whose spec has `main` first."""
    found = pod("Worker", 0, "Failed")
    found["spec"]["containers"] = [{"name": "main"}, {"name": "sidecar"}]
    found["status"] |= {"containerStatuses": list(containers), "initContainerStatuses": list(init)}
    return found


def test_which_container_speaks() -> None:
    """The default one, wherever it is listed. If it did not fail, the one that did: a failed init container kept it
    from starting, or a sidecar failed after it succeeded.
    """
    found = failed(ended("sidecar", 137), ended("main", 1))
    assert (exit_code(found), exit_code(found, "sidecar")) == (1, 137)
    assert exit_code(failed(ended("main", None), init=(ended("init", 2),))) == 2
    assert exit_code(failed(ended("main", 0), ended("sidecar", 137))) == 137
    assert exit_code(failed(ended("main", 0))) == 0
    assert exit_code(failed()) is None


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "NodeLost", "NodeShutdown", "OutOfcpu", "OutOfpods"])
def test_what_the_cluster_does_to_a_pod_is_a_disruption(reason: str) -> None:
    """The exit code of its program does not matter."""
    assert judge(pod("Worker", 0, "Failed", code=1, reason=reason), "Never") == "disrupted"


@pytest.mark.parametrize(("status", "kind"), [("True", "disrupted"), ("False", "permanent")])
def test_a_disruption_target_is_a_disruption(status: str, kind: str) -> None:
    """Newer clusters set this condition on pods whose status has no reason."""
    found = pod("Worker", 0, "Failed", code=137)
    found["status"]["conditions"] = [{"type": "DisruptionTarget", "status": status}]
    assert judge(found, "Never") == kind


def test_restarts_of_init_containers_count() -> None:
    """A replica whose initialization fails repeatedly uses up its retries, too."""
    assert restarts_of(failed(ended("main", None), init=(ended("init", 2),))) == 2


def test_which_of_two_pods_is_kept() -> None:
    """One that succeeded is preferred, even if it is being deleted, then one that runs, then a scheduled one, then the
    oldest.
    """
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
    """It names the pod, the code, and the kubelet's message."""
    found = pod("Worker", 3, "Failed", code=137, reason="Evicted")
    found["status"]["message"] = "The node was low on memory"
    assert (
        describe_failure(job(Worker=4), found)
        == "pod train-worker-3 exited with code 137 (Evicted: The node was low on memory)"
    )


def test_the_newest_counted_failure_is_kept() -> None:
    """The cache may not show its pod any more, or show it again; older ones are dropped once their pods are gone."""
    status = JobStatus(replica_statuses={"Worker": ReplicaStatus(retries={"0": Retry(failures=2, counted=["a", "b"])})})
    failed = pod("Worker", 0, "Failed", code=1, uid="c")
    (slot,) = slots_of(job(Worker=1, status=status), [failed])
    assert counted(slot, failed, "retryable", START).retry.counted == ["b", "c"]


@pytest.mark.parametrize(
    ("succeeded", "stopped", "expected"),
    [(True, True, (0, 2)), (True, False, (0, 2)), (False, True, (0, 0)), (False, False, (2, 0))],
)
def test_what_runs_at_the_end_is_counted_by_the_end(succeeded: bool, stopped: bool, expected: tuple[int, int]) -> None:
    """Running pods of a job that succeeds have succeeded; of one that fails they are active until they are stopped."""
    view = job(Worker=2)
    counts = final_counts(view, slots_of(view, pods("Worker", [0, 1])), succeeded=succeeded, stopped=stopped)["Worker"]
    assert (counts.active, counts.succeeded) == expected
