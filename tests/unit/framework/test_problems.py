"""Frameworks that are wrong: they fail alone, say why, and can still be stopped or mended."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from controllers.framework.actions import CreateFailed, Target
from controllers.framework.constants import State
from controllers.framework.types import Condition, Problem
from controllers.framework.wire import BadFramework, decode_framework
from tests.support.framework_world import CONFIG, World, manifest, role, template


def conditions(world: World) -> dict[str, Condition]:
    return {condition.type: condition for condition in world.status.conditions or ()}


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        ("text", "pod"),
        ({"spec": 3}, "pod.spec"),
        ({"spec": {"containers": "main"}}, "pod.spec.containers"),
        ({"spec": {"containers": ["main"]}}, "pod.spec.containers[0]"),
        ({"spec": {"containers": [{"env": {"A": "b"}}]}}, "pod.spec.containers[0].env"),
        ({"spec": {"containers": [{}], "initContainers": [3]}}, "pod.spec.initContainers[0]"),
        ({"metadata": {"labels": ["a"]}, "spec": {"containers": [{}]}}, "pod.metadata.labels"),
        ({"metadata": {"ownerReferences": {}}, "spec": {"containers": [{}]}}, None),
        ({"metadata": 3, "spec": {"containers": [{}]}}, "pod.metadata"),
    ],
)
def test_a_malformed_template_is_a_condition_that_names_the_field(pod: Any, field: str | None) -> None:
    """Scenario 51 (framework): nothing is created, and the condition and a Warning Event say what to mend."""
    world = World(manifest({**role(), "task": {"pod": pod}}))
    world.settle()
    if field is None:
        assert world.pods()
        return
    valid = conditions(world)["Valid"]
    assert (valid.status, valid.reason) == ("False", "InvalidSpec")
    assert valid.message.startswith(f"spec.taskRoles[0].task.{field}: ")
    assert [(note.type, note.reason) for note in world.notes] == [("Warning", "InvalidFramework")]
    assert not world.live


@pytest.mark.parametrize(
    ("roles", "field"),
    [
        ([role("a"), role("a")], "spec.taskRoles[1].name"),
        ([role("with-dash")], "spec.taskRoles[0].name"),
        ([role(number=10001)], "spec.taskRoles[0].taskNumber"),
        ([role(number=-1)], "spec.taskRoles[0].taskNumber"),
        ([role(policy=(-2, 0))], "spec.taskRoles[0].frameworkAttemptCompletionPolicy.minFailedTaskCount"),
        ([role(retry=(False, -3))], "spec.taskRoles[0].task.retryPolicy.maxRetryCount"),
    ],
)
def test_what_a_schema_would_refuse_is_refused_here_as_well(roles: list[Any], field: str) -> None:
    """The custom resource may be an older one without a schema."""
    world = World(manifest(*roles))
    assert world.framework().problems[0].field == field


def test_a_name_with_dashes_is_refused() -> None:
    """Names of pods would not split unambiguously."""
    assert World(manifest(role(), name="a-b")).framework().problems[0].field == "metadata.name"


def test_a_mended_framework_goes_on() -> None:
    """The condition goes with the problem, and the tasks are created."""
    world = World(manifest({**role(), "task": {"pod": "?"}}))
    world.settle()
    world.edit(taskRoles=[role()])
    world.settle()
    assert world.pods() == ["job-worker-0"]
    assert not world.status.conditions


def test_a_framework_broken_while_it_runs_keeps_its_pods() -> None:
    """Nothing new is created, nothing is scaled, what runs is followed to its end, and Stop works."""
    world = World(manifest(role(number=2)))
    world.settle()
    world.run_all()
    world.edit(taskRoles=[{**role(number=1), "task": {"pod": "?"}}])
    world.settle()
    assert len(world.pods()) == 2
    world.finish("job-worker-0", 1)
    world.settle()
    assert world.task(index=0).state is State.COMPLETED
    world.edit(executionType="Stop")
    world.settle()
    assert world.status.state is State.COMPLETED
    assert not world.live


def test_a_problem_is_told_once() -> None:
    """Steps that find the same problem again neither write nor repeat the Event."""
    world = World(manifest({**role(), "task": {"pod": "?"}}))
    world.settle()
    world.later(60)
    assert world.sync().status is world.expected
    assert len(world.notes) == 1


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"taskRoles": [{"taskNumber": "3"}]}, "spec.taskRoles[0].taskNumber", "expected a whole number, got text"),
        ({"taskRoles": {}}, "spec.taskRoles", "expected a list, got a mapping"),
        ({"executionType": "Run"}, "spec.executionType", "Invalid enum value 'Run'"),
    ],
)
def test_a_spec_that_cant_be_read_names_the_field(change: Any, field: str, message: str) -> None:
    """The problem is told in words of people who write YAML, and nothing is created."""
    world = World(manifest(role()))
    world.edit(**change)
    assert world.framework().problems == (Problem(field, message),)
    world.settle()
    assert not world.live


def test_an_attempt_that_ends_under_a_broken_spec_waits_for_its_mending() -> None:
    """Whether it is retried is in the spec, too."""
    world = World(manifest(role(), retry=(False, 1)))
    world.settle()
    roles = world.raw["spec"]["taskRoles"]
    world.edit(taskRoles="?")
    world.mark_deleting("job-attempt")
    world.settle()
    assert world.status.state is State.ATTEMPT_COMPLETED
    world.edit(taskRoles=roles)
    world.settle()
    assert (world.status.state, world.status.attempt_status.id) == (State.PREPARING, 1)


def test_a_broken_status_is_not_taken_for_none() -> None:
    """Somebody overwrote it: going on as if nothing had been created would be wrong."""
    with pytest.raises(BadFramework, match=r"status\.state: "):
        decode_framework(manifest(role()) | {"status": broken_status()})


def broken_status() -> Any:
    world = World(manifest(role()))
    world.settle()
    assert world.stored is not None
    return world.stored | {"state": "Sleeping"}


def test_nulls_in_a_spec_count_as_left_out() -> None:
    """As they do for frameworkcontroller."""
    raw = manifest(role())
    raw["spec"]["description"] = None
    raw["spec"]["taskRoles"][0]["frameworkAttemptCompletionPolicy"] = None
    raw["spec"]["taskRoles"][0]["task"]["podGracefulDeletionTimeoutSec"] = None
    framework = decode_framework(raw)
    assert not framework.problems
    assert framework.spec.task_roles[0].framework_attempt_completion_policy is None


def test_a_quota_is_a_condition_until_there_is_room() -> None:
    """Blocked creations are visible in the status and in Events, and the condition goes when they succeed."""
    world = World(manifest(role(number=2)))
    numbers = iter(range(1000))

    def over_quota(target: Target) -> CreateFailed | None:
        return CreateFailed(target, 403, f"exceeded quota: q, used: {next(numbers)}") if target else None

    world.refuse = over_quota
    world.sync()
    blocked = conditions(world)["CreationBlocked"]
    assert (blocked.status, blocked.reason) == ("True", "QuotaExceeded")
    written = len(world.written)
    world.sync()
    assert len(world.written) == written, "a changed number in the server's message is no reason to write"
    world.refuse = lambda target: None
    world.settle()
    assert not world.status.conditions
    assert len(world.pods()) == 2


def test_trouble_of_the_server_is_no_condition() -> None:
    """An API server that is away for a moment says nothing about the Framework."""
    world = World(manifest(role()))
    world.refuse = lambda target: CreateFailed(target, 503, "unavailable") if target else None
    assert world.sync().back_off
    assert not world.status.conditions


def test_native_conditions_follow_the_framework() -> None:
    """Valid, Ready and Completed are always there in native mode; Succeeded once it is over."""
    world = World(manifest(role(number=2, policy=(1, -1))), config=replace(CONFIG, native_mode=True))
    world.settle()
    assert {name: condition.status for name, condition in conditions(world).items()} == {
        "Valid": "True",
        "Ready": "False",
        "Completed": "False",
    }
    assert conditions(world)["Ready"].message == "0 of 2 tasks have an address"
    world.later(7)
    world.run_all()
    world.settle()
    ready = conditions(world)["Ready"]
    assert (ready.status, ready.last_transition_time) == ("True", world.now)
    world.later(7)
    world.finish("job-worker-1", 210)
    world.settle()
    found = conditions(world)
    assert (found["Completed"].status, found["Completed"].reason) == ("True", "ContainerPermanentFailed")
    assert (found["Succeeded"].status, found["Ready"].status) == ("False", "False")
    assert (found["Ready"].reason, found["Ready"].message) == ("AttemptCompleted", "the attempt has ended")
    assert found["Completed"].observed_generation == 1


def test_a_healthy_status_has_no_conditions_in_compatible_mode() -> None:
    """It is exactly frameworkcontroller's."""
    world = World(manifest(role()))
    world.settle()
    assert world.stored is not None
    assert "conditions" not in world.stored


def test_unknown_fields_of_a_template_reach_the_pod() -> None:
    """Scenario 52 (framework): what a future Kubernetes adds survives."""
    pod = template(schedulingGates=[{"name": "later"}], futureField={"deep": [1]})
    pod["spec"]["initContainers"] = [{"name": "side", "restartPolicy": "Always"}]
    world = World(manifest(role(pod=pod)))
    world.settle()
    spec = world.live["job-worker-0"]["spec"]
    assert spec["schedulingGates"] == [{"name": "later"}]
    assert spec["futureField"] == {"deep": [1]}
    assert spec["initContainers"][0]["restartPolicy"] == "Always"
