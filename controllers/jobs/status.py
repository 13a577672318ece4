"""A job's status: its conditions, the counts of its pods, and the facts that outlive their evidence.

The status is kubeflow's on the wire, so that its tools can read it. It holds everything that a decision must remember
between two syncs, because a controller may be replaced at any moment: when the job began, which pods' failures were
counted and when, which replicas have succeeded, how it ended. All of it is written in one request, before any action.

kubeflow's definitions of its kinds prune fields that it does not have. Where they are installed, our facts are kept in
one more condition, `Record`, as JSON in its message. It is never true and always the first, so a tool that reads true
conditions, or the last one, does not see it. Other writers of the status keep conditions that they don't know.

There is one condition per type. The rules are kubeflow's: setting a condition to its present status and reason changes
nothing, not even the message, except that of `Blocked`; a condition that changes becomes the last one; the transition
time changes with the status only; the end of a job makes Running false, and nothing changes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec

from store.decoding import Undecodable, converted, from_json
from store.errors import RcfarmError
from store.kube.api.objects import Object, merge_patch_between

ConditionType: TypeAlias = Literal["Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Blocked"]
ConditionStatus: TypeAlias = Literal["True", "False", "Unknown"]

RECORD = "Record"  # the type of the condition that holds our facts
MAX_MESSAGE = 4096  # characters of a condition's message, as of a container's termination message
_RECORDED = "restartsAndSuccesses"  # its reason


class BadStatus(RcfarmError, ValueError):
    """A stored status that can't be decoded; the message names the field."""


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
    kubelet, in pods that are gone; `seen`: the same in the present pod, by its UID. `counted`: UIDs of the counted pods
    that a cache may still show.
    """

    failures: int = 0
    disruptions: int = 0
    restarts: int = 0
    seen: dict[str, int] = {}
    last_failure_time: datetime | None = None
    counted: list[str] = []

    @property
    def all_restarts(self) -> int:
        """The restarts of containers in all of the replica's pods."""
        return self.restarts + sum(self.seen.values())


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Pods of one replica type; pending ones are not counted.

    `selector`: selects the type's pods, as text. `retries`: by replica index, in decimal. `completed`: indexes of the
    replicas that succeeded, whose pods may be gone.
    """

    active: int = 0
    succeeded: int = 0
    failed: int = 0
    selector: str = ""
    retries: dict[str, Retry] = {}
    completed: list[int] = []


class JobStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Times are UTC in whole seconds. `last_reconcile_time`: when the status last changed.

    `over_limit`: the job failed because it reached a limit, so no pod of it may run. `restarting_all`: all pods are
    being deleted, and none is created before the last one is gone.
    """

    conditions: list[Condition] = []
    replica_statuses: dict[str, ReplicaStatus] = {}
    start_time: datetime | None = None
    completion_time: datetime | None = None
    last_reconcile_time: datetime | None = None
    over_limit: bool = False
    restarting_all: bool = False

    def condition(self, kind: ConditionType) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def has(self, kind: ConditionType) -> bool:
        """Return whether the condition is present and true."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    @property
    def finished(self) -> bool:
        return self.has("Succeeded") or self.has("Failed")


class _ReplicaFacts(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """The fields of a `ReplicaStatus` that kubeflow does not have."""

    retries: dict[str, Retry] = {}
    completed: list[int] = []


class _Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The fields of a `JobStatus` that kubeflow does not have."""

    replica_statuses: dict[str, _ReplicaFacts] = {}
    over_limit: bool = False
    restarting_all: bool = False


_FACTS = msgspec.json.Decoder(_Facts)


