"""Planning: finds a placement for a gang without changing anything.

A `Request` is the planner's input: `new_request` checks it against the cluster.

Guaranteed: the pods are packed into the units of the tenant's own virtual cells, first into free leaves, then also into
leaves used at a lower priority; if the free quota would take devices from opportunistic pods, a packing without victims
is preferred. The chosen virtual leaves are mapped to physical ones. Groups that allow lazy preemption lose their quota,
not their devices. Opportunistic: the pods are packed into free leaves of the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from scheduler.hived.cells.cells import Cell, CellState, PhysicalLeaf, UnitIndex, Units, VirtualCell, mask_of
from scheduler.hived.cells.chain import Chain, VirtualCluster
from scheduler.hived.cells.groups import Placement, PodPlace, users_of
from scheduler.hived.cells.topology import bits, span
from scheduler.hived.contract import FREE_PRIORITY, OPPORTUNISTIC_PRIORITY, PodSchedulingSpec
from scheduler.hived.errors import UserError
from scheduler.hived.planning.mapping import CellMapping, Draft, Unmappable, UsableNodes, UsableUnits
from scheduler.hived.planning.packing import (
    Packing,
    VacantFit,
    choose_leaves,
    competitors,
    vacant_devices,
    vacant_leaves,
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a whole group. `sizes`: leaves per pod, descending. `chains`: to search, in this order.

    `suggested`: the nodes that may be used, None for all.
    """

    spec: PodSchedulingSpec
    virtual_cluster: VirtualCluster
    chains: tuple[Chain, ...]
    sizes: tuple[int, ...]
    suggested: frozenset[str] | None

    @property
    def is_opportunistic(self) -> bool:
        return self.spec.priority == OPPORTUNISTIC_PRIORITY

    def quota(self, chain: Chain) -> Units[VirtualCell]:
        """Return the units of a chain that a guaranteed request may use."""
        tenant, pinned = self.virtual_cluster, self.spec.pinned_cell_id
        return tenant.pinned[pinned] if pinned else tenant.quotas[chain.name]


def new_request(
    spec: PodSchedulingSpec,
    suggested: Collection[str],
    chains: Mapping[str, Chain],
    virtual_clusters: Mapping[str, VirtualCluster],
) -> Request:
    """Check a request. Raises `UserError` for an unknown virtual cluster, pinned cell or leaf cell type."""
    tenant = virtual_clusters.get(spec.virtual_cluster)
    if tenant is None:
        raise UserError(
            f"virtualCluster: there is no virtual cluster {spec.virtual_cluster!r}; use one of "
            f"{', '.join(virtual_clusters)}"
        )
    return Request(
        spec=spec,
        virtual_cluster=tenant,
        chains=_chains(spec, tenant, chains),
        sizes=tuple(
            member.leaf_cell_number
            for member in sorted(spec.affinity_group.members, key=lambda member: -member.leaf_cell_number)
            for _ in range(member.pod_number)
        ),
        suggested=None if spec.ignore_k8s_suggested_nodes else frozenset(suggested),
    )


def _chains(spec: PodSchedulingSpec, tenant: VirtualCluster, chains: Mapping[str, Chain]) -> tuple[Chain, ...]:
    if spec.pinned_cell_id:
        if spec.pinned_cell_id not in tenant.pinned:
            raise UserError(
                f"pinnedCellId: virtual cluster {tenant.name} has no pinned cell {spec.pinned_cell_id!r}; it has "
                f"{', '.join(tenant.pinned) or 'none'}"
            )
        return (tenant.pinned[spec.pinned_cell_id].cells[0].chain,)
    known = [chain for chain in chains.values() if spec.leaf_cell_type in ("", chain.topology.leaf_cell_type)]
    if not known:
        types = dict.fromkeys(chain.topology.leaf_cell_type for chain in chains.values())
        raise UserError(
            f"leafCellType: the cluster has no {spec.leaf_cell_type!r}; leave it out or use one of {', '.join(types)}"
        )
    if spec.priority == OPPORTUNISTIC_PRIORITY:
        return tuple(known)
    granted = tuple(chain for chain in known if chain.name in tenant.quotas)
    if not granted:
        types = dict.fromkeys(chains[name].topology.leaf_cell_type for name in tenant.quotas)
        what = f"no {spec.leaf_cell_type!r} in its quota" if spec.leaf_cell_type else "no cells but pinned ones"
        raise UserError(
            f"leafCellType: virtual cluster {tenant.name} has {what}; use "
            f"{'one of ' + ', '.join(types) if types else 'pinnedCellId'}, or priority -1"
        )
    return granted


C = TypeVar("C", bound=Cell)
L = TypeVar("L", PhysicalLeaf, VirtualCell)

_NODES_NAMED = 3  # unusable nodes named in a reason
_MAPPING_ATTEMPTS = 16  # packings tried for one chain, each without the cells that could not be mapped before


