"""What a job is to its controller: what it should be (specs), what is known of it (`JobView`), what to do (`Decision`).

Pods and services are raw objects. Specs are decoded from the custom resource by `decode_replica_specs` and
`decode_run_policy`; the status is in `controllers.job_status`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec

from controllers.job_status import JobStatus
from store.decoding import Undecodable, converted
from store.kube.objects import Object

RestartPolicy: TypeAlias = Literal["Always", "OnFailure", "Never", "ExitCode"]
CleanPodPolicy: TypeAlias = Literal["All", "Running", "None"]
SuccessPolicy: TypeAlias = Literal["", "AllWorkers"]
DeleteReason: TypeAlias = Literal["clean-up", "suspended", "surplus", "duplicate", "restart", "node lost"]

_T = TypeVar("_T")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class BadSpec(ValueError):
    """A job that can't be understood; the message names the field."""


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Replicas of one type. `template`: a pod template, as it is on the wire."""

    template: Object
    replicas: _Count = 1
    restart_policy: RestartPolicy = "Never"


class SchedulingPolicy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How the gang is scheduled. `min_available`: by default all replicas. `min_resources`: by default summed up."""

    min_available: _Count | None = None
    queue: str = ""
    min_resources: dict[str, Any] | None = None
    priority_class: str = ""
    schedule_timeout_seconds: _Count | None = None


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How long a job may run, how often it may be retried, and what is left of it.

    `clean_pod_policy`: which pods go when the job has finished: `All`, `Running` (those that have not ended) or `None`.
    `backoff_limit`: retries before the job fails; None for no limit. Source: kubeflow's RunPolicy.
    """

    clean_pod_policy: CleanPodPolicy = "Running"
    ttl_seconds_after_finished: _Count | None = None
    active_deadline_seconds: _Count | None = None
    backoff_limit: _Count | None = None
    scheduling_policy: SchedulingPolicy = SchedulingPolicy()
    suspend: bool = False


def decode_replica_specs(raw: Any, path: str) -> dict[str, ReplicaSpec]:
    """The map from type to spec, in the order in which it is written. `path`: of the field. Raises `BadSpec`."""
    if not isinstance(raw, dict) or not raw:
        raise BadSpec(f"{path}: expected an object with at least one replica type")
    return {replica_type: _decode(spec, ReplicaSpec, f"{path}.{replica_type}") for replica_type, spec in raw.items()}


def decode_run_policy(raw: Any, path: str) -> RunPolicy:
    """Absent: the defaults. Raises `BadSpec`."""
    return _decode(raw if raw is not None else {}, RunPolicy, path)


def _decode(raw: Any, kind: type[_T], path: str) -> _T:
    try:
        return converted(raw, kind)
    except Undecodable as error:
        problem, _, where = str(error).partition(" - at `$")
        raise BadSpec(f"{path}{where.rstrip('`')}: {problem}") from None


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a replica waits before it is created again after its nth failure in a row: `base`·2ⁿ⁻¹ up to `cap`
    seconds. The defaults are those of Kubernetes' Job."""

    base: float = 10.0
    cap: float = 360.0

    def delay(self, failures: int) -> float:
        return min(self.cap, self.base * 2.0 ** min(failures - 1, 60)) if failures > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Gang:
    """What is known of the object (PodGroup or PodDisruptionBudget) that makes one gang of the job's pods.

    `current`: it says what it should. `holds_creation`: pods have to wait for it.
    """

    exists: bool
    current: bool
    holds_creation: bool = False


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything about a job, apart from its pods and services, that a decision depends on.

    `status`: at least as new as the last one that was written; an older one would forget what holds a restart back.
    `type_label`, `index_label`: keys under which pods and services carry their replica.
    `chief_types`: types whose success is the job's success; the first index of `worker_type` stands in for them.
    `service_types`: which types get a service per replica; None for all.
    `default_container`: whose exit code counts; "" for the first. `gang`: None without gang scheduling.
    `force_delete_after`: seconds past its deletion time after which a pod that does not go, because its node is lost,
    is deleted by force; None never does. It gives up the promise that the old pod has stopped.
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
        """As messages for people call it."""
        return f"{self.kind} {self.name}"

    @property
    def total_replicas(self) -> int:
        return sum(spec.replicas for spec in self.replica_specs.values())

    @property
    def min_available(self) -> int:
        """How many pods the gang needs to start."""
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
    """Delete the pod with this UID and no successor of its name. `force`: without waiting for its kubelet."""

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
    """Delete the service with this UID and no successor of its name."""

    name: str
    uid: str
    reason: DeleteReason


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Its time to live is over."""


Action: TypeAlias = SyncGang | DeleteGang | CreatePod | DeletePod | CreateService | DeleteService | DeleteJob


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An Event to record on the job: something that became true with this decision."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. Write `status` first where it differs from the job's: it holds the facts (a counted failure, the
    end of the job) that the actions would destroy the evidence of. Then take the actions, in any order within a kind;
    the gang's comes first. `next_wake`: seconds until time alone changes the decision; None if it never does.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    next_wake: float | None = None
    events: tuple[JobEvent, ...] = ()
