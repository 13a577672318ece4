"""The records kept in the store: JSON values with a strict schema.

Every record is read with `decode`: a value that does not fit raises `BadRecord`, which names the key, the field and the
reason, so a caller that lists records can skip a bad one and keep the rest.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from store.decoding import Undecodable, from_json
from store.kv.protocol import BadRecord

RC_ID_LABEL = "replication_controller_id"  # on every pod that an RC placed (p2's RCIDLabel)
POD_ID_LABEL = "pod_id"
ALL_NODES = 1_000_000  # `replicas_desired` of a daemon set: one pod on each node; any farm keeps what it has placed
TASK_LABEL = "task_execution_id"  # on a pod that a task's execution placed; it belongs to no RC

Labels = dict[str, str]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Number = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
MAX_QUANTITY = 2**63 - 1  # larger numbers can't be written as JSON or as a metric
Quantity = Annotated[int, msgspec.Meta(ge=0, le=MAX_QUANTITY)]


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A tree of plain data. The garbage collector ignores these objects, which can't be part of a reference cycle: a
    farm keeps tens of thousands, and traversing them blocked its loop for tens of milliseconds."""


class Meta(StoredRecord, frozen=True):
    """`<root>/meta`: facts that every program must agree on."""

    schema: Count = 1
    shards: Annotated[int, msgspec.Meta(ge=1, le=256)] = 32


Amount = Annotated[str, msgspec.Meta(pattern="^([0-9]{1,9}|[0-9]{1,3}%)$")]  # a number of pods, or a share of them
Share = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,3}%$")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**9)]


class HttpAnalysis(StoredRecord, frozen=True, kw_only=True):
    """A GET of `url` that must be answered with `status`; None: with any of 200 to 299."""

    url: str
    """What is got."""

    status: int | None = None
    """The status that is a success. Default: any of 200 to 299."""


class PrometheusAnalysis(StoredRecord, frozen=True, kw_only=True):
    """An instant query to the Prometheus at `url`. It must return one number, for which `condition` holds: `< 0.01`."""

    url: str
    """The server, such as `http://prometheus:9090`."""

    query: str
    """An instant query that returns one number."""

    condition: str
    """What must hold for the number, such as `< 0.01`."""


class Analysis(StoredRecord, frozen=True, kw_only=True):
    """A question that the owner asks during a rollout: of an HTTP server, Prometheus or a command."""

    name: str
    """Its name, in the status and in reasons."""

    http: HttpAnalysis | None = None
    """A GET of an HTTP server. Exactly one of `http`, `prometheus` and `command` is needed."""

    prometheus: PrometheusAnalysis | None = None
    """A query to Prometheus."""

    command: str = ""
    """The name of a command that the farms' `farm.analysis_commands` lists."""

    interval: Seconds = 60.0
    """Seconds between two runs. Default: 60."""

    timeout: Seconds = 10.0
    """Seconds that one run may take. Default: 10."""

    failure_limit: Count = 0
    """Failures that the rollout survives. Default: 0."""


AnalysisOutcome = Literal["success", "failure", "no_data", "error"]


class AnalysisResult(StoredRecord, frozen=True, kw_only=True):
    """What the runs of an analysis came to. `outcome`, `value` and `at` are those of the last run: `value` is what was
    measured, a number, a status or an exit code, or why there is no answer.

    `failures`: of the whole rollout; `errors`: in a row; `passed`: successes since the rollout came into its state.
    """

    name: str
    outcome: AnalysisOutcome
    value: str = ""
    at: str = ""
    failures: Count = 0
    errors: Count = 0
    passed: Count = 0


