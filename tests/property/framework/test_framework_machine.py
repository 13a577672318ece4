"""A Framework under random events, outcomes, crashes and edits: the invariants.

The names of the checks are the guarantees. The world underneath is `tests.support.framework.world`.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controllers.framework.api.types import NEVER_RETRIED, FrameworkStatus, State, TaskStatus
from controllers.framework.step.context import Action, Create, CreateFailed, Delete, Gone, Target
from store.kube.api.objects import uid_of
from tests.support.framework.world import Crash, World, manifest, role

EXIT_CODES = st.sampled_from([0, 0, 1, 7, 137, 200, 201, 210])
LIMITS = st.sampled_from([-1, 0, 1, 2])
POLICIES = st.tuples(st.sampled_from([-1, 0, 1, 2]), st.sampled_from([-1, 0, 1, 2]))
TIMEOUTS = st.sampled_from([None, 0, 5])
ROLES = st.builds(
    lambda name, number, fancy, limit, policy, timeout: role(
        name, number, retry=(fancy, limit), policy=policy, timeout=timeout
    ),
    st.just("a"),
    st.integers(0, 3),
    st.booleans(),
    LIMITS,
    POLICIES,
    TIMEOUTS,
)
LEGAL = {
    State.CREATION_PENDING: {State.CREATION_REQUESTED, State.ATTEMPT_COMPLETED},
    State.CREATION_REQUESTED: {State.PREPARING, State.DELETING, State.ATTEMPT_COMPLETED},
    State.PREPARING: {State.RUNNING, State.DELETION_PENDING, State.DELETING, State.ATTEMPT_COMPLETED},
    State.RUNNING: {State.DELETION_PENDING, State.DELETING, State.ATTEMPT_COMPLETED},
    State.DELETION_PENDING: {State.DELETION_REQUESTED, State.DELETING, State.ATTEMPT_COMPLETED},
    State.DELETION_REQUESTED: {State.DELETING, State.ATTEMPT_COMPLETED},
    State.DELETING: {State.ATTEMPT_COMPLETED},
    State.ATTEMPT_COMPLETED: {State.CREATION_PENDING, State.COMPLETED},
    State.COMPLETED: set(),
}


def reachable(state: State) -> set[State]:
    """Return the states that one write may lead to, over one or several transitions."""
    found, frontier = {state}, {state}
    while frontier := set().union(*(LEGAL[one] for one in frontier)) - found:
        found |= frontier
    return found


REACHABLE = {state: reachable(state) for state in State}


class FrameworkMachine(RuleBasedStateMachine):
    """Edits come from users, events from kubelets and nodes, crashes and failures at random."""

    @initialize(
        roles=st.lists(ROLES, min_size=1, max_size=2),
        fancy=st.booleans(),
        limit=LIMITS,
        kind=st.sampled_from(["Start", "Start", "Start", "Create"]),
        seed=st.integers(0, 100),
        runs=st.booleans(),
    )
    def begin(self, roles: list[Any], fancy: bool, limit: int, kind: str, seed: int, runs: bool) -> None:
        named = [{**spec, "name": "ab"[number]} for number, spec in enumerate(roles)]
        self.world = World(manifest(*named, kind=kind, retry=(fancy, limit)), rng=random.Random(seed))
        self.checked = 0
        self.acted = 0
        if runs:
            self.world.sync()
            self.world.run_all()
            self.world.sync()

    def sync(self) -> None:
        try:
            self.world.sync()
        except Crash:
            self.world.crash()
        finally:
            self.world.crash_before = lambda action: False
            self.world.refuse = lambda target: None

    # the operator

    @rule()
    def syncs(self) -> None:
        self.sync()

    @rule(survives=st.integers(0, 8))
    def crashes(self, survives: int) -> None:
        """Crash after this number of writes and actions."""
        left = survives

        def dies(action: Action | None) -> bool:
            nonlocal left
            left -= 1
            return left < 0

        self.world.crash_before = dies
        self.sync()
        self.world.crash()

    @rule(status=st.sampled_from([0, 403, 422, 500]), quota=st.booleans())
    def creations_are_refused(self, status: int, quota: bool) -> None:
        message = "exceeded quota" if quota else "no"
        self.world.refuse = lambda target: CreateFailed(target, status, message)
        self.sync()

    @rule()
    def creations_are_not_answered(self) -> None:
        """The objects are created, but the answers are lost."""
        world = self.world

        def lost(target: Target) -> CreateFailed | None:
            world.refuse = lambda target: None
            try:
                framework = world.framework()
                world._create(framework, target)
            finally:
                world.refuse = lost
            return CreateFailed(target, 0, "connection lost")

        if world.expected is not None:
            world.refuse = lost
        self.sync()

    @rule()
    def the_server_is_away(self) -> None:
        self.world.is_away = True
        self.sync()
        self.world.is_away = False

    @rule(seconds=st.sampled_from([1, 5, 60, 900]))
    def time_passes(self, seconds: int) -> None:
        self.world.later(seconds)
        self.sync()

    # the cluster

    @rule(which=st.integers(0, 5), code=EXIT_CODES, ip=st.booleans())
    def a_pod_moves(self, which: int, code: int, ip: bool) -> None:
        names = self.world.pods()
        if not names:
            return
        name = names[which % len(names)]
        phase = self.world.live[name].get("status", {}).get("phase")
        if phase == "Pending":
            self.world.run(name, "10.0.0.1" if ip else "")
        elif phase == "Running":
            self.world.finish(name, code)

    @rule(which=st.integers(0, 5), force=st.booleans(), reported=st.booleans())
    def a_pod_is_deleted(self, which: int, force: bool, reported: bool) -> None:
        names = self.world.pods()
        if not names:
            return
        name = names[which % len(names)]
        if not force:
            self.world.mark_deleting(name)
            return
        final = self.world.live.pop(name)
        if reported and self.world.expected is not None:
            self.world.pending.append(Gone(uid_of(final), final))

    @rule(which=st.integers(0, 5))
    def a_namesake_takes_its_place(self, which: int) -> None:
        names = self.world.pods()
        if names:
            name = names[which % len(names)]
            metadata = {"name": name, "uid": f"stranger-{next(self.world.uids)}"}
            self.world.live[name] = {"kind": "Pod", "metadata": metadata, "status": {"phase": "Succeeded"}}

    @rule(collects=st.booleans())
    def pods_end(self, collects: bool) -> None:
        if collects:
            self.world.collect()
        self.world.reap()

    @rule()
    def the_config_map_is_deleted(self) -> None:
        if "job-attempt" in self.world.live:
            self.world.mark_deleting("job-attempt")
            self.world.collect()

    @rule(which=st.integers(0, 5))
    def the_cache_lags(self, which: int) -> None:
        uids = sorted(uid_of(obj) for obj in self.world.live.values())
        if uids:
            self.world.unseen.add(uids[which % len(uids)])

    @rule()
    def the_cache_catches_up(self) -> None:
        self.world.unseen.clear()

    # the user

    @rule(roles=st.lists(ROLES, min_size=1, max_size=2))
    def rescales(self, roles: list[Any]) -> None:
        self.world.edit(taskRoles=[{**spec, "name": "ab"[number]} for number, spec in enumerate(roles)])

    @precondition(lambda self: self.world.raw["spec"]["executionType"] == "Create")
    @rule()
    def starts(self) -> None:
        self.world.edit(executionType="Start")

    @rule(sure=st.integers(0, 5))
    def stops(self, sure: int) -> None:
        if sure == 0:
            self.world.edit(executionType="Stop")

    # what holds

    @invariant()
    def every_persisted_status_follows_from_the_one_before(self) -> None:
        written = self.world.written
        for position in range(max(1, self.checked), len(written)):
            check_framework(written[position - 1], written[position])
        self.checked = len(written)

    @invariant()
    def retries_never_exceed_the_policy(self) -> None:
        for status in self.world.written[-1:]:
            limit = self.world.raw["spec"]["retryPolicy"]["maxRetryCount"]
            if limit >= 0:
                assert status.retry_policy_status.accountable_retried_count <= limit

    @invariant()
    def actions_rest_on_what_is_stored(self) -> None:
        for action, status in self.world.acts[self.acted :]:
            check_action(action, status)
        self.acted = len(self.world.acts)

    @invariant()
    def at_most_one_live_object_per_name_was_created_and_recorded(self) -> None:
        if self.world.stored is None:
            return
        uids = [
            task.attempt_status.pod_uid
            for found in self.world.status.roles
            for task in found.tasks
            if task.attempt_status.pod_uid is not None
        ]
        assert len(uids) == len(set(uids))

    def teardown(self) -> None:
        """The Framework always reaches its end, once users and nodes are quiet and every pod finishes."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.unseen.clear()
        for name in [name for name, obj in world.live.items() if uid_of(obj).startswith("stranger")]:
            del world.live[name]
        if world.raw["spec"]["executionType"] == "Create":
            world.edit(executionType="Start")
        world.edit(retryPolicy={"fancyRetryPolicy": False, "maxRetryCount": 0}, taskRoles=[role("a", 2), role("b", 1)])
        for _ in range(60):
            world.settle()
            if world.status.state is State.COMPLETED:
                break
            for name in world.pods():
                if world.live[name].get("status", {}).get("phase") in ("Pending", "Running"):
                    world.finish(name)
            world.later(1000)
        assert world.status.state is State.COMPLETED
        world.settle()
        assert not world.pods()
        self.every_persisted_status_follows_from_the_one_before()


