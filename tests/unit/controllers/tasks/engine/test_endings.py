"""What an engine remembers of the executions that ended."""

from __future__ import annotations

from controllers.tasks.engine.endings import KEPT, Endings
from store.schema.tasks import TaskError, TaskFailure, TaskOutcome, TaskState


def ended(outcome: TaskOutcome, at: float = 0.0) -> TaskState:
    return TaskState(step="done", outcome=outcome, ended_at=at, error=TaskError("Exit", "4\n  on n1"))


def test_ends_are_counted_by_code_and_failures_are_named() -> None:
    """Every code is there from the beginning, so that its first increase is one. An abort needs no attention, and one
    that has succeeded since is left out."""
    endings = Endings()
    assert endings.counts == {"task_failed": 0, "task_timed_out": 0, "task_aborted": 0}
    outcomes: list[TaskOutcome] = ["failure", "timeout", "aborted", "success", "failure"]
    for number, outcome in enumerate(outcomes):
        endings.note(f"t{number}", ended(outcome, number))
    endings.note("t4", ended("success"))
    assert endings.counts == {"task_failed": 2, "task_timed_out": 1, "task_aborted": 1}
    assert list(endings.failures.values()) == [
        TaskFailure("t0", "task_failed", "Exit: 4 on n1", 0),
        TaskFailure("t1", "task_timed_out", "Exit: 4 on n1", 1),
    ]


def test_only_the_newest_failures_are_named() -> None:
    endings = Endings()
    for number in range(3 * KEPT):
        endings.note(f"t{number}", ended("failure"))
    assert list(endings.failures) == [f"t{number}" for number in range(2 * KEPT, 3 * KEPT)]
