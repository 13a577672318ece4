"""Defects of the reference that this HiveD must not have, each shown absent by what users would notice of it.

Those of the process around the algorithm (D9 to D12) are tested where that process is.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import yaml

from scheduler.hived.constants import POD_BIND_INFO, POD_SCHEDULING_SPEC
from scheduler.hived.errors import InvalidConfig, UserError
from scheduler.hived.groups import GroupState
from scheduler.hived.invariants import violations
from store.kube.objects import Object, name_of
from tests.support.hived import FILTERING, PREEMPTING, Cluster, Job, ownership, pod_object, snapshot, topology_of
from tests.support.hived_design import CT1, DGX2, FOUR, PIN, PIN_CT1, PIN_IB, VC1, design, nodes, played, pod_of, quota

FIRST, SECOND = "0.0.3.0", "0.0.3.1"  # The nodes of the pinned pair.
BOTH = [f"{FIRST}:0-15", f"{SECOND}:0-15"]


def on_pin(name: str, priority: int, *members: tuple[int, int], lazy: bool = True, ignore: bool = False) -> Job:
    return Job(name, "VC1", priority, members, DGX2, PIN, lazy=lazy, ignore=ignore)


# D1


@pytest.mark.parametrize("lazy", [False, True])
def test_a_victim_goes_on_after_a_cancelled_preemption(lazy: bool) -> None:
    """D1: the preemptor is deleted: its victim is allocated again, and the victim's next pod gets its place."""
    cluster = Cluster(design())
    victim = on_pin("victim", 1, (2, 16), lazy=lazy)
    cluster.ask(victim, pod="victim-0")
    cluster.ask(on_pin("strong", 2, (1, 16)), pod="strong-0")
    assert cluster.group("victim").state == GroupState.BEING_PREEMPTED
    cluster.delete("strong-0")
    assert cluster.group("victim").state == GroupState.ALLOCATED
    assert cluster.ask(victim, pod="victim-1").place == f"{SECOND}:0-15"


def test_a_victim_s_next_pod_while_it_is_being_preempted() -> None:
    """D1: a late pod of a group that is being preempted gets an answer, not an error, and is a victim like the others
    if it was bound.
    """
    cluster = Cluster(design())
    victim = on_pin("victim", 1, (2, 16), lazy=False)
    cluster.ask(victim, pod="victim-0")
    strong = on_pin("strong", 2, (2, 16))
    cluster.ask(strong, pod="strong-0")
    cluster.ask(victim, pod="victim-1")
    cluster.delete(*(name for name in ("victim-0", "victim-1")))
    assert [answer.place for answer in (cluster.ask(strong, pod=f"strong-{n}") for n in range(2))] == BOTH


def test_a_victim_goes_on_after_its_preemptor_is_overridden() -> None:
    """D1: a stronger preemptor of one of the two nodes replaces that of both, and is deleted: nobody is left behind."""
    cluster = Cluster(design())
    victim = on_pin("victim", 1, (2, 16), lazy=False)
    cluster.ask_all(victim)
    before = snapshot(cluster.algorithm)
    cluster.ask(on_pin("strong", 2, (2, 16)), pod="strong-0")
    cluster.ask(on_pin("stronger", 3, (1, 16)), pod="stronger-0")
    assert set(cluster.groups) == {"victim", "stronger"}
    cluster.delete("stronger-0")
    assert snapshot(cluster.algorithm) == before


# D2


def test_a_bind_over_reserved_cells_cancels_the_weaker_preemptor() -> None:
    """D2: in the Filtering phase a stronger pod is bound on a node that is reserved: the weaker preemption ends, and
    does not list the stronger pod as its victim.
    """
    cluster = Cluster(design())
    weak = on_pin("weak", 2, (1, 16))
    cluster.ask(on_pin("victim", 1, (2, 16), lazy=False), pod="victim-0")
    cluster.ask(weak, pod="weak-0")
    cluster.delete("victim-0")
    fill = on_pin("fill", 3, (1, 16), lazy=False)
    assert cluster.ask(fill, pod="fill-0", suggested=[SECOND], phase=FILTERING).place == f"{SECOND}:0-15"
    assert "weak" in cluster.groups
    strong = on_pin("strong", 3, (1, 16), lazy=False)
    assert cluster.ask(strong, pod="strong-0", phase=FILTERING).place == f"{FIRST}:0-15"
    assert "weak" not in cluster.groups
    assert cluster.ask(weak, pod="weak-0").waits
    assert {leaf.user.name for leaf in cluster.leaves(FIRST) if leaf.user} == {"strong"}
    assert not any(leaf.claimant for leaf in cluster.leaves(FIRST))


