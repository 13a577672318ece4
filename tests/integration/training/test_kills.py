"""Leaders of `rcfarm jobs` are killed under load. `RCFARM_KILLS=30` does so for longer."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.programs.daemon import DaemonLives
from tests.support.training.load import Load, Witness
from tests.support.training.real import SHORT_LEASE, SYSTEM, operator_arguments, training_cluster

KILLS = int(os.environ.get("RCFARM_KILLS", "2"))


async def test_leaders_are_killed_under_load(
    plane: ControlPlane, namespace: str, operator: DaemonLives, tmp_path: Path
) -> None:
    """Two replicas of one installation; the leader is killed again and again while jobs of both kinds start, restart,
    fail, succeed and are deleted: each ends as planned, and the whole history keeps the invariants."""
    witness, rng = Witness(plane, namespace), random.Random(11)
    arguments = operator_arguments(plane, tmp_path, "--lease", f"{SYSTEM}/rcfarm-jobs", *SHORT_LEASE)
    with DaemonLives(tmp_path / "second", *arguments) as second:
        replicas = (operator, second)
        async with training_cluster(plane, namespace, nodes=4) as cluster, asyncio.TaskGroup() as group:
            load = Load(cluster, rng)
            running = group.create_task(load.run())
            for _ in range(KILLS):
                leader = await until(lambda: leader_of(replicas), "a leader")
                ended = load.ended
                await until(lambda: load.ended > ended or running.done(), "work under this leader")  # noqa: B023
                await asyncio.sleep(rng.uniform(0, 1.5))
                leader.kill()
                leader.start()
            load.finish()
            await running
        second.kill()
        await until(lambda: leader_of((operator,)), "the first replica leads")
    seen = await asyncio.to_thread(witness.check)
    assert load.ended >= KILLS
    assert len(seen.pods) > load.ended


async def leader_of(replicas: tuple[DaemonLives, ...]) -> DaemonLives | None:
    for replica in replicas:
        _, metrics = await asyncio.to_thread(replica.process.get, "/metrics")
        if 'leader_election_master_status{name="rcfarm-jobs"} 1.0' in metrics:
            return replica
    return None
