"""The error line and exit code for each exception.

An error that a user, a store or the network can cause becomes one line. Any other is a bug in rcfarm and keeps its
traceback.
"""

from __future__ import annotations

from typing import NamedTuple

from rcfarm.operations.errors import ChangedSincePlanned
from store.errors import RcfarmError
from store.kube.api.errors import Unauthorized
from store.kv.protocol import BadRecord

ERROR = 1
NOT_FULLY_PLACED = 2
CHANGED_SINCE_PLANNED = 3


class ErrorLine(NamedTuple):
    text: str
    exit_code: int


class UsageProblem(RcfarmError):
    """Invalid usage; the message says what to write instead."""


def explain(error: Exception) -> ErrorLine | None:
    """Return the line and the exit code, or None if the error is a bug in this program."""
    if isinstance(error, ChangedSincePlanned):
        return ErrorLine(str(error), CHANGED_SINCE_PLANNED)
    if isinstance(error, BadRecord):
        return ErrorLine(f"{error}; `rcfarm doctor` lists every record that can't be read", ERROR)
    if isinstance(error, Unauthorized):
        text = f"{error}; the API server does not accept these credentials: log in again, or choose another --context"
        return ErrorLine(text, ERROR)
    if isinstance(error, RcfarmError):
        return ErrorLine(str(error), ERROR)
    return None
