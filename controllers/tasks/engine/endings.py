"""How executions have ended in an engine since it started: counted by code, and the newest that need attention."""

from __future__ import annotations

from collections import Counter

from store.schema.tasks import END_CODES, TaskFailure, TaskState

KEPT = 10  # failures that are named


class Endings:
    """`counts`: by code of the reason. `failures`: those that failed or timed out, by id, the newest last; one that
    has ended otherwise since is left out."""

    def __init__(self) -> None:
        self.counts = Counter(dict.fromkeys(filter(None, END_CODES.values()), 0))
        self.failures: dict[str, TaskFailure] = {}

    def note(self, execution: str, state: TaskState) -> None:
        """Record that an execution has ended in this state."""
        self.failures.pop(execution, None)
        code = state.end_code
        if not code:
            return
        self.counts[code] += 1
        if code != "task_aborted":
            self.failures[execution] = TaskFailure(execution, code, state.end_message, state.ended_at)
            for surplus in list(self.failures)[:-KEPT]:
                del self.failures[surplus]