class UpdatePolicy(StoredRecord, frozen=True, kw_only=True):
    """How a changed manifest is rolled out to the pods of an RC.

    `canary`: pods that get it first, none to begin with waves at once. `canary_selector`: labels of the nodes that they
    are on, of whose pods a share is one then; "": of any. `max_unavailable`: pods that may be away at a
    time; None: that of the spec. `max_surge`: pods beyond the replicas, on further nodes, while it lasts. Shares are
    of the replicas; those of `canary` and `max_surge` are rounded up, those of `max_unavailable` down.

    In seconds: `min_healthy_time` that a pod must pass without interruption to count; `healthy_deadline` within which
    a changed pod must count; `progress_deadline` within which a further one must; `soak` from the last one to the end.
    `analysis`: what must succeed besides. `wave_by`: a label of nodes; after the canary, the pods on nodes with one
    value of it are changed before those with the next. "": there is no such order.
    """

    canary: Amount = "1"
    canary_selector: str = ""
    max_unavailable: Amount | None = None
    max_surge: Amount = "0"
    min_healthy_time: Seconds = 10.0
    healthy_deadline: Seconds = 300.0
    progress_deadline: Seconds = 600.0
    auto_promote: bool = True
    auto_revert: bool = True
    soak: Seconds = 0.0
    wave_by: str = ""
    analysis: tuple[Analysis, ...] = ()

    @property
    def surges(self) -> bool:
        """Return whether there may be pods beyond the replicas."""
        return self.max_surge not in ("0", "0%")


_DEFAULT_POLICY = UpdatePolicy()


class RCSpec(StoredRecord, frozen=True, kw_only=True):
    """`spec`: the desired state of a replication controller. An absent `replicas_desired` is an error, never zero.

    `revision` counts the manifests that the RC has had; the former ones are kept under `revisions/`. `revised_by` and
    `revised_at`: who gave it the present one, and when; "" where no client wrote it down.

    A daemon set has a pod on each node that matches; `tolerate_drain`: it keeps them while nodes are emptied. `spread`:
    a label of nodes, over whose values the pods are spread, before they are spread over nodes; "": only over nodes.
    """

    id: str
    manifest: str
    replicas_desired: Count
    node_selector: str = ""
    pod_labels: Labels = {}
    rc_labels: Labels = {}
    disabled: bool = False
    allocation_strategy: Literal["static", "dynamic"] = "static"
    max_unavailable: Count = 1
    deleting: bool = False
    generation: Quantity = 1
    update: UpdatePolicy | None = None
    revision: Quantity = 1
    revised_by: str = ""
    revised_at: str = ""
    tolerate_drain: bool = False
    spread: str = ""

    @property
    def is_daemon_set(self) -> bool:
        """Return whether it has a pod on each node that matches, however many there are."""
        return self.replicas_desired == ALL_NODES

    @property
    def policy(self) -> UpdatePolicy:
        """How a changed manifest is rolled out."""
        return self.update or _DEFAULT_POLICY


class Revision(StoredRecord, frozen=True, kw_only=True):
    """`revisions/<number>`: a manifest that the RC had before the present one. `stable`: a rollout of it was done."""

    number: Quantity
    manifest: str
    by: str = ""
    at: str = ""
    stable: bool = False


class DeletedRC(StoredRecord, frozen=True, kw_only=True):
    """`deleted/<rc>`: what an RC was when its owner removed it, so that it can be restored.

    `manifest`: the last one that was rolled out to the end, which is not the spec's when its rollout was not done.
    `until`: when the record is removed; "" for never.
    """

    spec: RCSpec
    manifest: str
    farm: str
    deleted_at: str
    until: str = ""


class PersonsLock(StoredRecord, frozen=True):
    """`lock`: a person has locked the RC, and why. It stays until it is removed, as no process of that person lives."""

    holder: str
    reason: str
    since: str


class Owner(StoredRecord, frozen=True):
    """`owner`: the farm that holds, or last held, the RC. Only the key's session says whether it is held now."""

    farm: str
    since: str


class Mutation(StoredRecord, frozen=True):
    """`mutation`: who is changing the RC under the mutation lock, and why."""

    holder: str
    reason: str
    since: str


class Reason(StoredRecord, frozen=True):
    """The reason why something was not done. `code` is stable, for programs; `message` tells people what to do.

    `since`: when it was noticed; `until`: when the owner will act on it. "" where that is not known.
    """

    code: str
    message: str
    nodes: tuple[str, ...] = ()
    since: str = ""
    until: str = ""


