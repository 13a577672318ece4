"""The status of a job, as it is kept on the wire (kubeflow's form, so that its tools can read it), and as we use it.

Everything that a decision has to remember between two runs is in here, because a controller may be replaced at any
moment: when the job began, which pods' failures were counted, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec

from store.kube.objects import Object
from store.kube.patches import merge_patch_between

ConditionType: TypeAlias = Literal["Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Blocked"]
ConditionStatus: TypeAlias = Literal["True", "False", "Unknown"]


class BadStatus(ValueError):
    """A stored status that can't be understood; the message names the field."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One fact about the job. `last_transition_time` changes with `status` only."""

    type: str
    status: ConditionStatus
    reason: str = ""
    message: str = ""
    last_update_time: datetime | None = None
    last_transition_time: datetime | None = None


class Retry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What one replica has been through. Each failed pod counts once, under its UID.

    `failures`: pods of it that failed by themselves. `disruptions`: pods lost to the cluster (evicted, preempted, node
    lost); they do not count against the back-off limit. `restarts`: of containers by the kubelet, in those pods.
    `counted`: UIDs of the pods that are in these numbers and may still be seen.
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
        """Whether the condition is there, and true."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    @property
    def finished(self) -> bool:
        return self.has("Succeeded") or self.has("Failed")


def whole_seconds(moment: datetime) -> datetime:
    """The moment as a status can hold it."""
    return moment.astimezone(UTC).replace(microsecond=0)


def decode_status(raw: Mapping[str, Any] | None) -> JobStatus:
    """The status of a job as stored, without fields that are not ours; an absent one is empty. Raises `BadStatus`."""
    try:
        return msgspec.convert(raw or {}, JobStatus)
    except msgspec.ValidationError as error:
        raise BadStatus(f"status: {error}") from None


def encode_status(status: JobStatus) -> Object:
    """The status as JSON's types; what is absent or zero is left out."""
    encoded: Object = msgspec.to_builtins(status)
    return encoded


def status_patch(old: JobStatus, new: JobStatus) -> Object:
    """The merge patch (RFC 7386) that turns one stored status into the other; {} when they are equal.

    It names only what changes, so fields that are not ours survive; what vanished is written as null.
    """
    return merge_patch_between(encode_status(old), encode_status(new))
