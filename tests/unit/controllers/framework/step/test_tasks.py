"""Tasks: refused creations, all ways in which pods end, forced deletions."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from controllers.framework.api.types import CompletionStatus, State, TaskId
from controllers.framework.step.context import Action, Confirm, Create, CreateFailed, Delete, Gone, Target
from controllers.framework.step.step import CREATE_BATCH, PROBE, RECHECK
from store.kube.api.objects import is_deleting
from tests.support import require
from tests.support.framework.world import CONFIG, Crash, World, manifest, role, started

QUOTA = 'pods "job-worker-0" is forbidden: exceeded quota: team, requested: pods=1, used: pods=3, limited: pods=3'


def refusing(status: int, message: str, *, times: int = 1000) -> Any:
    """Make an API server that refuses this many pods."""
    left = times

    def refuse(target: Target) -> CreateFailed | None:
        nonlocal left
        if target is None or left <= 0:
            return None
        left -= 1
        return CreateFailed(target, status, message)

    return refuse


def outcome(world: World, name: str = "worker", index: int = 0) -> CompletionStatus:
    return require(world.task(name, index).attempt_status.completion_status)


def test_an_externally_deleted_pod_is_retried_as_a_task() -> None:
    """The outcome is -101, the next attempt follows at once, and the Framework is not retried."""
    world = started(role(retry=(True, 0)))
    world.mark_deleting("job-worker-0")
    world.sync()
    assert (world.task().state, outcome(world).code) == (State.DELETING, -101)
    world.settle()
    task = world.task()
    assert (task.state, task.attempt_status.id) == (State.PREPARING, 1)
    assert task.retry_policy_status.accountable_retried_count == 0
    assert world.status.attempt_status.id == 0
    assert [snapshot.trigger for snapshot in world.history] == ["OnTaskRetry"]


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (["is deleted", "fails"], -101),
        (["fails", "is deleted"], 137),
        (["is deleted", "fails at an unknown time"], -101),
    ],
)
def test_what_a_deleted_pod_ended_with(events: list[str], code: int) -> None:
    """A pod that had ended before its deletion keeps its outcome; later, and without an end time, the deletion may have
    caused the failure."""
    world = started(role())
    for event in events:
        world.later(2)
        match event:
            case "is deleted":
                world.mark_deleting("job-worker-0")
            case "fails":
                world.finish("job-worker-0", 137)
            case _:
                world.set_pod("job-worker-0", "Failed")
    world.sync()
    assert outcome(world).code == code


def test_the_last_state_of_a_deleted_pod_counts() -> None:
    """A pod that ended and vanished between two steps keeps its outcome, if the deletion event showed it."""
    world = started(role())
    world.finish("job-worker-0", 7)
    final = world.live.pop("job-worker-0")
    world.pending.append(Gone(final["metadata"]["uid"], final))
    world.sync()
    assert outcome(world).code == 7


def test_a_pod_missing_from_the_cache_is_confirmed_before_it_counts() -> None:
    """The cache may be older than the status: a quorum read comes before the attempt ends."""
    world = started(role())
    world.unseen.add(world.task().attempt_status.pod_uid or "")
    asked = world.sync()
    assert any(isinstance(action, Confirm) for action in world.actions)
    assert world.task().state is State.RUNNING
    assert asked.next_wake is not None
    del world.live["job-worker-0"]
    world.sync()
    assert outcome(world).code == -101


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        (422, 'Pod "x" is invalid: spec.containers[0].image: Required value', -200),
        (413, "Request entity too large: limit is 3145728", -200),
        (422, "Pod is invalid: read tcp: connection reset by peer", -310),
        (403, "pods is forbidden: user cannot create", -310),
        (400, "the request is malformed", -310),
    ],
)
def test_a_refused_pod_ends_the_attempt(status: int, message: str, code: int) -> None:
    """422 and 413 are permanent, 400 and 403 unknown; the message is in the diagnostics."""
    world = World(manifest(role(policy=(1, -1))))
    world.refuse = refusing(status, message)
    world.sync()
    assert outcome(world).code == code
    assert message in outcome(world).diagnostics


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, QUOTA),
        (403, 'pods "job-worker-0" is forbidden: not yet ready to handle request'),
        (403, 'pods is forbidden: User "x" cannot create pods: RBAC: clusterrole "jobs" not found'),
        (400, "the object provided is unrecognized (must be of type Pod)"),
        (500, "etcdserver: request timed out"),
        (429, "too many requests"),
        (0, "connection refused"),
        (404, 'namespaces "x" not found'),
    ],
)
def test_a_passing_refusal_keeps_the_task_pending(status: int, message: str) -> None:
    """Quota and server errors are retried after a back-off, and then succeed."""
    world = World(manifest(role()))
    world.refuse = refusing(status, message, times=1)
    asked = world.sync()
    asked = world.sync() if not asked.back_off else asked
    assert asked.back_off
    assert world.task().state is State.CREATION_PENDING
    world.settle()
    assert world.task().state is State.PREPARING
    assert world.task().attempt_status.id == 0


def test_nothing_is_created_before_the_back_off_ends() -> None:
    """One refusal stops the creations of that step; a later step without refusals creates again."""
    world = World(manifest(role(number=3)))
    world.refuse = lambda target: CreateFailed(target, 403, QUOTA) if target == TaskId("worker", 1) else None
    while not (asked := world.step_once()).back_off:
        pass
    assert not asked.actions
    assert [action for action in world.step_once().actions if isinstance(action, Create)] == [
        Create(TaskId("worker", 1))
    ]


def test_a_permanent_refusal_under_endless_retries_does_not_spin() -> None:
    """Each attempt waits for the back-off, even if the policy retries at once and forever."""
    world = World(manifest(role(retry=(False, -2))))
    world.refuse = refusing(422, "invalid")
    assert world.sync().back_off
    assert len([action for action in world.actions if action == Create(TaskId("worker", 0))]) == 1
    assert world.task().attempt_status.id == 1


def test_creations_come_in_batches() -> None:
    """The UIDs of a batch are persisted before the next one is created; while blocked, only a few are tried."""
    world = World(manifest(role(number=CREATE_BATCH + 50)))
    world.step_once()
    assert len(world.step_once().actions) == CREATE_BATCH
    assert len(world.step_once().actions) == 50

    world = World(manifest(role(number=CREATE_BATCH)))
    world.refuse = refusing(403, QUOTA)
    world.sync()
    assert len(world.step_once().actions) == PROBE


def test_objects_that_the_cache_lacks_are_read_once_per_sync() -> None:
    """A second object that vanishes from the cache, while the first one is read, makes nobody read the first again."""
    world = started(role(number=3))
    world.unseen.add("uid-2")

    def falls_further_behind(action: Action | None) -> bool:
        world.unseen.add("uid-3")
        return False

    world.crash_before = falls_further_behind
    world.acts.clear()
    asked = world.sync()
    assert [action.uid for action in world.actions if isinstance(action, Confirm)] == ["uid-2", "uid-3"]
    assert asked.next_wake == world.now + RECHECK
    world.sync()
    assert len(world.actions) == 4, "the next sync trusts no earlier read"


def test_an_orphan_is_deleted_once_per_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache shows one orphan after the other, and none of the deletions: each orphan is deleted once."""
    world = started(role(number=1))
    cached = dict(world.live)
    for index in (5, 6):
        pod = copy.deepcopy(world.live["job-worker-0"])
        pod["metadata"] |= {"name": f"job-worker-{index}", "uid": f"orphan-{index}"}
        world.live[f"job-worker-{index}"] = pod
    cached["job-worker-5"] = world.live["job-worker-5"]

    def catches_up(action: Action | None) -> bool:
        cached.setdefault("job-worker-6", world.live["job-worker-6"])
        return False

    world.crash_before = catches_up
    world.acts.clear()
    monkeypatch.setattr(world, "seen", lambda: cached)
    world.sync()
    assert [action.uid for action in world.actions if isinstance(action, Delete)] == ["orphan-5", "orphan-6"]


