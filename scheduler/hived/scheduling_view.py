"""What the scheduler knows of nodes and pods, and the only place where that, and the algorithm, change.

The model: every method is one step that nothing interrupts, for it never waits; so whoever calls one, sees a state in
which pods and algorithm agree. A pod's status follows `pod_states`; the algorithm hears of a pod exactly as often as
its state says: once when it begins to wait, once when it gets a place, once when it is gone.

What users write on their pods never stops anything. A bound pod whose placement can't be understood is left out, with
one warning, until its annotations change; it holds no devices in our eyes. One of which only the request can't be
understood keeps them (see `stand_in`).

An algorithm may be exchanged for one that was built aside (see `replay`): between `capture` and `swap`, all that
happens to nodes and allocated pods is kept, and told to the new one when it takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from scheduler.hived.constants import POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from scheduler.hived.node_health import why_bad
from scheduler.hived.pod_contract import extract_pod_bind_annotations, is_bound, is_interested, new_binding_pod
from scheduler.hived.pod_events import PodEvents
from scheduler.hived.pod_states import (
    ExtenderCall,
    PodEvent,
    PodScheduleStatus,
    PodScheduleStatuses,
    PodState,
    check_admitted,
    is_allocated,
    next_state,
)
from scheduler.hived.scheduler_metrics import NoSchedulerMetrics, SchedulerMetrics
from scheduler.hived.snapshot import WaitingPod
from scheduler.hived.stand_in import stand_in
from scheduler.hived.types import PodScheduleResult, SchedulerAlgorithm, SchedulingPhase
from store.kube.events import Recorder
from store.kube.objects import Object, annotations_of, key_of, name_of, uid_of

log = structlog.get_logger(__name__)

Change: TypeAlias = Callable[[SchedulerAlgorithm], None]


@dataclass(frozen=True, slots=True)
class Capture:
    """What an algorithm is rebuilt from. `pods`: the allocated ones, eldest first."""

    nodes: tuple[Object, ...]
    pods: tuple[Object, ...]


class SchedulingView:
    """`statuses`: of all live pods that ask for HiveD, except those that are left out. `nodes`: by name.

    `is_complete`: everything that was there at the start has been told of. `gone`: called with the UID of each pod that
    is deleted or has completed.
    """

    def __init__(
        self,
        algorithm: SchedulerAlgorithm,
        *,
        recorder: Recorder | None = None,
        metrics: SchedulerMetrics | None = None,
        gone: Callable[[str], None] = lambda uid: None,
    ) -> None:
        self.algorithm = algorithm
        self.statuses = PodScheduleStatuses()
        self.nodes: dict[str, Object] = {}
        self.is_complete = False
        self._events, self._metrics, self._gone = PodEvents(recorder), metrics or NoSchedulerMetrics(), gone
        self._left_out: dict[str, Mapping[str, str | None]] = {}  # by UID: the annotations that were not understood
        self._journal: list[Change] | None = None

    @property
    def left_out(self) -> Collection[str]:
        """The UIDs of bound pods whose placement can't be understood."""
        return self._left_out.keys()

    def node_seen(self, node: Object) -> None:
        """The API server shows the node, in this state."""
        old = self.nodes.get(name_of(node))
        self.nodes[name_of(node)] = node
        if old is None:
            self._tell(lambda algorithm: algorithm.add_node(node))
        else:
            self._tell(lambda algorithm: algorithm.update_node(old, node))
        self._log_health(old, node)

    def node_gone(self, node: Object) -> None:
        self.nodes.pop(name_of(node), None)
        log.warning("A node is gone", node=name_of(node))
        self._tell(lambda algorithm: algorithm.delete_node(node))

    def pod_seen(self, pod: Object) -> None:
        """The API server shows the pod, in this state."""
        if not is_interested(pod):
            self.pod_gone(pod)
        elif is_bound(pod):
            self._bound_seen(pod)
        elif (status := self.statuses.get(uid_of(pod))) is None:
            self._begin(pod)
        elif not is_allocated(status.pod_state):
            self._refresh(status, pod)

    def pod_gone(self, pod: Object) -> None:
        """It was deleted or has completed, whatever was known of it."""
        self._left_out.pop(uid_of(pod), None)
        status = self.statuses.get(uid_of(pod))
        if status is not None and is_allocated(status.pod_state):
            log.info("A pod has left its place", **_names(pod), node=status.pod["spec"]["nodeName"])
        self._forget(uid_of(pod))
        self._gone(uid_of(pod))

    def waiting(self) -> list[WaitingPod]:
        """The pods without a place, and what each was told last."""
        return [
            WaitingPod(status.pod, status.pod_state, _last_answer(status.pod_schedule_result))
            for status in self.statuses.values()
            if not is_allocated(status.pod_state)
        ]

    def filter(self, pod: Object, suggested: Collection[str]) -> PodScheduleStatus:
        """The pod's status after a filter: Binding, or the last decision says what it waits for. Raises `HivedError`.

        `pod`: as kube-scheduler knows it. Once Binding, the decision stays.
        """
        status = self._admitted(ExtenderCall.FILTER, pod)
        if status.pod_state == PodState.BINDING:
            status.pod_bind_attempts += 1
            status.pod_state = next_state(status.pod_state, PodEvent.FILTER_BIND)
            return status
        result = self.algorithm.schedule(status.pod, suggested, SchedulingPhase.FILTERING)
        event = PodEvent.FILTER_PREEMPT if result.pod_preempt_info is not None else PodEvent.FILTER_WAIT
        if result.pod_bind_info is not None:
            event, binding_pod = PodEvent.FILTER_BIND, new_binding_pod(status.pod, result.pod_bind_info)
            self._tell(lambda algorithm: algorithm.add_allocated_pod(binding_pod))
            status.pod = binding_pod
            self.lost_quota(result.downgraded, f"pod {key_of(pod)}")
        status.pod_state = next_state(status.pod_state, event)
        status.pod_schedule_result = result
        return status

    def preempt(self, pod: Object, suggested: Collection[str]) -> PodScheduleResult:
        """Whom the pod has to preempt. A bind result is left for the next filter to find. Raises `HivedError`."""
        status = self._admitted(ExtenderCall.PREEMPT, pod)
        result = self.algorithm.schedule(status.pod, suggested, SchedulingPhase.PREEMPTING)
        event = PodEvent.PREEMPT_WAIT
        if result.pod_bind_info is not None:
            event = PodEvent.PREEMPT_BIND
        elif result.pod_preempt_info is not None:
            event = PodEvent.PREEMPT_VICTIMS
        self.lost_quota(result.downgraded, f"pod {key_of(pod)}")
        status.pod_state = next_state(status.pod_state, event)
        status.pod_schedule_result = result
        return result

    def lost_quota(self, groups: Iterable[str], to: str) -> None:
        """Tell the owners of groups that go on, but from now on others may preempt them."""
        for name in groups:
            log.info("A group lost its quota", group=name, to=to)
            message = f"Affinity group {name} lost its quota to {to}: it runs on as an opportunistic one, as long as "
            group = self.algorithm.groups.get(name)
            for pod in [] if group is None else group.pods():
                self._events.event(pod, "Normal", "HivedQuotaLost", message + "no other needs the devices")

    def capture(self) -> Capture:
        """What there is now. Until `swap` or `abandon`, what happens is kept."""
        self._journal = []
        pods = [status.pod for status in self.statuses.values() if is_allocated(status.pod_state)]
        return Capture(tuple(self.nodes.values()), tuple(sorted(pods, key=_age)))

    def abandon(self) -> None:
        """There will be no `swap`."""
        self._journal = None

    def swap(self, algorithm: SchedulerAlgorithm) -> None:
        """Let an algorithm take over that was told of the capture. What waits is decided about anew."""
        assert self._journal is not None, "an algorithm takes over from what was captured"
        for change in self._journal:
            try:
                change(algorithm)
            except Exception:
                log.exception("What happened while the configuration was read can't be told to the new one")
        self._journal = None
        self.algorithm = algorithm
        for status in self.statuses.values():
            if not is_allocated(status.pod_state):
                status.pod_state, status.pod_schedule_result = PodState.WAITING, None
                algorithm.add_unallocated_pod(status.pod)

    def _admitted(self, call: ExtenderCall, pod: Object) -> PodScheduleStatus:
        """The status of a pod that a decision may be taken on. kube-scheduler may know newer annotations than we do."""
        state = self.statuses.state(uid_of(pod))
        status = self.statuses.get(uid_of(pod))
        node = "" if status is None else str(status.pod["spec"].get("nodeName") or "")
        check_admitted(call, state, key_of(pod), node)
        assert status is not None, "unknown pods are not admitted"
        if not is_allocated(state):
            metadata = status.pod["metadata"] | {"annotations": annotations_of(pod)}
            self._refresh(status, status.pod | {"metadata": metadata})
        return status

    def _log_health(self, old: Object | None, node: Object) -> None:
        before, now = None if old is None else why_bad(old), why_bad(node)
        if before == now or (old is None and not self.is_complete):
            return
        if now:
            log.warning("A node is bad", node=name_of(node), reason=now)
        else:
            log.info("A node is healthy", node=name_of(node))

    def _begin(self, pod: Object) -> None:
        self.algorithm.add_unallocated_pod(pod)
        self.statuses[uid_of(pod)] = PodScheduleStatus(pod, next_state(PodState.UNKNOWN, PodEvent.UNBOUND_SEEN))

    def _refresh(self, status: PodScheduleStatus, pod: Object) -> None:
        """The pod still waits. One that asks for something else now waits anew."""
        before, status.pod = status.pod, pod
        if _request(before) == _request(pod):
            status.pod_state = next_state(status.pod_state, PodEvent.UNBOUND_SEEN)
            return
        self.algorithm.delete_unallocated_pod(before)
        self.algorithm.add_unallocated_pod(pod)
        status.pod_state = next_state(next_state(status.pod_state, PodEvent.GONE), PodEvent.UNBOUND_SEEN)

    def _bound_seen(self, pod: Object) -> None:
        """An allocated pod keeps its placement as the algorithm was told of it, whatever is written on it later."""
        status = self.statuses.get(uid_of(pod))
        if status is not None and is_allocated(status.pod_state):
            if status.pod_state == PodState.BOUND or _same_placement(status.pod, pod):
                status.pod_state = next_state(status.pod_state, PodEvent.BOUND_SEEN)
                status.pod_schedule_result = None  # it names the places of the whole group
                return
            log.warning(
                "A pod was not bound as decided; what it says counts",
                **_names(pod),
                decided=status.pod["spec"]["nodeName"],
                node=pod["spec"]["nodeName"],
            )
        elif self._left_out.get(uid_of(pod)) == _placement(pod):
            return
        self._forget(uid_of(pod))
        if self._recover(pod) and status is not None and self.is_complete:
            log.error(
                "A pod was bound by another extender: there must be one only, or both give away the same devices",
                **_names(pod),
                node=pod["spec"]["nodeName"],
            )
            self._metrics.bound_elsewhere()

    def _recover(self, pod: Object) -> bool:
        """Whether its placement was understood."""
        try:
            placed = self._place(pod)
        except UserError as error:
            self._leave_out(pod, str(error))
            return False
        except Exception as error:
            log.exception("A bound pod can't be recovered", **_names(pod))
            self._leave_out(pod, str(error))
            return False
        self._left_out.pop(uid_of(pod), None)
        self.statuses[uid_of(pod)] = PodScheduleStatus(placed, next_state(PodState.UNKNOWN, PodEvent.BOUND_SEEN))
        log.debug("Recovered a bound pod", **_names(pod), node=pod["spec"]["nodeName"])
        return True

    def _place(self, pod: Object) -> Object:
        """Tell of a bound pod; as what it was told of. Raises `UserError`."""
        try:
            self._tell(lambda algorithm: algorithm.add_allocated_pod(pod))
        except UserError as error:
            substitute = stand_in(pod, self.algorithm.groups.values())
            if substitute is None:
                raise
            self._tell(lambda algorithm: algorithm.add_allocated_pod(substitute))
            self._warn(pod, "HivedPodWithoutRequest", "keeps its devices, maybe without quota", str(error))
            return substitute
        return pod

    def _leave_out(self, pod: Object, reason: str) -> None:
        self._left_out[uid_of(pod)] = _placement(pod)
        self._metrics.not_recovered()
        self._warn(pod, "HivedPodLeftOut", "is left out: its devices are not counted", reason)

    def _warn(self, pod: Object, event: str, what: str, reason: str) -> None:
        log.warning(f"A bound pod {what}", **_names(pod), node=pod["spec"]["nodeName"], reason=reason)
        self._events.event(pod, "Warning", event, f"To HiveD this pod {what}: {reason}")

    def _forget(self, uid: str) -> None:
        status = self.statuses.pop(uid, None)
        if status is None:
            return
        if is_allocated(status.pod_state):
            self._tell(lambda algorithm: algorithm.delete_allocated_pod(status.pod))
        else:
            self.algorithm.delete_unallocated_pod(status.pod)

    def _tell(self, change: Change) -> None:
        change(self.algorithm)
        if self._journal is not None:
            self._journal.append(change)


