"""Malformed and forged pods: each is refused, skipped, or put in its claimed place, and never stops the scheduler
(P20).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from scheduler.hived.contract import POD_BIND_INFO, POD_LEAF_CELL_ISOLATION, POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from store.kube.api.objects import Object, annotations_of
from tests.property.hived.world.checks import changes, demand
from tests.property.hived.world.choices import Choices, one_in, pick
from tests.property.hived.world.world import World
from tests.support.hived.cluster import FILTERING, Job, pod_object, snapshot

BAD_TEXTS = (
    "",
    "{",
    "[]",
    "null",
    "a: [",
    "virtualCluster: V0",
    "leafCellNumber: x",
    '{"virtualCluster":1}',
    "&a [*a]",
)


def ask_with_mistake(world: World, choices: Choices) -> None:
    """Submit a pod with one error: it is refused, and nothing has changed."""
    job = world.random_job(choices)
    wrong = pick(
        choices,
        (
            {**job.spec(job.members[0][1]), "virtualCluster": "unknown"},
            {**job.spec(job.members[0][1]), "priority": 1001},
            {**job.spec(job.members[0][1]), "priority": -2},
            {**job.spec(job.members[0][1]), "priority": 1, "pinnedCellId": "nothing"},
            {**job.spec(job.members[0][1]), "pinnedCellId": "", "leafCellType": "unknown"},
            {**job.spec(9999)},
            {**job.spec(0)},
            {**job.spec(job.members[0][1]), "affinityGroup": {"name": "g", "members": []}},
        ),
    )
    text = pick(choices, BAD_TEXTS) if one_in(choices, 3) else json.dumps(wrong)
    annotations = {POD_SCHEDULING_SPEC: text} if choices.below(9) else {}
    refuse(world, choices, pod_object(f"wrong-{world.number()}", annotations))


def disagree(world: World, choices: Choices) -> None:
    """Submit a pod of a group with another VC or priority, or without a free place."""
    groups = [group for group in world.algorithm.groups.values() if group.name in world.jobs]
    if not groups:
        return
    group = pick(choices, groups)
    job = world.jobs[group.name]
    wrong = (
        {**job.spec(job.members[0][1]), "virtualCluster": job.virtual_cluster + "x"},
        {**job.spec(job.members[0][1]), "priority": job.priority + 1, "pinnedCellId": ""},
        replace(job, members=(*job.members, (1, 4321))).spec(4321),
    )
    text = json.dumps(pick(choices, wrong))
    refuse(world, choices, pod_object(f"stranger-{world.number()}", {POD_SCHEDULING_SPEC: text}))


def refuse(world: World, choices: Choices, pod: Object) -> None:
    """Announce the pod, check that it is refused, and delete it."""
    before = snapshot(world.algorithm)
    world.log(f"refuse {annotations_of(pod)}")
    world.algorithm.add_unallocated_pod(pod)
    try:
        result: Any = world.algorithm.schedule(pod, world.cluster.node_names, FILTERING)
    except UserError:
        result = None
    demand(result is None, f"answered a wrong pod: {result}")
    world.algorithm.delete_unallocated_pod(pod)
    demand(snapshot(world.algorithm) == before, f"P20 {changes(before, world.algorithm)}")
    world.check()


def forge(world: World, choices: Choices) -> None:
    """Create a bound pod whose annotations are invalid, or claim other groups' devices."""
    job = world.random_job(choices)
    leaves = job.members[0][1]
    if world.jobs and one_in(choices, 3):
        job = replace(job, name=pick(choices, list(world.jobs)))
    node = pick(choices, world.cluster.node_names)
    annotations = {POD_SCHEDULING_SPEC: json.dumps(job.spec(leaves))}
    match choices.below(5):
        case 0:
            pass  # no bind info: bound by hand
        case 1:
            annotations[POD_BIND_INFO] = pick(choices, BAD_TEXTS)
        case 2:
            annotations = {POD_BIND_INFO: json.dumps(_bind_info(world, choices, job, leaves, node))}
        case _:
            annotations[POD_BIND_INFO] = json.dumps(_bind_info(world, choices, job, leaves, node))
            annotations[POD_LEAF_CELL_ISOLATION] = "0"
    name = f"forged-{world.number()}"
    pod = pod_object(name, annotations, node=node)
    world.log(f"forge {name} on {node}: {annotations}")
    world.pods[name] = pod, job.name, leaves
    world.jobs.setdefault(job.name, job)
    with suppress(UserError):
        world.cluster.recover(pod)
    world.spoil(job.name)
    world.check()


def _bind_info(world: World, choices: Choices, job: Job, leaves: int, node: str) -> Object:
    chain = pick(choices, list(world.algorithm.topology.chains.values()))
    placements: list[Object] = []
    for pods, number in job.members if choices.below(3) else [(1, leaves)]:
        for _ in range(pods):
            first = choices.below(4)
            placements.append(
                {
                    "podPlacements": [
                        {
                            "physicalNode": pick(choices, world.cluster.node_names) if placements else node,
                            "physicalLeafCellIndices": [first + index for index in range(number)],
                            "preassignedCellTypes": [pick(choices, ("", *chain.cell_types))] * number,
                        }
                    ]
                }
            )
    own = placements[0]["podPlacements"][0]
    return {
        "node": own["physicalNode"],
        "leafCellIsolation": own["physicalLeafCellIndices"],
        "cellChain": pick(choices, (chain.name, chain.name, "gone")),
        "affinityGroupBindInfo": placements,
    }