RolloutState = Literal[
    "pending",
    "canary",
    "awaiting_promotion",
    "rolling",
    "soaking",
    "done",
    "paused",
    "reverting",
    "reverted",
    "aborted",
    "failed",
]


BEFORE_PROMOTION: frozenset[RolloutState] = frozenset({"pending", "canary", "awaiting_promotion"})
ROLLING_OUT: frozenset[RolloutState] = BEFORE_PROMOTION | {"rolling", "soaking"}
ROLLOUT_STOPPED: frozenset[RolloutState] = frozenset({"reverted", "aborted", "failed"})


class Rollout(StoredRecord, frozen=True, kw_only=True):
    """`rollout`: what the owner records of the last rollout of the RC.

    `manifest` and `revision` are what is rolled out; `stable` and `stable_revision` what it is reverted to, "" and 0
    when there is nothing. `resumes`: the state before a pause. `reason`: why it waits, was reverted or failed.
    `progressed`: when a pod was last changed, or the number of changed pods that count last rose. `late`: nodes whose
    agent has not answered since their intent was changed: nothing waits for them. `request`: the last request that was
    obeyed. `analysis`: the results of those that have run since the last resumption.
    """

    revision: Quantity
    manifest: str
    stable: str = ""
    stable_revision: Quantity = 0
    state: RolloutState
    since: str
    started: str
    progressed: str
    reason: Reason | None = None
    resumes: RolloutState = "pending"
    late: tuple[str, ...] = ()
    updated: Count = 0
    request: str = ""
    analysis: tuple[AnalysisResult, ...] = ()

    def is_of(self, spec: RCSpec) -> bool:
        """Return whether this is the rollout of what the spec asks for now."""
        return self.manifest == spec.manifest and self.revision == spec.revision

    @property
    def is_stopped(self) -> bool:
        """Return whether it ended, or is about to end, without its revision."""
        return self.state == "reverting" or self.state in ROLLOUT_STOPPED


def effective_manifest(spec: RCSpec, rollout: Rollout | None) -> str:
    """Return the manifest that the pods should run in the end: the spec's, unless its rollout was stopped."""
    if rollout is None or not rollout.is_of(spec) or not rollout.is_stopped:
        return spec.manifest
    return rollout.stable or spec.manifest


def proven_manifest(spec: RCSpec, rollout: Rollout | None) -> str:
    """Return the manifest of the last rollout that was done; the spec's if there is none."""
    if rollout is None:
        return spec.manifest
    return rollout.manifest if rollout.state == "done" else rollout.stable or spec.manifest


class RolloutRequest(StoredRecord, frozen=True, kw_only=True):
    """`rollout-request`: what an operator asks of the rollout of a revision. `id` is new with each request.

    `shrink`: that a daemon set may lose pods until `least` are left, within a short time from `at`.
    """

    id: str
    verb: Literal["pause", "resume", "promote", "abort", "shrink"]
    revision: Quantity
    by: str = ""
    at: str = ""
    least: Count = 0


HandoverState = Literal["pending", "running", "done", "aborted"]


class Handover(StoredRecord, frozen=True, kw_only=True):
    """`handover`: the pods of the RC `old` pass to the RC `new`, node by node (p2's rolling update of two RCs).

    Both folders have the same record, so that neither RC can be in two of them. `desired`: pods that `new` has in the
    end; `minimum`: pods of both that stay healthy; `leave_old`: whether `old` is kept without its pods. `reason`: what
    it waits for, or why it ended.
    """

    old: str
    new: str
    desired: Count
    minimum: Count
    leave_old: bool = False
    state: HandoverState = "pending"
    started: str = ""
    by: str = ""
    reason: Reason | None = None

    @property
    def is_active(self) -> bool:
        """Return whether it has not ended."""
        return self.state in ("pending", "running")


class NodeTransfer(StoredRecord, frozen=True):
    """A node transfer in progress."""

    id: str
    old_node: str
    new_node: str

    @property
    def ends(self) -> tuple[str, str]:
        """The node that the pod leaves, and the one that it moves to."""
        return self.old_node, self.new_node


