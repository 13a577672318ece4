"""The state of a pod, and the phase that it means."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.tasks.api.phase import ErrorKind, Phase
from controllers.tasks.plugins.pod import GRACE, PRIMARY, LogTemplate, pod_phase
from store.kube.api.objects import Object, format_time
from tests.support import require

NOW = 1_780_000_000.0
USER, SYSTEM = ErrorKind.USER, ErrorKind.SYSTEM
RETRYABLE, PERMANENT = Phase.RETRYABLE_FAILURE, Phase.PERMANENT_FAILURE


def container(name: str = "main", **state: Any) -> Object:
    return {"name": name, "state": state}


def ended(code: int, name: str = "main", reason: str = "", **more: Any) -> Object:
    return container(
        name, terminated={"exitCode": code, "reason": reason or ("Error" if code else "Completed"), **more}
    )


def waits(reason: str, name: str = "main", message: str = "") -> Object:
    return container(name, waiting={"reason": reason, "message": message})


def pod(phase: str, *containers: Object, since: float = 0.0, **more: Any) -> Object:
    """Return a pod. `since`: seconds for which it has not been ready. `more`: of its status, spec or metadata."""
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "False", "lastTransitionTime": format_time(NOW - since)},
    ]
    metadata = {"name": "job", "namespace": "team", "uid": "u1", **more.pop("metadata", {})}
    spec = {"containers": [{"name": "main"}], "nodeName": "node-1", **more.pop("spec", {})}
    status = {"phase": phase, "conditions": conditions, "containerStatuses": list(containers), **more}
    return {"metadata": metadata, "spec": spec, "status": status}


RUNS = container(running={})
DELETED = {"deletionTimestamp": format_time(NOW + 30), "deletionGracePeriodSeconds": 30}

FAILURES: dict[str, tuple[Object, Phase, ErrorKind, str, bool]] = {
    "an exit code": (pod("Failed", ended(3)), RETRYABLE, USER, "NonZeroExit", False),
    "out of memory": (pod("Failed", ended(137, reason="OOMKilled")), RETRYABLE, USER, "OOMKilled", False),
    "out of memory in a child": (pod("Succeeded", ended(0, reason="OOMKilled")), RETRYABLE, USER, "OOMKilled", False),
    "killed": (pod("Failed", ended(137)), RETRYABLE, USER, "Interrupted", False),
    "node shuts down": (pod("Failed", ended(143), reason="Shutdown"), RETRYABLE, SYSTEM, "Interrupted", False),
    "node has shut down": (pod("Failed", ended(143), reason="Terminated"), RETRYABLE, SYSTEM, "Interrupted", False),
    "evicted": (pod("Failed", reason="Evicted"), RETRYABLE, SYSTEM, "Interrupted", False),
    "deadline": (pod("Failed", reason="DeadlineExceeded"), RETRYABLE, USER, "DeadlineExceeded", False),
    "no reason": (pod("Failed"), RETRYABLE, SYSTEM, "UnknownError", False),
    "primary failed, others run": (
        pod("Running", ended(2), container("side", running={})),
        RETRYABLE,
        USER,
        "NonZeroExit",
        False,
    ),
    "deleted while running": (
        pod("Failed", ended(143, finishedAt=format_time(NOW + 5)), metadata=DELETED),
        RETRYABLE,
        SYSTEM,
        "UnexpectedObjectDeletion",
        False,
    ),
    "no image for long": (
        pod("Pending", waits("ImagePullBackOff"), since=GRACE + 1),
        RETRYABLE,
        USER,
        "ImagePullBackOff",
        True,
    ),
    "no container for long": (
        pod("Pending", waits("CreateContainerConfigError"), since=GRACE + 1),
        PERMANENT,
        USER,
        "CreateContainerConfigError",
        True,
    ),
    "no image by that name": (
        pod("Pending", waits("InvalidImageName")),
        PERMANENT,
        USER,
        "InvalidImageName",
        True,
    ),
    "unknown": (pod("Pending", waits("SolarFlare")), RETRYABLE, SYSTEM, "SolarFlare", True),
    "an init container": (
        pod("Pending", waits("PodInitializing"), initContainerStatuses=[waits("SolarFlare", "init")]),
        RETRYABLE,
        SYSTEM,
        "SolarFlare",
        True,
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure(case: str) -> None:
    seen, phase, kind, code, cleans_up = FAILURES[case]

    found = pod_phase(seen, NOW)

    assert found.err is not None
    assert (found.phase, found.err.kind, found.err.code) == (phase, kind, code)
    assert found.cleanup_on_failure is cleans_up


NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}

LIVE: dict[str, tuple[Object, Phase, str]] = {
    "new": ({"metadata": {"name": "job"}, "spec": {}}, Phase.QUEUED, "not scheduled yet"),
    "no node": (pod("Pending", conditions=[NO_NODE]), Phase.QUEUED, "not scheduled: 0/3 nodes are available"),
    "scheduled": (pod("Pending"), Phase.QUEUED, "scheduled, and its node has not begun"),
    "image": (pod("Pending", waits("ContainerCreating")), Phase.INITIALIZING, "container main: ContainerCreating"),
    "no image yet": (
        pod("Pending", waits("ImagePullBackOff"), since=GRACE),
        Phase.INITIALIZING,
        "container main: ImagePullBackOff",
    ),
    "no secret yet": (
        pod("Pending", waits("CreateContainerConfigError"), since=GRACE),
        Phase.INITIALIZING,
        "container main: CreateContainerConfigError",
    ),
    "running": (pod("Running", RUNS), Phase.RUNNING, ""),
    "starts again": (pod("Running", ended(1), spec={"restartPolicy": "OnFailure"}), Phase.RUNNING, ""),
    "node does not answer": (pod("Unknown", RUNS), Phase.RUNNING, ""),
    "a sidecar failed": (pod("Running", RUNS, ended(1, "side")), Phase.RUNNING, ""),
    "succeeded": (pod("Succeeded", ended(0)), Phase.SUCCESS, ""),
    "primary succeeded": (pod("Running", ended(0), container("side", running={})), Phase.SUCCESS, ""),
    "a sidecar failed at the end": (pod("Failed", ended(0), ended(1, "side")), Phase.SUCCESS, ""),
    "succeeded, then deleted": (pod("Succeeded", ended(0), metadata=DELETED), Phase.SUCCESS, ""),
}


@pytest.mark.parametrize("case", LIVE)
def test_what_has_not_failed(case: str) -> None:
    seen, phase, reason = LIVE[case]

    found = pod_phase(seen, NOW)

    assert (found.phase, found.reason) == (phase, reason)


def test_the_primary_container_is_the_named_one() -> None:
    seen = pod("Running", RUNS, ended(0, "work"), metadata={"annotations": {PRIMARY: "work"}})

    assert pod_phase(seen, NOW).phase is Phase.SUCCESS


def test_the_end_of_each_container_is_in_the_message() -> None:
    seen = pod("Failed", ended(1, message="no such file"), ended(2, "side"), message="the pod gave up")

    found = pod_phase(seen, NOW)

    assert require(found.err).message.splitlines() == [
        "the pod gave up",
        "container main ended with exit code 1: Error: no such file",
        "container side ended with exit code 2: Error",
    ]


def test_links_to_logs_are_made_of_the_pods_facts() -> None:
    """Placeholders are case-insensitive; unknown ones stay."""
    uri = "https://logs/{{ .namespace }}/{{.podName}}/{{ .containerName }}?id={{ .ContainerID }}&on={{.nodeName}}{{.x}}"
    seen = pod("Running", {**RUNS, "containerID": "containerd://abc"})

    info = require(pod_phase(seen, NOW, attempt=2, logs=[LogTemplate("console", uri)]).info)

    [link] = info.logs
    assert (link.name, link.uri) == ("console (main)", "https://logs/team/job/main?id=abc&on=node-1{{.x}}")
    [resource] = info.external_resources
    assert (resource.external_id, resource.retry_attempt, resource.phase) == ("team/job", 2, Phase.RUNNING)
