"""A Framework's status and the phase that it means, and what the plugin makes of a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import BadFramework
from controllers.tasks.api.phase import ErrorKind, Phase
from controllers.tasks.plugins.framework import FrameworkPlugin, framework_phase
from store.kube.api.errors import NotFound
from store.kube.api.objects import Object, format_time, labels_of, name_of
from store.kube.memory.kube import MemoryKube
from tests.support.framework.world import manifest, role
from tests.support.tasks.engines import wall
from tests.support.tasks.kube import NAMESPACE, Stage

NOW = 1_780_000_000.0
START = format_time(NOW - 60)


def status(state: str, *, has_run: bool = False, **outcome: Any) -> Object:
    """Return a status. `outcome`: code, phrase, name and attributes of the completion."""
    completion = None
    if outcome:
        kind = {"name": outcome.get("name", "Failed"), "attributes": outcome.get("attributes", [])}
        completion = {"code": outcome["code"], "phrase": outcome["phrase"], "type": kind, "diagnostics": "see the log"}
    task = {
        "index": 0,
        "instanceUID": "t",
        "startTime": START,
        "state": "AttemptRunning",
        "transitionTime": START,
        "retryPolicyStatus": {},
        "attemptStatus": {"id": 0, "startTime": START, "podName": "job-worker-0"},
    }
    return {
        "startTime": START,
        "runTime": START if has_run else None,
        "state": state,
        "transitionTime": START,
        "retryPolicyStatus": {"totalRetriedCount": 2},
        "attemptStatus": {
            "id": 2,
            "startTime": START,
            "configMapName": "job-attempt",
            "completionStatus": completion,
            "taskRoleStatuses": [
                {"name": "worker", "instanceUID": "r", "podGracefulDeletionTimeoutSec": None, "taskStatuses": [task]}
            ],
        },
    }


def framework(seen: Object | None) -> Object:
    return {"metadata": {"name": "job", "namespace": "team"}, "status": seen}


OK: dict[str, Any] = {"code": 0, "phrase": "Succeeded", "name": "Succeeded"}
WRONG: dict[str, Any] = {"code": 3, "phrase": "ContainerUnrecognizedFailed"}


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (None, Phase.QUEUED),
        (status("AttemptCreationPending"), Phase.QUEUED),
        (status("AttemptPreparing"), Phase.INITIALIZING),
        (status("AttemptRunning", has_run=True), Phase.RUNNING),
        (status("AttemptCompleted", has_run=True, **WRONG), Phase.RUNNING),
        (status("AttemptCreationPending", has_run=True), Phase.RUNNING),
        (status("Completed", has_run=True, **OK), Phase.SUCCESS),
    ],
)
def test_what_has_not_failed(seen: Object | None, phase: Phase) -> None:
    """Between two attempts of the Framework the execution goes on."""
    assert framework_phase(framework(seen), NOW).phase is phase


@pytest.mark.parametrize(
    ("attributes", "phase", "kind"),
    [
        ([], Phase.RETRYABLE_FAILURE, ErrorKind.USER),
        (["Transient"], Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM),
        (["Transient", "Conflict"], Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM),
        (["Permanent"], Phase.PERMANENT_FAILURE, ErrorKind.USER),
    ],
)
def test_a_failure_is_of_the_kind_of_its_attributes(attributes: list[str], phase: Phase, kind: ErrorKind) -> None:
    found = framework_phase(framework(status("Completed", **WRONG, attributes=attributes)), NOW)

    assert found.err is not None
    assert (found.phase, found.err.kind, found.err.code) == (phase, kind, "ContainerUnrecognizedFailed")
    assert found.err.message == "ContainerUnrecognizedFailed (3): see the log"


def test_the_completion_code_and_the_tasks_are_shown() -> None:
    found = framework_phase(framework(status("Completed", **WRONG)), NOW, attempt=1)

    assert found.info is not None
    assert found.info.custom_info == {
        "framework": "team/job",
        "state": "Completed",
        "framework_retries": 2,
        "tasks": {"AttemptRunning": 1},
        "code": 3,
        "phrase": "ContainerUnrecognizedFailed",
        "diagnostics": "see the log",
    }
    [shown] = found.info.external_resources
    assert (shown.external_id, shown.retry_attempt) == ("team/job", 1)


def test_a_status_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(BadFramework, match="state"):
        framework_phase(framework({"state": "Dreaming"}), NOW)


def stage() -> Stage[MemoryKube]:
    return Stage(FrameworkPlugin(), MemoryKube(clock=wall, namespaces=[NAMESPACE]), FRAMEWORKS)


def config(**more: Any) -> dict[str, Any]:
    made = manifest(role())
    return {"framework": {"metadata": {"labels": {"a": "b"}}, "spec": made["spec"]}, **more}


@pytest.mark.looptime
async def test_a_framework_is_submitted_and_followed_to_its_end() -> None:
    """Its name has no dash, which Frameworks don't allow."""
    async with stage().playing() as world:
        await world.start("job-1", config())
        made = await world.object()
        assert name_of(made).startswith("job1n00")
        assert name_of(made).isalnum()
        assert labels_of(made)["a"] == "b"
        await world.report(made, status("AttemptRunning", has_run=True))
        await world.until_phase("Running", "job-1")
        await world.report(made, status("Completed", **OK))
        await world.until_done("job-1")

        assert await world.phases("job-1") == ["Queued", "Running", "Success"]
        last = await world.last_event("job-1")
        assert last.info is not None
        assert last.info["custom_info"]["code"] == 0


@pytest.mark.looptime
@pytest.mark.parametrize("on_abort", ["delete", "stop"])
async def test_an_abort_deletes_or_stops_it(on_abort: str) -> None:
    async with stage().playing() as world:
        await world.start("job-1", config(on_abort=on_abort))
        made = await world.object()
        await world.report(made, status("AttemptRunning", has_run=True))
        await world.until_phase("Running", "job-1")
        await world.abort("job-1")
        await world.until_done("job-1")

        if on_abort == "delete":
            with pytest.raises(NotFound):
                await world.api.get(FRAMEWORKS, name_of(made), NAMESPACE)
        else:
            left = await world.api.get(FRAMEWORKS, name_of(made), NAMESPACE)
            assert left["spec"]["executionType"] == "Stop"


@pytest.mark.looptime
async def test_all_problems_of_a_spec_are_in_one_error() -> None:
    bad = config()
    bad["framework"]["spec"]["taskRoles"] = [role(name="has-dashes", number=-1)]
    async with stage().playing() as world:
        await world.start("job-1", bad)
        state = await world.until_done("job-1")

    assert state.error is not None
    assert "taskRoles[0].name" in state.error.message
    assert "taskRoles[0].taskNumber" in state.error.message
    assert await world.objects() == []