def test_a_bind_that_cancels_a_preemptor_with_bad_nodes() -> None:
    """D2: of the weaker preemptor's two nodes one is bad: what it gives back does not upset what was decided."""
    cells = [{"cellType": "NODE", **node} for node in nodes("n0", "n1", "n2")]
    types = {"NODE": {"childCellType": "GPU", "childCellNumber": 2, "isNodeLevel": True}}
    physical = {"cellTypes": types, "physicalCells": cells}
    cluster = Cluster({"physicalCluster": physical, "virtualClusters": {"A": quota(("NODE", 3))}})
    cluster.ask_all(Job("victim", "A", 1, ((2, 2),), lazy=False))
    cluster.ask(Job("weak", "A", 2, ((2, 2),)), suggested=["n0", "n1"])
    cluster.delete_group("victim")
    cluster.break_("n1")
    cluster.ask_all(Job("strong", "A", 3, ((2, 2),)))
    assert {slot.node for slot in cluster.group("strong").slots} == {"n0", "n2"}
    assert set(cluster.groups) == {"strong"}
    assert violations(cluster.algorithm) == []


# D3


def two_pods() -> Cluster:
    cluster = Cluster(design())
    cluster.ask_all(on_pin("gang", 1, (2, 16)))
    return cluster


@pytest.mark.parametrize("order", [list, lambda pods: pods[::-1]], ids=["in-order", "reversed"])
def test_recovered_pods_are_in_their_own_slots(order: Callable[[list[Object]], list[Object]]) -> None:
    """D3: whichever pod is found first, each is in the slot of its place, and the state is that of before."""
    cluster = two_pods()
    other = cluster.restarted(order=order)
    assert ownership(other.algorithm) == ownership(cluster.algorithm)
    for slot in other.group("gang").slots:
        assert slot.pod is not None
        assert slot.pod["spec"]["nodeName"] == slot.node


@pytest.mark.parametrize("order", [list, lambda pods: pods[::-1]], ids=["in-order", "reversed"])
@pytest.mark.parametrize("gone", [FIRST, SECOND])
def test_a_group_lives_until_its_last_pod_is_gone(order: Callable[[list[Object]], list[Object]], gone: str) -> None:
    """D3: after recovery one pod is deleted: the other's devices stay taken, and a new pod of the group gets exactly
    the place that is free.
    """
    other = two_pods().restarted(order=order)
    (deleted,) = [name for name, pod in other.bound.items() if pod["spec"]["nodeName"] == gone]
    other.delete(deleted)
    assert other.ask(Job("thief", "VC1", 1, ((1, 1),), DGX2, PIN)).waits
    assert other.ask(on_pin("gang", 1, (2, 16)), pod="again").node == gone
    other.delete(*list(other.bound))
    assert not other.groups


def test_one_of_two_pods_is_found() -> None:
    """D3: only the second pod of a gang still runs: it is in its own slot, and the first one is kept for a new pod."""
    cluster = two_pods()
    (first,) = [name for name, pod in cluster.bound.items() if pod["spec"]["nodeName"] == FIRST]
    del cluster.bound[first]
    other = cluster.restarted()
    assert [slot.node for slot in other.group("gang").slots if slot.pod] == [SECOND]
    assert other.ask(on_pin("gang", 1, (2, 16)), pod="again").node == FIRST


@pytest.mark.parametrize("order", [list, lambda pods: pods[::-1]], ids=["in-order", "reversed"])
def test_a_pod_that_was_bound_after_its_group_was_downgraded(order: Callable[[list[Object]], list[Object]]) -> None:
    """D3: whichever of its pods is found first, the group has the quota again that nobody else uses meanwhile."""
    cluster = Cluster(design())
    weak = Job("weak", "VC2", 0, ((2, 1),), CT1)
    cluster.ask(weak, pod="weak-0")
    cluster.ask(Job("strong", "VC2", 1, ((1, 2),), CT1), pod="strong-0")
    assert cluster.group("weak").is_opportunistic
    cluster.ask(weak, pod="weak-1")
    cluster.delete("strong-0")
    other = cluster.restarted(order=order)
    assert not other.group("weak").is_opportunistic
    assert len(other.group("weak").pods()) == 2