def test_a_pod_that_never_shows_up_is_deleted_and_failed() -> None:
    """A pod absent from the cache for 300 s is deleted, then fails with -111."""
    world = World(manifest(role()))
    world.step_once()
    world.step_once()
    world.unseen.add("uid-2")
    asked = world.sync()
    assert (require(asked.next_wake) - world.now).total_seconds() == CONFIG.cache_timeout == 300
    world.later(300)
    world.sync()
    assert world.task().state is State.CREATION_REQUESTED, "only accepted so far"
    world.reap()
    world.settle()
    assert outcome(world).code == -111


def test_a_stuck_pod_is_deleted_by_force_after_its_timeout() -> None:
    """2 s after its requested deletion it is deleted with grace 0."""
    world = started(role(number=2, timeout=2))
    world.edit(taskRoles=[role(number=1, timeout=2)])
    asked = world.sync()
    assert (require(asked.next_wake) - world.now).total_seconds() == 2
    world.later(1)
    world.sync()
    assert "job-worker-1" in world.live
    world.later(1)
    world.sync()
    assert "job-worker-1" not in world.live
    assert world.actions[-1] == Delete(
        TaskId("worker", 1), "job-worker-1", "uid-3", 0, True, "it did not end within its graceful deletion timeout"
    )


def test_without_a_timeout_a_stuck_pod_is_waited_for() -> None:
    """A null timeout waits forever, so that two pods of a name never run."""
    world = started(role(number=2))
    world.edit(taskRoles=[role(number=1)])
    world.sync()
    world.later(1_000_000)
    asked = world.sync()
    assert asked.next_wake is None
    assert "job-worker-1" in world.live


