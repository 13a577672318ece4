"""How a barrier ends: its exit codes, of which the operator knows two by `controllers.framework.codes`."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from controllers.framework import codes


class Exit(IntEnum):
    PASSED = 0
    """The gang is whole, the files are written."""

    FAILED = 1
    """Nothing could be found out about the gang, or nothing could be written."""

    CRASHED = 2
    """A defect of the barrier."""

    TRANSIENT = codes.CONTAINER_TRANSIENT_CONFLICT_FAILED
    """The gang is not whole. With a fancy policy the Framework is retried after a random delay."""

    PERMANENT = codes.CONTAINER_PERMANENT_FAILED
    """The gang will never be whole for this pod. With a fancy policy nothing is retried."""


_MEANINGS = {
    Exit.PASSED: "passed",
    Exit.FAILED: "failed, for another reason than the gang's",
    Exit.CRASHED: "a defect of the barrier",
    Exit.TRANSIENT: "transient conflict, the Framework may be retried after a delay",
    Exit.PERMANENT: "permanent, a retry would not help",
}


class Outcome(NamedTuple):
    """An exit code and why it is this one."""

    exit: Exit
    reason: str

    def __str__(self) -> str:
        """The last line of the log."""
        return f"exit {self.exit.value} ({_MEANINGS[self.exit]}): {self.reason}"
