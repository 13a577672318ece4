"""Experiments in the middle of a life: what is done and undone, or asked and not taken, must leave no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.invariants import violations
from scheduler.hived.snapshot import decode_snapshot, restore, take_snapshot
from tests.property.hived.checks import demand, told
from tests.property.hived.choices import Choices, pick, shuffled
from tests.property.hived.world import World
from tests.support.hived import FILTERING, Job, ownership, snapshot

State = Callable[[HivedAlgorithm], dict[str, Any]]


def allocate_and_delete(world: World, choices: Choices) -> None:
    """P16: a gang that gets its place and is deleted leaves the state as it was, unless it took from others."""
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
            world.tell(f"{change.__name__} {name}")
            change(name)
            world.check()
    demand_same("P18", before, state(world.algorithm))


def _exact(world: World) -> State:
    """What is compared: everything, but while nodes are bad, not which of several bad cells are shown where."""
    return snapshot if set(world.cluster.node_names) <= world.algorithm.healthy_nodes else _but_for_doomed


def demand_same(what: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    changed = {key: (before.get(key), after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key)}
    demand(not changed, f"{what} {changed}")


def _but_for_doomed(algorithm: HivedAlgorithm) -> dict[str, Any]:
    """Who has what, and how much is doomed, not which cells."""
    doomed = {
        f"doomed {chain.name} {key}": mask.bit_count()
        for chain in algorithm.chains.values()
        for key, mask in chain.doomed.items()
        if mask
    }
    return ownership(algorithm) | doomed


def ask_for_quota(world: World, choices: Choices) -> None:
    """Safety: while all nodes are well, who asks for a whole cell of its quota that is free, gets it."""
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
        f"safety: {cell.address} is free: {result and told(result)}",
    )
    world.delete(*names)


def save_and_restore(world: World, choices: Choices) -> None:
    """What is saved of a state restores it, with claims, downgrades and doomed cells."""
    text = b"".join(take_snapshot(world.algorithm, json.dumps(world.cluster.config)).pieces())
    restored = restore(decode_snapshot(text), world.algorithm.topology, lambda: world.cluster.now)
    demand(not (found := violations(restored)), found)
    state = _exact(world)
    demand_same("restored", state(world.algorithm), state(restored))
