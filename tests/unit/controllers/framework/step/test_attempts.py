"""Completion policies: when tasks complete an attempt of their Framework, and its outcome."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controllers.framework.api.types import CompletionStatus, State
from tests.support import require
from tests.support.framework.world import CONFIG, World, manifest, role, started


def ended(world: World, *ends: tuple[str, int]) -> CompletionStatus | None:
    """Return the attempt's outcome after these pods ended in this order, a second apart."""
    for name, code in ends:
        world.later(1)
        if name in world.live:
            world.finish(name, code)
        world.settle()
    return world.status.attempt_status.completion_status


def test_the_failure_that_reaches_the_threshold_decides() -> None:
    """With minFailed 2, the second failure by time gives the outcome and is the trigger."""
    world = started(role(number=3, policy=(2, -1)))
    assert ended(world, ("job-worker-2", 5)) is None
    outcome = require(ended(world, ("job-worker-0", 6)))
    assert (outcome.code, outcome.phrase, outcome.type.name) == (6, "ContainerUnrecognizedFailed", "Failed")
    assert outcome.trigger
    assert (outcome.trigger.task_role_name, outcome.trigger.task_index) == ("worker", 0)
    assert world.status.state is State.COMPLETED
    assert not world.live


def test_completion_time_orders_tasks_not_their_index() -> None:
    """If one step sees several failures, the one that completed later reaches the threshold."""
    world = started(role(number=2, policy=(2, -1)))
    world.finish("job-worker-1", 5)
    world.sync()
    world.finish("job-worker-0", 6)
    world.sync()
    del world.live["job-worker-1"]
    world.sync()
    world.later(1)
    del world.live["job-worker-0"]
    world.sync()
    outcome = require(world.status.attempt_status.completion_status)
    assert outcome.code == 6


def test_enough_successes_stop_the_others() -> None:
    """With minSucceeded N, the Nth success completes the attempt, and running tasks are ended."""
    world = started(role("chief", 2, policy=(-1, 2)), role("worker", 1))
    ended(world, ("job-chief-0", 0))
    assert world.status.state is State.RUNNING
    outcome = require(ended(world, ("job-chief-1", 0)))
    assert outcome.code == 0
    assert outcome.trigger
    assert (outcome.trigger.task_role_name, outcome.trigger.task_index) == ("chief", 1)
    stopped = world.task("worker").attempt_status.completion_status
    assert stopped
    assert stopped.code == -220
    assert not world.live


def test_without_a_policy_all_failures_are_a_success() -> None:
    """As in frameworkcontroller; a Warning Event reports it."""
    world = started(role(number=2))
    outcome = require(ended(world, ("job-worker-0", 1), ("job-worker-1", 2)))
    assert (outcome.code, world.status.state) == (0, State.COMPLETED)
    assert any(note.type == "Warning" and note.reason == "CompletionPolicyOmitted" for note in world.notes)


def test_a_default_policy_can_be_set() -> None:
    """With `defaultCompletionPolicy` a role without a policy fails the attempt with its first failure."""
    world = World(manifest(role(number=2)), config=replace(CONFIG, default_completion_policy=True))
    world.settle()
    world.run_all()
    outcome = require(ended(world, ("job-worker-0", 3)))
    assert outcome.code == 3
    assert any(note.reason == "CompletionPolicyDefaulted" and "worker" in note.message for note in world.notes)


def test_zero_does_not_activate_a_threshold() -> None:
    """0 is the same as -1: never."""
    world = started(role(number=2, policy=(0, 0)))
    assert ended(world, ("job-worker-0", 1)) is None


def test_the_earliest_trigger_wins() -> None:
    """If two policies are satisfied, the task that completed first decides."""
    world = started(role("first", 1, policy=(1, -1)), role("second", 1, policy=(-1, 1)))
    world.finish("job-first-0", 9)
    world.finish("job-second-0", 0)
    world.sync()
    del world.live["job-second-0"]
    world.now = world.now.replace(second=1)
    world.unseen.add("nothing")
    status = require(world.step_once().status)
    outcome = require(status.attempt_status.completion_status)
    assert outcome.code == 0


def test_no_tasks_never_complete() -> None:
    """A Framework without tasks waits for some."""
    world = World(manifest(role(number=0)))
    world.settle()
    assert world.status.state is State.PREPARING
    assert world.status.attempt_status.completion_status is None


@pytest.mark.parametrize(("fancy", "limit", "attempts"), [(False, 0, 1), (False, 2, 3), (True, 0, 1)])
def test_task_retries_follow_their_policy(fancy: bool, limit: int, attempts: int) -> None:
    """A task that keeps failing with an unknown code has 1 + limit attempts."""
    world = started(role(number=1, policy=(1, -1), retry=(fancy, limit)))
    while world.status.state is not State.COMPLETED:
        world.finish("job-worker-0", 3)
        world.settle()
    assert len({uid for name, uid in world.created if name == "job-worker-0"}) == attempts
