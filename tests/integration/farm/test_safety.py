"""Farms that are stopped without noticing, on a real Consul: a farm that has lost an RC writes nothing more of it.

Every test ends with the whole audit log: every act was by the owner of the RC at that moment.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from store.schema.records import Owner, decode
from tests.support.consul.delaying_proxy import holding_proxy
from tests.support.consul.server import ConsulServer
from tests.support.farm.witness import Act, Witness
from tests.support.programs.installation import Daemon, Installation, installation

NODES = [f"node-{number}" for number in range(1, 7)]
LEASE = 3.0
FAST: dict[str, Any] = {"claim_grace": 3, "handover_interval": 0.02}
WRITERS = 8  # concurrent changes of RCs


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """Six live nodes, and no farm yet."""
    async with installation(consul_server, tmp_path / "site") as site:
        await site.fleet.add_nodes(NODES)
        yield site


async def two_farms(site: Installation) -> dict[str, Daemon]:
    farms = {name: site.farm(name, **FAST) for name in ("farm-a", "farm-b")}
    await site.until_live(*farms)
    return farms


async def create(site: Installation, count: int) -> list[str]:
    rc_ids = [f"rc-{number}" for number in range(count)]
    await _each(rc_ids, lambda rc_id: site.fleet.create(rc_id, 1))
    return rc_ids


async def scale(site: Installation, rc_ids: Iterable[str], replicas: int) -> None:
    await _each(rc_ids, lambda rc_id: site.fleet.rcs.set_replicas(rc_id, replicas))


async def _each(rc_ids: Iterable[str], change: Callable[[str], Awaitable[object]]) -> None:
    slots = asyncio.Semaphore(WRITERS)

    async def one(rc_id: str) -> None:
        async with slots:
            await change(rc_id)

    await asyncio.gather(*map(one, rc_ids))


async def until_placed(site: Installation, witness: Witness, rc_ids: list[str], replicas: int) -> None:
    """Wait until each of the RCs has exactly this number of pods."""

    async def placed() -> bool:
        counts = Counter((await witness.look()).placements.values())
        return all(counts[rc_id] == replicas for rc_id in rc_ids)

    await site.until(placed, f"{len(rc_ids)} RCs have {replicas} pods each")


async def owners(site: Installation) -> Counter[str]:
    """Return how many RCs each farm holds."""
    entries = (await site.store.list(site.keys.rcs, consistent=True)).entries
    held = [entry for entry in entries if entry.key.endswith("/owner") and entry.session]
    return Counter(decode(Owner, entry.key, entry.value).farm for entry in held)


async def until_shared(site: Installation, rc_ids: list[str]) -> None:
    """Wait until both farms hold some of the RCs, and together all of them."""

    async def shared() -> bool:
        held = await owners(site)
        return len(held) == 2 and held.total() == len(rc_ids)

    await site.until(shared, "two farms share the RCs")


def acts_of(acts: Iterable[Act], farm: str, *, since: int = 0) -> list[Act]:
    return [act for act in acts if act.actor == farm and act.at > since]


async def last_index(site: Installation) -> int:
    """Return the index of the last write to the tree."""
    return max(entry.modify_index for entry in (await site.store.list(site.root, consistent=True)).entries)


async def test_a_stopped_owner_has_lost_its_rcs_when_it_goes_on(site: Installation) -> None:
    """SIGSTOP past the lease: the other farm takes over and changes every RC; SIGCONT: the stale farm writes nothing,
    becomes a member again under a new session, and gets its share back."""
    witness = Witness(site.store, site.keys)
    async with witness.watching():
        farms = await two_farms(site)
        rc_ids = await create(site, 40)
        await until_placed(site, witness, rc_ids, 1)
        await until_shared(site, rc_ids)

        farms["farm-a"].pause()
        await scale(site, rc_ids, 3)
        await until_placed(site, witness, rc_ids, 3)
        await site.until(lambda: are_owned_by(site, "farm-b", 40), "the other farm has them all")
        stopped_at = await last_index(site)

        farms["farm-a"].resume()
        await site.until_logged(farms["farm-a"], "Session lost; releasing all RCs")
        await site.until_live("farm-a", "farm-b")
        await until_shared(site, rc_ids)
        assert acts_of(await witness.acts(), "farm-a", since=stopped_at) == []
        await scale(site, rc_ids, 2)
        await until_placed(site, witness, rc_ids, 2)
    acts = await witness.check_acts()
    assert acts_of(acts, "farm-a", since=stopped_at), "the farm works again"


async def test_a_write_that_arrives_late_is_refused(site: Installation, consul_server: ConsulServer) -> None:
    """A transaction of the owner is held up in the network until another farm owns the RC: Consul refuses it as a
    whole. Only the fence can cause this: the transaction only adds pods, to empty nodes. (Without the `check-session`
    this test fails: the late write is applied.)"""
    witness = Witness(site.store, site.keys)
    async with witness.watching(), holding_proxy(consul_server.address) as network:
        site.farm("farm-a", url=f"consul://{network.address}", **FAST)
        await site.fleet.create("web", 1)
        await site.fleet.until_placed("web", ["node-1"])

        network.hold()
        await site.fleet.rcs.set_replicas("web", 3)
        [connection] = await site.until(lambda: network.holding(b"pods/node-2"), "the owner adds a pod")
        await site.fleet.rcs.set_replicas("web", 1)
        site.farm("farm-b", **FAST)
        await site.until(lambda: owned_by(site, "farm-b"), "the other farm takes over")
        before = await site.store.list(site.keys.rcs, consistent=True)

        network.release()
        answer = await site.until(lambda: network.answers.get(connection), "Consul answers the late write")
        assert answer.startswith(b"HTTP/1.1 409 Conflict")
        assert (await site.store.list(site.keys.rcs, consistent=True)).entries == before.entries
        await site.until_live("farm-a", "farm-b")
    await witness.check_acts()


async def are_owned_by(site: Installation, farm: str, count: int) -> bool:
    return await owners(site) == {farm: count}


async def owned_by(site: Installation, farm: str) -> bool:
    status = await site.fleet.status("web")
    return status is not None and status.farm == farm and await are_owned_by(site, farm, 1)


async def test_stops_in_the_middle_of_bulk_work(site: Installation) -> None:
    """Hundreds of RCs are being scaled when one farm stops for longer than its lease; later the other one does. Each
    time the remaining farm completes the work."""
    witness = Witness(site.store, site.keys)
    async with witness.watching():
        farms = await two_farms(site)
        rc_ids = await create(site, 300)
        await until_placed(site, witness, rc_ids, 1)
        await until_shared(site, rc_ids)
        for name, replicas in (("farm-a", 4), ("farm-b", 2)):
            await stop_while_scaling(site, witness, farms[name], rc_ids, replicas)
            await site.until_live(*farms)
            await until_shared(site, rc_ids)
    await witness.check_acts()


async def stop_while_scaling(
    site: Installation, witness: Witness, farm: Daemon, rc_ids: list[str], replicas: int
) -> None:
    """Stop the farm while it works on its share, and before it has seen all of it; continue it when the other farms
    have done the rest."""
    name, part = farm.name, 2 * len(rc_ids) // 3
    began = await last_index(site)
    scaling = asyncio.create_task(scale(site, rc_ids[:part], replicas))

    async def acts_since(index: int) -> int:
        return len(acts_of(await witness.acts(), name, since=index))

    await site.until(lambda: acts_since(began), f"{name} has begun")
    farm.pause()
    await scaling
    await scale(site, rc_ids[part:], replicas)
    await until_placed(site, witness, rc_ids, replicas)
    stopped_at = await last_index(site)
    farm.resume()
    await site.until_logged(farm, "Session lost; releasing all RCs")
    assert await acts_since(stopped_at) == 0


async def test_stops_around_the_lease(site: Installation) -> None:
    """Farms stop for about as long as their lease, repeatedly, while RCs are scaled: whether slightly longer or
    shorter, no RC ever has acts of two owners, and all RCs reach their desired state."""
    rng = random.Random(3)
    witness = Witness(site.store, site.keys)
    async with witness.watching():
        farms = await two_farms(site)
        rc_ids = await create(site, 60)
        await until_placed(site, witness, rc_ids, 1)
        for replicas in (4, 1, 5, 2, 3):
            farm = farms[rng.choice(sorted(farms))]
            farm.pause()
            scaling = asyncio.create_task(scale(site, rc_ids, replicas))
            await asyncio.sleep(rng.uniform(LEASE - 0.7, LEASE + 0.5))
            farm.resume()
            await scaling
        await until_placed(site, witness, rc_ids, 3)
    await witness.check_acts()


async def test_consul_hangs_past_the_lease(site: Installation, consul_server: ConsulServer) -> None:
    """Consul stops answering, with changes under way: both farms release everything without its help. Consul continues,
    and so do they; pending changes are neither lost nor made by a farm without ownership."""
    witness = Witness(site.store, site.keys)
    async with witness.watching():
        farms = await two_farms(site)
        rc_ids = await create(site, 40)
        await until_placed(site, witness, rc_ids, 1)
        await until_shared(site, rc_ids)
        scaling = asyncio.create_task(scale(site, rc_ids, 3))
        await asyncio.sleep(0.05)
        consul_server.pause()
        try:
            for farm in farms.values():
                await site.until_logged(farm, "Session lost; releasing all RCs")
        finally:
            consul_server.resume()
        await scaling
        await until_placed(site, witness, rc_ids, 3)
        await until_shared(site, rc_ids)
    await witness.check_acts()
