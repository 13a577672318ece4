"""Farms and Consul, killed at random moments under load."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rcfarm.operations.errors import NoSuchRC, RCExists
from rcfarm.operations.restore import deleted_rcs
from store.kv.protocol import Unavailable
from store.schema.records import RCStatus
from tests.support.consul.server import ConsulServer, StartConsul
from tests.support.farm.simulated_agents import running_agents
from tests.support.farm.witness import Placed, Witness
from tests.support.programs.installation import Daemon, Installation, installation

SEED = 20
KILLS = 50
CONSUL_KILLS = 3
FARMS = 3
NODES = [f"node-{number}" for number in range(8)]
WEB, OTHER = {"pool": "web"}, {"pool": "other"}
FAST: dict[str, Any] = {"claim_grace": 3, "handover_interval": 0.02, "manifest_gc_interval": 0.2}


class Operator:
    """Changes the fleet at random. `desired`: replicas of the RCs that are to exist.

    RCs whose ids end in the same number share a pod id, which has room for all of them: together they never desire more
    than there are nodes.
    """

    def __init__(self, site: Installation, rng: random.Random) -> None:
        self.desired: dict[str, int] = {}
        self.changes: Counter[str] = Counter()
        self._site, self._rng = site, rng
        self._created = 0
        self._stopped = False

    async def create(self) -> None:
        """Create an RC, with its own pod id or one that it shares with other RCs."""
        self._created += 1
        shared = self._created % 3 == 0
        rc_id = f"rc-{self._created}"
        pod_id = f"shared-{self._created // 3 % 5}" if shared else rc_id
        if shared and sum(self._pod_id(other) == pod_id for other in self.desired) == 3:
            return
        replicas, strategy = self._replicas(pod_id), self._rng.choice(["static", "dynamic"])
        create = partial(self._site.fleet.create, rc_id, replicas, pod_id=pod_id, node_selector="pool=web")
        with suppress(RCExists):  # an earlier attempt was applied
            await self._insist(lambda: create(rc_labels={"shares": pod_id}, allocation_strategy=strategy))
        self.desired[rc_id] = replicas

    async def scale(self) -> None:
        rc_id = self._rng.choice(sorted(self.desired))
        replicas = self._replicas(self._pod_id(rc_id))
        await self._insist(lambda: self._site.fleet.rcs.set_replicas(rc_id, replicas))
        self.desired[rc_id] = replicas

    async def delete(self) -> None:
        rc_id = self._rng.choice(sorted(self.desired))
        with suppress(NoSuchRC):  # an earlier attempt was applied
            await self._insist(lambda: self._site.fleet.rcs.delete(rc_id, force=True))
        del self.desired[rc_id]

    async def move(self) -> None:
        """Remove a node from its pool, or add it again: dynamic RCs move their pods."""
        node, labels = self._rng.choice(NODES), self._rng.choice([WEB, WEB, OTHER])
        await self._insist(lambda: self._site.fleet.relabel(node, labels))

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Make one change after the other; the last change is complete when the block ends."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._work())
            yield
            self._stopped = True

    async def _work(self) -> None:
        while not self._stopped:
            change = self._rng.choice([self.create, self.scale, self.scale, self.delete, self.move])
            if len(self.desired) < 30:
                change = self.create
            await change()
            self.changes[change.__name__] += 1
            await asyncio.sleep(self._rng.uniform(0.0, 0.05))

    async def _insist(self, change: Callable[[], Awaitable[object]]) -> None:
        """Retry until Consul answers; a change that was already applied is not repeated."""
        while True:
            try:
                await change()
            except Unavailable:
                await asyncio.sleep(0.1)
            else:
                return

    def _pod_id(self, rc_id: str) -> str:
        number = int(rc_id.removeprefix("rc-"))
        return f"shared-{number // 3 % 5}" if number % 3 == 0 else rc_id

    def _replicas(self, pod_id: str) -> int:
        return self._rng.randint(0, 2 if pod_id.startswith("shared") else 5)


@pytest.mark.timeout(600)  # a slow machine needs long to start fifty farms
async def test_farms_killed_at_random_moments(consul_server: ConsulServer, tmp_path: Path) -> None:
    """Fifty times a farm is killed (SIGKILL) and replaced, while RCs are created, scaled, moved and deleted. In no
    snapshot does a (node, pod id) have two RCs, a pod no intent, or an intent no pod; every act was by the RC's owner
    at that moment; in the end every RC has its desired state, and deleted RCs leave what they are restored from."""
    async with installation(consul_server, tmp_path / "site") as site:
        witness = Witness(site.store, site.keys)
        async with running_agents(site.store, site.keys, dict.fromkeys(NODES, WEB)), witness.watching():
            operator = Operator(site, random.Random(SEED))
            async with operator.working():
                farms = await killed(site, random.Random(SEED + 1))
            for node in NODES:
                await site.fleet.relabel(node, WEB)
            placed = await site.until(lambda: settled(site, witness, operator.desired), "every RC has what it desires")
            await site.until_not(lambda: leftovers(site, placed), "nothing is left of what is not desired any more")
        acts = await witness.check_acts()
        assert len({act.actor for act in acts}) > FARMS, "only farms that were killed soon did anything"
        assert len({(act.rc, act.token) for act in acts if act.token > 1}) > 10, "hardly any RC had a second owner"
        assert all(farm.is_running for farm in farms)


async def killed(site: Installation, rng: random.Random) -> list[Daemon]:
    """Kill a farm and start another one, repeatedly. Return the remaining farms. Some reuse the name of the killed one,
    and wait until its lease ends."""
    farms = [site.farm(f"farm-{number}", **FAST) for number in range(FARMS)]
    await site.until(site.live_farms, "a farm is live")
    for number in range(FARMS, FARMS + KILLS):
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        victim = farms.pop(rng.randrange(FARMS))
        if rng.random() < 0.7:  # the others are killed at any time, also while they start
            await site.until_logged(victim, "Farm joined; claiming RCs")
        victim.kill()
        if rng.random() < 0.2:
            victim.start()
            farms.append(victim)
        else:
            farms.append(site.farm(f"farm-{number}", **FAST))
    return farms


async def test_consul_killed_at_random_moments(start_consul: StartConsul, tmp_path: Path) -> None:
    """Consul is killed (SIGKILL) and restarted with its data, while RCs are created, scaled, moved and deleted. Writes
    of unknown outcome do no harm: the same invariants hold, and in the end every RC has its desired state."""
    server, rng = start_consul(durable=True), random.Random(SEED)
    async with installation(server, tmp_path / "site") as site:
        witness = Witness(site.store, site.keys)
        await site.fleet.add_nodes(NODES, WEB)
        farms = [site.farm(f"farm-{number}", **FAST) for number in range(2)]
        async with witness.watching():
            operator = Operator(site, random.Random(SEED + 1))
            async with operator.working():
                for _ in range(CONSUL_KILLS):
                    await asyncio.sleep(rng.uniform(1.0, 2.5))
                    server.kill()
                    await asyncio.sleep(rng.uniform(0.0, 2.0))
                    await asyncio.to_thread(server.start)
            for node in NODES:
                await site.fleet.relabel(node, WEB)
            await site.until(lambda: settled(site, witness, operator.desired), "every RC has what it desires")
        await witness.check_acts()
        assert all(farm.is_running for farm in farms)


async def settled(site: Installation, witness: Witness, desired: dict[str, int]) -> Placed | None:
    """Return all placements once every RC has its desired state and its status says so."""
    placed = await witness.look()
    counts = Counter(placed.placements.values())
    if placed.specs.keys() != desired.keys() or any(counts[rc_id] != desired[rc_id] for rc_id in desired):
        return None
    statuses = [await site.fleet.status(rc_id) for rc_id in desired]
    return placed if all(status is not None and _is_settled(status) for status in statuses) else None


def _is_settled(status: RCStatus) -> bool:
    # Where no agent reports the pods' health, an RC with all its pods is still progressing.
    return status.state in ("converged", "progressing") and status.placed == status.desired


async def leftovers(site: Installation, placed: Placed) -> set[object]:
    """Return the records of RCs, pods and manifests that should not exist, and those that are missing."""
    store, keys = site.store, site.keys
    folders = [keys.parse_rc(key) for key in await store.keys(keys.rcs)]
    verdicts = map(keys.parse_health, await store.keys(keys.healths))
    health = {(key.rc, key.node) for key in verdicts}
    manifests = {key.removeprefix(keys.manifests) for key in await store.keys(keys.manifests)}
    realities = {tuple(key.removeprefix(keys.realities).split("/")) for key in await store.keys(keys.realities)}
    restorable = {record.manifest for record in (await deleted_rcs(store, keys)).records}
    return set[object]().union(
        {key.rc for key in folders} ^ placed.specs.keys(),
        health ^ {(rc_id, node) for (node, _), rc_id in placed.placements.items()},
        manifests ^ ({spec.manifest for spec in placed.specs.values()} | restorable),
        realities ^ placed.placements.keys(),
    )
