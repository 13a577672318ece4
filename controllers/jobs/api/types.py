"""The types of a job's controller: desired state (specs), the status, the input of a decision (`JobView`), and what was
decided (`Decision`).

Pods and services are raw objects. Specs are decoded from the custom resource by `decode_replica_specs` and
`decode_run_policy`. The status is kubeflow's on the wire, so that its tools can read it. It holds everything that a
decision must remember between two syncs, because a controller may be replaced at any moment: when the job began, which
pods' failures were counted, and when.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from store.decoding import Undecodable, converted, problem_of
from store.errors import RcfarmError
from store.kube.api.objects import Object
from store.kube.api.patches import merge_patch_between
from store.timing import doubled

RestartPolicy: TypeAlias = Literal["Always", "OnFailure", "Never", "ExitCode"]
CleanPodPolicy: TypeAlias = Literal["All", "Running", "None"]
SuccessPolicy: TypeAlias = Literal["", "AllWorkers"]
DeleteReason: TypeAlias = Literal["clean-up", "suspended", "surplus", "duplicate", "restart", "node lost"]

_T = TypeVar("_T")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

ConditionType: TypeAlias = Literal["Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Blocked"]
ConditionStatus: TypeAlias = Literal["True", "False", "Unknown"]


class BadSpec(RcfarmError, ValueError):
    """An invalid job; the message names the field."""


class BadStatus(RcfarmError, ValueError):
    """A stored status that can't be decoded; the message names the field."""


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


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One fact about the job. `last_transition_time` changes with `status` only."""

    type: str
    status: ConditionStatus
    reason: str = ""
    message: str = ""
    last_update_time: datetime | None = None
    last_transition_time: datetime | None = None


class Retry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The failures of one replica. Each failed pod counts once, under its UID.

    `failures`: number of its pods that failed for their own reasons. `disruptions`: pods that the cluster removed
    (evicted, preempted, node lost); they do not count against the back-off limit. `restarts`: of containers by the
    kubelet, in those pods. `counted`: UIDs of the counted pods that a cache may still show.
    """

    failures: int = 0
    disruptions: int = 0
    restarts: int = 0
    last_failure_time: datetime | None = None
    counted: list[str] = []


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Pods of one replica type; pending ones are not counted. `retries`: by replica index, in decimal."""

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    retries: dict[str, Retry] = {}


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Times are UTC in whole seconds. `last_reconcile_time`: when the status last changed."""

    conditions: list[Condition] = []
    replica_statuses: dict[str, ReplicaStatus] = {}
    start_time: datetime | None = None
    completion_time: datetime | None = None
    last_reconcile_time: datetime | None = None

    def condition(self, kind: ConditionType) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def has(self, kind: ConditionType) -> bool:
        """Return whether the condition is present and true."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    @property
    def finished(self) -> bool:
        return self.has("Succeeded") or self.has("Failed")


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
class JobView:
    """Everything about a job, apart from its pods and services, that a decision depends on.

    `status`: at least as new as the last one that was written; an older one could lack a failure that delays a restart.
    `type_label`, `index_label`: keys of the labels that hold the replica of a pod or service.
    `chief_types`: types whose success is the job's success; without any, the first index of `worker_type` decides.
    `service_types`: which types get a service per replica; None for all.
    `default_container`: the container whose exit code counts; "" for the first. `gang`: None without gang scheduling.
    `force_delete_after`: seconds past its deletion time after which a pod that still exists, because its node is lost,
    is deleted by force; None: never. A forced deletion does not guarantee that the old pod has stopped.
    """

    name: str
    kind: str
    replica_specs: Mapping[str, ReplicaSpec]
    type_label: str
    index_label: str
    run_policy: RunPolicy = field(default_factory=RunPolicy)
    status: JobStatus = field(default_factory=JobStatus)
    success_policy: SuccessPolicy = ""
    deleting: bool = False
    chief_types: Collection[str] = ("Chief", "Master")
    worker_type: str = "Worker"
    service_types: Collection[str] | None = None
    default_container: str = ""
    gang: Gang | None = None
    backoff: Backoff = Backoff()
    force_delete_after: float | None = None

    @property
    def title(self) -> str:
        """The job's name in messages."""
        return f"{self.kind} {self.name}"

    @property
    def total_replicas(self) -> int:
        return sum(spec.replicas for spec in self.replica_specs.values())

    @property
    def min_available(self) -> int:
        """The number of pods that the gang needs to start."""
        wanted = self.run_policy.scheduling_policy.min_available
        return self.total_replicas if wanted is None else wanted

    def has_services(self, replica_type: str) -> bool:
        return self.service_types is None or replica_type in self.service_types


@dataclass(frozen=True, slots=True)
class SyncGang:
    """Create the gang's object, or bring it up to date. `min_available`: pods that must be able to run together."""

    min_available: int


@dataclass(frozen=True, slots=True)
class DeleteGang:
    """Delete the gang's object."""


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


Action: TypeAlias = SyncGang | DeleteGang | CreatePod | DeletePod | CreateService | DeleteService | DeleteJob


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An Event to record on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step. First write `status` if it differs from the job's: it holds facts (a counted failure, the end of
    the job) whose evidence the actions destroy. Then take the actions, in any order within a kind; the gang's comes
    first. `next_wake`: seconds until time alone changes the decision; None if it never does.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    next_wake: float | None = None
    events: tuple[JobEvent, ...] = ()


def decode_replica_specs(raw: Any, path: str) -> dict[str, ReplicaSpec]:
    """Decode the map from type to spec, keeping its order. `path`: that of the field. Raises `BadSpec`."""
    if not isinstance(raw, dict) or not raw:
        raise BadSpec(f"{path}: expected an object with at least one replica type")
    return {replica_type: _decode(spec, ReplicaSpec, f"{path}.{replica_type}") for replica_type, spec in raw.items()}


def decode_run_policy(raw: Any, path: str) -> RunPolicy:
    """Decode the run policy; an absent one has the defaults. Raises `BadSpec`."""
    return _decode(raw if raw is not None else {}, RunPolicy, path)


def _decode(raw: Any, kind: type[_T], path: str) -> _T:
    try:
        return converted(raw, kind)
    except Undecodable as error:
        problem = problem_of(error)
        raise BadSpec(f"{'.'.join(filter(None, (path, problem.path)))}: {problem.text}") from None


def whole_seconds(moment: datetime) -> datetime:
    """Return the time in UTC, without microseconds, as a status holds it."""
    return moment.astimezone(UTC).replace(microsecond=0)


def decode_status(raw: Mapping[str, Any] | None) -> JobStatus:
    """Decode a stored status, without fields that are not ours; an absent one is empty. Raises `BadStatus`."""
    try:
        return converted(raw or {}, JobStatus)
    except Undecodable as error:
        raise BadStatus(f"status: {error}") from None


def encode_status(status: JobStatus) -> Object:
    """Return the status as JSON types, without absent and default values."""
    encoded: Object = msgspec.to_builtins(status)
    return encoded


def status_patch(old: JobStatus, new: JobStatus) -> Object:
    """Return the merge patch (RFC 7386) that turns one stored status into the other; {} when they are equal.

    It holds only changes, so fields that are not ours survive; removed fields are null.
    """
    return merge_patch_between(encode_status(old), encode_status(new))
