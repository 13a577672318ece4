"""PoolSchedulers of several farms on one real Consul."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from scheduler.pool.scheduler import PoolScheduler
from scheduler.protocol import SchedulerError
from store.consul.store import ConsulSettings, ConsulStore
from store.schema.keys import Keys
from store.schema.records import Capacity
from store.schema.selectors import Selector
from tests.support.consul.server import ConsulServer
from tests.support.farm.pool import Directory, manifest, overcommitted, place, pool_node, reserved

WEB = Selector.parse("pool=web")
NODES = 40
FARMS = 4


@pytest.fixture
async def stores(consul: ConsulServer) -> AsyncIterator[list[ConsulStore]]:
    """One client per farm, as separate processes would have."""
    stores = [ConsulStore(ConsulSettings.from_env(consul.url, environ={})) for _ in range(FARMS)]
    yield stores
    for store in stores:
        await store.close()


@pytest.fixture
def keys(root: str) -> Keys:
    return Keys(root)


async def test_concurrent_farms_never_overcommit(stores: list[ConsulStore], keys: Keys) -> None:
    """Four farms request at once twice what the pool has: every core is allocated, none twice; the rest is refused."""
    directory = Directory(*(pool_node(f"n{number:02}", cpu=1000) for number in range(NODES)))
    schedulers = [PoolScheduler(store, keys, directory, rng=random.Random(7)) for store in stores]
    asked = [
        (scheduler, manifest(f"pod-{farm}-{number}", cpu=200))
        for farm, scheduler in enumerate(schedulers)
        for number in range(20)
    ]

    answers = await asyncio.gather(
        *(scheduler.allocate_nodes(pod, WEB, 5) for scheduler, pod in asked), return_exceptions=True
    )
    given = sum(len(answer) for answer in answers if not isinstance(answer, BaseException))
    refused = [str(answer) for answer in answers if isinstance(answer, SchedulerError)]
    pods = await reserved(stores[0], keys)
    assert given == sum(map(len, pods.values())) == NODES * 5
    assert refused
    assert all(f"left out: {NODES} without room (n00, n01, n02, …)" in message for message in refused), refused[0]
    assert not any(overcommitted(held, Capacity(1000)) for held in pods.values())


async def test_allocating_and_giving_back_at_once_leaks_nothing(stores: list[ConsulStore], keys: Keys) -> None:
    """Farms that reserve, place, remove and free on the same few nodes end with an empty pool."""
    directory = Directory(*(pool_node(f"n{number}", cpu=1000) for number in range(4)))

    async def work(farm: int, store: ConsulStore) -> None:
        scheduler = PoolScheduler(store, keys, directory, strategy="pack" if farm % 2 else "spread")
        for number in range(10):
            pod = manifest(f"pod-{farm}-{number}", cpu=200)
            nodes = await scheduler.allocate_nodes(pod, WEB, 2)
            assert set(nodes) <= set((await scheduler.eligible_nodes(pod, WEB)).placeable)
            for node in nodes:
                await place(store, keys, node, pod)
            await scheduler.deallocate_nodes(WEB, nodes, pod_id=pod.id)
            assert (await scheduler.eligible_nodes(pod, WEB)).eligible == set(nodes), "the pods are still there"
            for node in nodes:
                await store.delete(keys.intent(node, pod.id))
            await scheduler.deallocate_nodes(WEB, nodes, pod_id=pod.id)

    async with asyncio.TaskGroup() as tasks:
        for farm, store in enumerate(stores):
            tasks.create_task(work(farm, store))
    assert await stores[0].keys(keys.pools) == []


async def test_another_farm_sees_and_uses_what_was_reserved(stores: list[ConsulStore], keys: Keys) -> None:
    """A farm takes over and places first on the nodes that the dead farm had reserved but not used."""
    directory = Directory(pool_node("n1"), pool_node("n2"))
    pod = manifest("web", cpu=100)
    heir = PoolScheduler(stores[1], keys, directory)
    running = asyncio.create_task(heir.run())
    assert (await heir.eligible_nodes(pod, WEB)).placeable == ()
    await PoolScheduler(stores[0], keys, directory).allocate_nodes(pod, WEB, 2)
    async with asyncio.timeout(10):
        while (await heir.eligible_nodes(pod, WEB)).placeable != ("n1", "n2"):
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
