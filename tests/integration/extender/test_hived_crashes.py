"""`kill -9` of the extender, repeatedly, while gangs come and go: its state is restored from the cluster."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.extender.load import Load
from tests.support.extender.real_cluster import HivedCluster, hived_cluster
from tests.support.extender.witness import Witness
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane

KILLS = 30
SLOTS = 16
STARTS = 0.2  # how many of the kills come while it starts
LIFE = 1.2  # seconds at most from then until the kill


@pytest.mark.timeout(600)  # a slow machine needs long to start thirty extenders
async def test_extenders_are_killed_at_random_moments(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Thirty kills while gangs of many shapes, guaranteed and opportunistic, are created, complete, are deleted and
    evicted, and nodes go bad and heal. No device is ever held by two pods, or belongs to the placements of two gangs;
    annotations are complete and pods of one gang agree. In the end every gang runs, and nothing stays allocated."""
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
            await until(running.done, "all gangs ended")
        await until(lambda: holds_nothing(cluster), "nothing allocated")
        assert "Traceback" not in cluster.extender.log()
        assert "Two groups use the same devices" not in cluster.extender.log()
    seen = await asyncio.to_thread(witness.check)
    assert load.completed > KILLS / 4
    assert load.cut_short > KILLS / 4
    assert len(seen.bound) > KILLS
    assert len(seen.ended) > KILLS / 8
    assert seen.most_held > 24


async def trouble_nodes(cluster: HivedCluster, rng: random.Random) -> None:
    """Make nodes bad for a moment, one after the other. All are healthy in the end."""
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