@dataclass(frozen=True, slots=True)
class NoPlace:
    """No placement for a gang in one chain, with the reason."""

    chain: str
    reason: str


def plan(request: Request) -> Placement | list[NoPlace]:
    """Return the first placement without victims in the order of the request's chains, else the first placement, else a
    reason per chain.
    """
    failures: list[NoPlace] = []
    evicting: Placement | None = None
    for chain in request.chains:
        found = _opportunistic(request, chain) if request.is_opportunistic else _guaranteed(request, chain)
        if isinstance(found, NoPlace):
            failures.append(found)
        elif not found.victims():
            return found
        else:
            evicting = evicting or found
    return evicting or failures


def _opportunistic(request: Request, chain: Chain) -> Placement | NoPlace:
    units, usable = chain.nodes, UsableNodes(chain, request.suggested)
    excluded, allowed = units.bad, None if request.suggested is None else (lambda unit: units.cells[unit] in usable)
    if request.suggested is not None and len(request.suggested) < len(chain.topology.nodes) // 4:
        # they are few: looking them up is faster than trying nodes until one may be used
        excluded = ~usable.cells(chain.topology.node_level)
    chosen = Packing(units.for_opportunistic(), excluded, allowed).pack(request.sizes)
    if chosen is None:
        never = _never(units, request.sizes)
        return NoPlace(chain.name, f"no {_nodes(request)} has room for opportunistic pods of {_sizes(request)}{never}")
    leaves = {unit: list(units.cells[unit].leaf_cells()) for unit in chosen}
    pods = _choose(units.cells, leaves, chosen, request.sizes, OPPORTUNISTIC_PRIORITY)
    return Placement(chain, tuple(PodPlace(tuple(pod)) for pod in pods))


def _guaranteed(request: Request, chain: Chain) -> Placement | NoPlace:
    units = request.quota(chain)
    usable = UsableNodes(chain, request.suggested)
    worthwhile = UsableUnits(units, usable)
    allowed = None if request.suggested is None else worthwhile.__contains__
    has_room = False
    for threshold in (OPPORTUNISTIC_PRIORITY, request.spec.priority):
        excluded = units.bad
        for _ in range(_MAPPING_ATTEMPTS):
            packing = Packing(units.for_guaranteed(threshold), excluded, allowed)
            chosen = packing.pack(request.sizes)
            if chosen is None:
                break
            has_room = True
            leaves = {unit: list(units.cells[unit].leaf_cells()) for unit in chosen}
            try:
                found = _mapped(usable, chain, _choose(units.cells, leaves, chosen, request.sizes, threshold))
            except Unmappable as failure:
                if allowed is None or worthwhile.counts_all:
                    excluded |= _alike(units, failure)
                worthwhile.counts_all = True
                continue
            if threshold == OPPORTUNISTIC_PRIORITY and found.victims():
                return _without_victims(request, chain, usable, excluded, allowed) or found
            return found
    if not has_room and allowed is not None:
        has_room = Packing(units.for_guaranteed(request.spec.priority), units.bad).pack(request.sizes) is not None
    return NoPlace(chain.name, _why_not(request, chain, units, has_room=has_room))


def _without_victims(
    request: Request, chain: Chain, usable: UsableNodes, excluded: int, allowed: Callable[[int], bool] | None
) -> Placement | None:
    """Return a placement in the free quota that evicts no pod, if one is found within the attempts."""
    if vacant_devices(chain) < sum(request.sizes):
        return None
    units = request.quota(chain)
    index = UnitIndex(VacantFit(), units.cells)
    for _ in range(_MAPPING_ATTEMPTS):
        chosen = Packing(index, excluded, allowed).pack(request.sizes)
        if chosen is None:
            return None
        leaves = {unit: list(units.cells[unit].leaf_cells()) for unit in chosen}
        vacant = {unit: vacant_leaves(units.cells[unit]) for unit in chosen}
        pods = _choose(units.cells, leaves, chosen, request.sizes, OPPORTUNISTIC_PRIORITY, vacant)
        try:
            found = _mapped(usable, chain, pods)
        except Unmappable as failure:
            excluded |= _alike(units, failure)
            continue
        displacing = [unit for unit, place in zip(chosen, found.places, strict=True) if users_of(place.leaves)]
        if not displacing:
            return found
        excluded |= competitors(units, chosen, displacing)
    return None


def _why_not(request: Request, chain: Chain, units: Units[VirtualCell], *, has_room: bool) -> str:
    spec = request.spec
    where = f"pinned cell {spec.pinned_cell_id}" if spec.pinned_cell_id else f"quota of {spec.virtual_cluster}"
    if not has_room:
        why = f"the {where} has no room for pods of {_sizes(request)} at priority {spec.priority}"
        why += _never(units, request.sizes)
    else:
        why = (
            f"the {where} has room for pods of {_sizes(request)}, but no {_nodes(request)} can be given to it without "
            "breaking another guarantee"
        )
    unusable = list(islice(_unusable_nodes(request, chain), _NODES_NAMED + 1))
    if len(unusable) > _NODES_NAMED:
        unusable[-1] = "..."
    return f"{why}; unusable nodes: {', '.join(unusable)}" if unusable else why


