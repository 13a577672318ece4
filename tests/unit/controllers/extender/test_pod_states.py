"""The states of pods: each row of the transition table, and every pair outside of it. Substitute requests for bound
pods whose request can't be read.
"""

from __future__ import annotations

import pytest

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
from scheduler.hived.contract import POD_SCHEDULING_SPEC, extract_pod_bind_info, extract_pod_scheduling_spec
from scheduler.hived.errors import PlatformError, UserError
from store.kube.api.objects import Object
from tests.support import require
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import PIN, design

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

REFUSED = {
    (ExtenderCall.FILTER, UNKNOWN): "not exist",
    (ExtenderCall.FILTER, BOUND): "already bound to node n1",
    (ExtenderCall.PREEMPT, UNKNOWN): "not exist",
    (ExtenderCall.PREEMPT, BINDING): "already being bound to node n1",
    (ExtenderCall.PREEMPT, BOUND): "already bound to node n1",
    (ExtenderCall.BIND, UNKNOWN): "not exist",
    (ExtenderCall.BIND, WAITING): "it has no node yet",
    (ExtenderCall.BIND, PREEMPTING): "it has no node yet",
}

GANG = Job("gang", "VC1", 5, ((2, 16),), pinned=PIN)


@pytest.mark.parametrize(("state", "event", "after"), ROWS)
def test_transitions(state: PodState, event: PodEvent, after: PodState) -> None:
    """Each row of the table."""
    assert next_state(state, event) == after


@pytest.mark.parametrize(("state", "event"), IMPOSSIBLE)
def test_impossible_events(state: PodState, event: PodEvent) -> None:
    """A decision on a pod that was not admitted is a defect of the scheduler, not a state."""
    with pytest.raises(PlatformError, match=f"state {state}"):
        next_state(state, event)


@pytest.mark.parametrize("state", PodState)
@pytest.mark.parametrize("call", ExtenderCall)
def test_admission(call: ExtenderCall, state: PodState) -> None:
    """A call that is invalid in a state is a user error that names the call, the pod and the reason."""
    problem = REFUSED.get((call, state))
    if problem is None:
        check_admitted(call, state, "ns/p", "n1")
    else:
        with pytest.raises(UserError, match=f"{call} of pod ns/p: .*{problem}"):
            check_admitted(call, state, "ns/p", "n1")


def test_allocated_states() -> None:
    """Binding and Bound pods hold devices."""
    assert [state for state in PodState if is_allocated(state)] == [BINDING, BOUND]


def test_statuses_by_uid() -> None:
    """A pod without a status is Unknown; each status counts once."""
    statuses = PodScheduleStatuses(
        {uid: PodScheduleStatus({}, state) for uid, state in (("a", BOUND), ("b", WAITING), ("c", BOUND))}
    )
    assert (statuses.state("a"), statuses.state("unknown")) == (BOUND, UNKNOWN)
    assert statuses.by_state() == {BOUND: 2, WAITING: 1}


def spoilt(pod: Object) -> Object:
    """Return the pod with an unreadable request."""
    annotations = pod["metadata"]["annotations"] | {POD_SCHEDULING_SPEC: "{"}
    return pod | {"metadata": pod["metadata"] | {"annotations": annotations}}


def found() -> tuple[Cluster, Object, Object]:
    """Return both bound pods of a gang, and a process that has recovered the first of them."""
    cluster = Cluster(design())
    for name in ("first", "second"):
        cluster.ask(GANG, 16, pod=name)
    first, second = cluster.bound["first"], cluster.bound["second"]
    other = Cluster(design())
    other.recover(first)
    return other, first, second


def test_a_readable_pod_needs_none() -> None:
    """It counts under its own request."""
    cluster, _, second = found()
    assert stand_in(second, cluster.groups.values()) is None


def test_a_free_place_of_a_group_is_the_pod_s() -> None:
    """The group supplies the request."""
    cluster, _, second = found()
    counts_as = require(stand_in(spoilt(second), cluster.groups.values()))
    assert extract_pod_scheduling_spec(counts_as) == extract_pod_scheduling_spec(second)
    cluster.recover(counts_as)
    assert len(cluster.group("gang").pods()) == 2


def test_a_place_that_another_pod_has_is_not() -> None:
    """A copy of a bound pod, bound by hand: it is a group of its own, without quota, and the group is unchanged."""
    cluster, first, _ = found()
    counts_as = require(stand_in(spoilt(first), cluster.groups.values()))
    spec, info = extract_pod_scheduling_spec(counts_as), extract_pod_bind_info(counts_as)
    assert (spec.affinity_group.name, spec.priority) == ("test/first", -1)
    assert info.leaf_cell_isolation == extract_pod_bind_info(first).leaf_cell_isolation
