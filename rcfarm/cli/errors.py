"""What users are told when something goes wrong, and with which exit code.

One line per error that a person, a store or the network can cause. Everything else is a defect of rcfarm and keeps its
traceback.
"""

from __future__ import annotations

from typing import NamedTuple

from rcfarm.node_store import NodeError
from rcfarm.rc_errors import ChangedSincePlanned, RCError
from scheduler.hived.errors import HivedError
from store.kube.errors import KubeError, Unauthorized
from store.kv import StoreError
from store.records import BadRecord
from store.selectors import BadLabel, BadSelector

ERROR = 1
NOT_FULLY_PLACED = 2
CHANGED_SINCE_PLANNED = 3


class Explained(NamedTuple):
    text: str
    exit_code: int


class UsageProblem(Exception):
    """What was asked for can't be meant; the message says what to write instead."""


def explain(error: Exception) -> Explained | None:
    """The line and the exit code, or None when the error is a defect of this program."""
    if isinstance(error, ChangedSincePlanned):
        return Explained(str(error), CHANGED_SINCE_PLANNED)
    if isinstance(error, RCError | NodeError | UsageProblem | BadLabel | BadSelector):
        return Explained(str(error), ERROR)
    if isinstance(error, BadRecord):
        return Explained(f"{error}; `rcfarm doctor` lists every record that can't be read", ERROR)
    if isinstance(error, Unauthorized):
        text = f"{error}; the API server does not accept these credentials: log in again, or choose another --context"
        return Explained(text, ERROR)
    if isinstance(error, StoreError | KubeError | HivedError):
        return Explained(str(error), ERROR)
    return None