# D4


def test_a_preemption_that_ignores_suggestions_is_not_cancelled_by_them() -> None:
    """D4: the group said that suggestions do not count, so a node that is no longer suggested changes nothing."""
    cluster = Cluster(design())
    cluster.ask_all(on_pin("victim", 1, (2, 16), lazy=False))
    strong = on_pin("strong", 2, (2, 16), ignore=True)
    cluster.ask(strong, pod="strong-0", suggested=[])
    claimed = cluster.group("strong")
    assert cluster.ask(strong, pod="strong-0", suggested=[FIRST]).victims
    assert cluster.ask(strong, pod="strong-1", suggested=[]).victims
    assert cluster.group("strong") is claimed
    assert cluster.places("strong") == BOTH


# D5


def test_naming_victims_while_filtering_downgrades_nobody() -> None:
    """D5: a Filtering-phase answer that names victims leaves no trace: those that would be downgraded keep their
    quota.
    """
    cluster = played(6)
    before = snapshot(cluster.algorithm)
    strong = on_pin("strong", 2, (2, 16))
    assert cluster.ask(strong, pod="strong-0", phase=FILTERING).victims == {pod_of(5)}
    assert snapshot(cluster.algorithm) == before
    assert cluster.ask(strong, pod="strong-0", phase=PREEMPTING).victims == {pod_of(5)}
    assert cluster.group("g5").is_opportunistic


# D6


def test_a_chain_that_nobody_has_quota_of() -> None:
    """D6: a chain that no VC uses is fine: opportunistic pods run there."""
    cluster = Cluster(design(VC1, quota(("CT1-NODE", 1))))
    job = Job("opportunist", "VC2", -1, ((1, 8),), "DGX1-P100")
    assert cluster.ask(job).place == "1.0.0.2:0-7"


@pytest.mark.parametrize("cell_type", ["NO-SUCH-TYPE", f"{FOUR}.NO-SUCH-TYPE", "CT1-NODE.DGX2-V100-NODE"])
def test_a_virtual_cell_of_an_unknown_type(cell_type: str) -> None:
    """D6: a quota of a type that is not there, or not in that chain, is refused at start, by its path in the file."""
    with pytest.raises(InvalidConfig, match=r"virtualClusters\.VC2\.virtualCells\[0\]"):
        topology_of(design(VC1, quota((cell_type, 1))))


# D7


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({}, id="by-hand"),
        pytest.param({POD_SCHEDULING_SPEC: "virtualCluster: VC1\npriority: 0\nleafCellNumber: 1\n"}, id="no-bind-info"),
        pytest.param({POD_SCHEDULING_SPEC: "{", POD_BIND_INFO: "{"}, id="malformed"),
        pytest.param({POD_SCHEDULING_SPEC: "- 1", POD_BIND_INFO: "7"}, id="other-shapes"),
    ],
)
def test_a_pod_that_was_bound_by_hand(annotations: dict[str, str]) -> None:
    """D7: an enabled pod that somebody bound without HiveD is a user error that names it; its deletion is one less."""
    cluster = played(6)
    before = snapshot(cluster.algorithm)
    pod = pod_object("by-hand", annotations, node="0.0.1.0")
    with pytest.raises(UserError, match="test/by-hand"):
        cluster.algorithm.add_allocated_pod(pod)
    assert snapshot(cluster.algorithm) == before
    cluster.algorithm.delete_allocated_pod(pod)
    assert snapshot(cluster.algorithm) == before


# D8


class TracedPod(dict[str, object]):
    """A pod whose end can be seen."""


@pytest.mark.parametrize("text", ["", "{", "virtualCluster: VC1\npriority: high\n", "virtualCluster: nobody\n"])
def test_a_waiting_pod_with_a_malformed_spec_leaves_nothing(text: str) -> None:
    """D8: such a pod is refused when it is scheduled, and once it is deleted nothing of it is kept."""
    cluster = Cluster(design())
    pod = TracedPod(pod_object("odd", {POD_SCHEDULING_SPEC: text}))
    cluster.algorithm.add_unallocated_pod(pod)
    with pytest.raises(UserError):
        cluster.algorithm.schedule(pod, cluster.node_names, PREEMPTING)
    cluster.algorithm.delete_unallocated_pod(pod)
    trace = weakref.ref(pod)
    del pod
    gc.collect()
    assert trace() is None


