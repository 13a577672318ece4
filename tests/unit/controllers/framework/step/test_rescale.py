"""Scaling during an attempt."""

from __future__ import annotations

from controllers.framework.api.types import State
from store.kube.api.objects import is_deleting
from tests.support.framework.world import World, role, started


def names(world: World) -> list[str]:
    return [found.name for found in world.status.roles]


def test_scaling_up_adds_tasks_at_the_end() -> None:
    """Running tasks stay; new ones are created."""
    world = started(role(number=1))
    before = world.task()
    world.edit(taskRoles=[role(number=3)])
    world.settle()
    assert world.pods() == ["job-worker-0", "job-worker-1", "job-worker-2"]
    assert world.task() == before


def test_scaling_down_ends_the_last_tasks() -> None:
    """They are marked with -230 before their pods are deleted, and then leave the status."""
    world = started(role(number=3))
    world.edit(taskRoles=[role(number=1)])
    asked = world.step_once()
    assert [task.deletion_pending for task in world.status.roles[0].tasks] == [False, True, True]
    outcome = world.task(index=2).attempt_status.completion_status
    assert outcome
    assert outcome.code == -230
    assert len(asked.actions) == 2
    world.settle()
    assert len(world.status.roles[0].tasks) == 1
    assert world.pods() == ["job-worker-0"]
    assert [snapshot.trigger for snapshot in world.history] == ["OnTaskDeletion", "OnTaskDeletion"]


def test_scaling_back_up_while_tasks_end_makes_new_ones() -> None:
    """From 3 to 1, then to 2 while pods terminate: index 1 is a new instance, index 2 is gone."""
    world = started(role(number=3))
    before = world.task(index=1)
    world.edit(taskRoles=[role(number=1)])
    world.sync()
    world.edit(taskRoles=[role(number=2)])
    world.sync()
    assert world.task(index=1).deletion_pending, "a marked task is never revived"
    assert is_deleting(world.live["job-worker-1"])
    world.settle()
    after = world.task(index=1)
    assert after.instance_uid != before.instance_uid
    assert not after.deletion_pending
    assert len(world.status.roles[0].tasks) == 2
    assert world.pods() == ["job-worker-0", "job-worker-1"]


def test_a_failed_task_scaled_away_does_not_count() -> None:
    """Lowering the number and minFailed in one patch does not trigger the policy."""
    world = started(role(number=3, policy=(2, -1)))
    world.finish("job-worker-2", 1)
    world.settle()
    assert world.task(index=2).state is State.COMPLETED
    world.edit(taskRoles=[role(number=2, policy=(1, -1))])
    world.settle()
    assert world.status.state is State.RUNNING
    assert len(world.status.roles[0].tasks) == 2


def test_replacing_a_role_drains_the_old_one() -> None:
    """The removed role's pods end, the new role's start at once."""
    world = started(role("old", 2), role("worker", 1))
    world.edit(taskRoles=[role("worker", 1), role("new", 1)])
    world.sync()
    assert "job-new-0" in world.live
    assert is_deleting(world.live["job-old-0"])
    world.settle()
    assert names(world) == ["new", "worker"], "the last role takes the place of the removed one"
    assert world.pods() == ["job-new-0", "job-worker-0"]


def test_a_pending_task_scaled_away_leaves_at_once() -> None:
    """No pod was created for it, so there is nothing to wait for."""
    world = started(role(number=1))
    world.refuse = lambda target: None
    world.edit(taskRoles=[role(number=1), role("extra", 2)], executionType="Create")
    world.settle()
    assert len(world.status.roles) == 2
    assert world.pods() == ["job-worker-0"], "nothing new is created before it is started"
    world.edit(taskRoles=[role(number=1)])
    world.settle()
    assert names(world) == ["worker"]


def test_a_scaled_away_task_is_not_retried() -> None:
    """Its retry policy does not matter."""
    world = started(role(number=2, retry=(False, -2)))
    world.finish("job-worker-1", 1)
    world.edit(taskRoles=[role(number=1, retry=(False, -2))])
    world.settle()
    assert world.pods() == ["job-worker-0"]


def test_a_closing_attempt_is_not_rescaled() -> None:
    """Once the outcome is fixed, the roles stay as they are; the next attempt follows the spec."""
    world = started(role(number=1, policy=(1, -1)), retry=(False, 1))
    world.finish("job-worker-0", 1)
    while world.status.attempt_status.completion_status is None:
        world.sync()
        world.reap()
    world.edit(taskRoles=[role(number=2, policy=(1, -1))])
    world.step_once()
    assert len(world.status.roles[0].tasks) == 1
    world.settle()
    assert world.status.attempt_status.id == 1
    assert len(world.pods()) == 2


def test_a_task_of_a_higher_number_waits_for_its_successors() -> None:
    """Tasks leave from the end only, so that indices have no gaps."""
    world = started(role(number=3))
    world.edit(taskRoles=[role(number=1)])
    world.sync()
    del world.live["job-worker-1"]
    world.sync()
    assert len(world.status.roles[0].tasks) == 3
    del world.live["job-worker-2"]
    world.sync()
    assert len(world.status.roles[0].tasks) == 1


def test_pods_of_tasks_that_left_are_orphans() -> None:
    """A pod that was created but not recorded before its task was scaled away is deleted."""
    world = started(role(number=1))
    pod = world.live["job-worker-0"]
    extra = {**pod, "metadata": {**pod["metadata"], "name": "job-worker-5", "uid": "extra"}}
    extra["metadata"]["labels"] = {**pod["metadata"]["labels"], "FC_TASK_INDEX": "5"}
    world.live["job-worker-5"] = extra
    world.settle()
    assert world.pods() == ["job-worker-0"]