RCState = Literal["converged", "progressing", "short", "held", "quarantined", "disabled", "deleting"]


class RCStatus(StoredRecord, frozen=True, kw_only=True):
    """`status`: what the owner last observed and did. `generation` is that of the spec that it acted on.

    `completed`: pods whose processes have all ended with success and are not restarted; they count as healthy.
    """

    state: RCState
    generation: Quantity
    desired: Count
    placed: Count
    healthy: Count
    farm: str
    token: Quantity
    reasons: tuple[Reason, ...] = ()
    node_transfer: NodeTransfer | None = None
    updated_at: str = ""
    completed: Count = 0


NO_SPACE = "no space left on the disk"  # begins every message about a full disk, or follows its colon
HealthState = Literal["passing", "warning", "critical", "unknown"]


class Health(StoredRecord, frozen=True):
    """`health/<node>`: the agent's verdict on one pod; it counts only while the key carries the agent's session.

    `condition` adds to the status; "" for an ordinary pod. Readers ignore conditions that they do not know:

    - crashing: a process has ended and is being restarted, or has not yet stayed up for long enough
    - restarted: the pod passes, but has crashed repeatedly within the last minutes
    - blocked: the pod can't be brought to its intent; `manifest` is what runs, or what can't be started
    - failed, completed: the processes have ended and, by their restart policy, are not restarted

    `cause` explains the condition. `restarts` counts the starts after the first one when the record was written, which
    happens at 1, 2, 3, 5, 10, 20, 30, 50, 100, … restarts.
    """

    status: HealthState
    manifest: str
    output: str = ""
    since: str = ""
    condition: str = ""
    cause: str = ""
    restarts: Quantity = 0

    @property
    def is_blocked_by_disk(self) -> bool:
        """Return whether the pod can't be brought to its intent because its agent's disk is full."""
        return self.condition == "blocked" and NO_SPACE in self.cause


class Capacity(StoredRecord, frozen=True):
    """The capacity of a node, or the request of a pod. `cpu` in millicores, `memory` in bytes, `devices` per kind."""

    cpu: Quantity = 0
    memory: Quantity = 0
    devices: dict[str, Count] = {}


class NodeSpec(StoredRecord, frozen=True, kw_only=True):
    """`nodes/<node>/spec`. `schedulable` false: no new pods. `evict`: the pods on the node should leave, too."""

    name: str
    labels: Labels = {}
    capacity: Capacity = Capacity()
    schedulable: bool = True
    evict: bool = False


class Enforcement(StoredRecord, frozen=True, kw_only=True):
    """How an agent holds pods to their limits. `enforced`: the limits of a launchable that hold for its whole tree of
    processes. `tree`: whether a pod's processes die with it, those that left their session included. `why`: what is in
    the way of the rest, and what to do; "" if nothing is."""

    by: Literal["cgroup v2", "cgroup v1", "rlimits"]
    enforced: tuple[Literal["memory", "cpu", "pids"], ...] = ()
    tree: bool = False
    why: str = ""

    @property
    def words(self) -> str:
        """The limits that hold, those that do not, and why: `memory, cpu, pids by cgroup v1`."""
        held = f"{', '.join(self.enforced)} by {self.by}" if self.enforced else ""
        parts = [] if "memory" in self.enforced else ["memory of each process by rlimits"]
        missing = [name for name in ("cpu", "pids") if name not in self.enforced]
        parts += [f"{' and '.join(missing)} not at all"] if missing else []
        parts += [] if self.tree else ["processes that leave their session are out of reach"]
        parts = [held, *parts] if held else parts
        return "; ".join(parts) + (f" ({self.why})" if self.why else "")


