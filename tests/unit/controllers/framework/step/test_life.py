"""A Framework's life cycle: from its creation through its attempts to its end. No time passes unless a test says so."""

from __future__ import annotations

import pytest

from controllers.framework.api.types import State
from controllers.framework.step.context import Delete, DeleteFramework, Gone
from store.kube.api.objects import is_deleting
from tests.support import require
from tests.support.framework.world import CONFIG, START, Crash, World, manifest, role, started


def test_a_framework_that_is_only_created_waits() -> None:
    """With executionType Create, no ConfigMap is created."""
    world = World(manifest(role(), kind="Create"))
    asked = world.settle()
    assert world.status.state is State.CREATION_PENDING
    assert not world.live
    assert asked.next_wake is None


def test_starting_creates_the_config_map_before_the_pods() -> None:
    """A change from Create to Start creates the ConfigMap, then the pods of all tasks."""
    world = World(manifest(role("ps", 1), role("worker", 2), kind="Create"))
    world.settle()
    world.edit(executionType="Start")
    world.settle()
    assert [name for name, _ in world.created] == ["job-attempt", "job-ps-0", "job-worker-0", "job-worker-1"]
    assert world.status.state is State.PREPARING


def test_the_first_running_task_makes_the_framework_run() -> None:
    """A Framework is running once one of its tasks has run; its run time is that moment."""
    world = World(manifest(role(number=2)))
    world.settle()
    world.later(5)
    world.run("job-worker-1")
    world.settle()
    assert world.status.state is State.RUNNING
    assert world.status.run_time == world.now
    assert world.task(index=0).state is State.PREPARING


def test_node_and_addresses_are_known_from_when_the_pod_is_seen() -> None:
    """They are null before the pod is seen, then empty until it has an address."""
    world = World(manifest(role()))
    world.step_once()
    assert world.task().attempt_status.pod_ip is None
    world.settle()
    assert world.task().attempt_status.pod_ip == ""
    world.run("job-worker-0", "10.1.0.4")
    world.settle()
    attempt = world.task().attempt_status
    assert (attempt.pod_ip, attempt.pod_host_ip, attempt.pod_node_name) == ("10.1.0.4", "192.0.2.1", "node1")


def test_a_finished_gang_completes_the_framework() -> None:
    """When all tasks have succeeded, all objects are gone and the outcome is code 0, triggered by the last task."""
    world = started(role(number=2))
    world.finish("job-worker-0")
    world.later(3)
    world.settle()
    world.finish("job-worker-1")
    world.settle()
    outcome = world.status.attempt_status.completion_status
    assert world.status.state is State.COMPLETED
    assert world.status.completion_time == world.now
    assert outcome is not None
    assert outcome.code == 0
    assert outcome.trigger
    assert (outcome.trigger.task_role_name, outcome.trigger.task_index) == ("worker", 1)
    assert not world.live


def test_stopping_ends_everything() -> None:
    """Stop completes with -210, its tasks with -220, and no pod is left."""
    world = started(role(number=2, retry=(True, -2)), retry=(True, -2))
    world.edit(executionType="Stop")
    world.settle()
    assert world.status.state is State.COMPLETED
    assert code(world) == -210
    assert {task_code(world, index) for index in (0, 1)} == {-220}
    assert not world.live


def test_stopping_stamps_tasks_at_once() -> None:
    """The status with the Framework's outcome also has the tasks', while their pods still run."""
    world = started(role(number=2))
    world.edit(executionType="Stop")
    world.step_once()
    assert world.status.state is State.DELETION_PENDING
    assert world.task().state is State.RUNNING
    assert task_code(world, 0) == -220


def test_stopping_before_anything_was_created() -> None:
    """A change from Create to Stop completes at once, without creating an object."""
    world = World(manifest(role(), kind="Create"))
    world.settle()
    world.edit(executionType="Stop")
    world.settle()
    assert world.status.state is State.COMPLETED
    assert code(world) == -210
    assert not world.created


