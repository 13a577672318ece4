"""Experiments within a life: steps that are undone, or answers that are not used, must leave no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.inspection.snapshot import decode_snapshot, restore, take_snapshot
from tests.property.hived.world.checks import demand, describe
from tests.property.hived.world.choices import Choices, pick, shuffled
from tests.property.hived.world.world import World
from tests.support.hived.cluster import FILTERING, Job, ownership, snapshot
from tests.support.hived.invariants import violations

State = Callable[[HivedAlgorithm], dict[str, Any]]


def allocate_and_delete(world: World, choices: Choices) -> None:
    """P16: a gang that is placed and deleted leaves the state as it was, unless it took from other groups."""
    state = _exact(world)
    before = state(world.algorithm)
    others = {name: (group.state, group.priority) for name, group in world.algorithm.groups.items()}
    job = world.announce(world.random_job(choices))
    names = world.pods_of(job.name)
    for name in names:
        world.schedule(choices, name, world.cluster.node_names, FILTERING)
    took = {name: (group.state, group.priority) for name, group in world.algorithm.groups.items() if name in others}
    world.delete(*shuffled(choices, names))
    if took == others:
        demand_same("P16", before, state(world.algorithm))


def break_and_heal(world: World, choices: Choices) -> None:
    """P18: nodes that were bad for a moment leave the state as it was."""
    nodes = world.cluster.node_names
    healthy = [name for name in nodes if name in world.algorithm.healthy_nodes]
    if not healthy:
        return
    names = shuffled(choices, healthy)[: 1 + choices.below(3)]
    state = _exact(world)
    before = state(world.algorithm)
    for change in (world.cluster.break_, world.cluster.heal):
        for name in shuffled(choices, names):
            world.log(f"{change.__name__} {name}")
            change(name)
            world.check()
    demand_same("P18", before, state(world.algorithm))


def _exact(world: World) -> State:
    """Return the state to compare: everything, except which bad cells are doomed while nodes are bad."""
    return snapshot if set(world.cluster.node_names) <= world.algorithm.healthy_nodes else _but_for_doomed


def demand_same(what: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = {key: (before.get(key), after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key)}
    demand(not changed, f"{what} {changed}")


def _but_for_doomed(algorithm: HivedAlgorithm) -> dict[str, Any]:
    """Return ownership and the number of doomed cells, not which cells they are."""
    doomed = {
        f"doomed {chain.name} {key}": mask.bit_count()
        for chain in algorithm.chains.values()
        for key, mask in chain.doomed.items()
        if mask
    }
    return ownership(algorithm) | doomed


def ask_for_quota(world: World, choices: Choices) -> None:
    """Safety: while all nodes are healthy, a request for a whole free cell of its quota is served."""
    if not set(world.cluster.node_names) <= world.algorithm.healthy_nodes:
        return
    free = [
        (name, cell)
        for name, cluster in world.algorithm.virtual_clusters.items()
        for cell in cluster.preassigned
        if not cell.used and len(world.cluster.waiting) < 99
    ]
    if not free:
        return
    name, cell = pick(choices, free)
    topology = cell.chain.topology
    leaves = topology.leaves_at(min(cell.level, topology.node_level))
    job = Job(
        f"quota{world.number()}",
        name,
        1000,
        ((cell.leaves // leaves, leaves),),
        leaf_type=topology.leaf_cell_type,
        pinned=cell.pinned_id,
    )
    world.announce(job)
    names = world.pods_of(job.name)
    result = world.schedule(choices, names[0], world.cluster.node_names, FILTERING)
    demand(
        result is not None and result.pod_wait_info is None,
        f"safety: {cell.address} is free: {result and describe(result)}",
    )
    world.delete(*names)


def save_and_restore(world: World, choices: Choices) -> None:
    """A saved state restores itself, with claims, downgrades and doomed cells."""
    text = b"".join(take_snapshot(world.algorithm, json.dumps(world.cluster.config)).pieces())
    restored = restore(decode_snapshot(text), world.algorithm.topology, lambda: world.cluster.now)
    demand(not (found := violations(restored)), found)
    state = _exact(world)
    demand_same("restored", state(world.algorithm), state(restored))