def test_a_preempting_pod_whose_spec_was_spoilt_meanwhile() -> None:
    """D8: a preempting pod's annotation is edited into nonsense, and the pod deleted: its preemption ends all the
    same.
    """
    cluster = Cluster(design())
    cluster.ask_all(on_pin("victim", 1, (2, 16), lazy=False))
    before = snapshot(cluster.algorithm)
    cluster.ask(on_pin("strong", 2, (1, 16)), pod="strong-0")
    cluster.waiting["strong-0"]["metadata"]["annotations"][POD_SCHEDULING_SPEC] = "{"
    cluster.delete("strong-0")
    assert snapshot(cluster.algorithm) == before


def test_a_bound_pod_whose_annotations_were_spoilt_meanwhile() -> None:
    """D8: a bound pod's annotations are edited into nonsense; when it is deleted its devices are free all the same."""
    cluster = Cluster(design())
    before = snapshot(cluster.algorithm)
    cluster.ask(on_pin("one", 1, (1, 16)), pod="one-0")
    cluster.bound["one-0"]["metadata"]["annotations"] |= {POD_SCHEDULING_SPEC: "{", POD_BIND_INFO: "{"}
    cluster.delete("one-0")
    assert snapshot(cluster.algorithm) == before


# D13

DISAGREEING = [
    pytest.param(Job("gang", "VC2", 1, ((2, 16),), DGX2, PIN), id="virtual-cluster"),
    pytest.param(on_pin("gang", 7, (2, 16)), id="priority"),
    pytest.param(on_pin("gang", 1, (3, 16)), id="members"),
    pytest.param(on_pin("gang", 1, (2, 16), (1, 1)), id="more-members"),
]


@pytest.mark.parametrize("job", DISAGREEING)
def test_a_pod_that_disagrees_with_its_allocated_group(job: Job) -> None:
    """D13: a pod of another VC, priority or membership than its group has is refused; the group is as it was."""
    cluster = Cluster(design())
    cluster.ask(on_pin("gang", 1, (2, 16)), 16)
    before = snapshot(cluster.algorithm)
    with pytest.raises(UserError, match="gang"):
        cluster.ask(job, 16, pod="other")
    assert snapshot(cluster.algorithm) == before


@pytest.mark.parametrize("job", DISAGREEING)
def test_a_pod_that_disagrees_with_its_preempting_group(job: Job) -> None:
    """D13: the same holds for a group that preempts."""
    cluster = Cluster(design())
    cluster.ask_all(on_pin("victim", 0, (2, 16), lazy=False))
    cluster.ask(on_pin("gang", 1, (2, 16)), 16)
    before = snapshot(cluster.algorithm)
    with pytest.raises(UserError, match="gang"):
        cluster.ask(job, 16, pod="other")
    assert snapshot(cluster.algorithm) == before


def test_a_bound_pod_that_disagrees_with_its_group() -> None:
    """D13: a pod that is found bound in a place of a group, but asks for another priority, keeps the place, since it
    runs there; that it disagrees is logged, with what to do.
    """
    cluster = two_pods()
    second = cluster.bound["gang-1"]
    spec = yaml.safe_load(second["metadata"]["annotations"][POD_SCHEDULING_SPEC])
    second["metadata"]["annotations"][POD_SCHEDULING_SPEC] = yaml.safe_dump({**spec, "priority": 7})
    with structlog.testing.capture_logs() as logs:
        other = cluster.restarted()
    assert len(other.group("gang").pods()) == 2
    assert other.group("gang").priority == 1
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert "test/gang-1: priority 7" in line["reason"]


# D14


def test_a_pinned_cell_given_to_another_tenant() -> None:
    """D14: the pinned pair is another VC's now: the group in it runs on without a guarantee, and takes none of the new
    owner's.
    """
    vc1 = {**VC1, "pinnedCells": [{"pinnedCellId": PIN_CT1}, {"pinnedCellId": PIN_IB}]}
    vc2 = quota(("CT1-NODE", 1), pinned=(PIN,))
    other = two_pods().restarted(design(vc1, vc2))
    gang = other.group("gang")
    assert gang.is_opportunistic
    assert all(slot.pod for slot in gang.slots)
    assert {leaf.user.name for leaf in other.leaves(FIRST) if leaf.user} == {"gang"}
    assert {leaf.priority for leaf in other.leaves(FIRST)} == {-1}
    owner = Job("owner", "VC2", 0, ((2, 16),), DGX2, pinned=PIN)
    assert other.ask(owner).victims <= {name_of(pod) for pod in gang.pods()}
    assert other.group("owner").state == GroupState.PREEMPTING