class NodeAlive(StoredRecord, frozen=True):
    """`nodes/<node>/alive`: the running agent; the node is alive while the key carries a session.

    `limits`: None of an agent that does not report them. `listener`: the URL at which it serves logs and runs commands;
    "" where it does not. `loopback`: identifies the machine (or container) on whose loopback it listens; "" for a
    listener beyond loopback.
    """

    agent: str
    since: str
    address: str = ""
    version: str = ""
    layout: Count = 1  # of the keys that the agent writes
    limits: Enforcement | None = None
    listener: str = ""
    loopback: str = ""


class Intent(StoredRecord, frozen=True, kw_only=True):
    """`intent/<node>/<pod_id>`: the desired state of a pod. `token` is the fencing token of the owner that wrote it.

    A pod belongs to an RC, or to the execution of a task; then `rc` is "". `restart`: the id of an operator's request;
    the agent stops the pod's processes once for each new one, and starts them again.
    """

    manifest: str
    rc: str
    shard: str
    token: Quantity = 0
    labels: Labels = {}
    restart: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def task(self) -> str:
        """Return the id of the execution that the pod belongs to; "" for a pod of an RC."""
        return "" if self.rc else self.labels.get(TASK_LABEL, "")

    @property
    def belongs_to(self) -> str:
        """Return the RC or the task's execution that the pod belongs to, in words."""
        return f"task {self.task}" if self.task else f"rc {self.rc}"


class Exit(StoredRecord, frozen=True):
    """The end of a process. `code` is None when the agent was not its parent and can't know.

    `cause`: why the kernel ended it, as a predicate: `killed by the kernel: over its memory limit of 512Mi`.
    """

    at: str
    code: Number | None = None
    signal: str = ""
    cause: str = ""

    @property
    def words(self) -> str:
        """The end as a predicate: `exited with code 1`, `ended by SIGKILL`."""
        if self.cause:
            return self.cause
        if self.signal:
            return f"ended by {self.signal}"
        return "ended while no agent was watching" if self.code is None else f"exited with code {self.code}"


class Usage(StoredRecord, frozen=True, kw_only=True):
    """What a launchable's tree of processes used at a time, as its control group counts it.

    `memory`: bytes, without the file cache that the kernel can drop. `cpu`: millicores, over the seconds before.
    `pids`: processes and threads. `memory_limit` in bytes; 0: none. `oom_kills`: processes killed for lack of memory
    since the pod runs its manifest.
    """

    at: str
    memory: Quantity = 0
    memory_limit: Quantity = 0
    cpu: Quantity = 0
    pids: Quantity = 0
    oom_kills: Quantity = 0


ProcessState = Literal["running", "starting", "backoff", "stopping", "stopped", "completed", "failed"]


class Process(StoredRecord, frozen=True, kw_only=True):
    """One launchable as the agent sees it.

    `output`: the last lines that a task's process wrote, once it has ended; of another process, the last lines on
    stderr, or else on stdout, of its last run that failed. `log`: the file on the node that has all of them. `usage`
    may be minutes old, because no record is written for it alone unless much has changed; the agent's metrics have the
    present one.
    """

    state: ProcessState
    pid: Count | None = None
    started_at: str = ""
    restarts: Quantity = 0
    last_exit: Exit | None = None
    reason: str = ""
    output: str = ""
    usage: Usage | None = None
    log: str = ""


PodState = Literal["running", "installing", "starting", "stopping", "failed"]


class Transition(StoredRecord, frozen=True, kw_only=True):
    """What happened to a pod. `what`: started, exited, completed or failed (of the launchable `of`), or health.

    `text`: in words, as in `exited with code 1` or `passing → critical: no answer`.
    """

    at: str
    what: Literal["started", "exited", "completed", "failed", "health"]
    of: str = ""
    text: str = ""


RECENT = 12  # transitions that a pod's report keeps


class Reality(StoredRecord, frozen=True, kw_only=True):
    """`reality/<node>/<pod_id>`, or `task-pods/<node>/<pod_id>` for a task's pod: the observed state of a pod.

    `manifest` is the one that is actually running. `recent`: its last transitions, oldest first, at most `RECENT`.
    """

    manifest: str
    rc: str
    state: PodState
    launchables: dict[str, Process] = {}
    ports: dict[str, Count] = {}
    address: str = ""
    reason: str = ""
    updated_at: str = ""
    task: str = ""
    recent: tuple[Transition, ...] = ()