def test_stopping_during_a_retry_delay_skips_it() -> None:
    """The next attempt opens and closes at once with -210; its id still counts."""
    world = started(role(policy=(1, -1)), retry=(True, 0))
    world.finish("job-worker-0", 201)
    world.settle()
    assert world.status.state is State.ATTEMPT_COMPLETED
    world.edit(executionType="Stop")
    world.settle()
    assert (world.status.state, code(world)) == (State.COMPLETED, -210)
    assert world.status.attempt_status.id == 1


def test_a_starved_gang_retries_after_a_random_delay() -> None:
    """Code 201 under a fancy policy retries within the range, and does not count."""
    delays = set()
    for seed in range(8):
        world = started(role("ps", 1), role(number=2, policy=(1, -1)), retry=(True, 0))
        world.rng.seed(seed)
        world.finish("job-worker-1", 201, init=True)
        asked = world.settle()
        status = world.status
        delay = require(status.retry_policy_status.retry_delay_sec)
        assert 60 <= delay <= 900
        assert not world.pods()
        assert asked.next_wake is not None
        assert (asked.next_wake - world.now).total_seconds() == delay
        world.later(delay - 1)
        world.settle()
        assert world.status.state is State.ATTEMPT_COMPLETED
        world.later(1)
        world.settle()
        assert world.status.attempt_status.id == 1
        assert world.status.retry_policy_status.accountable_retried_count == 0
        assert len(world.pods()) == 3
        delays.add(delay)
    assert len(delays) > 4


@pytest.mark.parametrize(
    ("exit_code", "retry", "retries"),
    [
        (210, (True, 5), 0),  # permanent
        (210, (False, 2), 2),
        (7, (True, 1), 1),  # unknown
        (0, (False, -1), 0),  # success is only retried when everything is
        (0, (False, -2), 3),
    ],
)
def test_how_often_a_framework_is_retried(exit_code: int, retry: tuple[bool, int], retries: int) -> None:
    """A fancy policy retries no permanent failure, whatever the count allows, and unknown ones as often as allowed."""
    world = started(role(policy=(1, -1)), retry=retry)
    for attempt in range(retries + 1):
        assert (world.status.state is not State.COMPLETED, world.status.attempt_status.id) == (True, attempt)
        world.finish("job-worker-0", exit_code)
        world.settle()
    repeats = retry[1] == -2
    assert (world.status.state is State.COMPLETED) == (not repeats)
    assert world.status.retry_policy_status.accountable_retried_count == retries + repeats
    assert repeats or code(world) == exit_code


def test_a_retried_framework_starts_over() -> None:
    """All tasks start over with new identities and the same pod names; the old attempt goes to the history."""
    world = started(role(number=2, policy=(1, -1)), retry=(False, 1))
    before = world.task()
    world.finish("job-worker-1", 1)
    world.settle()
    after = world.task()
    assert after.instance_uid != before.instance_uid
    assert after.attempt_status.pod_name == before.attempt_status.pod_name
    assert after.attempt_status.pod_uid != before.attempt_status.pod_uid
    snapshot = next(snapshot for snapshot in world.history if snapshot.trigger == "OnFrameworkRetry")
    assert snapshot.status.attempt_status.completion_status
    assert snapshot.status.attempt_status.completion_status.code == 1


def test_an_externally_deleted_config_map_ends_the_attempt() -> None:
    """The outcome is -100; the new attempt begins only after the old one's pods are gone."""
    world = started(role(number=2), retry=(True, 0))
    world.mark_deleting("job-attempt")
    world.collect()
    world.sync()
    assert (world.status.state, code(world)) == (State.DELETING, -100)
    assert all(is_deleting(obj) for obj in world.live.values())
    assert [name for name, _ in world.created].count("job-attempt") == 1
    world.settle()
    assert (world.status.state, world.status.attempt_status.id) == (State.PREPARING, 1)


def test_a_config_map_that_vanished_is_confirmed_before_it_counts() -> None:
    """If the cache does not show it, a quorum read comes first; only then the attempt ends with -100."""
    world = started(role())
    world.unseen.add("uid-1")
    world.sync()
    assert world.status.state is State.RUNNING
    del world.live["job-attempt"]
    world.settle()
    assert (world.status.state, code(world)) == (State.COMPLETED, -100)