@pytest.mark.parametrize("reverse", [False, True])
def test_two_groups_that_claim_the_same_leaf(reverse: bool) -> None:
    """D14: two bound pods say that they have the same device (one was bound by an old process, say): no leaf is given
    to both, and deleting either leaves the other's state intact.
    """
    cluster, rival = Cluster(design()), Cluster(design())
    cluster.ask(Job("one", "VC1", 1, ((1, 4),), DGX2), pod="one-0")
    rival.ask(Job("two", "VC1", 1, ((1, 2),), DGX2), pod="two-0")
    pods = [cluster.bound["one-0"], rival.bound["two-0"]]
    third = Cluster(design())
    accepted: list[str] = []
    for pod in reversed(pods) if reverse else pods:
        try:
            third.recover(pod)
            accepted.append(name_of(pod))
        except UserError:
            continue
    held = [leaf.user.name for leaf in third.leaves("0.0.1.0") if leaf.user]
    assert accepted
    first = accepted[0].removesuffix("-0")
    assert held.count(first) == {"one": 4, "two": 2}[first]
    third.delete(*accepted)
    assert not third.groups
    assert snapshot(third.algorithm) == snapshot(Cluster(design()).algorithm)


def test_a_place_that_another_group_was_found_on_is_not_filled_again() -> None:
    """D14: a gang's second place is found in use by another pod, and its own pod there is gone: a new pod of the gang
    waits instead of sharing the device; also when the other has left, as the device may be anybody's by then.
    """
    cluster, rival = Cluster(design()), Cluster(design())
    gang = Job("gang", "VC2", 1, ((2, 1),), CT1)
    cluster.ask_all(gang)
    for name in ("first", "other"):
        rival.ask(Job(name, "VC2", 1, ((1, 1),), CT1), pod=name)
    third = Cluster(design())
    third.recover(rival.bound["other"])
    third.recover(cluster.bound["gang-0"])
    assert third.ask(gang, pod="late").waits
    third.delete("other")
    assert third.ask(gang, pod="late").waits
    assert third.ask(Job("next", "VC2", 1, ((1, 1),), CT1), pod="next").place == "0.0.0.0:1"
    third.delete("gang-0")
    assert third.ask(gang, pod="late").waits
    third.delete("next")
    assert third.ask(gang, pod="late").place == "0.0.0.0:0"


# D15


def pairs_in_a_row() -> Object:
    """One cell of three pairs of nodes, all of it the quota of one VC."""
    types = {
        "NODE": {"childCellType": "GPU", "childCellNumber": 2, "isNodeLevel": True},
        "PAIR": {"childCellType": "NODE", "childCellNumber": 2},
        "ROW": {"childCellType": "PAIR", "childCellNumber": 3},
    }
    row = {"cellType": "ROW", "cellChildren": [{"cellChildren": nodes(f"{name}0", f"{name}1")} for name in "xyz"]}
    return {
        "physicalCluster": {"cellTypes": types, "physicalCells": [row]},
        "virtualClusters": {"A": quota(("ROW", 1)), "B": quota()},
    }


def test_a_mapping_that_only_a_matching_finds() -> None:
    """D15: one node of the first virtual pair and both of the two others are to be mapped to pairs of which the second
    has one suggested node: the first virtual pair must yield the first physical one, after the others have failed.
    """
    cluster = Cluster(pairs_in_a_row())
    cluster.ask(Job("filler", "A", 0, ((1, 2),)), pod="filler", suggested=["y1"])
    cluster.ask_all(Job("victim", "A", 0, ((2, 2),)), suggested=["y0", "x0"])
    assert cluster.places("victim") == ["y0:0-1", "x0:0-1"]
    cluster.delete("filler")
    suggested = ["x0", "x1", "y1", "z0", "z1"]
    answer = cluster.ask(Job("five", "A", 1, ((5, 2),)), suggested=suggested)
    assert not answer.waits, answer.reason
    assert {slot.node for slot in cluster.group("five").slots} == set(suggested)


# D16


