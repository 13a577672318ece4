"""Explanations of decisions: `explain` for one pod now, `simulate` for pods on a changed copy of the cluster.

`explain` says why a pod waits, which cells were considered, what excluded each, and the victims. Nothing is changed or
guessed: the planner computes the explanation, chain by chain, on the same state. It looks at every unit of those
chains, which deciding never does, so it must not run in the scheduler's loop.

`simulate` works on a restored snapshot: nodes are lost, cells are added, pods arrive.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm, SchedulingPhase, check_agreement, free_slots, why_contested
from scheduler.hived.cells.cells import Cell, PhysicalCell, VirtualCell
from scheduler.hived.cells.chain import Chain
from scheduler.hived.cells.groups import AffinityGroup, GroupState, Placement, claimants_of, users_of
from scheduler.hived.config.file import HivedConfig, PhysicalCellSpec, read_config
from scheduler.hived.config.resolve import resolve
from scheduler.hived.contract import (
    MAX_GUARANTEED_PRIORITY,
    OPPORTUNISTIC_PRIORITY,
    PodSchedulingSpec,
    extract_pod_scheduling_spec,
)
from scheduler.hived.errors import HivedError, UserError
from scheduler.hived.inspection.snapshot import Snapshot, restore
from scheduler.hived.planning.planner import Request, new_request, plan
from scheduler.hived.planning.recovery import is_contested
from store.kube.api.objects import Object, key_of

EXAMPLES = 3  # cells named per reason


class Excluded(msgspec.Struct, rename="camel"):
    """Cells excluded for one reason, with some of their names."""

    reason: str
    cells: int
    examples: list[str]


class ChainFinding(msgspec.Struct, rename="camel"):
    """One considered chain. `scope`: the part of it that the request may use. `outcome`: in words."""

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
    """`verdict`: bind, preempt, wait or refused; `summary` says it in words, and `code` is that of the reason.
    `places`: `NODE: devices` per pod."""

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
    code: str = ""


CODES = {"bind": "gpu_binding", "preempt": "gpu_preempting", "wait": "gpu_waiting", "refused": "gpu_refused"}


def explain(algorithm: HivedAlgorithm, pod: Object, suggested: Collection[str] | None = None) -> PodExplanation:
    """Return the decision for a pod, if made now. `suggested`: kube-scheduler's nodes; None for all nodes."""
    nodes = algorithm.healthy_nodes if suggested is None else suggested
    try:
        spec = extract_pod_scheduling_spec(pod)
        pods = " + ".join(f"{member.pod_number}x{member.leaf_cell_number}" for member in spec.affinity_group.members)
        kind = f" {spec.leaf_cell_type}" if spec.leaf_cell_type else ""
        needs = f"{pods}{kind} leaf cells" + (f" of pinned cell {spec.pinned_cell_id}" if spec.pinned_cell_id else "")
        found = PodExplanation(
            pod=key_of(pod),
            group=spec.affinity_group.name,
            virtual_cluster=spec.virtual_cluster,
            priority=spec.priority,
            needs=needs,
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
        return PodExplanation(pod=key_of(pod), verdict="refused", summary=why, code=CODES["refused"])
    found.code = found.code or CODES[found.verdict]
    return found


def _explain_group(
    found: PodExplanation, pod: Object, spec: PodSchedulingSpec, group: AffinityGroup, algorithm: HivedAlgorithm
) -> None:
    """Explain a pod whose group has, or has claimed, its places and gets no others. Raises `UserError`."""
    check_agreement(pod, spec, group)
    users = users_of(group.leaves())
    found.places = [_place(slot.node, slot.devices) for slot in group.slots]
    if group.state is GroupState.BEING_PREEMPTED:
        claimants = ", ".join(claimant.name for claimant in claimants_of(group.leaves()))
        found.code = "gpu_being_preempted"
        found.summary = f"its group is being preempted by {claimants}: the pod waits until that group is deleted"
    elif group.state is GroupState.PREEMPTING and users:
        found.verdict = "preempt"
        found.victims = [_victim(user, downgraded=False) for user in users]
        found.summary = "its group has claimed its places and waits until their users are deleted"
    else:
        free = free_slots(pod, spec, group)
        slots = [slot for slot in free if not is_contested(slot, algorithm.leaves)]
        found.places = [_place(slot.node, slot.devices) for slot in slots]
        if slots:
            found.verdict, found.summary = "bind", "its group already has its places; the next filter call binds it"
        else:
            found.code, found.summary = "gpu_contested", why_contested(free, group)


def _explain_request(found: PodExplanation, request: Request, algorithm: HivedAlgorithm) -> None:
    for chain in request.chains:
        outcome = plan(replace(request, chains=(chain,)))
        if isinstance(outcome, Placement):
            found.places = [
                _place(place.leaves[0].node, [leaf.device for leaf in place.leaves]) for place in outcome.places
            ]
            evicted = outcome.victims()
            found.victims = [_victim(group, downgraded=False) for group in evicted]
            found.victims += [_victim(group, downgraded=True) for group in outcome.downgraded if group not in evicted]
            found.verdict = "preempt" if evicted else "bind"
            found.summary = (
                "it fits once its victims are deleted" if evicted else "it fits; the next filter call binds it"
            )
            found.chains.append(_finding(request, chain, found.summary))
            return
        found.chains.append(_finding(request, chain, outcome[0].reason))
    found.summary = "no cells for it now, neither free nor preemptible"
    found.hints = list(_hints(request, algorithm))


def _hints(request: Request, algorithm: HivedAlgorithm) -> Iterator[str]:
    """Yield changes to the request that would give it a place, each checked with the planner."""
    used: set[int] = set()
    if not request.is_opportunistic:
        used = {priority for chain in request.chains for cell in _units(request, chain) for priority in cell.used}
    # for each priority from its own upward that is used where it may be placed, the next higher one
    above = sorted(each + 1 for each in used if request.spec.priority <= each < MAX_GUARANTEED_PRIORITY)
    for priority in above:
        outcome = plan(replace(request, spec=msgspec.structs.replace(request.spec, priority=priority)))
        if isinstance(outcome, Placement):
            groups = dict.fromkeys(group.name for group in [*outcome.victims(), *outcome.downgraded])
            yield f"with priority {priority} it would take the place of {', '.join(groups) or 'no group'}"
            break
    if not request.is_opportunistic and not request.spec.pinned_cell_id:
        spec = msgspec.structs.replace(request.spec, priority=OPPORTUNISTIC_PRIORITY)
        nodes = algorithm.healthy_nodes if request.suggested is None else request.suggested
        outcome = plan(new_request(spec, nodes, algorithm.chains, algorithm.virtual_clusters))
        if isinstance(outcome, Placement):
            where = dict.fromkeys(place.leaves[0].node for place in outcome.places)
            yield f"as an opportunistic pod (priority -1) it would run now, on {', '.join(where)}"


def _finding(request: Request, chain: Chain, outcome: str) -> ChainFinding:
    excluded: dict[str, list[str]] = {}
    usable = 0
    for cell in _units(request, chain):
        why = _exclusion(request, cell)
        if why is None:
            usable += 1
        else:
            excluded.setdefault(why[0], []).append(why[1])
    tenant = request.virtual_cluster
    if request.is_opportunistic:
        scope = f"free leaf cells of all {len(chain.nodes.cells)} nodes"
    elif request.spec.pinned_cell_id:
        scope = f"pinned cell {request.spec.pinned_cell_id} of {tenant.name}"
    else:
        types = chain.topology.cell_types
        quota = (f"{number} {types[level - 1]}" for name, level, number in tenant.levels() if name == chain.name)
        scope = f"quota of {tenant.name}: {', '.join(quota)}"
    notes = [Excluded(reason, len(cells), cells[:EXAMPLES]) for reason, cells in excluded.items()]
    return ChainFinding(chain.name, scope, outcome, usable, notes)


def _units(request: Request, chain: Chain) -> Sequence[Cell]:
    return chain.nodes.cells if request.is_opportunistic else request.quota(chain).cells


def _exclusion(request: Request, cell: Cell) -> tuple[str, str] | None:
    """Return the reason and the cell, in words, if not even the smallest pod fits there."""
    name, physical = cell.address, cell.physical if isinstance(cell, VirtualCell) else cell
    if isinstance(cell, VirtualCell) and cell.physical is not None:
        name += f" on {cell.physical.node}"
    if not cell.healthy:
        return "its node is bad", name
    if request.suggested is not None and isinstance(physical, PhysicalCell) and physical.node not in request.suggested:
        return "kube-scheduler does not suggest its node", name
    threshold = request.spec.priority
    available = cell.leaves - sum(number for priority, number in cell.used.items() if priority >= threshold)
    if available >= request.sizes[-1]:
        return None
    groups = ""
    if isinstance(physical, PhysicalCell):  # the groups that hold or claim leaves at or above the priority
        names: dict[str, None] = {}
        for leaf in physical.leaf_cells():
            owner = leaf.claimant or leaf.user
            if owner is not None and leaf.priority >= threshold:
                missing, why = len(owner.slots) - len(owner.pods()), ""  # what keeps it from running
                if owner.state is GroupState.PREEMPTING:
                    why = " [waits for its victims]"
                elif missing:
                    why = f" [{missing} of {len(owner.slots)} pods missing]"
                names[owner.name + why] = None
        groups = ", ".join(names)
    return (
        f"too few leaf cells are free{'' if request.is_opportunistic else f' or used below priority {threshold}'}",
        f"{name} ({available} of {cell.leaves} left" + (f"; used by {groups})" if groups else ")"),
    )


def _victim(group: AffinityGroup, *, downgraded: bool) -> Victim:
    pods = [f"{key_of(slot.pod)} on {slot.node}" for slot in group.slots if slot.pod is not None]
    return Victim(group.name, group.virtual_cluster, group.priority, downgraded, pods)


def _place(node: str, devices: Iterable[int]) -> str:
    return f"{node}: {','.join(map(str, devices))}"


class HitGroup(msgspec.Struct, rename="camel"):
    """A group with devices on a lost node. `pods`: those on that node."""

    group: str
    virtual_cluster: str
    priority: int
    pods: list[str]


class UnservedQuota(msgspec.Struct, rename="camel"):
    """Cells of a quota for which only bad hardware is left. `before`: their number without the change."""

    virtual_cluster: str
    chain: str
    cell_type: str
    cells: int
    before: int


class Simulation(msgspec.Struct, rename="camel"):
    """Result of a simulation. `pods`: their decisions in turn, each after applying the previous ones."""

    lost_nodes: list[str]
    added_cells: list[str]
    hit_groups: list[HitGroup]
    unserved_quotas: list[UnservedQuota]
    pods: list[PodExplanation]


def read_snapshot_config(snapshot: Snapshot) -> HivedConfig:
    """Parse a snapshot's configuration; the address of its API server is irrelevant."""
    return read_config(snapshot.config, environ={}, home=Path("/"))


def restored(snapshot: Snapshot, config: HivedConfig | None = None) -> HivedAlgorithm:
    """Restore a snapshot's scheduler, optionally under a configuration with more cells. Raises `HivedError`."""
    return restore(snapshot, resolve(config or read_snapshot_config(snapshot)), time.time)


def simulate(
    snapshot: Snapshot, pods: Sequence[Object], *, lose: Collection[str] = (), add: Sequence[str] = ()
) -> Simulation:
    """Simulate changes. `lose`: nodes; `add`: physical cells as `CELL_TYPE=NODE` (comma-separated nodes, as many as the
    type has). Raises `HivedError`.
    """
    config = read_snapshot_config(snapshot)
    cells = (*config.physical_cells, *(_new_cell(config, cell) for cell in add))
    algorithm = restored(snapshot, replace(config, physical_cells=cells))
    before = _unserved(algorithm)
    known = {node for chain in algorithm.topology.chains.values() for node in chain.nodes}
    for node in lose:
        if node not in known:
            raise UserError(f"--lose {node}: the configuration has no such node")
    added = {node for cell in add for node in cell.partition("=")[2].split(",")}
    algorithm.set_health((algorithm.healthy_nodes | added) - set(lose))
    hit: list[HitGroup] = []
    for group in algorithm.groups.values():
        slots = [slot for slot in group.slots if slot.node in lose]
        if on_lost := [f"{key_of(slot.pod)} on {slot.node}" for slot in slots if slot.pod is not None]:
            hit.append(HitGroup(group.name, group.virtual_cluster, group.priority, on_lost))
    chains = algorithm.topology.chains
    unserved = [
        UnservedQuota(tenant, chain, chains[chain].cell_types[level - 1], cells, before.get((tenant, chain, level), 0))
        for (tenant, chain, level), cells in _unserved(algorithm).items()
    ]
    explained = []
    for pod in pods:
        found = explain(algorithm, pod)
        if found.verdict in ("bind", "preempt"):  # apply the decision for the pods that follow
            try:  # pods in a snapshot have no spec
                decision = algorithm.schedule({"spec": {}, **pod}, algorithm.healthy_nodes, SchedulingPhase.PREEMPTING)
                if decision.result.pod_bind_info is not None:
                    algorithm.commit(decision)
            except HivedError as error:
                found = PodExplanation(pod=key_of(pod), verdict="refused", summary=str(error), code=CODES["refused"])
        explained.append(found)
    return Simulation(
        lost_nodes=list(lose),
        added_cells=list(add),
        hit_groups=hit,
        unserved_quotas=unserved,
        pods=explained,
    )


def _new_cell(config: HivedConfig, text: str) -> PhysicalCellSpec:
    cell_type, separator, names = text.partition("=")
    nodes = [name for name in names.split(",") if name]
    chains = dict.fromkeys(cell.cell_type for cell in config.physical_cells)
    if not separator or cell_type not in chains:
        raise UserError(
            f"--add {text}: write CELL_TYPE=NODE, or CELL_TYPE=NODE,NODE... for a type above node level, with one of "
            f"the cell types {', '.join(chains)}"
        )
    number = _nodes_of_type(config, cell_type)
    if len(nodes) != number:
        raise UserError(f"--add {text}: a cell of type {cell_type} has {number} nodes, here are {len(nodes)}")
    return _tree(config, cell_type, nodes, top=True)


def _nodes_of_type(config: HivedConfig, cell_type: str) -> int:
    spec = config.cell_types[cell_type]
    return 1 if spec.is_node_level else spec.child_cell_number * _nodes_of_type(config, spec.child_cell_type)


def _tree(config: HivedConfig, cell_type: str, nodes: Sequence[str], *, top: bool) -> PhysicalCellSpec:
    """Return a cell with these nodes; cells below nodes get defaults."""
    spec = config.cell_types[cell_type]
    written = cell_type if top else ""
    if spec.is_node_level:
        return PhysicalCellSpec(cell_type=written, cell_address=nodes[0])
    share = len(nodes) // spec.child_cell_number
    children = tuple(
        _tree(config, spec.child_cell_type, nodes[start : start + share], top=False)
        for start in range(0, len(nodes), share)
    )
    return PhysicalCellSpec(cell_type=written, cell_children=children)


Quota = tuple[str, str, int]  # virtual cluster, chain, level


def _unserved(algorithm: HivedAlgorithm) -> Mapping[Quota, int]:
    return {
        (tenant, chain.name, level): mask.bit_count()
        for chain in algorithm.chains.values()
        for (tenant, level), mask in chain.doomed.items()
        if mask
    }
