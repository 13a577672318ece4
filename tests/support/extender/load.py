"""A load of gangs that run, complete or are deleted, one after the other in each of several slots."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Sequence

from store.kube.api.errors import KubeError
from store.kube.api.objects import PODS, Object
from tests.support.extender.real_cluster import HivedCluster, node_of

LOOK = 0.2  # seconds between two reads of the pods
SHAPES = (((1, 1),), ((2, 1),), ((1, 4),), ((3, 2),), ((2, 8),), ((1, 2), (2, 1)), ((2, 4),), ((1, 8),))
_ENDED = ("Succeeded", "Failed")


class Load:
    """Keeps `slots` gangs running. `completed`: gangs whose pods all ran to their end; `cut_short`: gangs that lost a
    pod by preemption or by their owner.
    """

    def __init__(
        self, cluster: HivedCluster, rng: random.Random, virtual_clusters: Sequence[str], *, slots: int
    ) -> None:
        self.completed = self.cut_short = 0
        self._cluster, self._rng, self._virtual_clusters, self._slots = cluster, rng, virtual_clusters, slots
        self._numbers = itertools.count()
        self._pods: dict[str, Object] = {}
        self._looked = asyncio.Event()
        self._is_last = asyncio.Event()

    async def run(self) -> None:
        """Run until `finish` was called and the last gangs have ended."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look())
            slots = [group.create_task(self._repeat()) for _ in range(self._slots)]
            await asyncio.wait(slots)
            looking.cancel()

    def finish(self) -> None:
        """Start no more gangs."""
        self._is_last.set()

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(KubeError):
                self._pods = await self._cluster.pods()
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(LOOK)

    async def _repeat(self) -> None:
        rng = self._rng
        while not self._is_last.is_set():
            name = f"g{next(self._numbers)}"
            priority = rng.choice((-1, -1, -1, 0, 1, 5))
            job = self._cluster.job(name, rng.choice(self._virtual_clusters), priority, *rng.choice(SHAPES))
            seconds = rng.uniform(1.5, 5.0) if priority < 0 else rng.uniform(0.1, 2.0)
            plan = {"exit_code": "0", "run_seconds": f"{seconds:.2f}", "stop_seconds": f"{rng.uniform(0.0, 0.4):.2f}"}
            pods = set(await self._cluster.submit(job, **plan))
            patience = rng.uniform(0.2, 4.0) if rng.random() < 0.2 else math.inf
            await self._until_ended(pods, patience, rng.uniform(0.0, 1.0) if rng.random() < 0.3 else math.inf)
            await self._delete(pods)

    async def _until_ended(self, pods: set[str], patience: float, life: float) -> None:
        """Wait until all of them have completed, one is missing, or their owner deletes them: when they were not placed
        within `patience` seconds, or have been for `life` seconds.
        """
        now = asyncio.get_running_loop().time
        begun, placed = now(), math.inf
        await self._looked.wait()  # a read that began before the pods existed
        while True:
            await self._looked.wait()
            found = [self._pods[name] for name in pods if name in self._pods]
            if len(found) == len(pods) and all(pod["status"].get("phase") in _ENDED for pod in found):
                self.completed += 1
                return
            if all(map(node_of, found)):
                placed = min(placed, now())
            if len(found) < len(pods) or now() > min(begun + patience, placed + life):
                self.cut_short += 1
                return

    async def _delete(self, pods: set[str]) -> None:
        while left := pods & self._pods.keys():
            for name in left:
                with contextlib.suppress(KubeError):
                    await self._cluster.api.delete(PODS, name, self._cluster.namespace)
            await self._looked.wait()
