"""The wire format: statuses as frameworkcontroller writes and reads them, and their compression.

Invalid Frameworks affect no other, report the field, and can still be stopped or corrected.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from controllers.framework.api.types import Condition, Problem, State
from controllers.framework.api.wire import (
    BadFramework,
    compress,
    decode_framework,
    decode_status,
    decompress,
    encode_status,
    status_patch,
)
from controllers.framework.step.context import CreateFailed, Target
from tests.support import require
from tests.support.framework.world import CONFIG, World, manifest, role, template

TIME = "2024-05-01T12:00:00Z"
RUNNING: dict[str, Any] = {
    "startTime": TIME,
    "runTime": TIME,
    "completionTime": None,
    "state": "AttemptRunning",
    "transitionTime": TIME,
    "retryPolicyStatus": {"totalRetriedCount": 0, "accountableRetriedCount": 0, "retryDelaySec": None},
    "attemptStatus": {
        "id": 0,
        "startTime": TIME,
        "runTime": TIME,
        "completionTime": None,
        "instanceUID": "0_uid-1",
        "configMapName": "job-attempt",
        "configMapUID": "uid-1",
        "completionStatus": None,
        "taskRoleStatuses": [
            {
                "name": "worker",
                "instanceUID": "c1d67a6f-9dd3-4c9e-8d53-87b4b8ca2a9a",
                "podGracefulDeletionTimeoutSec": None,
                "taskStatuses": [
                    {
                        "index": 0,
                        "instanceUID": "a9f85f86-6a4c-4b18-a4a1-6e0c1e2e7a10",
                        "startTime": TIME,
                        "runTime": None,
                        "completionTime": None,
                        "state": "AttemptDeletionPending",
                        "transitionTime": TIME,
                        "deletionPending": False,
                        "retryPolicyStatus": {
                            "totalRetriedCount": 0,
                            "accountableRetriedCount": 0,
                            "retryDelaySec": None,
                        },
                        "attemptStatus": {
                            "id": 0,
                            "startTime": TIME,
                            "runTime": TIME,
                            "completionTime": None,
                            "instanceUID": "0_uid-2",
                            "podName": "job-worker-0",
                            "podUID": "uid-2",
                            "podNodeName": "node1",
                            "podIP": "10.0.0.1",
                            "podHostIP": "192.0.2.1",
                            "completionStatus": {
                                "code": 137,
                                "phrase": "ContainerSigKillReceived",
                                "type": {"name": "Failed", "attributes": ["Transient"]},
                                "diagnostics": 'matched {"containers":[{"code":137}]}',
                                "pod": {
                                    "reason": "Evicted",
                                    "containers": [
                                        {"name": "init", "code": 0},
                                        {"name": "main", "reason": "Error", "signal": 9, "code": 137},
                                    ],
                                },
                            },
                        },
                    }
                ],
            }
        ],
    },
}


def test_a_status_reads_and_writes_identically() -> None:
    """Every field has its name, with explicit nulls; empty fields of a pod's end are left out."""
    status = require(decode_status(RUNNING))
    assert encode_status(status) == RUNNING
    assert list(encode_status(status)) == list(RUNNING)


def test_a_completed_frameworks_trigger_is_on_the_wire() -> None:
    """`trigger` has its role and index; there is no `pod`."""
    world = World(manifest(role(policy=(1, -1))))
    world.settle()
    world.finish("job-worker-0", 7)
    world.settle()
    outcome = require(world.stored)["attemptStatus"]["completionStatus"]
    assert (outcome["code"], outcome["phrase"]) == (7, "ContainerUnrecognizedFailed")
    assert outcome["type"] == {"name": "Failed", "attributes": []}
    assert (outcome["trigger"]["taskRoleName"], outcome["trigger"]["taskIndex"]) == ("worker", 0)
    assert "pod" not in outcome


