"""Random gangs: mostly within their tenant's quota, sometimes impossible for any tenant."""

from __future__ import annotations

from scheduler.hived.cells.topology import ChainTopology, Topology
from tests.property.hived.world.choices import Choices, one_in, pick
from tests.support.hived.cluster import Job

PRIORITIES = (0, 1, -1, 2, 5, -1, 1000, 0)


def random_job(choices: Choices, name: str, topology: Topology) -> Job:
    """Return a job of one of the virtual clusters."""
    tenant = pick(choices, list(topology.virtual_clusters))
    cells = topology.virtual_clusters[tenant]
    movable = [cell for cell in cells if not cell.pinned_cell_id]
    pins = [cell for cell in cells if cell.pinned_cell_id]
    priority = pick(choices, PRIORITIES)
    if not movable and not pins and not one_in(choices, 8):
        priority = -1
    if priority >= 0 and cells:
        cell = pick(choices, pins if pins and (not movable or one_in(choices, 4)) else movable)
        chain, level, pinned = topology.chains[cell.chain], cell.level, cell.pinned_cell_id
    else:
        chain, pinned = pick(choices, list(topology.chains.values())), ""
        level = chain.top_level
    return Job(
        name,
        tenant,
        priority,
        _members(choices, chain, level),
        leaf_type=_leaf_type(choices, chain, topology),
        pinned=pinned,
        lazy=one_in(choices, 2),
        ignore=one_in(choices, 2),
    )


def _members(choices: Choices, chain: ChainTopology, level: int) -> tuple[tuple[int, int], ...]:
    """Return members, with sizes of cells more often than other sizes."""
    pods: dict[int, int] = {}
    for _ in range(1 + one_in(choices, 4)):
        size = chain.leaves_at(1 + choices.below(min(level, chain.node_level)))
        pods[1 + choices.below(size) if one_in(choices, 4) else size] = pick(choices, (1, 1, 2, 3))
    return tuple((number, leaves) for leaves, number in pods.items())


def _leaf_type(choices: Choices, chain: ChainTopology, topology: Topology) -> str:
    if one_in(choices, 2):
        return ""
    types = sorted({other.leaf_cell_type for other in topology.chains.values()})
    return pick(choices, types) if one_in(choices, 8) else chain.leaf_cell_type
