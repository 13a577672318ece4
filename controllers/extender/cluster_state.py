"""The scheduler's knowledge of nodes and pods, and the informers that feed it. Only this module changes it, and calls
the algorithm.

The model: no method awaits, so each is one uninterrupted step, and callers always see a state in which pods and
algorithm agree. A pod's status follows `pod_states`; each change of its state is passed to the algorithm exactly once:
when the pod begins to wait, when it gets a place, and when it is gone.

No annotation stops the scheduler. A bound pod with an unreadable placement is left out, with one warning, until its
annotations change; it is treated as holding no devices. A pod with only an unreadable request keeps its devices (see
`stand_in`).

An algorithm may be replaced by one that `rebuild` makes in a thread, from the immutable result of `capture`. Between
`capture` and `swap`, all changes of nodes and allocated pods are recorded, and replayed on the new algorithm at the
swap. Running pods are never touched: those without quota in the new configuration continue as opportunistic work, and
are reported.

The informers follow all nodes and all live pods: the API server filters out completed pods, as for kube-scheduler, and
the watch reports them as deleted. Of pods without HiveD's resource limit only the identity is kept, and of nodes only
what decisions use.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import structlog

from controllers.extender.pod_states import (
    ExtenderCall,
    PodEvent,
    PodScheduleStatus,
    PodScheduleStatuses,
    PodState,
    check_admitted,
    is_allocated,
    next_state,
    stand_in,
)
from controllers.extender.reporting import Metrics, write_event
from scheduler.hived.algorithm import HivedAlgorithm, SchedulingPhase
from scheduler.hived.cells.groups import AffinityGroup
from scheduler.hived.contract import (
    OPPORTUNISTIC_PRIORITY,
    POD_SCHEDULING_SPEC,
    extract_pod_bind_annotations,
    is_bound,
    is_hived_enabled,
    is_interested,
    why_bad,
)
from scheduler.hived.errors import UserError
from scheduler.hived.inspection.snapshot import WaitingPod
from store.kube.api.objects import NODES, PODS, Object, annotations_of, key_of, name_of, uid_of
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state
from store.kube.informer.reflector import without_managed_fields

log = structlog.get_logger(__name__)

Change: TypeAlias = Callable[[HivedAlgorithm], None]
LIVE_PODS: Final = "status.phase!=Succeeded,status.phase!=Failed"
_IDENTITY = ("name", "namespace", "uid", "resourceVersion")


@dataclass(frozen=True, slots=True)
class Capture:
    """The input for rebuilding an algorithm. `pods`: the allocated pods, oldest first."""

    nodes: tuple[Object, ...]
    pods: tuple[Object, ...]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An algorithm with all captured objects. `recovered`: the pods that it has placed (`NAMESPACE/NAME`). `failed`:
    why it could not place others.
    """

    algorithm: HivedAlgorithm
    recovered: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Replacement:
    """The allocated pods after a switch to another algorithm, recovered or failed, and `downgraded`: the names of the
    groups that lost their quota to it.
    """

    recovered: tuple[str, ...]
    failed: Mapping[str, str]
    downgraded: tuple[str, ...]


