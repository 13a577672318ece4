"""The vocabulary of the state machine: the actions that it asks the engine for, and the outcomes that answer them.

An execution has at most one action in flight. Each action has one type of outcome, `Handle` has three; `Declared` and
`Sent` answer no action and may come at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from controllers.tasks.api.phase import ExecutionError, PhaseInfo, Transition
from store.schema.tasks import CacheStatus, CleanupStep, ErrorKind, TaskEvent, TaskSpec, TaskState, Wait


@dataclass(frozen=True)
class LookUp:
    """Look the result up in the catalog. `reserve`: on a miss, get the reservation, or extend one's own."""

    reserve: bool


@dataclass(frozen=True)
class Admit:
    """Request units per resource, all of them or none. The grants belong to the transaction that saves the outcome."""

    quotas: Mapping[str, int]


@dataclass(frozen=True)
class Handle:
    """Call the plugin's `handle`; after a success, also read the outputs."""

    attempt: int


@dataclass(frozen=True)
class CleanUp:
    """Do the steps in their order, for the attempt; an error of one does not stop the others."""

    attempt: int
    steps: tuple[CleanupStep, ...]
    reason: str


Action = LookUp | Admit | Handle | CleanUp


@dataclass(frozen=True)
class CacheAnswered:
    """`held_by`: another execution that holds the reservation, and so computes the result; "" if none does."""

    status: Literal["HIT", "MISS", "LOOKUP_FAILURE", "DISABLED"]
    held_by: str = ""


@dataclass(frozen=True)
class Admitted:
    """`granted`: all units are held. `waits`: why they are not; one of `Infeasible` fails the execution."""

    granted: bool
    waits: tuple[Wait, ...] = ()


@dataclass(frozen=True)
class Outputs:
    """What an attempt's output reader shows. `names`: the outputs that exist. `dynamic`: the attempt has planned more
    work instead, and its outputs are not checked."""

    names: frozenset[str] = frozenset()
    error: ExecutionError | None = None
    recoverable: bool = False
    dynamic: bool = False


@dataclass(frozen=True)
class Handled:
    """The plugin returned. `state_write`: value and version, (None, 0) after a reset, None if it wrote nothing.

    `raw`: events that it recorded. `outputs`: None if it put no reader. `waits`: refusals of its own resource requests.
    `checkpoint`: the path of the attempt's checkpoints, shown with its end.
    """

    transition: Transition
    state_write: tuple[Any, int] | None = None
    raw: tuple[PhaseInfo, ...] = ()
    outputs: Outputs | None = None
    waits: tuple[Wait, ...] = ()
    plugin: str = ""
    checkpoint: str = ""


@dataclass(frozen=True)
class RoundFailed:
    """The plugin raised, hung, or returned nonsense. An error that is not `retryable` fails the execution at once.

    `fault`: the plugin, or the system that it drives, is at fault; not the execution.
    """

    message: str
    retryable: bool = True
    code: str = "PluginError"
    kind: ErrorKind = "SYSTEM"
    fault: bool = False


@dataclass(frozen=True)
class Held:
    """The plugin can't be called, or can't go on: RemoteUnknown, PluginPaused, EngineMissing. No budget is charged."""

    wait: Wait


@dataclass(frozen=True)
class CleanedUp:
    """All steps were tried; "" stands for success. `cache`: the result of `put_cache`. `fault`: as of `RoundFailed`."""

    abort_error: str = ""
    finalize_error: str = ""
    cache: CacheStatus = ""
    fault: bool = False


@dataclass(frozen=True)
class Declared:
    """The plugin declares the idempotency key of what it is about to create."""

    key: str


@dataclass(frozen=True)
class Sent:
    """The events below this number have left the outbox."""

    up_to: int


Outcome = CacheAnswered | Admitted | Handled | RoundFailed | Held | CleanedUp | Declared | Sent


@dataclass(frozen=True)
class Backoff:
    """Delays in seconds that double from `base` to `cap`."""

    base: float
    cap: float

    def delay(self, failures: int, jitter: float) -> float:
        """Return the delay after that number of failures in a row. `jitter`: 0 to 1; 1 halves the delay."""
        return min(self.cap, self.base * 2.0 ** min(failures - 1, 60)) * (1 - jitter / 2)


@dataclass(frozen=True)
class Policy:
    """The engine's limits. As in Flyte, except that round errors count in a row, per execution.

    `max_system_failures`: retries after failures of the system's kind. `interruptible_failures`: system failures after
    which an execution is no longer interruptible. `max_round_errors`: failed calls in a row that are repeated.
    `cache_poll`: seconds between looks at a result that another execution computes.
    """

    max_system_failures: int = 3
    interruptible_failures: int = 1
    max_phase_versions: int = 100_000
    max_round_errors: int = 10
    cache_poll: float = 10.0
    round_backoff: Backoff = Backoff(1.0, 30.0)
    retry_backoff: Backoff = Backoff(1.0, 60.0)
    cleanup_backoff: Backoff = Backoff(1.0, 60.0)


@dataclass(frozen=True)
class Execution:
    """One execution as the store has it. `state`: as last committed; None if no engine has handled it.

    `dependencies`: the state of each of `spec.depends_on`; one that is not named does not exist yet, and is waited for.
    `token`: the fencing token of the engine's ownership.
    """

    spec: TaskSpec
    state: TaskState | None = None
    dependencies: Mapping[str, Literal["succeeded", "failed", "pending"]] = field(default_factory=dict)
    token: int = 0


@dataclass(frozen=True)
class Step:
    """State, events and, if `release`, the release of all units are one transaction; the action follows it.

    `release`: the remote work is known to have ended, so the execution's grants and tickets go. `wake`: when to step
    next if nothing happens before, in seconds since the epoch and in the future; None: never.
    """

    state: TaskState
    events: tuple[TaskEvent, ...]
    action: Action | None
    release: bool
    wake: float | None
