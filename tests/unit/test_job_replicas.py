"""One pod and one service for each replica that the spec wants, and no other."""

from __future__ import annotations

from controllers.job_decision import decide
from controllers.job_status import JobStatus
from controllers.job_types import (
    CreatePod,
    CreateService,
    Decision,
    DeletePod,
    DeleteService,
)
from tests.support.jobs import (
    START,
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
    """Scenario 44: 4 workers and 2 parameter servers make 6 pods and 6 services, and the job is Created."""
    decision = decide(job(PS=2, Worker=4), [], [], START)
    assert tally(decision) == {"CreatePod": 6, "CreateService": 6}
    assert actions(decision, CreatePod) == [CreatePod("PS", i) for i in range(2)] + [
        CreatePod("Worker", i) for i in range(4)
    ]
    assert conditions(decision.status) == {"Created": "True"}
    assert decision.status.start_time == START
    assert [event.reason for event in decision.events] == ["JobCreated"]


def test_only_what_is_missing_is_created() -> None:
    """Scenario 45: with 2 workers and 1 parameter server pending, the other 3 pods are created."""
    present = [*pods("Worker", [0, 1], "Pending"), pod("PS", 0, "Pending")]
    decision = decide(job(Worker=4, PS=2), present, [], START)
    assert actions(decision, CreatePod) == [CreatePod("Worker", 2), CreatePod("Worker", 3), CreatePod("PS", 1)]


def test_scaling_down_deletes_the_surplus_and_creates_nothing() -> None:
    """Scenario 46: indexes 0, 1, 2 with 1 replica delete 1 and 2; services alike."""
    present, serving = pods("Worker", range(3)), services("Worker", range(3))
    decision = decide(job(Worker=1), present, serving, START)
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-1", "train-worker-2"]
    assert [a.name for a in actions(decision, DeleteService)] == ["train-worker-1", "train-worker-2"]
    assert tally(decision) == {"DeletePod": 2, "DeleteService": 2}


def test_a_hole_below_a_surplus_index_is_not_filled() -> None:
    """Section 12: with 1 replica and pods 0 and 4, nothing is created for 1 to 3."""
    decision = decide(job(Worker=1), pods("Worker", [0, 4]), services("Worker", [0]), START)
    assert tally(decision) == {"DeletePod": 1}


def test_odd_indexes_do_no_harm() -> None:
    """Scenario 47: "abc" and "-1" are left alone; 10⁹ is a surplus, and costs nothing."""
    present = [pod("Worker", 0), *(pod("Worker", index) for index in ("abc", "-1", 10**9))]
    decision = decide(job(Worker=1), present, services("Worker", [0]), START)
    assert [a.name for a in actions(decision, DeletePod)] == ["train-worker-1000000000"]
    assert tally(decision) == {"DeletePod": 1}


def test_pods_of_a_type_that_the_spec_does_not_have_stay_while_the_job_runs() -> None:
    """They are not judged; the clean-up at the end takes them."""
    present = [pod("Worker", 0), pod("Evaluator", 0)]
    view = job(Worker=1)
    assert tally(decide(view, present, services("Worker", [0]), START)) == {}
    assert tally(decide(finished(view), present, [], START)) == {"DeletePod": 2}


def test_the_best_of_several_pods_is_kept() -> None:
    """Section 12: duplicates of an index are deleted; the one that runs stays, whatever its age."""
    running, pending = pod("Worker", 0, "Running", uid="good"), pod("Worker", 0, "Pending", uid="spare")
    pending["metadata"]["name"] = "train-worker-0-again"
    decision = decide(job(Worker=1), [pending, running], services("Worker", [0]), START)
    assert actions(decision, DeletePod) == [DeletePod("train-worker-0-again", "spare", "duplicate")]


def test_a_failed_duplicate_is_no_failure_of_the_job() -> None:
    """Only the pod that is kept speaks for its replica."""
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
    """Its successor has the same name, so it has to be gone first."""
    decision = decide(job(Worker=1), [pod("Worker", 0, deleting=at(30))], services("Worker", [0]), START)
    assert tally(decision) == {}
    assert decision.next_wake is None


def test_services_only_for_the_types_that_have_them() -> None:
    """`service_types` names them."""
    decision = decide(job(Worker=1, PS=1, service_types={"PS"}), [], [], START)
    assert actions(decision, CreateService) == [CreateService("PS", 0)]


def test_a_lost_service_comes_back_while_its_pod_runs() -> None:
    """Services depend on the spec alone."""
    decision = decide(job(Worker=2), pods("Worker", range(2)), services("Worker", [0]), START)
    assert decision.actions == (CreateService("Worker", 1),)


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    """Neither actions nor a new status."""
    decision = decide(job(Worker=1, deleting=True), [], [], START)
    assert decision == Decision(JobStatus())
