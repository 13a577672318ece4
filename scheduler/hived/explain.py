"""Explaining a decision: why a pod waits, which cells were considered, what excluded each, who would have to go.

Nothing is changed, and nothing is guessed: what is told is worked out by the planner itself, chain by chain, on the
same state. It looks at every unit of the chains in question, which deciding never does: not for the scheduler's loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm, check_agreement, free_slots, why_contested
from scheduler.hived.cells import Cell, PhysicalCell, VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.constants import MAX_GUARANTEED_PRIORITY, OPPORTUNISTIC_PRIORITY
from scheduler.hived.errors import UserError
from scheduler.hived.groups import AffinityGroup, GroupState, claimants_of, users_of
from scheduler.hived.placement import Placement
from scheduler.hived.planner import plan
from scheduler.hived.pod_contract import PodSchedulingSpec, extract_pod_scheduling_spec
from scheduler.hived.recovery import is_contested
from scheduler.hived.request import Request, new_request
from store.kube.objects import Object, key_of

EXAMPLES = 3  # cells named per reason


class Excluded(msgspec.Struct, rename="camel"):
    """Cells that can't be used for one reason, some of them by name."""

    reason: str
    cells: int
    examples: list[str]


class ChainFinding(msgspec.Struct, rename="camel"):
    """One chain that was looked at. `scope`: of what in it the request may have. `outcome`: in words."""

    chain: str
    scope: str
    outcome: str
    usable_cells: int
    excluded: list[Excluded]


class Victim(msgspec.Struct, rename="camel"):
    """A group in the way. `pods`: `NAMESPACE/NAME on NODE`. `downgraded`: it keeps its devices and loses its quota."""

    group: str
    virtual_cluster: str
    priority: int
    downgraded: bool
    pods: list[str]


class PodExplanation(msgspec.Struct, rename="camel", kw_only=True):
    """`verdict`: bind, preempt, wait or refused; `summary` says it in words. `places`: `NODE: devices` per pod."""

    pod: str
    group: str = ""
    virtual_cluster: str = ""
    priority: int = 0
    needs: str = ""
    verdict: str
    summary: str
    places: list[str] = []
    victims: list[Victim] = []
    chains: list[ChainFinding] = []
    hints: list[str] = []


def explain(algorithm: HivedAlgorithm, pod: Object, suggested: Collection[str] | None = None) -> PodExplanation:
    """What would be decided for a pod now. `suggested`: kube-scheduler's nodes; None for all of them."""
    nodes = algorithm.healthy_nodes if suggested is None else suggested
    try:
        spec = extract_pod_scheduling_spec(pod)
        found = PodExplanation(
            pod=key_of(pod),
            group=spec.affinity_group.name,
            virtual_cluster=spec.virtual_cluster,
            priority=spec.priority,
            needs=_needs(spec),
            verdict="wait",
            summary="",
        )
        group = algorithm.groups.get(spec.affinity_group.name)
        if group is not None:
            _explain_group(found, pod, spec, group, algorithm)
        else:
            _explain_request(found, new_request(spec, nodes, algorithm.chains, algorithm.virtual_clusters), algorithm)
    except UserError as error:
        why = str(error).removeprefix(f"pod {key_of(pod)}: ")
        return PodExplanation(pod=key_of(pod), verdict="refused", summary=why)
    return found


def _explain_group(
    found: PodExplanation, pod: Object, spec: PodSchedulingSpec, group: AffinityGroup, algorithm: HivedAlgorithm
) -> None:
    """The group has, or has claimed, a place: its other pods get theirs there and nowhere else. Raises `UserError`."""
    check_agreement(pod, spec, group)
    users = users_of(group.leaves())
    found.places = [_place(slot.node, slot.devices) for slot in group.slots]
    if group.state is GroupState.BEING_PREEMPTED:
        claimants = ", ".join(claimant.name for claimant in claimants_of(group.leaves()))
        found.summary = f"its group is being preempted by {claimants}: it gets no place until it is gone"
    elif group.state is GroupState.PREEMPTING and users:
        found.verdict = "preempt"
        found.victims = [_victim(user, downgraded=False) for user in users]
        found.summary = "its group has claimed its places, and waits until their users are gone"
    else:
        free = free_slots(pod, spec, group)
        slots = [slot for slot in free if not is_contested(slot, algorithm.leaves)]
        found.places = [_place(slot.node, slot.devices) for slot in slots]
        if slots:
            found.verdict, found.summary = "bind", "its group has its places: the next filter call binds it"
        else:
            found.summary = why_contested(free, group)


def _explain_request(found: PodExplanation, request: Request, algorithm: HivedAlgorithm) -> None:
    for chain in request.chains:
        outcome = plan(replace(request, chains=(chain,)))
        if isinstance(outcome, Placement):
            _explain_placement(found, outcome)
            found.chains.append(_finding(request, chain, found.summary))
            return
        found.chains.append(_finding(request, chain, outcome[0].reason))
    found.summary = "no cells for it now, neither free nor preemptible"
    found.hints = list(_hints(request, algorithm))


def _explain_placement(found: PodExplanation, placement: Placement) -> None:
    found.places = [_place(place.leaves[0].node, [leaf.device for leaf in place.leaves]) for place in placement.places]
    evicted = placement.victims()
    found.victims = [_victim(group, downgraded=False) for group in evicted]
    found.victims += [_victim(group, downgraded=True) for group in placement.downgraded if group not in evicted]
    found.verdict = "preempt" if evicted else "bind"
    found.summary = (
        "it fits once the groups in the way are gone" if evicted else "it fits: the next filter call binds it"
    )


