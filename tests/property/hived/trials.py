"""Experiments in the middle of a life: what is done and undone, or asked and not taken, must leave no trace."""

from __future__ import annotations

from tests.property.hived.checks import changes, demand, told
from tests.property.hived.choices import Choices, pick, shuffled
from tests.property.hived.world import World
from tests.support.hived import FILTERING, Job, snapshot


def allocate_and_delete(world: World, choices: Choices) -> None:
    """P16: a gang that gets its place and is deleted leaves the state as it was, unless it took from others."""
    before = snapshot(world.algorithm)
    others = {name: (group.state, group.priority) for name, group in world.algorithm.groups.items()}
    job = world.announce(world.random_job(choices))
    names = world.pods_of(job.name)
    for name in names:
        world.schedule(choices, name, world.cluster.node_names, FILTERING)
    took = {name: (group.state, group.priority) for name, group in world.algorithm.groups.items() if name in others}
    world.delete(*shuffled(choices, names))
    if took == others:
        demand(snapshot(world.algorithm) == before, f"P16 {changes(before, world.algorithm)}")


def break_and_heal(world: World, choices: Choices) -> None:
    """P18: a node that was bad for a moment leaves the state as it was."""
    healthy = sorted(world.algorithm.healthy_nodes & set(world.cluster.node_names))
    if not healthy:
        return
    names = shuffled(choices, healthy)[: 1 + choices.below(3)]
    before = snapshot(world.algorithm)
    for change in (world.cluster.break_, world.cluster.heal):
        for name in shuffled(choices, names):
            world.tell(f"{change.__name__} {name}")
            change(name)
            world.check()
    demand(snapshot(world.algorithm) == before, f"P18 {changes(before, world.algorithm)}")


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