def test_a_deletion_that_the_cache_does_not_show_is_confirmed() -> None:
    """The deletion of a pod missing from the cache is repeated until it is certainly gone."""
    world = started(role(number=2))
    world.edit(taskRoles=[role(number=1)])
    world.crash_before = lambda action: isinstance(action, Delete)
    with pytest.raises(Crash):
        world.sync()
    world.crash()
    world.crash_before = lambda action: False
    world.unseen.add("uid-3")
    asked = world.sync()
    assert asked.back_off
    assert world.task(index=1).state is State.DELETION_PENDING
    world.reap()
    world.sync()
    assert len(world.status.roles[0].tasks) == 1


def test_a_changed_timeout_counts_for_pods_that_end_already() -> None:
    """The spec's timeout is copied into the status of its role."""
    world = started(role(number=2))
    world.edit(taskRoles=[role(number=1)])
    world.sync()
    world.edit(taskRoles=[role(number=1, timeout=1)])
    world.sync()
    world.later(2)
    world.sync()
    assert "job-worker-1" not in world.live


def test_a_pod_in_phase_unknown_freezes_its_task() -> None:
    """The phase Unknown changes nothing."""
    world = started(role())
    world.set_pod("job-worker-0", "Unknown")
    assert world.sync().status is world.expected
    assert world.task().state is State.RUNNING
    world.edit(taskRoles=[role(number=0)])
    world.sync()
    assert not is_deleting(world.live["job-worker-0"])
    world.set_pod("job-worker-0", "Running")
    world.settle()
    assert not world.pods()


def test_a_namesake_is_not_our_pod() -> None:
    """Another pod of that name does not count; ours is gone."""
    world = started(role(number=1))
    other = {"kind": "Pod", "metadata": {"name": "job-worker-0", "uid": "other"}, "status": {"phase": "Succeeded"}}
    world.live["job-worker-0"] = other
    world.sync()
    assert outcome(world).code == -101


def test_an_unanswered_deletion_is_repeated_after_the_back_off() -> None:
    """Not at once, and not never."""
    world = started(role(number=2))
    world.edit(taskRoles=[role(number=1)])
    world.is_away = True
    asked = world.sync()
    assert asked.back_off
    assert len([action for action in world.actions if isinstance(action, Delete)]) == 1
    world.is_away = False
    world.settle()
    assert world.pods() == ["job-worker-0"]


def test_an_unanswered_confirmation_decides_nothing() -> None:
    """A pod that the cache lost while the server is away is neither given up nor requested endlessly."""
    world = started(role())
    del world.live["job-worker-0"]
    world.is_away = True
    assert world.sync().back_off
    assert world.task().state is State.RUNNING
    world.is_away = False
    world.sync()
    assert outcome(world).code == -101


def test_a_strangers_pod_is_left_alone() -> None:
    """A pod of that name that is not ours stays; the creation is retried."""
    world = World(manifest(role()))
    stranger = {"kind": "Pod", "metadata": {"name": "job-worker-0", "uid": "other"}, "status": {"phase": "Running"}}
    world.live["job-worker-0"] = stranger
    world.unseen.add("other")  # it has not our label
    asked = world.sync()
    assert asked.back_off
    assert world.live["job-worker-0"] is stranger
    assert not [action for action in world.actions if isinstance(action, Delete)]
    assert any(note.reason == "NameTaken" and "job-worker-0" in note.message for note in world.notes)
    del world.live["job-worker-0"]
    world.settle()
    assert world.task().state is State.PREPARING
    assert not world.status.conditions, "the blockage has ended"


def test_a_pod_of_an_earlier_attempt_is_waited_for() -> None:
    """It is the same Framework's and will be collected: it is not deleted, and no Event reports it."""
    world = World(manifest(role()))
    metadata = {
        "name": "job-worker-0",
        "uid": "old",
        "annotations": {"FC_FRAMEWORK_UID": "fw-uid"},
        "ownerReferences": [{"controller": True, "uid": "earlier"}],
    }
    world.live["job-worker-0"] = {"kind": "Pod", "metadata": metadata, "status": {"phase": "Running"}}
    asked = world.sync()
    assert world.task().state is State.CREATION_PENDING
    assert asked.next_wake is not None
    assert not world.status.conditions
    assert "job-worker-0" in world.live


def test_changes_that_can_be_read_again_are_deferrable() -> None:
    """Phases may be written a moment later; UIDs, outcomes and the last address of a gang may not."""
    world = World(manifest(role(number=2)))
    assert not world.step_once().deferrable  # the first status
    assert not world.step_once().deferrable  # the ConfigMap's UID
    assert not world.step_once().deferrable  # the pods' UIDs
    assert world.step_once().deferrable  # they are pending
    world.run("job-worker-0", "10.0.0.1")
    assert world.step_once().deferrable
    world.run("job-worker-1", "10.0.0.2")
    assert not world.step_once().deferrable, "now the barrier can pass"
    world.finish("job-worker-0")
    assert not world.step_once().deferrable
    assert world.step_once().deferrable  # its deletion was accepted