def _hints(request: Request, algorithm: HivedAlgorithm) -> Iterator[str]:
    """What would help, tried out."""
    for priority in _priorities_above(request):
        outcome = plan(replace(request, spec=msgspec.structs.replace(request.spec, priority=priority)))
        if isinstance(outcome, Placement):
            groups = dict.fromkeys(group.name for group in [*outcome.victims(), *outcome.downgraded])
            yield f"with priority {priority} it would take the place of {', '.join(groups) or 'nobody'}"
            break
    if not request.is_opportunistic and not request.spec.pinned_cell_id:
        spec = msgspec.structs.replace(request.spec, priority=OPPORTUNISTIC_PRIORITY)
        nodes = algorithm.healthy_nodes if request.suggested is None else request.suggested
        outcome = plan(new_request(spec, nodes, algorithm.chains, algorithm.virtual_clusters))
        if isinstance(outcome, Placement):
            where = dict.fromkeys(place.leaves[0].node for place in outcome.places)
            yield f"as an opportunistic pod (priority -1) it would run now, on {', '.join(where)}"


def _priorities_above(request: Request) -> list[int]:
    """Just above each priority, from its own upward, that something has where it may be placed."""
    if request.is_opportunistic:
        return []
    used = {priority for chain in request.chains for cell in _units(request, chain) for priority in cell.used}
    return sorted(priority + 1 for priority in used if request.spec.priority <= priority < MAX_GUARANTEED_PRIORITY)


def _finding(request: Request, chain: Chain, outcome: str) -> ChainFinding:
    excluded: dict[str, list[str]] = {}
    usable = 0
    for cell in _units(request, chain):
        why = _exclusion(request, cell)
        if why is None:
            usable += 1
        else:
            excluded.setdefault(why[0], []).append(why[1])
    notes = [Excluded(reason, len(cells), cells[:EXAMPLES]) for reason, cells in excluded.items()]
    return ChainFinding(chain.name, _scope(request, chain), outcome, usable, notes)


def _units(request: Request, chain: Chain) -> Sequence[Cell]:
    return chain.nodes.cells if request.is_opportunistic else request.quota(chain).cells


def _scope(request: Request, chain: Chain) -> str:
    tenant = request.virtual_cluster
    if request.is_opportunistic:
        return f"free leaf cells of all {len(chain.nodes.cells)} nodes"
    if request.spec.pinned_cell_id:
        return f"pinned cell {request.spec.pinned_cell_id} of {tenant.name}"
    numbers = (
        f"{number} {chain.topology.cell_types[level - 1]}"
        for name, level, number in tenant.levels()
        if name == chain.name
    )
    return f"quota of {tenant.name}: {', '.join(numbers)}"


def _exclusion(request: Request, cell: Cell) -> tuple[str, str] | None:
    """(reason, the cell in words) if not even the smallest pod can go there."""
    name = _name(cell)
    physical = cell.physical if isinstance(cell, VirtualCell) else cell
    if not cell.healthy:
        return "its node is bad", name
    if request.suggested is not None and isinstance(physical, PhysicalCell) and physical.node not in request.suggested:
        return "kube-scheduler does not suggest its node", name
    threshold = request.spec.priority
    available = cell.leaves - sum(number for priority, number in cell.used.items() if priority >= threshold)
    if available >= request.sizes[-1]:
        return None
    groups = ", ".join(_users(physical, threshold)) if isinstance(physical, PhysicalCell) else ""
    return (
        f"too few leaf cells are free{'' if request.is_opportunistic else f' or used below priority {threshold}'}",
        f"{name} ({available} of {cell.leaves} left" + (f"; used by {groups})" if groups else ")"),
    )


def _name(cell: Cell) -> str:
    if isinstance(cell, VirtualCell):
        return cell.address if cell.physical is None else f"{cell.address} on {cell.physical.node}"
    return cell.address


def _users(cell: PhysicalCell, threshold: int) -> Iterable[str]:
    """The groups that hold or claim leaves at or above a priority."""
    owners = (leaf.claimant or leaf.user for leaf in cell.leaf_cells() if leaf.priority >= threshold)
    return dict.fromkeys(_holder(owner) for owner in owners if owner is not None)


def _holder(group: AffinityGroup) -> str:
    """Its name, and what keeps it from running: it holds or claims its places all the same."""
    if group.state is GroupState.PREEMPTING:
        return f"{group.name} [waits for its victims]"
    missing = len(group.slots) - len(group.pods())
    return f"{group.name} [{missing} of {len(group.slots)} pods missing]" if missing else group.name


def _victim(group: AffinityGroup, *, downgraded: bool) -> Victim:
    pods = [f"{key_of(slot.pod)} on {slot.node}" for slot in group.slots if slot.pod is not None]
    return Victim(group.name, group.virtual_cluster, group.priority, downgraded, pods)


def _needs(spec: PodSchedulingSpec) -> str:
    pods = " + ".join(f"{member.pod_number}x{member.leaf_cell_number}" for member in spec.affinity_group.members)
    kind = f" {spec.leaf_cell_type}" if spec.leaf_cell_type else ""
    return f"{pods}{kind} leaf cells" + (f" of pinned cell {spec.pinned_cell_id}" if spec.pinned_cell_id else "")


def _place(node: str, devices: Iterable[int]) -> str:
    return f"{node}: {','.join(map(str, devices))}"