def test_leaves_are_chosen_without_trying_all_combinations() -> None:
    """D16: 16 of 32 free leaves that are scattered over a node are found at once: trying all 600 million combinations
    would take longer than any test may.
    """
    types = {
        "PAIR": {"childCellType": "GPU", "childCellNumber": 2},
        "NODE": {"childCellType": "PAIR", "childCellNumber": 32, "isNodeLevel": True},
    }
    physical = {"cellTypes": types, "physicalCells": [{"cellType": "NODE", "cellAddress": "n"}]}
    cluster = Cluster({"physicalCluster": physical, "virtualClusters": {"A": quota(("NODE", 1))}})
    for number in range(64):
        cluster.ask(Job(f"one{number}", "A", 0), pod=f"one{number}")
    cluster.delete(*(f"one{number}" for number in range(0, 64, 2)))
    answer = cluster.ask(Job("many", "A", 0, ((1, 16),)))
    assert answer.devices == tuple(range(0, 32, 2))


# D17


def host_and_quads() -> Cluster:
    """A rack of hosts of two quads: a tenant has one host and two single quads."""
    types = {
        "PAIR": {"childCellType": "A100", "childCellNumber": 2},
        "QUAD": {"childCellType": "PAIR", "childCellNumber": 2},
        "HOST": {"childCellType": "QUAD", "childCellNumber": 2, "isNodeLevel": True},
        "RACK": {"childCellType": "HOST", "childCellNumber": 4},
    }
    rack = {"cellType": "RACK", "cellChildren": nodes("a0", "a1", "a2", "a3")}
    nlp = quota(("RACK.HOST", 1), ("RACK.HOST.QUAD", 2))
    return Cluster(
        {
            "physicalCluster": {"cellTypes": types, "physicalCells": [rack]},
            "virtualClusters": {"nlp": nlp, "vision": quota(("RACK.HOST", 2))},
        }
    )


@pytest.mark.parametrize(
    "jobs", [[Job("two", "nlp", 0, ((2, 4),))], [Job(f"one{n}", "nlp", 0, ((1, 4),)) for n in "ab"]]
)
def test_the_smaller_unit_is_preferred(jobs: list[Job]) -> None:
    """D17: two pods of four, of one gang or of two, use the two quads, so that a pod of eight still finds the host."""
    cluster = host_and_quads()
    for job in jobs:
        cluster.ask_all(job)
    assert cluster.ask(Job("whole", "nlp", 0, ((1, 8),))).devices == tuple(range(8))


@pytest.mark.parametrize(
    ("leaves", "members"),
    [
        pytest.param(4, ((1, 1), (2, 2), (1, 3)), id="3+1-2+2"),
        pytest.param(4, ((2, 1), (2, 3)), id="3+1-3+1"),
        pytest.param(
            7, ((4, 2), (2, 3)), id="3+2+2-3+2+2"
        ),  # the largest first, each where it fits best, misses it too
    ],
)
@pytest.mark.parametrize("priority", [0, -1])
def test_a_packing_that_ascending_greedy_misses(
    leaves: int, members: tuple[tuple[int, int], ...], priority: int
) -> None:
    """D17: a gang that fills two nodes exactly is placed, whatever order of its pods that takes."""
    types = {"NODE": {"childCellType": "GPU", "childCellNumber": leaves, "isNodeLevel": True}}
    cells = [{"cellType": "NODE", **node} for node in nodes("n0", "n1")]
    physical = {"cellTypes": types, "physicalCells": cells}
    cluster = Cluster({"physicalCluster": physical, "virtualClusters": {"A": quota(("NODE", 2))}})
    answers = cluster.ask_all(Job("gang", "A", priority, members))
    devices = [(answer.node, device) for answer in answers for device in answer.devices]
    assert len(devices) == len(set(devices)) == 2 * leaves


# D18

TRANSCRIPT = """
import json
from tests.support.hived import snapshot
from tests.support.hived_design import played
cluster = played(20)
print(json.dumps([cluster.bound, snapshot(cluster.algorithm)], sort_keys=True))
"""


def test_every_process_decides_alike() -> None:
    """D18: the same story gives the same decisions and the same state in processes that hash strings differently."""
    root = Path(__file__).parents[3]
    said = []
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        said.append(
            subprocess.run([sys.executable, "-c", TRANSCRIPT], env=environ, check=True, capture_output=True).stdout
        )
    assert said[0] == said[1]
    assert json.loads(said[0])[0]