def test_a_framework_that_is_being_deleted_is_left_to_the_collector() -> None:
    """Its status and its objects are left alone."""
    world = started(role())
    world.raw["metadata"]["deletionTimestamp"] = "2024-05-01T12:00:00Z"
    world.finish("job-worker-0", 1)
    asked = world.step_once()
    assert asked.status is world.expected
    assert not asked.actions


def test_a_completed_framework_is_deleted_after_its_retention() -> None:
    """After the retention the Framework is deleted by its UID; the deletion is not repeated at once."""
    world = started(role())
    world.finish("job-worker-0")
    asked = world.settle()
    assert asked.next_wake is not None
    assert (asked.next_wake - START).total_seconds() == CONFIG.retain_completed
    world.now = asked.next_wake
    asked = world.sync()
    assert world.is_deleted
    assert world.actions[-1] == DeleteFramework("fw-uid")
    assert asked.next_wake is not None


def test_a_crash_between_creation_and_its_record_leaves_an_orphan() -> None:
    """A pod that was created but never recorded is deleted, and created again."""
    world = World(manifest(role()))
    world.crash_before = lambda action: action is None and "job-worker-0" in world.live
    with pytest.raises(Crash):
        world.sync()
    orphan = world.live["job-worker-0"]["metadata"]["uid"]
    world.crash()
    world.crash_before = lambda action: False
    world.sync()
    world.sync()
    assert is_deleting(world.live["job-worker-0"])
    world.settle()
    assert [action.uid for action in world.actions if isinstance(action, Delete)] == [orphan]
    assert world.task().attempt_status.pod_uid == world.live["job-worker-0"]["metadata"]["uid"] != orphan
    assert world.task().attempt_status.id == 0


def test_an_orphaned_config_map_is_replaced() -> None:
    """An unrecorded ConfigMap of the attempt is deleted, and created again."""
    world = World(manifest(role()))
    world.crash_before = lambda action: action is None and bool(world.live)
    with pytest.raises(Crash):
        world.sync()
    world.crash()
    world.crash_before = lambda action: False
    world.settle()
    assert [name for name, _ in world.created].count("job-attempt") == 2
    assert world.status.attempt_status.config_map_uid == world.live["job-attempt"]["metadata"]["uid"]


def test_a_crash_after_the_outcome_was_stored_resumes_the_deletion() -> None:
    """The next operator deletes the pod; the outcome stays as it was stored."""
    world = started(role(policy=(1, -1)))
    world.finish("job-worker-0", 7)
    world.crash_before = lambda action: isinstance(action, Delete)
    with pytest.raises(Crash):
        world.sync()
    world.crash()
    world.crash_before = lambda action: False
    world.set_pod("job-worker-0", "Succeeded")  # whatever it says now
    world.settle()
    assert world.status.state is State.COMPLETED
    assert code(world) == 7


def test_a_config_map_that_never_shows_up_ends_the_attempt() -> None:
    """The outcome is -110 after the deadline, once its deletion is certain."""
    world = World(manifest(role()))
    world.step_once()
    world.unseen.add("uid-1")
    asked = world.sync()
    assert (require(asked.next_wake) - world.now).total_seconds() == CONFIG.cache_timeout
    world.later(CONFIG.cache_timeout)
    asked = world.sync()
    assert asked.back_off, "it is still there: its pods hold it"
    world.collect()
    world.reap()
    world.settle()
    assert (world.status.state, code(world)) == (State.COMPLETED, -110)
    assert "job-attempt" not in world.live


def test_a_status_says_what_an_older_cache_does_not() -> None:
    """A confirmed deletion counts although the cache still shows the object."""
    world = started(role(retry=(True, 0)))
    before = world.task()
    gone = world.live.pop("job-worker-0")
    world.unseen.clear()
    world.pending.append(Gone(gone["metadata"]["uid"]))
    world.settle()
    assert world.task().attempt_status.id == before.attempt_status.id + 1


def code(world: World) -> int:
    outcome = require(world.status.attempt_status.completion_status)
    return outcome.code


def task_code(world: World, index: int) -> int:
    outcome = require(world.task(index=index).attempt_status.completion_status)
    return outcome.code
