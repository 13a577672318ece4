"""What explains a job on Kubernetes of any kind: the Lease of its operator, Events, and the state of its pods. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from store.kube.api.objects import Object, is_deleting, key_of
from store.schema.records import Reason, rfc3339

SKEW = timedelta(seconds=5)
_STARTING = ("PodInitializing", "ContainerCreating")  # reasons of a container that starts normally
_SCHEDULER_PATIENCE = timedelta(seconds=5)


class JobReason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason of a state. `subject`: the job by its kind (`framework`), or one of its tasks as `ROLE-INDEX`. `code`:
    of the list of reasons, scope framework. The times are RFC 3339 in UTC, or ""."""

    subject: str
    state: str
    reason: str
    code: str = ""
    since: str = ""
    until: str = ""


def job_reason(subject: str, state: str, why: Reason) -> JobReason:
    """Return a reason with what it is about."""
    return JobReason(subject=subject, state=state, reason=why.message, code=why.code, since=why.since, until=why.until)


@dataclass(frozen=True, slots=True)
class ObservedObjects:
    """The objects read beside the job. `pods`: by name. `warnings`: Events, the newest last; those about other
    objects are ignored. `leases`: the possible Leases of its operator; None: not known. `now`: aware."""

    pods: Mapping[str, Object]
    warnings: Sequence[Object]
    leases: Sequence[LeaseInfo] | None
    now: datetime


def of_pod(pod: Object, forced: datetime | None, never_forced: str, now: datetime) -> Iterator[Reason]:
    """Yield why a pod does not run yet, or does not go. `forced`: when its deletion is forced; None: never, for the
    reason `never_forced`."""
    status: Object = pod.get("status") or {}
    if is_deleting(pod):
        due = datetime.fromisoformat(pod["metadata"]["deletionTimestamp"])  # the end of the grace period
        end, finalizers = rfc3339(due), pod["metadata"].get("finalizers")
        node = (pod.get("spec") or {}).get("nodeName") or "no node"
        text = f"its pod should have ended at {end}; "
        text += (
            f"its finalizers hold it: {', '.join(finalizers)}"
            if finalizers
            else f"check {node}: a node that is down does not confirm the end"
        )
        if now < due:
            yield Reason("pod_deleting", f"its pod is being deleted, and has until {end} to end", until=end)
        elif forced is None:
            yield Reason("pod_stuck", f"{text}, and {never_forced}", since=end)
        else:
            at = rfc3339(forced)
            yield Reason("pod_stuck", f"{text}; it is deleted by force at {at}", since=end, until=at)
    scheduled = [each for each in status.get("conditions") or () if each.get("type") == "PodScheduled"]
    for condition in scheduled:
        if condition.get("status") == "False":
            text = f"not scheduled: {condition.get('message') or condition.get('reason')}"
            yield Reason("pod_unscheduled", text, since=condition.get("lastTransitionTime") or "")
    spec, created = pod.get("spec") or {}, pod["metadata"].get("creationTimestamp")
    is_old = created and now - datetime.fromisoformat(created) > _SCHEDULER_PATIENCE
    if not scheduled and not spec.get("nodeName") and is_old and not is_deleting(pod):
        scheduler = spec.get("schedulerName") or "default-scheduler"
        text = f"no scheduler has taken up its pod since {created}; check that {scheduler} runs"
        yield Reason("scheduler_missing", text, since=created)
    if status.get("phase") == "Pending":
        yield from _of_containers(status.get("initContainerStatuses") or (), "init container")
        yield from _of_containers(status.get("containerStatuses") or (), "container")


def _of_containers(statuses: Iterable[Any], kind: str) -> Iterator[Reason]:
    for each in statuses:
        state = each.get("state") or {}
        if waiting := state.get("waiting"):
            if waiting.get("reason") not in _STARTING:
                text = f"{kind} {each['name']}: {waiting.get('reason')}: {waiting.get('message', '')}".removesuffix(
                    ": "
                )
                yield Reason("container_waiting", text)
        elif kind == "init container" and "running" in state:
            text = f"its init container {each['name']} has not ended; its log says what it waits for"
            yield Reason("init_running", text, since=(state["running"] or {}).get("startedAt") or "")


def said(warnings: Sequence[Object], uid: str, known: Sequence[Reason], repeating: Container[str] = ()) -> list[Reason]:
    """Return the newest Warning of each reason about the object of that UID, unless a known reason contains its
    message. `repeating`: reasons of Events that are left out, because they repeat a status."""
    newest = {event.get("reason"): event for event in warnings if (event.get("involvedObject") or {}).get("uid") == uid}
    return [
        Reason("warned", f"{event.get('reason')}: {message}")
        for event in newest.values()
        if (message := str(event.get("message") or ""))
        and event.get("reason") not in repeating
        and not any(message in reason.message for reason in known)
    ]


class LeaseInfo(NamedTuple):
    """A Lease. `key`: NAMESPACE/NAME. `holder`: "" without one. `ends`: when the lease of the last renewal ends."""

    key: str
    holder: str
    renewed: datetime | None
    ends: datetime | None

    def is_held(self, now: datetime) -> bool:
        return bool(self.holder) and self.ends is not None and now < self.ends + SKEW


def lease_info(lease: Object) -> LeaseInfo:
    spec: Object = lease.get("spec") or {}
    renewed = datetime.fromisoformat(spec["renewTime"]) if spec.get("renewTime") else None
    duration = timedelta(seconds=int(spec.get("leaseDurationSeconds") or 0))
    return LeaseInfo(key_of(lease), str(spec.get("holderIdentity") or ""), renewed, renewed and renewed + duration)


def why_nobody_leads(observed: ObservedObjects) -> Reason | None:
    """Return why no operator leads, or None when one does or the Leases are not known."""
    leases, now = observed.leases, observed.now
    if leases is None or any(lease.is_held(now) for lease in leases):
        return None
    if not leases:
        text = "no operator leads: there is no such Lease; start `rcfarm jobs`, or name its Lease with --lease"
        return Reason("no_operator_leads", text)
    last = max(leases, key=lambda lease: lease.renewed.timestamp() if lease.renewed else 0.0)
    if not last.holder or last.renewed is None:
        text = f"no operator leads: the Lease {last.key} has no holder; start `rcfarm jobs`"
        return Reason("no_operator_leads", text)
    silent = int((now - last.renewed).total_seconds())
    text = (
        f"no operator leads: {last.holder} last renewed the Lease {last.key} {silent} s ago; check that it runs, and "
        "its log"
    )
    return Reason("no_operator_leads", text, since=rfc3339(last.ends or last.renewed))
