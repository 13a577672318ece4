"""The states of pods: each row of the table of transitions, and whatever is not in it."""

from __future__ import annotations

import pytest

from scheduler.hived.errors import PlatformError, UserError
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

UNKNOWN, WAITING, PREEMPTING, BINDING, BOUND = PodState
PENDING = (WAITING, PREEMPTING)

ROWS = [
    (UNKNOWN, PodEvent.UNBOUND_SEEN, WAITING),
    *((state, PodEvent.BOUND_SEEN, BOUND) for state in (UNKNOWN, *PENDING)),
    *((state, PodEvent.FILTER_BIND, BINDING) for state in PENDING),
    *((state, PodEvent.FILTER_PREEMPT, state) for state in PENDING),
    *((state, event, WAITING) for state in PENDING for event in (PodEvent.FILTER_WAIT, PodEvent.PREEMPT_WAIT)),
    *((state, PodEvent.PREEMPT_VICTIMS, PREEMPTING) for state in PENDING),
    *((state, PodEvent.PREEMPT_BIND, state) for state in PENDING),
    (BINDING, PodEvent.FILTER_BIND, BINDING),
    (BINDING, PodEvent.BOUND_SEEN, BOUND),
    (BOUND, PodEvent.BOUND_SEEN, BOUND),
    *((state, PodEvent.UNBOUND_SEEN, state) for state in (*PENDING, BINDING, BOUND)),
    *((state, PodEvent.GONE, UNKNOWN) for state in PodState),
]
IMPOSSIBLE = sorted({(state, event) for state in PodState for event in PodEvent} - {row[:2] for row in ROWS})


@pytest.mark.parametrize(("state", "event", "after"), ROWS)
def test_transitions(state: PodState, event: PodEvent, after: PodState) -> None:
    """Each row of the table."""
    assert next_state(state, event) == after


@pytest.mark.parametrize(("state", "event"), IMPOSSIBLE)
def test_what_can_not_happen(state: PodState, event: PodEvent) -> None:
    """A decision on a pod that was not admitted to one is a defect of ours, not a state."""
    with pytest.raises(PlatformError, match=f"state {state}"):
        next_state(state, event)


REFUSED = {
    (ExtenderCall.FILTER, UNKNOWN): "not exist",
    (ExtenderCall.FILTER, BOUND): "already bound to node n1",
    (ExtenderCall.PREEMPT, UNKNOWN): "not exist",
    (ExtenderCall.PREEMPT, BINDING): "already being bound to node n1",
    (ExtenderCall.PREEMPT, BOUND): "already bound to node n1",
    (ExtenderCall.BIND, UNKNOWN): "not exist",
    (ExtenderCall.BIND, WAITING): "no node was decided",
    (ExtenderCall.BIND, PREEMPTING): "no node was decided",
}


@pytest.mark.parametrize("state", PodState)
@pytest.mark.parametrize("call", ExtenderCall)
def test_admission(call: ExtenderCall, state: PodState) -> None:
    """A call that makes no sense in a state is the caller's error, and names the call, the pod and why."""
    problem = REFUSED.get((call, state))
    if problem is None:
        check_admitted(call, state, "ns/p", "n1")
    else:
        with pytest.raises(UserError, match=f"{call} of pod ns/p: .*{problem}"):
            check_admitted(call, state, "ns/p", "n1")


def test_who_holds_devices() -> None:
    """Binding and Bound pods do."""
    assert [state for state in PodState if is_allocated(state)] == [BINDING, BOUND]


def test_statuses_by_uid() -> None:
    """A pod without a status is Unknown; each status counts once."""
    statuses = PodScheduleStatuses(
        {uid: PodScheduleStatus({}, state) for uid, state in (("a", BOUND), ("b", WAITING), ("c", BOUND))}
    )
    assert (statuses.state("a"), statuses.state("nobody")) == (BOUND, UNKNOWN)
    assert statuses.by_state() == {BOUND: 2, WAITING: 1}
