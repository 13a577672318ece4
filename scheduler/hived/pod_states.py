"""The life of a pod as the scheduler sees it: its states, what can happen to it, and what becomes of it then.

A pod that was deleted, has completed or was never seen is Unknown, which is the absence of a status. Binding and Bound
pods hold devices: they are allocated. Everything here is pure; who acts on a change of state is `scheduling_view`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from scheduler.hived.errors import PlatformError, UserError
from scheduler.hived.types import PodScheduleResult
from store.kube.objects import Object


class PodState(StrEnum):
    """As in the seed."""

    UNKNOWN = "Unknown"
    WAITING = "Waiting"
    PREEMPTING = "Preempting"
    BINDING = "Binding"
    BOUND = "Bound"


class PodEvent(StrEnum):
    """What can happen to a pod: what the API server shows, and what was decided on a call that was admitted."""

    UNBOUND_SEEN = "unbound pod seen"
    BOUND_SEEN = "bound pod seen"
    GONE = "deleted or completed"
    FILTER_BIND = "filter: bind"
    FILTER_PREEMPT = "filter: preempt"
    FILTER_WAIT = "filter: wait"
    PREEMPT_BIND = "preempt: bind"
    PREEMPT_VICTIMS = "preempt: victims"
    PREEMPT_WAIT = "preempt: wait"


class ExtenderCall(StrEnum):
    """What kube-scheduler asks for."""

    FILTER = "filter"
    BIND = "bind"
    PREEMPT = "preempt"


def is_allocated(state: PodState) -> bool:
    """Whether a pod in this state holds devices (the seed's `IsAllocated`)."""
    return state in (PodState.BINDING, PodState.BOUND)


_PENDING_EVENTS: Final[Mapping[PodEvent, PodState | None]] = {  # None: as before
    PodEvent.UNBOUND_SEEN: None,
    PodEvent.BOUND_SEEN: PodState.BOUND,
    PodEvent.FILTER_BIND: PodState.BINDING,
    PodEvent.FILTER_PREEMPT: None,
    PodEvent.FILTER_WAIT: PodState.WAITING,
    PodEvent.PREEMPT_BIND: None,
    PodEvent.PREEMPT_VICTIMS: PodState.PREEMPTING,
    PodEvent.PREEMPT_WAIT: PodState.WAITING,
}
_TRANSITIONS: Final[Mapping[PodState, Mapping[PodEvent, PodState | None]]] = {
    PodState.UNKNOWN: {PodEvent.UNBOUND_SEEN: PodState.WAITING, PodEvent.BOUND_SEEN: PodState.BOUND},
    PodState.WAITING: _PENDING_EVENTS,
    PodState.PREEMPTING: _PENDING_EVENTS,
    PodState.BINDING: {
        PodEvent.UNBOUND_SEEN: None,
        PodEvent.FILTER_BIND: None,
        PodEvent.BOUND_SEEN: PodState.BOUND,
    },
    PodState.BOUND: {PodEvent.UNBOUND_SEEN: None, PodEvent.BOUND_SEEN: None},
}


def next_state(state: PodState, event: PodEvent) -> PodState:
    """The state after an event. Raises `PlatformError` when the event can't happen in this state."""
    if event == PodEvent.GONE:
        return PodState.UNKNOWN
    if event not in _TRANSITIONS[state]:
        raise PlatformError(f"a pod in state {state} met the event {event!r}, which is impossible there")
    return _TRANSITIONS[state][event] or state


def check_admitted(call: ExtenderCall, state: PodState, pod: str, node: str) -> None:
    """Raise `UserError` when a pod in this state can't be the subject of a call; kube-scheduler tries again.

    `pod`: how to name it; `node`: that it is allocated on, if it is.
    """
    if call == ExtenderCall.BIND:
        problem = _BIND_REFUSED.get(state)
    elif call == ExtenderCall.PREEMPT and state == PodState.BINDING:
        problem = "it is already being bound to node {node}"
    else:
        problem = _DECISION_REFUSED.get(state)
    if problem is not None:
        raise UserError(f"{call} of pod {pod}: {problem.format(node=node)}")


_NOT_THERE: Final = "it does not exist, has completed, does not ask for HiveD, or was not seen yet"
_UNDECIDED: Final = "no node was decided for it yet; let filter decide first"
_DECISION_REFUSED: Final = {PodState.UNKNOWN: _NOT_THERE, PodState.BOUND: "it is already bound to node {node}"}
_BIND_REFUSED: Final = {
    PodState.UNKNOWN: _NOT_THERE,
    PodState.WAITING: _UNDECIDED,
    PodState.PREEMPTING: _UNDECIDED,
}


@dataclass(slots=True)
class PodScheduleStatus:
    """What is known of one pod (the seed's `PodScheduleStatus`).

    `pod`: as the algorithm was last told of it; of an allocated pod, with its placement in its annotations.
    `pod_bind_attempts`: filters since it began to bind. `pod_schedule_result`: the last decision, if any. `refusal`:
    why there was none when the pod was last asked about, or "".
    """

    pod: Object
    pod_state: PodState
    pod_bind_attempts: int = 0
    pod_schedule_result: PodScheduleResult | None = None
    refusal: str = ""


class PodScheduleStatuses(dict[str, PodScheduleStatus]):
    """By pod UID (the seed's `PodScheduleStatuses`)."""

    def state(self, uid: str) -> PodState:
        status = self.get(uid)
        return PodState.UNKNOWN if status is None else status.pod_state

    def by_state(self) -> Counter[PodState]:
        """How many pods are in each state."""
        return Counter(status.pod_state for status in self.values())