def test_a_fresh_status_has_all_its_nulls() -> None:
    """Unknown values are null, not left out."""
    world = World(manifest(role()))
    world.step_once()
    attempt = require(world.stored)["attemptStatus"]
    assert {name for name, value in attempt.items() if value is None} == {
        "runTime",
        "completionTime",
        "instanceUID",
        "configMapUID",
        "completionStatus",
    }
    task = attempt["taskRoleStatuses"][0]["taskStatuses"][0]
    assert {name for name, value in task["attemptStatus"].items() if value is None} == {
        "runTime",
        "completionTime",
        "instanceUID",
        "podUID",
        "podNodeName",
        "podIP",
        "podHostIP",
        "completionStatus",
    }


def test_null_lists_are_empty_ones() -> None:
    """frameworkcontroller writes empty lists as null, too."""
    raw = json.loads(json.dumps(RUNNING))
    raw["attemptStatus"]["taskRoleStatuses"][0]["taskStatuses"] = None
    status = require(decode_status(raw))
    assert status.roles[0].tasks == ()


@pytest.mark.parametrize("raw", [None, {}])
def test_a_status_that_was_never_written(raw: Any) -> None:
    """A null or empty status, as some tools send it, counts as absent."""
    assert decode_status(raw) is None


def test_large_statuses_are_compressed() -> None:
    """From 716800 bytes the roles are gzipped, and readers decompress them."""
    world = World(manifest(role(number=2000)))
    world.step_once()
    plain = encode_status(world.status)
    size = len(msgspec.json.encode(world.status.roles))
    assert size >= 716_800
    wire = json.loads(msgspec.json.encode(encode_status(world.status, compress_large=True)))
    assert wire["attemptStatus"]["taskRoleStatuses"] is None
    packed = base64.b64decode(wire["attemptStatus"]["taskRoleStatusesCompressed"])
    assert json.loads(gzip.decompress(packed)) == plain["attemptStatus"]["taskRoleStatuses"]
    assert len(packed) < size / 5
    assert decode_status(wire) == world.status


def test_small_statuses_are_never_compressed() -> None:
    """Old readers keep working."""
    world = World(manifest(role()))
    world.settle()
    assert encode_status(world.status, compress_large=True) == encode_status(world.status)


def test_raw_roles_are_preferred_to_compressed_ones() -> None:
    """As other readers of both do."""
    raw = json.loads(json.dumps(RUNNING))
    raw["attemptStatus"]["taskRoleStatusesCompressed"] = base64.b64encode(compress(b"[]")).decode()
    status = require(decode_status(raw))
    assert len(status.roles) == 1
    assert encode_status(status) == RUNNING


def test_equal_statuses_compress_to_equal_bytes() -> None:
    """There is no time stamp: an unchanged status is no change."""
    assert compress(b"[]" * 100) == compress(b"[]" * 100)


@pytest.mark.parametrize(
    "packed",
    [b"", b"not gzip", compress(b"[]")[:-4], compress(b'{"a": 1}'), compress(b" " * (65 * 1024 * 1024) + b"[]")],
    ids=["empty", "garbage", "cut", "another type", "bomb"],
)
def test_a_bad_compressed_list_is_refused(packed: bytes) -> None:
    """The error names the field; a bomb is not unpacked."""
    with pytest.raises(ValueError, match=r"."):
        decompress(packed)
    raw = json.loads(json.dumps(RUNNING))
    raw["attemptStatus"] |= {"taskRoleStatuses": None, "taskRoleStatusesCompressed": base64.b64encode(packed).decode()}
    with pytest.raises(BadFramework, match="taskRoleStatusesCompressed"):
        decode_status(raw)


