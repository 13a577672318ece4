"""`kill -9` of the extender, again and again, while gangs come and go: what it knew is in the cluster."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.control_plane import ControlPlane
from tests.support.hived_cluster import HivedCluster, hived_cluster
from tests.support.hived_load import Load
from tests.support.hived_witness import Witness
from tests.support.jobs_replica import until

KILLS = 30
SLOTS = 16
STARTS = 0.2  # how many of the kills come while it starts
LIFE = 1.2  # seconds at most from then until the kill


@pytest.mark.timeout(300)
async def test_extenders_are_killed_at_random_moments(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Thirty kills while gangs of many shapes, guaranteed and opportunistic, are created, complete, are deleted and
    evicted, and nodes go bad and heal. Never is a device held by two pods, or in the places of two gangs; annotations
    are whole and pods of one gang agree. In the end every gang gets its turn, and nothing is left allocated."""
    rng = random.Random(30)
    witness = Witness(control_plane, namespace)
    quotas, evicts = {"a": 3, "b": 2}, {"extender.evict_victims": "always"}
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=6, quotas=quotas, settings=evicts) as cluster:
        load = Load(cluster, rng, ("a", "b"), slots=SLOTS)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.run())
            group.create_task(trouble_nodes(cluster, rng))
            for _ in range(KILLS):
                if rng.random() > STARTS:
                    await cluster.extender.until_ready()
                await asyncio.sleep(rng.uniform(0.0, LIFE))
                cluster.extender.kill()
                cluster.extender.start()
            await cluster.extender.until_ready()
            load.finish()
            await until(running.done, "all gangs over", within=60)
        await until(lambda: holds_nothing(cluster), "nothing allocated")
        assert "Traceback" not in cluster.extender.log()
        assert "Two groups have the same devices" not in cluster.extender.log()
    seen = await asyncio.to_thread(witness.check)
    assert load.completed > KILLS / 4
    assert load.cut_short > KILLS / 4
    assert len(seen.bound) > KILLS
    assert len(seen.ended) > KILLS / 8
    assert seen.most_held > 24


async def trouble_nodes(cluster: HivedCluster, rng: random.Random) -> None:
    """Let nodes go bad for a moment, one after the other. All are well in the end."""
    for _ in range(KILLS):
        node = rng.choice(cluster.nodes)
        change, bad = rng.choice(((cluster.set_ready, False), (cluster.set_cordoned, True)))
        await change(node, bad)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        await change(node, not bad)
        await asyncio.sleep(rng.uniform(0.0, 0.5))


async def holds_nothing(cluster: HivedCluster) -> bool:
    cells = await cluster.inspect("clusterstatus/physicalcluster")
    return not await cluster.groups() and all(cell["cellState"] == "Free" for cell in cells)