class FarmMember(StoredRecord, frozen=True, kw_only=True):
    """`farms/<farm>`: a member; alive while the key carries a session. Farms of equal selector form a group."""

    farm: str
    selector: str = ""
    since: str = ""
    address: str = ""
    version: str = ""
    layout: Count = 1  # of the keys that the farm reads and writes

    @property
    def name(self) -> str:
        """The farm's name, as all kinds of members have one."""
        return self.farm


class Brake(StoredRecord, frozen=True, kw_only=True):
    """`<root>/brake`: present while the farms remove nothing. An operator removes it with `rcfarm brake release`.

    `farm`: the one that found the accident, with `code` and `message`; "" where an operator engaged the brake: `by` is
    that operator, and `message` the reason that was given.
    """

    farm: str
    since: str
    code: Literal["no_rcs_found", "zero_replicas_found", "too_many_gone", "engaged"]
    message: str
    by: str = ""

    @property
    def words(self) -> str:
        """The reason in words, with the operator who gave it."""
        return f"engaged by {self.by}: {self.message}" if self.by else self.message


IncidentKind = Literal["brake", "rc", "rollout", "node", "audit"]


class Incident(StoredRecord, frozen=True, kw_only=True):
    """`incidents/<kind>/<about>`: something that a person is notified about. It goes once its end was sent, too.

    `sent`: when its beginning was sent, "" before. `problem`: why it can't be sent, as the sender last found.
    """

    kind: IncidentKind
    about: str
    summary: str
    severity: Literal["critical", "error", "warning"]
    since: str
    farm: str
    resolved: bool = False
    sent: str = ""
    problem: str = ""


class History(StoredRecord, frozen=True):
    """`<root>/history`: the latest links of a chain that one farm lengthens, oldest first."""

    links: list[str]


class AuditEvent(StoredRecord, frozen=True, kw_only=True):
    """`audit/<day>/<ulid>`: written in the transaction that it records. `timestamp` in RFC 3339, UTC.

    `actor` is the name that the writer claims. A person's command adds `uid`, its user id on the machine, and
    `accessor`, the id of the Consul token that it was written with; Consul can resolve that id.
    """

    event_type: str
    event_details: dict[str, Any]
    timestamp: str
    actor: str = ""
    schema_version: Count = 1
    uid: Count | msgspec.UnsetType = msgspec.UNSET
    accessor: str | msgspec.UnsetType = msgspec.UNSET


R = TypeVar("R", bound=msgspec.Struct)
_encoder = msgspec.json.Encoder()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def utc_now() -> str:
    """Return the wall clock's time as records carry it: RFC 3339, UTC, whole seconds."""
    return rfc3339(datetime.now(UTC))


def rfc3339(time: datetime) -> str:
    """Return a UTC time in the form that records carry."""
    return time.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def encode(record: msgspec.Struct | Labels) -> bytes:
    """Return the record's JSON. Fields stay in the order of their declaration, so equal records are equal bytes."""
    return _encoder.encode(record)


def decode(record_type: type[R], key: str, value: bytes) -> R:
    """Read a record. Raises `BadRecord` naming `key`, the field and the reason, and nothing else."""
    decoder = _decoders.get(record_type)
    if decoder is None:
        decoder = _decoders[record_type] = msgspec.json.Decoder(record_type)
    try:
        return from_json(decoder, value)  # type: ignore[no-any-return]
    except Undecodable as error:
        raise BadRecord(key, f"not a valid {record_type.__name__}: {error}") from error


_labels_decoder = msgspec.json.Decoder(Labels)


def decode_labels(key: str, value: bytes) -> Labels:
    """Read a flat map of strings, as stored under `pods/<node>`. Raises `BadRecord`, and nothing else."""
    try:
        return from_json(_labels_decoder, value)
    except Undecodable as error:
        raise BadRecord(key, f"not a map of labels: {error}") from error