def test_the_patch_writes_the_status_whole() -> None:
    """The patch holds the nulls, applies only to the object that was read, and contains nothing of the spec."""
    world = World(manifest(role()))
    world.settle()
    framework = world.framework()
    wire = encode_status(world.status)
    assert status_patch(framework, wire) == [
        {"op": "test", "path": "/metadata/uid", "value": "fw-uid"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
        {"op": "add", "path": "/status", "value": wire},
    ]


def test_a_framework_is_decoded_with_the_expected_status() -> None:
    """The expected status replaces the stored one, which may be older or another client's."""
    world = World(manifest(role()))
    world.settle()
    mine = replace(world.status, conditions=())
    decoded = decode_framework({**world.raw, "status": {"state": "nonsense"}}, status=mine)
    assert decoded.status is mine


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
    """Nothing is created; the condition and a Warning Event say what to correct."""
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
        ([], "metadata.name"),  # which has a dash: the names of pods could not be split
        ([role("a"), role("a")], "spec.taskRoles[1].name"),
        ([role("with-dash")], "spec.taskRoles[0].name"),
        ([role(number=10001)], "spec.taskRoles[0].taskNumber"),
        ([role(number=-1)], "spec.taskRoles[0].taskNumber"),
        ([role(policy=(-2, 0))], "spec.taskRoles[0].frameworkAttemptCompletionPolicy.minFailedTaskCount"),
        ([role(retry=(False, -3))], "spec.taskRoles[0].task.retryPolicy.maxRetryCount"),
    ],
)
def test_what_a_schema_would_refuse_is_refused_here_as_well(roles: list[Any], field: str) -> None:
    """The installed CRD may be an older one without a schema."""
    world = World(manifest(*roles, name="job" if roles else "a-b"))
    assert world.framework().problems[0].field == field


def test_a_corrected_framework_continues() -> None:
    """The condition is removed with the problem, and the tasks are created."""
    world = World(manifest({**role(), "task": {"pod": "?"}}))
    world.settle()
    world.edit(taskRoles=[role()])
    world.settle()
    assert world.pods() == ["job-worker-0"]
    assert not world.status.conditions


def test_a_framework_broken_while_it_runs_keeps_its_pods() -> None:
    """No creation and no scaling; running pods are followed to their end, and Stop works."""
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


def test_a_problem_is_reported_once() -> None:
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
    """The problem is described in YAML's terms, and nothing is created."""
    world = World(manifest(role()))
    world.edit(**change)
    assert world.framework().problems == (Problem(field, message),)
    world.settle()
    assert not world.live


def test_an_attempt_that_ends_under_a_broken_spec_waits_for_its_correction() -> None:
    """The retry decision needs the spec."""
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
    """A status overwritten by another client must not count as absent: everything would be created again."""
    with pytest.raises(BadFramework, match=r"status\.state: "):
        decode_framework(manifest(role()) | {"status": broken_status()})


def broken_status() -> Any:
    world = World(manifest(role()))
    world.settle()
    assert world.stored is not None
    return world.stored | {"state": "Sleeping"}


def test_nulls_in_a_spec_count_as_left_out() -> None:
    """As in frameworkcontroller."""
    raw = manifest(role())
    raw["spec"]["description"] = None
    raw["spec"]["taskRoles"][0]["frameworkAttemptCompletionPolicy"] = None
    raw["spec"]["taskRoles"][0]["task"]["podGracefulDeletionTimeoutSec"] = None
    framework = decode_framework(raw)
    assert not framework.problems
    assert framework.spec.task_roles[0].framework_attempt_completion_policy is None


def test_a_quota_is_a_condition_until_there_is_room() -> None:
    """Blocked creations are visible in the status and in Events; the condition is removed when they succeed."""
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
    """A short outage of the API server adds no condition."""
    world = World(manifest(role()))
    world.refuse = lambda target: CreateFailed(target, 503, "unavailable") if target else None
    assert world.sync().back_off
    assert not world.status.conditions


def test_native_conditions_follow_the_framework() -> None:
    """Valid, Ready and Completed are always present in native mode; Succeeded once completed."""
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


def test_unknown_fields_of_a_template_reach_the_pod() -> None:
    """Fields of a future Kubernetes version survive."""
    pod = template(schedulingGates=[{"name": "later"}], futureField={"deep": [1]})
    pod["spec"]["initContainers"] = [{"name": "side", "restartPolicy": "Always"}]
    world = World(manifest(role(pod=pod)))
    world.settle()
    spec = world.live["job-worker-0"]["spec"]
    assert spec["schedulingGates"] == [{"name": "later"}]
    assert spec["futureField"] == {"deep": [1]}
    assert spec["initContainers"][0]["restartPolicy"] == "Always"
