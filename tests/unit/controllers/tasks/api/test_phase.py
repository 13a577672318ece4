"""What plugins report: names, constructors, and what they do with the caller's values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from controllers.tasks.api.phase import (
    DEFAULT_PHASE_VERSION,
    PHASE_INFO_UNDEFINED,
    PHASES,
    SYSTEM_ERROR_CODE,
    UNKNOWN_TRANSITION,
    ErrorKind,
    ExecutionError,
    ExternalResource,
    NamedEnum,
    Phase,
    PhaseInfo,
    ReasonInfo,
    TaskInfo,
    TaskLog,
    Transition,
    TransitionType,
    do_transition,
    do_transition_type,
    phase_info_failed,
    phase_info_failure,
    phase_info_failure_with_cleanup,
    phase_info_initializing,
    phase_info_not_ready,
    phase_info_queued,
    phase_info_queued_with_task_info,
    phase_info_retryable_failure,
    phase_info_retryable_failure_with_cleanup,
    phase_info_running,
    phase_info_success,
    phase_info_system_failure,
    phase_info_system_failure_with_cleanup,
    phase_info_system_retryable_failure,
    phase_info_system_retryable_failure_with_cleanup,
    phase_info_waiting_for_cache,
    phase_info_waiting_for_resources,
    phase_info_waiting_for_resources_info,
)
from controllers.tasks.api.resources import AllocationStatus
from store.decoding import Undecodable
from tests.support import require

THEN = datetime(2024, 5, 1, 12, tzinfo=UTC)
NESTED: Any = functools.reduce(lambda inner, _: [inner], range(150), cast(Any, 0))
FAILURES: list[tuple[Callable[..., PhaseInfo], Phase, ErrorKind, bool]] = [
    (phase_info_failure, Phase.PERMANENT_FAILURE, ErrorKind.USER, False),
    (phase_info_failure_with_cleanup, Phase.PERMANENT_FAILURE, ErrorKind.USER, True),
    (phase_info_system_failure, Phase.PERMANENT_FAILURE, ErrorKind.SYSTEM, False),
    (phase_info_system_failure_with_cleanup, Phase.PERMANENT_FAILURE, ErrorKind.SYSTEM, True),
    (phase_info_retryable_failure, Phase.RETRYABLE_FAILURE, ErrorKind.USER, False),
    (phase_info_retryable_failure_with_cleanup, Phase.RETRYABLE_FAILURE, ErrorKind.USER, True),
    (phase_info_system_retryable_failure, Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM, False),
    (phase_info_system_retryable_failure_with_cleanup, Phase.RETRYABLE_FAILURE, ErrorKind.SYSTEM, True),
]
PROGRESS: list[tuple[Callable[[TaskInfo], PhaseInfo], Phase, int, str]] = [
    (lambda info: phase_info_not_ready(THEN, 3, "r"), Phase.NOT_READY, 3, "r"),
    (lambda info: phase_info_waiting_for_resources(THEN, 3, "r"), Phase.WAITING_FOR_RESOURCES, 3, "r"),
    (lambda info: phase_info_waiting_for_resources_info(THEN, 3, "r", info), Phase.WAITING_FOR_RESOURCES, 3, "r"),
    (lambda info: phase_info_queued(THEN, 3, "r"), Phase.QUEUED, 3, "r"),
    (lambda info: phase_info_queued_with_task_info(3, "r", info), Phase.QUEUED, 3, "r"),
    (lambda info: phase_info_initializing(THEN, 3, "r", info), Phase.INITIALIZING, 3, "r"),
    (lambda info: phase_info_running(3, info), Phase.RUNNING, 3, ""),
    (lambda info: phase_info_waiting_for_cache(3, info), Phase.WAITING_FOR_CACHE, 3, ""),
    (lambda info: phase_info_success(info), Phase.SUCCESS, 0, ""),
]


@pytest.mark.parametrize("kind", [Phase, TransitionType, AllocationStatus])
def test_each_value_is_read_from_its_name(kind: type[NamedEnum]) -> None:
    assert [kind.parse(str(each)) for each in kind.values()] == list(kind)
    assert all(each.is_member() for each in kind.values())
    assert f"{kind(0)}" == str(kind(0))


def test_the_names_are_those_of_flyte() -> None:
    assert " ".join(str(each).removeprefix("Phase") for each in PHASES) == (
        "Undefined NotReady WaitingForResources Queued Initializing Running Success RetryableFailure PermanentFailure "
        "WaitingForCache Aborted"
    )
    assert str(Phase.RUNNING) == "PhaseRunning"
    assert [int(each) for each in PHASES] == list(range(11))
    assert list(map(str, AllocationStatus)) == ["AllocationUndefined", "Granted", "Exhausted", "NamespaceQuotaExceeded"]
    assert list(map(str, TransitionType)) == ["TransitionTypeEphemeral", "TransitionTypeBarrier"]
    assert (DEFAULT_PHASE_VERSION, SYSTEM_ERROR_CODE) == (0, "SystemError")


@pytest.mark.parametrize("text", ["Running", "phaserunning", "PHASE_RUNNING", "", " PhaseRunning"])
def test_another_name_is_refused_with_the_type_and_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^'{text}' is no Phase; "):
        Phase.parse(text)


def test_a_number_without_a_name_prints_as_such() -> None:
    assert str(Phase(77)) == "Phase(77)"
    assert str(AllocationStatus(9)) == "AllocationStatus(9)"
    assert not Phase(77).is_member()
    assert Phase(77) not in Phase.values()
    with pytest.raises(ValueError, match="77"):
        PhaseInfo(Phase(77))
    with pytest.raises(ValueError, match="x"):
        Phase("x")


def test_the_questions_about_phases() -> None:
    def those(question: Callable[[Phase], bool]) -> set[Phase]:
        return {phase for phase in PHASES if question(phase)}

    failures = {Phase.RETRYABLE_FAILURE, Phase.PERMANENT_FAILURE}
    assert those(Phase.is_failure) == failures
    assert those(Phase.is_success) == {Phase.SUCCESS}
    assert those(Phase.is_terminal) == failures | {Phase.SUCCESS, Phase.ABORTED}
    assert those(Phase.is_waiting_for_resources) == {Phase.WAITING_FOR_RESOURCES}


def test_a_transition_prints_as_in_flyte() -> None:
    barrier = do_transition_type(TransitionType.BARRIER, PHASE_INFO_UNDEFINED)
    assert str(barrier) == "TransitionTypeBarrier,Phase<PhaseUndefined:0 <nil> Reason:>"
    assert Transition(TransitionType.EPHEMERAL, PHASE_INFO_UNDEFINED) == UNKNOWN_TRANSITION
    running = phase_info_running(2, TaskInfo(occurred_at=THEN))
    assert do_transition(running).type is TransitionType.EPHEMERAL
    assert str(running) == "Phase<PhaseRunning:2 Info<@2024-05-01T12:00:00+00:00> Reason:>"
    assert str(phase_info_failure("Code", "text")) == "Phase<PhasePermanentFailure:0 Error:Code: text (USER)>"


@pytest.mark.parametrize(("make", "phase", "version", "reason"), PROGRESS)
def test_progress_has_its_phase_version_reason_and_time(
    make: Callable[[TaskInfo], PhaseInfo], phase: Phase, version: int, reason: str
) -> None:
    before = datetime.now(UTC)
    info = make(TaskInfo())
    assert (info.phase, info.version, info.reason, info.err, info.cleanup_on_failure) == (
        phase,
        version,
        reason,
        None,
        False,
    )
    assert info.info is not None
    assert info.info.occurred_at == THEN or before <= (info.info.occurred_at or THEN) <= datetime.now(UTC)


@pytest.mark.parametrize(("make", "phase", "kind", "cleanup"), FAILURES)
def test_failures_have_their_kind_and_cleanup(
    make: Callable[..., PhaseInfo], phase: Phase, kind: ErrorKind, cleanup: bool
) -> None:
    info = make("Code", "text", TaskInfo(occurred_at=THEN))
    assert info == PhaseInfo(
        phase, 0, TaskInfo(occurred_at=THEN), ExecutionError("Code", "text", kind), cleanup_on_failure=cleanup
    )
    assert info.with_version(4).cleanup_on_failure is cleanup
    assert info.with_version(4).version == 4


def test_a_failure_with_the_error_of_the_caller() -> None:
    given = ExecutionError("Code", "text")
    assert phase_info_failed(Phase.RETRYABLE_FAILURE, given).err == given
    unknown = phase_info_failed(Phase.PERMANENT_FAILURE, None)
    assert (require(unknown.err).code, unknown.cleanup_on_failure) == ("Unknown", False)
    with pytest.raises(ValueError, match="PhaseRunning is no failure"):
        phase_info_failed(Phase.RUNNING, given)


def test_the_info_of_the_caller_stays_as_it_is() -> None:
    custom = {"a": [1]}
    given = TaskInfo(custom_info=custom)
    built = phase_info_running(1, given)
    custom["a"].append(2)
    assert given.occurred_at is None
    assert require(built.info).custom_info == {"a": [1]}
    dated = TaskInfo(occurred_at=THEN)
    assert phase_info_initializing(datetime.now(UTC), 0, "", dated).info == dated


@pytest.mark.parametrize(
    "make",
    [
        lambda: do_transition("running"),  # type: ignore[arg-type]
        lambda: do_transition_type(0, PHASE_INFO_UNDEFINED),  # type: ignore[arg-type]
        lambda: do_transition(PHASE_INFO_UNDEFINED, poll_after=-1),
        lambda: do_transition(PHASE_INFO_UNDEFINED, poll_after=float("nan")),
        lambda: phase_info_running(-1),
        lambda: phase_info_running(2**32),
        lambda: phase_info_running(True),
        lambda: phase_info_running(0, {}),  # type: ignore[arg-type]
        lambda: phase_info_queued(datetime(2024, 5, 1), 0, ""),
        lambda: phase_info_failure(1, "text"),  # type: ignore[arg-type]
        lambda: TaskInfo(logs=[TaskLog("u")]),  # type: ignore[arg-type]
        lambda: TaskInfo(logs=("u",)),  # type: ignore[arg-type]
        lambda: ExternalResource("job", logs=("u",)),  # type: ignore[arg-type]
        lambda: TaskInfo(additional_reasons=("why",)),  # type: ignore[arg-type]
        lambda: TaskInfo(custom_info={"a": object()}),
        lambda: TaskInfo(custom_info={"a": NESTED}),
    ],
)
def test_a_value_of_another_type_is_refused_where_it_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"^\S"):
        make()


def test_info_and_error_return_from_json() -> None:
    info = TaskInfo(
        logs=(TaskLog("http://logs", "main", ttl=60.0),),
        occurred_at=THEN,
        reported_at=THEN,
        custom_info={"a": [1, None, {"b": "c"}]},
        external_resources=(ExternalResource("job-1", logs=(TaskLog("u"),), phase=Phase.RUNNING),),
        additional_reasons=(ReasonInfo("pulling", THEN),),
    )
    data = info.to_json()
    assert data["external_resources"][0]["phase"] == "PhaseRunning"
    assert TaskInfo.from_json(data) == info
    error = ExecutionError("Code", "text", ErrorKind.SYSTEM)
    assert ExecutionError.from_json(error.to_json()) == error


@pytest.mark.parametrize("data", [None, [], {"logs": 1}, {"external_resources": [1]}, {"occurred_at": "yesterday"}])
def test_other_json_is_undecodable(data: object) -> None:
    with pytest.raises(Undecodable):
        TaskInfo.from_json(data)
