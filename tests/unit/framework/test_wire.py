"""What is on the wire: statuses as frameworkcontroller writes and reads them, and their compression."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from controllers.framework.compression import compress, decompress
from controllers.framework.wire import BadFramework, decode_framework, decode_status, encode_status, status_patch
from tests.support.framework_world import World, manifest, role

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
    """Every field by its name, explicit nulls included; what is empty of a pod's end is left out."""
    status = decode_status(RUNNING)
    assert status is not None
    assert encode_status(status) == RUNNING
    assert list(encode_status(status)) == list(RUNNING)


def test_a_completed_frameworks_trigger_is_on_the_wire() -> None:
    """`trigger` with its role and index, and no `pod`."""
    world = World(manifest(role(policy=(1, -1))))
    world.settle()
    world.finish("job-worker-0", 7)
    world.settle()
    assert world.stored is not None
    outcome = world.stored["attemptStatus"]["completionStatus"]
    assert (outcome["code"], outcome["phrase"]) == (7, "ContainerUnrecognizedFailed")
    assert outcome["type"] == {"name": "Failed", "attributes": []}
    assert (outcome["trigger"]["taskRoleName"], outcome["trigger"]["taskIndex"]) == ("worker", 0)
    assert "pod" not in outcome


def test_a_fresh_status_has_all_its_nulls() -> None:
    """What is not known yet is null, not left out."""
    world = World(manifest(role()))
    world.step_once()
    assert world.stored is not None
    attempt = world.stored["attemptStatus"]
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
    status = decode_status(raw)
    assert status is not None
    assert status.roles[0].tasks == ()


@pytest.mark.parametrize("raw", [None, {}])
def test_a_status_that_was_never_written(raw: Any) -> None:
    """Null, or empty as some tools send it: there is none."""
    assert decode_status(raw) is None


def test_large_statuses_are_compressed() -> None:
    """Scenario 53 (framework): from 716800 bytes on the roles are gzipped, and readers find them again."""
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
    """As readers of both do it."""
    raw = json.loads(json.dumps(RUNNING))
    raw["attemptStatus"]["taskRoleStatusesCompressed"] = base64.b64encode(compress(b"[]")).decode()
    status = decode_status(raw)
    assert status is not None
    assert len(status.roles) == 1
    assert encode_status(status) == RUNNING


def test_equal_statuses_compress_to_equal_bytes() -> None:
    """No time stamp: an unchanged status is no change."""
    assert compress(b"[]" * 100) == compress(b"[]" * 100)


@pytest.mark.parametrize(
    "packed",
    [b"", b"not gzip", compress(b"[]")[:-4], compress(b'{"a": 1}'), compress(b" " * (65 * 1024 * 1024) + b"[]")],
    ids=["empty", "garbage", "cut", "another type", "bomb"],
)
def test_a_bad_compressed_list_is_refused(packed: bytes) -> None:
    """It names the field; a bomb is not unpacked."""
    with pytest.raises(ValueError, match=r"."):
        decompress(packed)
    raw = json.loads(json.dumps(RUNNING))
    raw["attemptStatus"] |= {
        "taskRoleStatuses": None,
        "taskRoleStatusesCompressed": base64.b64encode(packed).decode(),
    }
    with pytest.raises(BadFramework, match="taskRoleStatusesCompressed"):
        decode_status(raw)


def test_the_patch_writes_the_status_whole() -> None:
    """With its nulls, only onto the object that was read, and with nothing of the spec."""
    world = World(manifest(role()))
    world.settle()
    framework = world.framework()
    wire = encode_status(world.status)
    assert status_patch(framework, wire) == [
        {"op": "test", "path": "/metadata/uid", "value": "fw-uid"},
        {"op": "test", "path": "/metadata/resourceVersion", "value": "1"},
        {"op": "add", "path": "/status", "value": wire},
    ]


def test_a_framework_is_decoded_with_what_we_know_better() -> None:
    """Our own expectation replaces a stored status, which may be older or somebody else's."""
    world = World(manifest(role()))
    world.settle()
    mine = replace(world.status, conditions=())
    decoded = decode_framework({**world.raw, "status": {"state": "nonsense"}}, status=mine)
    assert decoded.status is mine