class SchedulingView:
    """`statuses`: of all live pods that ask for HiveD, except those left out. `nodes`: by name.

    `is_complete`: the first lists of nodes and pods were added. `gone`: called with the UID of each pod that is deleted
    or completed.
    """

    def __init__(
        self,
        algorithm: HivedAlgorithm,
        *,
        recorder: Recorder | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.statuses = PodScheduleStatuses()
        self.nodes: dict[str, Object] = {}
        self.is_complete = False
        self.gone: Callable[[str], None] = lambda uid: None
        self._recorder, self._metrics = recorder, metrics or Metrics()
        self._left_out: dict[str, Mapping[str, str | None]] = {}  # by UID: the annotations that were unreadable
        self._journal: list[Change] | None = None

    @property
    def left_out(self) -> Collection[str]:
        """Return the UIDs of bound pods with an unreadable placement."""
        return self._left_out.keys()

    def node_seen(self, node: Object) -> None:
        """Add or update a node as shown by the API server."""
        old = self.nodes.get(name_of(node))
        self.nodes[name_of(node)] = node
        self._apply(lambda algorithm: algorithm.add_node(node))
        before, now = None if old is None else why_bad(old), why_bad(node)
        if before == now or (old is None and not self.is_complete):
            return
        if now:
            log.warning("Node became bad", node=name_of(node), reason=now)
        else:
            log.info("Node became healthy", node=name_of(node))

    def node_gone(self, node: Object) -> None:
        self.nodes.pop(name_of(node), None)
        log.warning("Node deleted", node=name_of(node))
        self._apply(lambda algorithm: algorithm.delete_node(node))

    def pod_seen(self, pod: Object) -> None:
        """Add or update a pod as shown by the API server."""
        if not is_interested(pod):
            self.pod_gone(pod)
        elif is_bound(pod):
            self._bound_seen(pod)
        elif (status := self.statuses.get(uid_of(pod))) is None:
            self.algorithm.add_unallocated_pod(pod)
            self.statuses[uid_of(pod)] = PodScheduleStatus(pod, next_state(PodState.UNKNOWN, PodEvent.UNBOUND_SEEN))
        elif not is_allocated(status.pod_state):
            self._refresh(status, pod)

    def pod_gone(self, pod: Object) -> None:
        """Remove a pod that was deleted or completed, in whatever state."""
        self._left_out.pop(uid_of(pod), None)
        status = self.statuses.get(uid_of(pod))
        if status is not None and is_allocated(status.pod_state):
            log.info("Pod released its cells", **_names(pod), node=status.pod["spec"]["nodeName"])
        self._forget(uid_of(pod))
        self.gone(uid_of(pod))

    def waiting(self) -> list[WaitingPod]:
        """Return the pods without a place, each with its last answer."""
        waiting = []
        for status in self.statuses.values():
            if is_allocated(status.pod_state):
                continue
            reason, result = "", status.pod_schedule_result
            if result is not None and result.pod_wait_info is not None:
                reason = result.pod_wait_info.reason
            elif result is not None and result.pod_preempt_info is not None:
                found = result.pod_preempt_info
                reason = f"waits for pods to leave {found.node}: {', '.join(map(key_of, found.victim_pods))}"
            waiting.append(WaitingPod(status.pod, status.pod_state, reason))
        return waiting

    def filter(self, pod: Object, suggested: Collection[str]) -> PodScheduleStatus:
        """Filter a pod. Return its status: Binding, or waiting with the last decision. Raises `HivedError`.

        `pod`: as kube-scheduler sent it. Once the pod is Binding, the decision stays.
        """
        status = self._admitted(ExtenderCall.FILTER, pod)
        if status.pod_state == PodState.BINDING:
            status.pod_bind_attempts += 1
            status.pod_state = next_state(status.pod_state, PodEvent.FILTER_BIND)
            return status
        decision = self.algorithm.schedule(status.pod, suggested, SchedulingPhase.FILTERING)
        result = decision.result
        event = PodEvent.FILTER_PREEMPT if result.pod_preempt_info is not None else PodEvent.FILTER_WAIT
        if result.pod_bind_info is not None:
            event, bound = PodEvent.FILTER_BIND, self.algorithm.commit(decision)
            self._record(lambda algorithm: algorithm.restore(bound))  # another algorithm has cells of its own
            status.pod = bound
            self.lost_quota(result.downgraded, f"pod {key_of(pod)}")
        status.pod_state = next_state(status.pod_state, event)
        status.pod_schedule_result = result
        return status

    def preempt(self, pod: Object, suggested: Collection[str]) -> PodScheduleStatus:
        """Find the pod's victims. Return its status, with the decision; a bind result is left for the next filter to
        find. Raises `HivedError`.
        """
        status = self._admitted(ExtenderCall.PREEMPT, pod)
        result = self.algorithm.schedule(status.pod, suggested, SchedulingPhase.PREEMPTING).result
        event = PodEvent.PREEMPT_WAIT
        if result.pod_bind_info is not None:
            event = PodEvent.PREEMPT_BIND
        elif result.pod_preempt_info is not None:
            event = PodEvent.PREEMPT_VICTIMS
        self.lost_quota(result.downgraded, f"pod {key_of(pod)}")
        status.pod_state = next_state(status.pod_state, event)
        status.pod_schedule_result = result
        return status

    def lost_quota(self, groups: Iterable[str], to: str) -> None:
        """Log the groups' loss of quota and write Events on their pods: they continue, but may be preempted."""
        for name in groups:
            log.info("Group lost its quota", group=name, to=to)
            message = f"Affinity group {name} lost its quota to {to}: it continues as an opportunistic one until "
            group = self.algorithm.groups.get(name)
            for pod in [] if group is None else group.pods():
                text = message + "another group needs the devices"
                write_event(self._recorder, pod, "Normal", "HivedQuotaLost", text)

    def capture(self) -> Capture:
        """Return the current state. Later changes are recorded until `swap` or `abandon`."""
        self._journal = []
        pods = [status.pod for status in self.statuses.values() if is_allocated(status.pod_state)]
        pods.sort(key=lambda pod: (str(pod["metadata"].get("creationTimestamp") or ""), key_of(pod)))
        return Capture(tuple(self.nodes.values()), tuple(pods))

    def abandon(self) -> None:
        """Stop recording changes; there will be no `swap`."""
        self._journal = None

    def swap(self, algorithm: HivedAlgorithm) -> None:
        """Switch to an algorithm rebuilt from the captured state. Waiting pods are scheduled again."""
        assert self._journal is not None, "an algorithm takes over from what was captured"
        for change in self._journal:
            try:
                change(algorithm)
            except Exception:
                log.exception("Could not replay a change on the new configuration")
        self._journal = None
        self.algorithm = algorithm
        for status in self.statuses.values():
            if not is_allocated(status.pod_state):
                status.pod_state, status.pod_schedule_result = PodState.WAITING, None
                algorithm.add_unallocated_pod(status.pod)

    def _admitted(self, call: ExtenderCall, pod: Object) -> PodScheduleStatus:
        """Return the status of a pod that may be decided on. kube-scheduler may have newer annotations than the
        informer.
        """
        state = self.statuses.state(uid_of(pod))
        status = self.statuses.get(uid_of(pod))
        node = "" if status is None else str(status.pod["spec"].get("nodeName") or "")
        check_admitted(call, state, key_of(pod), node)
        assert status is not None, "unknown pods are not admitted"
        if not is_allocated(state):
            metadata = status.pod["metadata"] | {"annotations": annotations_of(pod)}
            self._refresh(status, status.pod | {"metadata": metadata})
        return status

    def _refresh(self, status: PodScheduleStatus, pod: Object) -> None:
        """Update a waiting pod. If its request changed, it is removed and added again."""
        before, status.pod = status.pod, pod
        if _request(before) == _request(pod):
            status.pod_state = next_state(status.pod_state, PodEvent.UNBOUND_SEEN)
            return
        self.algorithm.delete_unallocated_pod(before)
        self.algorithm.add_unallocated_pod(pod)
        status.pod_state = next_state(next_state(status.pod_state, PodEvent.GONE), PodEvent.UNBOUND_SEEN)

    def _bound_seen(self, pod: Object) -> None:
        """Record a bound pod. An allocated pod keeps the placement first passed to the algorithm, whatever it says
        later.
        """
        status = self.statuses.get(uid_of(pod))
        if status is not None and is_allocated(status.pod_state):
            same_node = status.pod["spec"]["nodeName"] == pod["spec"]["nodeName"]
            if status.pod_state == PodState.BOUND or (
                same_node and extract_pod_bind_annotations(status.pod) == extract_pod_bind_annotations(pod)
            ):
                status.pod_state = next_state(status.pod_state, PodEvent.BOUND_SEEN)
                status.pod_schedule_result = None  # it holds the places of the whole group
                return
            log.warning(
                "Pod was not bound as decided; using the placement in its annotations",
                **_names(pod),
                decided=status.pod["spec"]["nodeName"],
                node=pod["spec"]["nodeName"],
            )
        elif self._left_out.get(uid_of(pod)) == _placement(pod):
            return
        self._forget(uid_of(pod))
        if self._recover(pod) and status is not None and self.is_complete:
            log.error(
                "Pod was bound by another extender; run only one, or both allocate the same devices",
                **_names(pod),
                node=pod["spec"]["nodeName"],
            )
            self._metrics.bound_elsewhere()

    def _recover(self, pod: Object) -> bool:
        """Add a bound pod. Return whether its placement is readable."""
        try:
            placed = self._place(pod)
        except UserError as error:
            self._leave_out(pod, str(error))
            return False
        except Exception as error:
            log.exception("Could not recover bound pod", **_names(pod))
            self._leave_out(pod, str(error))
            return False
        self._left_out.pop(uid_of(pod), None)
        self.statuses[uid_of(pod)] = PodScheduleStatus(placed, next_state(PodState.UNKNOWN, PodEvent.BOUND_SEEN))
        log.debug("Recovered bound pod", **_names(pod), node=pod["spec"]["nodeName"])
        return True

    def _place(self, pod: Object) -> Object:
        """Add a bound pod to the algorithm, with a substitute request if its own is unreadable.

        Return the pod as added. Raises `UserError`.
        """
        try:
            self._apply(lambda algorithm: algorithm.restore(pod))
        except UserError as error:
            substitute = stand_in(pod, self.algorithm.groups.values())
            if substitute is None:
                raise
            self._apply(lambda algorithm: algorithm.restore(substitute))
            self._warn(pod, "HivedPodWithoutRequest", "keeps its devices, possibly without quota", str(error))
            return substitute
        return pod

    def _leave_out(self, pod: Object, reason: str) -> None:
        self._left_out[uid_of(pod)] = _placement(pod)
        self._metrics.not_recovered()
        self._warn(pod, "HivedPodLeftOut", "is left out: its devices are not counted", reason)

    def _warn(self, pod: Object, event: str, what: str, reason: str) -> None:
        log.warning(f"Bound pod {what}", **_names(pod), node=pod["spec"]["nodeName"], reason=reason)
        write_event(self._recorder, pod, "Warning", event, f"This pod {what}: {reason}")

    def _forget(self, uid: str) -> None:
        status = self.statuses.pop(uid, None)
        if status is None:
            return
        if is_allocated(status.pod_state):
            self._apply(lambda algorithm: algorithm.delete_allocated_pod(status.pod))
        else:
            self.algorithm.delete_unallocated_pod(status.pod)

    def _apply(self, change: Change) -> None:
        change(self.algorithm)
        self._record(change)

    def _record(self, change: Change) -> None:
        if self._journal is not None:
            self._journal.append(change)


def rebuild(build: Callable[[], HivedAlgorithm], capture: Capture) -> Rebuilt:
    """Build an algorithm and add the captured nodes, then the pods. Raises what `build` raises."""
    algorithm = build()
    for node in capture.nodes:
        algorithm.add_node(node)
    recovered, failed = [], {}
    for pod in capture.pods:
        try:
            algorithm.restore(pod)
        except Exception as error:
            log.exception("Pod's place does not fit the new configuration", pod=key_of(pod), uid=uid_of(pod))
            failed[key_of(pod)] = str(error)
        else:
            recovered.append(key_of(pod))
    return Rebuilt(algorithm, tuple(recovered), failed)


def newly_downgraded(before: HivedAlgorithm, after: HivedAlgorithm) -> tuple[str, ...]:
    """Return the groups that are downgraded in `after` only."""
    known = {name for name, group in before.groups.items() if is_downgraded(group)}
    return tuple(name for name, group in after.groups.items() if is_downgraded(group) and name not in known)


def is_downgraded(group: AffinityGroup) -> bool:
    """Return whether the group asked for quota and holds its devices without any."""
    return group.is_opportunistic and group.spec.priority > OPPORTUNISTIC_PRIORITY


def _names(pod: Object) -> dict[str, str]:
    return {"pod": key_of(pod), "uid": uid_of(pod)}


def _request(pod: Object) -> str | None:
    return annotations_of(pod).get(POD_SCHEDULING_SPEC)


def _placement(pod: Object) -> dict[str, str | None]:
    """Return all annotations that determine a pod's place."""
    return {**extract_pod_bind_annotations(pod), POD_SCHEDULING_SPEC: _request(pod)}


class ClusterInformers:
    """Node and pod informers that notify `view`, then call `pod_seen` with each new pod. `clock`: monotonic seconds."""

    def __init__(
        self,
        api: KubeApi,
        view: SchedulingView,
        pod_seen: Callable[[Object], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.nodes = Informer(api, NODES, transform=_cached_node, clock=clock, rng=rng)
        self.pods = Informer(api, PODS, field_selector=LIVE_PODS, transform=_cached_pod, clock=clock, rng=rng)
        self.nodes.add_handler(_Handler(view.node_seen, view.node_gone))
        self.pods.add_handler(_Handler(view.pod_seen, view.pod_gone, pod_seen))


@dataclass(frozen=True, slots=True)
class _Handler:
    """Passes objects to `seen` and `gone`, and each new one to `new` afterwards."""

    seen: Callable[[Object], None]
    gone: Callable[[Object], None]
    new: Callable[[Object], None] = lambda obj: None

    def added(self, obj: Object) -> None:
        self.seen(obj)
        self.new(obj)

    def updated(self, old: Object, new: Object) -> None:
        self.seen(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self.gone(last_state(obj))


def _cached_node(node: Object) -> Object:
    """Transform: keep what determines a node's health, its spec and conditions."""
    conditions = (node.get("status") or {}).get("conditions") or []
    return without_managed_fields(node) | {"status": {"conditions": conditions}}


def _cached_pod(pod: Object) -> Object:
    """Transform: keep all of a pod that asks for HiveD, and only the identity of any other pod."""
    if is_hived_enabled(pod):
        return without_managed_fields(pod)
    return {"metadata": {name: pod["metadata"][name] for name in _IDENTITY if name in pod["metadata"]}}