def decode_status(raw: Mapping[str, Any] | None) -> JobStatus:
    """Decode a stored status, without fields that are not ours; an absent one is empty. Raises `BadStatus`."""
    try:
        status = converted({field: value for field, value in (raw or {}).items() if value is not None}, JobStatus)
    except Undecodable as error:
        raise BadStatus(f"status: {error}") from None
    record = next((condition for condition in status.conditions if condition.type == RECORD), None)
    if record is None:
        return status
    try:
        facts = from_json(_FACTS, record.message)
    except Undecodable as error:
        remedy = "remove this condition from the status, and counting starts over"
        raise BadStatus(f"status.conditions: the message of {RECORD}: {error}; {remedy}") from None
    statuses = dict(status.replica_statuses)
    for name, ours in facts.replica_statuses.items():
        entry = statuses.get(name, ReplicaStatus())
        statuses[name] = msgspec.structs.replace(entry, retries=ours.retries, completed=ours.completed)
    return msgspec.structs.replace(
        status,
        conditions=[condition for condition in status.conditions if condition.type != RECORD],
        replica_statuses=statuses,
        over_limit=facts.over_limit,
        restarting_all=facts.restarting_all,
    )


def status_patch(old: JobStatus, new: JobStatus, *, pruned: bool = False) -> Object:
    """Return the merge patch (RFC 7386) that turns one stored status into the other; {} when they are equal.

    It holds only changes, so fields that are not ours survive; removed fields are null. `pruned`: our facts are stored
    in a condition.
    """
    if old == new:
        return {}
    patch = merge_patch_between(_encoded(old, pruned=pruned), _encoded(new, pruned=pruned))
    if not new.replica_statuses:
        patch["replicaStatuses"] = {}  # kubeflow's definitions refuse null, and some require the field
    return patch


def _encoded(status: JobStatus, *, pruned: bool) -> Object:
    if not pruned:
        return dict(msgspec.to_builtins(status))
    facts = _Facts(
        replica_statuses={
            name: _ReplicaFacts(entry.retries, entry.completed)
            for name, entry in status.replica_statuses.items()
            if entry.retries or entry.completed
        },
        over_limit=status.over_limit,
        restarting_all=status.restarting_all,
    )
    statuses = {
        name: msgspec.structs.replace(entry, retries={}, completed=[])
        for name, entry in status.replica_statuses.items()
    }
    conditions = status.conditions
    if facts != _Facts():
        moment = status.last_reconcile_time
        record = Condition(
            type=RECORD,
            status="False",
            reason=_RECORDED,
            message=msgspec.json.encode(facts).decode(),
            last_update_time=moment,
            last_transition_time=moment,
        )
        conditions = [record, *conditions]
    plain = msgspec.structs.replace(
        status, conditions=conditions, replica_statuses=statuses, over_limit=False, restarting_all=False
    )
    return dict(msgspec.to_builtins(plain))


def whole_seconds(moment: datetime) -> datetime:
    """Return the time in UTC, without microseconds, as a status holds it."""
    return moment.astimezone(UTC).replace(microsecond=0)


def set_condition(
    status: JobStatus, kind: ConditionType, value: ConditionStatus, reason: str, message: str, now: datetime
) -> JobStatus:
    """Return the status with this condition. A finished job's status is returned unchanged.

    Another message alone changes `Blocked` only. `Blocked` that is not true is put first: a tool that shows the last
    condition shows what the job does now. A huge message, such as one that quotes a value, is cut.
    """
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE - 1]}…"
    before = status.condition(kind)
    same = before is not None and (before.status, before.reason) == (value, reason)
    if status.finished or (same and (kind != "Blocked" or (before is not None and before.message == message))):
        return status
    moment = whole_seconds(now)
    same_value = before is not None and before.status == value
    condition = Condition(
        type=kind,
        status=value,
        reason=reason,
        message=message,
        last_update_time=moment,
        last_transition_time=before.last_transition_time if before is not None and same_value else moment,
    )
    others = [other for other in status.conditions if other.type != kind]
    past = kind == "Blocked" and value != "True"
    return msgspec.structs.replace(status, conditions=[condition, *others] if past else [*others, condition])


def without_condition(status: JobStatus, kind: ConditionType) -> JobStatus:
    if status.condition(kind) is None:
        return status
    return msgspec.structs.replace(status, conditions=[c for c in status.conditions if c.type != kind])
