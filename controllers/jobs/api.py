"""What a job is: the interface that an operator implements, the names of a job's objects, the desired state (specs),
the input of a decision (`JobView`), what was decided (`Decision`), and the errors.

A pod and its service share one name, `JOB-TYPE-INDEX` in lower case. It must be a DNS-1035 label, because services
require that: at most 63 of `a-z`, `0-9` and `-`, a letter first. Label values have at most 63 characters as well. A
text that does not fit is cut and gets a hash of the whole text, so that different jobs never share a name by
truncation, and the same job always gets the same name.

Pods and services are raw objects. Specs are decoded from the custom resource by `decode_replica_specs` and `decode`,
the status by `controllers.jobs.status`.

Errors in the handling of a job, apart from the API's own (`store.kube.api.errors`):

BadSpec, BadStatus    the job is invalid; only a change of it helps
JobError              the sync is retried later
├── AdoptionRefused   the job may not adopt anything: it is being deleted, or is not the cached one
├── ClaimFailed       some pods or services could not be adopted or released
├── ActionsFailed     some of the decided actions failed; the others were taken
├── Leftover          an object of an earlier job of that name still has a needed name; it will be deleted
├── NameTaken         an object that the job does not own has a needed name; an administrator must remove it
├── HookFailed        an operator's hook raised
└── NotServed         the API server does not serve a resource that is needed
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from controllers.jobs.status import ConditionType, JobStatus
from scheduler.hived.contract import MAX_GUARANTEED_PRIORITY, OPPORTUNISTIC_PRIORITY
from store.decoding import Undecodable, converted, load_yaml, problem_of
from store.errors import RcfarmError
from store.kube.api.objects import Object, Resource, annotations_of, controller_of, is_deleting, key_of, name_of
from store.schema.keys import BadLabel, check_label_value, is_dns_label
from store.timing import doubled

RestartPolicy: TypeAlias = Literal["Always", "OnFailure", "Never", "ExitCode"]
CleanPodPolicy: TypeAlias = Literal["All", "Running", "None"]
SuccessPolicy: TypeAlias = Literal["", "AllWorkers"]
SuccessRule: TypeAlias = Literal["FirstWorker", "AnyWorker", "AllWorkers"]
DeleteReason: TypeAlias = Literal["clean-up", "suspended", "surplus", "duplicate", "restart", "node lost"]

_T = TypeVar("_T")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=OPPORTUNISTIC_PRIORITY, le=MAX_GUARANTEED_PRIORITY)]

RESTART_ANNOTATION = "rcfarm.dev/restart"
"""An annotation of jobs. With the value `job`, a failed replica restarts all replicas instead of itself alone."""

HIVED_ANNOTATION = "rcfarm.dev/hived"
"""An annotation of jobs: what the job asks of HiveD, in JSON or YAML; see `HivedRequest`."""

MAX_LABEL = 63  # characters: RFC 1035 labels, and values of Kubernetes labels

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NOT_DNS = re.compile(r"[^a-z0-9]+")
_NOT_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")
_HASH = 8  # hexadecimal digits
_SHORTEST_STEM = 8  # characters of the job's name that are kept at least, for readability


class GroupVersion(NamedTuple):
    """`group` is "" for the core group."""

    group: str
    version: str

    def __str__(self) -> str:
        """Return the `apiVersion` of objects: `v1`, `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version


class GroupVersionKind(NamedTuple):
    """A kind of object, in one version."""

    group: str
    version: str
    kind: str

    @property
    def group_version(self) -> GroupVersion:
        return GroupVersion(self.group, self.version)


class ControllerInterface(Protocol):
    """Implemented by all operators. `JobOperator` implements it for any custom resource."""

    def controller_name(self) -> str:
        """Return the operator's name, shown as the component in Events."""

    def get_api_group_version_kind(self) -> GroupVersionKind:
        """Return the kind of the jobs."""

    def get_api_group_version(self) -> GroupVersion:
        """Return the version of the jobs' API group."""

    def get_group_name_label_key(self) -> str:
        """Return the key of the label that every pod and service of the operator carries, with one value for all."""

    def get_group_name_label_value(self) -> str:
        """Return the value of that label."""

    def get_job_name_label_key(self) -> str:
        """Return the key of the label that holds the name of the pod's or service's job."""

    def get_replica_type_label_key(self) -> str:
        """Return the key of the label that holds the replica type, in lower case."""

    def get_replica_index_label_key(self) -> str:
        """Return the key of the label that holds the replica's index, in decimal."""

    def get_job_from_informer_cache(self, namespace: str, name: str) -> Object | None:
        """Return the cached job, or None when the cache has none."""

    async def get_job_from_api_client(self, namespace: str, name: str) -> Object:
        """Read the job from the API server. Raises `KubeError`, `NotFound` when there is none."""


def gen_general_name(job_name: str, replica_type: str, index: int | str) -> str:
    """Return the name of one replica's pod and service, as kubeflow's `GenGeneralName`."""
    tail = f"-{replica_type}-{index}".lower().replace("/", "-")
    name = job_name.replace("/", "-") + tail
    if len(name) <= MAX_LABEL and _DNS_1035.fullmatch(name):
        return name
    hashed = "-" + _digest(name)
    end = hashed + _NOT_DNS.sub("-", tail).rstrip("-")
    if len(end) > MAX_LABEL - _SHORTEST_STEM:
        end = hashed  # which covers the type and the index
    start = _NOT_DNS.sub("-", job_name.lower()).strip("-")
    if not start[:1].isalpha():
        start = f"j{start}"
    return start[: MAX_LABEL - len(end)].rstrip("-") + end


def label_value(text: str) -> str:
    """Return `text` as the value of a label: `/` becomes `-`, and a value that is not valid is cut and hashed."""
    value = text.replace("/", "-")
    with suppress(BadLabel):
        check_label_value(value)
        if len(value) <= MAX_LABEL:
            return value
    start = _NOT_LABEL.sub("-", value)[: MAX_LABEL - _HASH - 1].strip("-_.")
    return f"{start}-{_digest(text)}" if start else _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]


class BadSpec(RcfarmError, ValueError):
    """An invalid job; the message names the field."""


class JobError(RcfarmError):
    """An error in the handling of one job. The sync is retried later."""


class AdoptionRefused(JobError):
    """The live job is being deleted or is another one than the cached job, which may therefore not adopt anything."""


class ClaimFailed(JobError):
    """Some candidates could not be adopted or released. `claimed`: the candidates that do belong to the job."""

    def __init__(self, owner: Object, resource: Resource, claimed: list[Object], errors: Sequence[Exception]) -> None:
        super().__init__(
            f"{key_of(owner)}: {len(errors)} of its {resource.plural} could not be claimed: {_joined(errors)}"
        )
        self.claimed, self.errors = claimed, tuple(errors)


class ActionsFailed(JobError):
    """Some actions failed; each error is in `errors`."""

    def __init__(self, job: Object, errors: Sequence[Exception]) -> None:
        super().__init__(f"{key_of(job)}: {_joined(errors)}")
        self.errors = tuple(errors)


class Leftover(JobError):
    """An object of an earlier job of the same name, or one that is being deleted, still has the name."""


class NameTaken(JobError):
    """An object with another controller, or with none, has the name."""


class HookFailed(JobError):
    """An operator's hook raised; the message names the hook and the error."""


class NotServed(JobError):
    """The API server does not serve a resource; the message says what to install or to disable."""


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Replicas of one type. `template`: a pod template, undecoded."""

    template: Object
    replicas: _Count = 1
    restart_policy: RestartPolicy = "Never"


class SchedulingPolicy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The scheduling of the gang. `min_available`: by default all replicas. `min_resources`: by default summed up."""

    min_available: _Count | None = None
    queue: str = ""
    min_resources: dict[str, Any] | None = None
    priority_class: str = ""
    schedule_timeout_seconds: _Count | None = None


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The limits of a job's run time and retries, and the pods that are deleted at its end.

    `clean_pod_policy`: pods deleted when the job has finished: `All`, `Running` (those that have not ended) or `None`.
    `backoff_limit`: retries before the job fails; None for no limit. Source: kubeflow's RunPolicy.
    """

    clean_pod_policy: CleanPodPolicy = "Running"
    ttl_seconds_after_finished: _Count | None = None
    active_deadline_seconds: _Count | None = None
    backoff_limit: _Count | None = None
    scheduling_policy: SchedulingPolicy = SchedulingPolicy()
    suspend: bool = False


class HivedRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a job asks of HiveD: that its pods are one affinity group, which gets all of its cells or none.

        {virtualCluster: prod, priority: 100, leafCellType: A100, leafCellNumber: {Master: 8, Worker: 8}}

    `leaf_cell_number`: the devices of each pod, by type or one number for all; pods of a type without devices take no
    part. `gang` False: each pod is placed alone, as the pods of a job whose size changes must be. `scheduler`: the
    kube-scheduler of the tenant; "" leaves the template's. The other fields are HiveD's.
    """

    virtual_cluster: Annotated[str, msgspec.Meta(min_length=1)]
    leaf_cell_number: _Count | dict[str, _Count]
    priority: _Priority = 0
    leaf_cell_type: str = ""
    pinned_cell_id: str = ""
    lazy_preemption_enable: bool = False
    ignore_k8s_suggested_nodes: bool = msgspec.field(default=True, name="ignoreK8sSuggestedNodes")
    gang: bool = True
    scheduler: str = ""

    def cells(self, replica_type: str) -> int:
        """Return the number of devices of each pod of the type."""
        numbers = self.leaf_cell_number
        return numbers if isinstance(numbers, int) else numbers.get(replica_type, 0)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a replica is created again after its nth failure: `base`·2ⁿ⁻¹ up to `cap` seconds. The defaults
    are those of Kubernetes' Job."""

    base: float = 10.0
    cap: float = 360.0

    def delay(self, failures: int) -> float:
        return doubled(self.base, self.cap, failures - 1) if failures > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Gang:
    """The state of the object (PodGroup or PodDisruptionBudget) that makes one gang of the job's pods.

    `current`: its spec is as desired. `holds_creation`: pods must wait until the scheduler admits the group.
    """

    exists: bool
    current: bool
    holds_creation: bool = False


@dataclass(frozen=True, slots=True)
class Companion:
    """The state of the one object beside pods, services and gang that a job may have, such as an autoscaler.

    `wanted`: the job needs it while it is active. `current`: its fields of ours are as desired.
    """

    wanted: bool
    exists: bool
    current: bool


@dataclass(frozen=True, slots=True)
class Wording:
    """The reasons and messages of a job's conditions, as format strings.

    All may use `{kind}`, `{namespace}` and `{name}`, and the reason `{condition}`. `restarting` and `failed` also have
    `{type}`, `{index}` and `{count}`, the failed replicas of the type. `succeeded`, `failed` and the two limits have
    `{why}`: the pods and the facts that decided. `exited` is the Event about a failed pod, with `{pod}` and `{code}`.

    `pending`: of a job without a running pod; "" leaves its condition Running as it is. `backoff_reason`,
    `deadline_reason`: of Failed when a limit was reached; "" for the reason of every other failure. `silent`:
    conditions that become true without an Event. `invalid_reason`: of Blocked when the spec is invalid.
    """

    reason: str = "Job{condition}"
    created: str = "{kind} {name} is created"
    running: str = "{kind} {name} is running"
    pending: str = "{kind} {name} has no running pod"
    restarting: str = "{kind} {name} is restarting {type} {index}"
    suspended: str = "{kind} {name} is suspended"
    resumed: str = "{kind} {name} is resumed"
    succeeded: str = "{kind} {name} has succeeded: {why}"
    failed: str = "{kind} {name} has failed: {why}"
    backoff: str = "{kind} {name} has failed: {why}"
    deadline: str = "{kind} {name} has failed: {why}"
    exited: str = "pod {pod} exited with code {code}"
    backoff_reason: str = "BackoffLimitExceeded"
    deadline_reason: str = "DeadlineExceeded"
    invalid_reason: str = "InvalidSpec"
    silent: Collection[ConditionType] = ()


FIRST_SIGNAL = 128
_PERMANENT = frozenset({1, 2, 126, 127, 128, 139})  # errors, misuse, can't execute, not found, bad exit, SIGSEGV


def is_retryable(code: int | None) -> bool:
    """Return whether a replica with the policy `ExitCode` is retried after this exit code; None: it reported none.

    The rule is tf-operator's list where that names a code, else kubeflow's: a death by a signal (128 and above) is
    retryable, an error of the program (1 to 127) permanent. With 138 (SIGUSR1) a program asks for a retry.
    """
    return code is None or (code >= FIRST_SIGNAL and code not in _PERMANENT)


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything about a job, apart from its pods and services, that a decision depends on.

    `status`: at least as new as the last one that was written; an older one could lack a failure that delays a restart.
    `type_label`, `index_label`: keys of the labels that hold the replica of a pod or service.
    `chief_types`: types whose success is the job's success; without any, replicas of `worker_type` decide by
    `success_rule`: its first replica or all of them, any one, or all. `leaders_only`: these replicas alone make the job
    Running or Succeeded; else any pod that runs makes it Running, and without them all replicas decide.
    `is_retryable`: judges an exit code under the policy `ExitCode`. `ignored_types`: types whose failures never end the
    job. `create_after`: type to another type, whose pods must have addresses before pods of the first are created.
    `service_types`: which types get a service per replica; None for all.
    `default_container`: the container whose exit code counts; "" for the first. `gang`: None without gang scheduling.
    `force_delete_after`: seconds past its deletion time after which a pod that still exists, because its node is lost,
    is deleted by force; None: never. A forced deletion does not guarantee that the old pod has stopped.
    `restart_whole`: a failure restarts all replicas, and counts once. `fixed_size`: the pods are given the number of
    replicas, so a change of it in a run is reported. `selector`: labels of the job's pods, for the selectors of replica
    statuses; None leaves these out. `companion`: None if the operator has none. `warnings`: what the spec says that can
    hardly be meant, naming the field; each becomes an Event when the job is new or its spec has changed.
    """

    name: str
    kind: str
    replica_specs: Mapping[str, ReplicaSpec]
    type_label: str
    index_label: str
    run_policy: RunPolicy = field(default_factory=RunPolicy)
    status: JobStatus = field(default_factory=JobStatus)
    namespace: str = ""
    wording: Wording = Wording()
    success_rule: SuccessRule = "FirstWorker"
    leaders_only: bool = False
    is_retryable: Callable[[int | None], bool] = is_retryable
    ignored_types: Collection[str] = ()
    create_after: Mapping[str, str] = field(default_factory=dict)
    restart_whole: bool = False
    fixed_size: bool = False
    selector: Mapping[str, str] | None = None
    companion: Companion | None = None
    warnings: Sequence[str] = ()
    deleting: bool = False
    chief_types: Collection[str] = ("Chief", "Master")
    worker_type: str = "Worker"
    service_types: Collection[str] | None = None
    default_container: str = ""
    gang: Gang | None = None
    backoff: Backoff = Backoff()
    force_delete_after: float | None = None

    def text(self, pattern: str, **facts: object) -> str:
        """Return one of the texts of `wording`."""
        return pattern.format(kind=self.kind, namespace=self.namespace, name=self.name, **facts)

    def reason(self, condition: str) -> str:
        """Return the reason of a condition."""
        return self.text(self.wording.reason, condition=condition)

    @property
    def min_available(self) -> int:
        """The number of pods that the gang needs to start."""
        wanted = self.run_policy.scheduling_policy.min_available
        return sum(spec.replicas for spec in self.replica_specs.values()) if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class SyncGang:
    """Create the gang's object, or bring it up to date. `min_available`: pods that must be able to run together."""

    min_available: int


@dataclass(frozen=True, slots=True)
class DeleteGang:
    """Delete the gang's object."""


@dataclass(frozen=True, slots=True)
class SyncCompanion:
    """Create the companion, or bring it up to date."""


@dataclass(frozen=True, slots=True)
class DeleteCompanion:
    """Delete the companion."""


@dataclass(frozen=True, slots=True)
class CreatePod:
    """`type` as in the spec."""

    type: str
    index: int


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod with this UID, not a successor of its name. `force`: do not wait for its kubelet."""

    name: str
    uid: str
    reason: DeleteReason
    force: bool = False


@dataclass(frozen=True, slots=True)
class CreateService:
    """`type` as in the spec."""

    type: str
    index: int


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete the service with this UID, not a successor of its name."""

    name: str
    uid: str
    reason: DeleteReason


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job: its time to live has passed."""


Action: TypeAlias = (
    SyncGang
    | DeleteGang
    | SyncCompanion
    | DeleteCompanion
    | CreatePod
    | DeletePod
    | CreateService
    | DeleteService
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An Event to record on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step. First write `status` if it differs from the job's: it holds facts (a counted failure, the end of
    the job) whose evidence the actions destroy. Then take the actions: the one on the gang's object first, services
    before pods, those of one kind in any order. `next_wake`: seconds until time alone changes the decision; None if it
    never does.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    next_wake: float | None = None
    events: tuple[JobEvent, ...] = ()


def decode_replica_specs(raw: Any, path: str, *, restart_policy: RestartPolicy = "Never") -> dict[str, ReplicaSpec]:
    """Decode the map from type to spec, keeping its order. `path`: that of the field. Raises `BadSpec`.

    `restart_policy`: of a type that names none. Types that differ in case only would have the same pods.
    """
    if not isinstance(raw, dict) or not raw:
        raise BadSpec(f"{path}: expected an object with at least one replica type")
    specs = {}
    spelled: dict[str, str] = {}  # by type in lower case
    for replica_type, spec in raw.items():
        if not is_dns_label(replica_type.lower()):
            rule = f"at most {MAX_LABEL} of a-z, A-Z, 0-9 and '-', and '-' neither first nor last"
            raise BadSpec(f"{path}: pods can't be labelled with the replica type {replica_type!r}: {rule}")
        if (other := spelled.setdefault(replica_type.lower(), replica_type)) != replica_type:
            raise BadSpec(f"{path}: {other} and {replica_type} are the same type; keep one of them")
        given = {"restartPolicy": restart_policy} | spec if isinstance(spec, dict) else spec
        specs[replica_type] = decode(given, ReplicaSpec, f"{path}.{replica_type}")
    return specs


def decode(raw: Any, kind: type[_T], path: str) -> _T:
    """Decode a part of a spec. `path`: that of the field. Raises `BadSpec`."""
    try:
        return converted(raw, kind)
    except Undecodable as error:
        problem = problem_of(error)
        raise BadSpec(f"{'.'.join(filter(None, (path, problem.path)))}: {problem.text}") from None


def hived_request(job: Object) -> HivedRequest | None:
    """Return what the job asks of HiveD, None if it asks for nothing. Raises `BadSpec`."""
    text = annotations_of(job).get(HIVED_ANNOTATION)
    return None if text is None else _parsed(text)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> HivedRequest:
    path = f"metadata.annotations[{HIVED_ANNOTATION}]"
    try:
        return decode(load_yaml(text), HivedRequest, path)
    except Undecodable as error:
        raise BadSpec(f"{path}: {error}") from None


def not_ours(obj: Object, resource: Resource, job: Object, job_kind: str) -> JobError:
    """Return the error for an object that has a needed name and is not controlled by the job."""
    controller = controller_of(obj)
    what = f"{resource.kind} {key_of(obj)}"
    if is_deleting(obj):
        return Leftover(f"{what} is still being deleted")
    if controller is None:
        return NameTaken(f"{what} has the name that {job_kind} {name_of(job)} needs, and has no controller; delete it")
    owner = f"{controller.get('kind')} {controller.get('name')}"
    if owner == f"{job_kind} {name_of(job)}":
        return Leftover(f"{what} belongs to an earlier {owner} and is not collected yet")
    return NameTaken(f"{what} has the name that {job_kind} {name_of(job)} needs, and belongs to {owner}; rename one")


def _joined(errors: Sequence[Exception]) -> str:
    """Join the first three distinct texts: a job of a thousand replicas fails a thousand times with one cause."""
    texts = list(dict.fromkeys(str(error) for error in errors))
    more = f"; and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