def _never(units: Units[C], sizes: Sequence[int]) -> str:
    """Return a clause for units that are too few or too small even when empty, else "". `sizes`: descending."""
    rooms = Counter(cell.leaves for cell in units.cells)
    too_many = any(
        sum(room // size * number for room, number in rooms.items()) < pods for pods, size in enumerate(sizes, 1)
    )
    return ", not even when it is empty: ask for less" if too_many or sum(sizes) > sum(rooms.elements()) else ""


def _unusable_nodes(request: Request, chain: Chain) -> Iterator[str]:
    """Yield the nodes that the request can't use however empty they are, in words, in configuration order."""
    suggested, nodes, node_level = request.suggested, chain.nodes, chain.topology.node_level
    asked = span(0, len(nodes.cells))
    if request.spec.pinned_cell_id:
        level, index = chain.topology.pinned[request.spec.pinned_cell_id]
        if level > node_level:
            asked = chain.free.cells_below(level, index, node_level)
        else:
            asked = 1 << chain.levels[level - 1][index].host.index
    for index in bits(asked & nodes.bad if suggested is None else asked):
        cell = nodes.cells[index]
        if not cell.healthy:
            yield f"{cell.node} (bad)"
        elif suggested is not None and cell.node not in suggested:
            yield f"{cell.node} (not suggested)"


def _sizes(request: Request) -> str:
    sizes = request.sizes
    parts = [f"{sizes.count(size)}x{size}" for size in dict.fromkeys(sizes)]
    return f"{' + '.join(parts)} leaf cells"


def _nodes(request: Request) -> str:
    return "healthy node" if request.suggested is None else "healthy node that kube-scheduler suggests"


def _mapped(usable: UsableNodes, chain: Chain, pods: Sequence[Sequence[VirtualCell]]) -> Placement:
    """Return the placement of chosen virtual leaves. Raises `Unmappable`."""
    draft = Draft(chain)
    leaves = [cell for pod in pods for cell in pod]
    used = (cell.physical for cell in leaves if isinstance(cell.physical, PhysicalLeaf))
    for user in users_of(leaf for leaf in used if leaf.state is CellState.USED):
        if user.spec.lazy_preemption_enable and not user.is_opportunistic:
            draft.downgrade(user)  # it keeps its devices, where it would be evicted
    CellMapping(draft, usable).map(leaves)
    places = []
    for pod in pods:
        devices = tuple(leaf for cell in pod if isinstance(leaf := draft.physical_of(cell), PhysicalLeaf))
        assert len(devices) == len(pod), "the mapping has bound every leaf"
        places.append(PodPlace(devices, tuple(pod)))
    return Placement(chain, tuple(places), tuple(draft.downgraded))


def _choose(
    cells: Sequence[Cell],
    leaves: dict[int, list[L]],
    chosen: Sequence[int],
    sizes: Sequence[int],
    threshold: int,
    vacant: Mapping[int, int] | None = None,
) -> list[list[L]]:
    """Return the leaves of each pod in its unit, as close together as possible. `leaves`: of each unit, in tree order.
    `vacant`: masks of the leaves to choose from, None for all.
    """
    taken = dict.fromkeys(chosen, 0)
    pods: list[list[L]] = []
    for unit, size in zip(chosen, sizes, strict=True):
        free = preemptible = 0
        for position, leaf in enumerate(leaves[unit]):
            if leaf.priority == FREE_PRIORITY:
                free |= 1 << position
            elif leaf.priority < threshold:
                preemptible |= 1 << position
        left = ~taken[unit] if vacant is None else vacant[unit] & ~taken[unit]
        cell = cells[unit]
        fanouts = tuple(reversed(cell.chain.topology.fanouts[1 : cell.level]))  # of its levels, above the leaves
        positions = choose_leaves(fanouts, free & left, preemptible & left, size)
        taken[unit] |= sum(1 << position for position in positions)
        pods.append([leaves[unit][position] for position in positions])
    return pods


def _alike(units: Units[VirtualCell], failure: Unmappable) -> int:
    """Return the mask of units to exclude because `cell` could not be mapped.

    For a preassigned cell that is not pinned, these are the units of all unbound preassigned cells of its level, which
    compete for the same physical cells, except those that the mapping has served; for any other cell, its own unit.
    """
    cell = failure.cell
    if cell.parent is None and not cell.pinned_id:
        unbound = cell.virtual_cluster.unbound(cell.chain.name, cell.level)
        return mask_of((other.unit for other in unbound if other not in failure.given), len(units.cells))
    while cell.units is None and cell.parent is not None:
        cell = cell.parent
    return 1 << cell.unit
