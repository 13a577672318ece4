"""Frameworks in the states that a barrier meets, as the operator writes them."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from store.kube.api.objects import Object

BEGAN = "2026-01-02T03:04:05Z"
CONFIG_MAP_UID = "cm-uid"
ATTEMPT = f"0_{CONFIG_MAP_UID}"


def ip_of(role: str, index: int) -> str:
    return f"10.{1 + (index + 1) // 256}.{len(role)}.{(index + 1) % 256}"


def pod_uid(role: str, index: int) -> str:
    return f"{role}-{index}-uid"


def task(role: str, index: int, **changes: Any) -> Object:
    """Return a running task. `ip`, `uid`, `attempt`: of its pod; `outcome`: Succeeded or Failed; the rest: its own
    fields."""
    attempt, uid = changes.pop("attempt", 0), changes.pop("uid", pod_uid(role, index))
    outcome = changes.pop("outcome", None)
    return {
        "index": index,
        "instanceUID": f"{role}-{index}",
        "startTime": BEGAN,
        "runTime": None,
        "completionTime": None,
        "state": "AttemptPreparing",
        "transitionTime": BEGAN,
        "deletionPending": False,
        "retryPolicyStatus": {"totalRetriedCount": attempt, "accountableRetriedCount": 0, "retryDelaySec": None},
        "attemptStatus": {
            "id": attempt,
            "startTime": BEGAN,
            "instanceUID": f"{attempt}_{uid}" if uid else None,
            "podName": f"gang-{role}-{index}",
            "podUID": uid,
            "podIP": changes.pop("ip", ip_of(role, index)),
            "completionStatus": outcome and {"code": 1, "phrase": outcome, "type": {"name": outcome}},
        },
        **changes,
    }


def gang(*, name: str = "gang", wanted: dict[str, int] | None = None, **roles: list[Object] | int) -> Object:
    """Return a Framework. `roles`: in the status' order, their tasks or the number of running ones; `wanted`: the
    spec's numbers, by default those of the status."""
    tasks = {role: _tasks(role, each) for role, each in roles.items()}
    numbers = wanted if wanted is not None else {role: len(each) for role, each in tasks.items()}
    return {
        "apiVersion": "frameworkcontroller.microsoft.com/v1",
        "kind": "Framework",
        "metadata": {"name": name, "annotations": {"note": "secret"}},
        "spec": {
            "executionType": "Start",
            "taskRoles": [
                {"name": role, "taskNumber": number, "task": {"pod": {"spec": {"containers": [{"name": "secret"}]}}}}
                for role, number in numbers.items()
            ],
        },
        "status": {
            "startTime": BEGAN,
            "runTime": None,
            "completionTime": None,
            "state": "AttemptRunning",
            "transitionTime": BEGAN,
            "retryPolicyStatus": {"totalRetriedCount": 0, "accountableRetriedCount": 0, "retryDelaySec": None},
            "attemptStatus": {
                "id": 0,
                "startTime": BEGAN,
                "instanceUID": ATTEMPT,
                "configMapName": f"{name}-attempt",
                "configMapUID": CONFIG_MAP_UID,
                "completionStatus": None,
                "taskRoleStatuses": [
                    {"name": role, "instanceUID": role, "podGracefulDeletionTimeoutSec": None, "taskStatuses": each}
                    for role, each in tasks.items()
                ],
            },
        },
    }


def compressed(framework: Object, raw: bytes | None = None) -> Object:
    """Return the Framework with its roles compressed, or with `raw` in their place."""
    attempt = framework["status"]["attemptStatus"]
    content = gzip.compress(json.dumps(attempt["taskRoleStatuses"]).encode()) if raw is None else raw
    framework["status"]["attemptStatus"] = {
        **attempt,
        "taskRoleStatuses": None,
        "taskRoleStatusesCompressed": base64.b64encode(content).decode(),
    }
    return framework


def _tasks(role: str, each: list[Object] | int) -> list[Object]:
    return [task(role, index) for index in range(each)] if isinstance(each, int) else each
