"""Inspection under random lives of random clusters: its cached pieces equal a walk over all cells."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from scheduler.hived.inspection.inspection import Inspected, Inspection
from tests.property.hived.world.checks import Violation
from tests.property.hived.world.choices import Seeded
from tests.property.hived.world.events import step
from tests.property.hived.world.world import World
from tests.support.hived.naive_inspection import expected_cluster, expected_groups, shown

STEPS = 80


@pytest.mark.parametrize("seed", range(30))
async def test_snapshots_equal_a_walk_over_everything(seed: int) -> None:
    """After any events, restarts and reconfigurations included; and again without events."""
    rng = random.Random(f"inspection/{seed}")
    choices = Seeded(rng)
    world = World(choices)
    followed = world.algorithm
    inspection = Inspection(Inspected(followed))
    for _ in range(STEPS):
        with suppress(Violation):  # not tested here
            step(world, choices)
        if rng.random() < 0.5:
            continue  # some changes accumulate
        if world.algorithm is not followed:
            followed = world.algorithm
            inspection.follow(Inspected(followed))
        expected = expected_cluster(followed)
        assert await shown(inspection.cluster_status()) == expected, "\n".join(world.story)
        assert await shown(inspection.physical_cluster()) == expected["physicalCluster"]
        assert await shown(inspection.virtual_clusters()) == expected["virtualClusters"]
        assert await shown(inspection.affinity_groups()) == expected_groups(followed), "\n".join(world.story)
        for name in followed.virtual_clusters:
            assert await shown(inspection.virtual_cluster(name)) == expected["virtualClusters"][name]