def check_framework(before: FrameworkStatus, after: FrameworkStatus) -> None:
    old, new = before.attempt_status, after.attempt_status
    assert new.id >= old.id
    assert after.retry_policy_status.total_retried_count == new.id
    assert after.state in REACHABLE[before.state]
    assert (after.completion_time is None) == (after.state is not State.COMPLETED)
    if new.id > old.id:
        assert old.completion_status is None or old.completion_status.code not in NEVER_RETRIED
        return
    assert old.config_map_uid in (None, new.config_map_uid), "a UID changes only with the attempt"
    assert old.completion_status in (None, new.completion_status), "an outcome never changes"
    for role_before in before.roles:
        role_after = after.role(role_before.name)
        if role_after is None or role_after.instance_uid != role_before.instance_uid:
            continue
        for task in role_before.tasks:
            later = role_after.task(task.index)
            if later is not None and later.instance_uid == task.instance_uid:
                check_task(task, later)


def check_action(action: Action, status: FrameworkStatus) -> None:
    """Check that the fact that an action relies on is in the status that was stored before it."""
    if isinstance(action, Create):
        assert status.attempt_status.completion_status is None, "a closing attempt creates nothing"
        if action.target is None:
            assert status.state is State.CREATION_PENDING
        else:
            found = status.role(action.target.role)
            task = found.task(action.target.index) if found else None
            assert task is not None
            assert task.state is State.CREATION_PENDING
            assert task.attempt_status.pod_uid is None
    elif isinstance(action, Delete) and not action.confirm:
        known = {task.attempt_status.pod_uid: task.attempt_status for found in status.roles for task in found.tasks}
        if action.uid == status.attempt_status.config_map_uid:
            assert status.attempt_status.completion_status is not None
        elif action.uid in known:
            assert known[action.uid].completion_status is not None


def check_task(before: TaskStatus, after: TaskStatus) -> None:
    old, new = before.attempt_status, after.attempt_status
    assert new.id >= old.id
    assert not (before.deletion_pending and not after.deletion_pending)
    assert after.state in REACHABLE[before.state]
    assert after.retry_policy_status.total_retried_count == new.id
    if new.id == old.id:
        assert old.pod_uid in (None, new.pod_uid), "a UID changes only with the attempt"
        assert old.completion_status in (None, new.completion_status), "an outcome never changes"
    assert (new.completion_status is not None) or after.state not in (State.ATTEMPT_COMPLETED, State.COMPLETED)
    assert (new.instance_uid is None) == (new.pod_uid is None)


TestFrameworkMachine = FrameworkMachine.TestCase
TestFrameworkMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
