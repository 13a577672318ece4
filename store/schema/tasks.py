"""The records of task executions: what operators ask for, what the engine knows, the history; and of cached results.

An engine owns an execution as a farm owns an RC, by the session on its `owner` key. Only the owner writes `state` and
the events. Times are seconds since the epoch, as the state machine computes with them; those that only people read are
RFC 3339 text. A cached result and its reservation stand in one key, so that a result and the end of its reservation are
one write.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from store.schema.records import Count, Labels, Quantity, StoredRecord

Moment = Annotated[float, msgspec.Meta(ge=0, le=253402300799.0)]  # up to the year 9999; 0: has not happened
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # 0: no limit
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
Units = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Weight = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
StateVersion = Annotated[int, msgspec.Meta(ge=0, le=255)]

Name = Annotated[str, msgspec.Meta(max_length=1024)]  # parts of keys, tickets, names and messages
ResourceName = Annotated[str, msgspec.Meta(max_length=256)]

TaskPhase = Literal[
    "PhaseUndefined",
    "PhaseNotReady",
    "PhaseWaitingForResources",
    "PhaseQueued",
    "PhaseInitializing",
    "PhaseRunning",
    "PhaseSuccess",
    "PhaseRetryableFailure",
    "PhasePermanentFailure",
    "PhaseWaitingForCache",
    "PhaseAborted",
]
ErrorKind = Literal["UNKNOWN", "USER", "SYSTEM"]
CacheStatus = Literal[
    "", "DISABLED", "MISS", "HIT", "POPULATED", "LOOKUP_FAILURE", "PUT_FAILURE", "SKIPPED"
]  # as Flyte's CatalogCacheStatus; "" until it was looked up
TaskOutcome = Literal["", "success", "failure", "timeout", "aborted", "retry"]
END_CODES: dict[TaskOutcome, str] = {
    "success": "",
    "failure": "task_failed",
    "timeout": "task_timed_out",
    "aborted": "task_aborted",
}  # of the reason of an execution that has ended
SHOWN_OF_ERROR = 200  # characters of an error where executions are listed
CleanupStep = Literal["abort", "finalize", "put_cache", "release_reservation"]
WaitCode = Literal[
    "Infeasible",
    "LimitReached",
    "KeyLimitReached",
    "RateLimited",
    "BehindHigherPriority",
    "FairShare",
    "Parent",
    "Dependency",
    "Backoff",
    "RemoteUnknown",
    "PluginPaused",
    "EngineMissing",
    "Plugin",
    "CleaningUp",
]


class AbortRequest(StoredRecord, frozen=True, kw_only=True):
    """An operator's request to stop. `force`: end also when the plugin can't stop what it began."""

    reason: str = ""
    by: str = ""
    at: str = ""
    force: bool = False


class TaskSpec(StoredRecord, frozen=True, kw_only=True):
    """`tasks/<shard>/<id>/spec`: the desired execution. Only operators write it.

    - `name`: for people; default: `id`. `config`: the plugin's own part. `outputs`: declared types by name.
    - `retries`: after failures of the user's kind. `quotas`: units per resource, granted before the plugin is called.
    - `priority`: higher first. `fair_key`: who shares fairly; default: the project. `weight`: of that share.
    - `queue_timeout`: waiting in one attempt; `execution_timeout`: running in one attempt; `active_deadline`: since the
      execution was first queued, over all attempts. Seconds; 0: none.
    - `cache_version`: "" for no cache. `plugin`: the id of a plugin to use instead of the type's default.
    - `depends_on`: ids of executions that must succeed first.
    - `generation` grows with every edit; `rerun` with every request to run an ended execution again.
    """

    id: Name
    type: Name
    project: Name = "default"
    domain: Name = "default"
    name: Name = ""
    namespace: Name = ""
    inputs: dict[str, Any] = {}
    config: dict[str, Any] = {}
    outputs: dict[str, str] = {}
    retries: Count = 0
    quotas: Annotated[dict[ResourceName, Units], msgspec.Meta(max_length=8)] = {}
    priority: Priority = 0
    fair_key: Name = ""
    weight: Weight = 1.0
    queue_timeout: Seconds = 0.0
    execution_timeout: Seconds = 0.0
    active_deadline: Seconds = 0.0
    cache_version: Name = ""
    cache_serialize: bool = False
    cache_overwrite: bool = False
    interruptible: bool = False
    labels: Labels = {}
    annotations: Labels = {}
    environment: Labels = {}
    service_account: Name = ""
    resources: dict[str, Any] = {}
    depends_on: tuple[Name, ...] = ()
    plugin: Name = ""
    abort: AbortRequest | None = None
    generation: Quantity = 1
    rerun: Count = 0
    created_at: str = ""
    submitted_by: str = ""
    schedule: str = ""


class TaskError(StoredRecord, frozen=True):
    """The error that ended an attempt. `kind`: whose budget it is charged to."""

    code: str
    message: str
    kind: ErrorKind = "UNKNOWN"


class Wait(StoredRecord, frozen=True):
    """The reason why an execution does not run. `until`: when that changes by the clock alone; 0 where unknown.

    `Plugin`: the plugin has it, and reports a phase before Running. `CleaningUp`: the plugin stops what it began.
    """

    code: WaitCode
    message: str
    since: Moment = 0.0
    until: Moment = 0.0


class RemoteIntent(StoredRecord, frozen=True):
    """Written before anything external is created. `key`: the idempotency key that the creation carries."""

    key: str
    at: Moment


class TaskState(StoredRecord, frozen=True, kw_only=True):
    """`tasks/<shard>/<id>/state`: what the owner knows. `generation` and `rerun`: of the spec that it acted on.

    - `step`: what comes next. `outcome` and `pending`: the decided end of the attempt, and what is left to clean up.
    - `version`, `digest`: of what the last event of the phase showed. `attempt` counts from 0, also over reruns.
    - `cleanup`: the plugin asked that its abort be called after a failure.
    - `granted`: resources whose units the execution holds. `reserved`: it holds the cache's reservation.
    - `queued_at`: first queueing; `waiting_at`: since when the attempt queues, 0 if it does not; `running_at`: the
      attempt's first Initializing or Running; `retry_at`: no call before this time.
    - `is_lost`: the state was deleted, and nothing knows what the attempt has begun; its plugin is called to stop only.
    - `round_errors`: failed calls in a row. Events up to, and without, `sent` have left the outbox.
    """

    generation: Quantity = 0
    rerun: Count = 0
    step: Literal["admitting", "running", "cleaning", "done"] = "admitting"
    phase: TaskPhase = "PhaseUndefined"
    version: Count = 0
    digest: str = ""
    plugin: str = ""
    attempt: Count = 0
    user_failures: Count = 0
    system_failures: Count = 0
    plugin_state: Any = None
    plugin_state_version: StateVersion = 0
    cleanup: bool = False
    outcome: TaskOutcome = ""
    pending: tuple[CleanupStep, ...] = ()
    error: TaskError | None = None
    reason: str = ""
    reasons: tuple[Wait, ...] = ()
    info: dict[str, Any] | None = None
    granted: tuple[str, ...] = ()
    cache: CacheStatus = ""
    reserved: bool = False
    intent: RemoteIntent | None = None
    is_lost: bool = False
    created: Moment = 0.0
    queued_at: Moment = 0.0
    attempt_at: Moment = 0.0
    waiting_at: Moment = 0.0
    running_at: Moment = 0.0
    ended_at: Moment = 0.0
    round_errors: Count = 0
    round_error: str = ""
    retry_at: Moment = 0.0
    next_event: Count = 0
    sent: Count = 0
    token: Quantity = 0

    @property
    def end_code(self) -> str:
        """Return the code of the reason for an end without success; "" for a success, and before the end."""
        return END_CODES.get(self.outcome, "task_failed") if self.step == "done" else ""

    @property
    def end_message(self) -> str:
        """Return the error in one line, in which others are listed, too."""
        text = f"{self.error.code}: {self.error.message}" if self.error else self.reason
        return " ".join(text.split())[:SHOWN_OF_ERROR]


class TaskOwner(StoredRecord, frozen=True):
    """`tasks/<shard>/<id>/owner`: the engine that holds, or last held, the execution. Only the key's session says
    whether it is held now."""

    engine: str
    since: str


class TaskEvent(StoredRecord, frozen=True, kw_only=True):
    """`task-events/<shard>/<id>/<n>`: one entry of the history, and of the outbox. (id, attempt, n) identifies it.

    `kind`: transition: the phase, or what the plugin reports of it, changed; raw: the plugin recorded it; abort: the
    execution has ended by request; retry: an attempt begins after a failed one, or the execution runs again.
    """

    n: Count
    at: Moment
    attempt: Count
    phase: TaskPhase
    version: Count = 0
    kind: Literal["transition", "raw", "abort", "retry"] = "transition"
    reason: str = ""
    error: TaskError | None = None
    info: dict[str, Any] | None = None


class EnginePause(StoredRecord, frozen=True, kw_only=True):
    """A plugin or a sink that an engine has paused, because its calls fail for one execution after the other.

    `calls`: of a plugin. `types`: of the tasks that it handles by default. `probe_at`: when it is tried next; `probes`:
    tries that failed. `error`: of the last one.
    """

    kind: Literal["plugin", "sink"]
    name: str
    calls: Literal["", "handle", "clean-up"] = ""
    types: tuple[str, ...] = ()
    since: Moment = 0.0
    probe_at: Moment = 0.0
    probes: Count = 0
    error: str = ""


class TaskFailure(StoredRecord, frozen=True):
    """An execution that failed or timed out. `code`: of the list of reasons; `message`: the error, in one line."""

    id: str
    code: str
    message: str = ""
    at: Moment = 0.0


class EngineLoad(StoredRecord, frozen=True, kw_only=True):
    """What an engine has in hand. `owned`: executions; `phases`: how many of them are in each phase, or "cleaning".

    `waits`: how many wait for a reason of each code. `undelivered`: executions with events that a sink has not taken.
    `failures`: the newest that failed or timed out since the engine started, the oldest first.
    """

    owned: Count = 0
    phases: dict[str, Count] = {}
    waits: dict[str, Count] = {}
    undelivered: Count = 0
    failures: tuple[TaskFailure, ...] = ()


class EngineMember(StoredRecord, frozen=True, kw_only=True):
    """`engines/<engine>`: a member; alive while the key carries a session."""

    engine: str
    selector: str = ""
    since: str = ""
    address: str = ""
    version: str = ""
    layout: Count = 1  # of the keys that the engine reads and writes
    pauses: tuple[EnginePause, ...] = ()
    load: EngineLoad = EngineLoad()  # as of the last calm moment

    @property
    def name(self) -> str:
        """The engine's name, as all kinds of members have one."""
        return self.engine


class CachedResult(StoredRecord, frozen=True, kw_only=True):
    """A result. `outputs`: the reference of the document in the data store. `sha256` and `size` (bytes) are the
    document's. `metadata`: where the result comes from, for people."""

    outputs: str
    sha256: str
    size: Quantity
    created_at: str
    metadata: Labels = {}


class Reservation(StoredRecord, frozen=True):
    """The right to produce the result. `owner`: `<execution>/<attempt>`. `until`: seconds since the epoch; after that
    another owner may take it."""

    owner: str
    until: Moment


class CatalogEntry(StoredRecord, frozen=True, kw_only=True):
    """`catalog/<digest>`: `task` and `cache_version` are parts of what the digest identifies, for people."""

    task: str = ""
    cache_version: str = ""
    result: CachedResult | None = None
    reservation: Reservation | None = None