def _names(pod: Object) -> dict[str, str]:
    return {"pod": key_of(pod), "uid": uid_of(pod)}


def _request(pod: Object) -> str | None:
    return annotations_of(pod).get(POD_SCHEDULING_SPEC)


def _placement(pod: Object) -> dict[str, str | None]:
    """All annotations that tell where it is."""
    return {**extract_pod_bind_annotations(pod), POD_SCHEDULING_SPEC: _request(pod)}


def _same_placement(decided: Object, bound: Object) -> bool:
    """Whether a pod is bound as it was decided."""
    return bool(
        decided["spec"]["nodeName"] == bound["spec"]["nodeName"]
        and extract_pod_bind_annotations(decided) == extract_pod_bind_annotations(bound)
    )


def _last_answer(result: PodScheduleResult | None) -> str:
    """Why the pod is not bound, in words; "" before its first decision."""
    if result is not None and result.pod_wait_info is not None:
        return result.pod_wait_info.reason
    if result is not None and result.pod_preempt_info is not None:
        found = result.pod_preempt_info
        return f"waits for pods to leave {found.node}: {', '.join(map(key_of, found.victim_pods))}"
    return ""


def _age(pod: Object) -> tuple[str, str]:
    return str(pod["metadata"].get("creationTimestamp") or ""), key_of(pod)
