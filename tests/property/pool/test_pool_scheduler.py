"""Safety of the PoolScheduler under random concurrent farms."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.pool.ledger import NodeReservations
from scheduler.pool.scheduler import PoolScheduler, Strategy
from scheduler.protocol import SchedulerError
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Op, TxnResult
from store.schema.keys import Keys
from store.schema.records import decode
from store.schema.selectors import Selector
from tests.support.farm.pool import Directory, manifest, overcommitted, place, pool_node, reserved

keys = Keys()
PODS = [manifest("a", cpu=400), manifest("b", cpu=700, memory=3), manifest("c", memory=5, gpu=1), manifest("d", gpu=1)]
SELECTORS = [Selector.parse(text) for text in ("", "pool=web", "pool in (web,db)")]
NODES = {
    node.name: node
    for node in (
        pool_node("n0", cpu=1000, memory=10, gpu=1),
        pool_node("n1", cpu=1500, memory=8),
        pool_node("n2", cpu=800, memory=4, pool="db", gpu=2),
        pool_node("n3", cpu=2000, memory=16, gpu=1),
    )
}


class Checked(EmbeddedStore):
    """A store that checks after every write that no node holds more than its capacity."""

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        result = await super().txn(ops)
        for entry in self.state.listing(keys.pools).entries:
            node = entry.key.removeprefix(keys.pools)
            pods = decode(NodeReservations, entry.key, entry.value).pods
            assert not overcommitted(pods, NODES[node].capacity), f"{node} is overcommitted by {pods}"
        return result


class Farm:
    """Uses a scheduler as an RC's owner does, and remembers its reservation for each pod id."""

    def __init__(self, store: EmbeddedStore, strategy: Strategy, seed: int) -> None:
        self.store = store
        self.scheduler = PoolScheduler(store, keys, Directory(*NODES.values()), strategy, rng=random.Random(seed))
        self.holds: set[tuple[str, str]] = set()

    async def allocate(self, pod: int, selector: int, count: int) -> None:
        try:
            nodes = await self.scheduler.allocate_nodes(PODS[pod], SELECTORS[selector], count)
        except SchedulerError:
            return
        self.holds |= {(node, PODS[pod].id) for node in nodes}

    async def place(self, pod: int, selector: int, count: int) -> None:
        answer = await self.scheduler.eligible_nodes(PODS[pod], SELECTORS[selector])
        for node in answer.placeable[:count]:
            if (node, PODS[pod].id) in self.holds:
                await place(self.store, keys, node, PODS[pod])

    async def remove(self, pod: int, selector: int, count: int) -> None:
        pod_id = PODS[pod].id
        nodes = sorted(node for node, held in self.holds if held == pod_id)[:count]
        self.holds -= {(node, pod_id) for node in nodes}
        for node in nodes:
            await self.store.delete(keys.intent(node, pod_id))
        await self.scheduler.deallocate_nodes(SELECTORS[selector], nodes, pod_id=pod_id)

    async def work(self, steps: Sequence[Step]) -> None:
        for action, pod, selector, count in steps:
            await action(self, pod, selector, count)

    async def catch_up(self) -> None:
        """Read what a sweep has changed, as a farm does within its interval."""
        await self.scheduler.refresh()
        ledger = self.scheduler.ledger
        self.holds = {
            (node, pod_id)
            for node, pod_id in self.holds
            if (held := ledger.pods(node).get(pod_id)) is not None and not held.releasing
        }


Step = tuple[Callable[[Farm, int, int, int], Coroutine[Any, Any, None]], int, int, int]
steps = st.tuples(
    st.sampled_from([Farm.allocate, Farm.allocate, Farm.place, Farm.remove]),
    st.integers(0, len(PODS) - 1),
    st.integers(0, len(SELECTORS) - 1),
    st.integers(1, 4),
)
work = st.lists(st.lists(steps, max_size=3), min_size=3, max_size=3)  # one list of steps per farm
sweeps = st.sets(st.integers(0, 2), min_size=1)  # the farms that sweep


async def _run(rounds: list[list[list[Step]] | set[int]], strategies: list[Strategy]) -> None:
    store = Checked()
    farms = [Farm(store, strategy, number) for number, strategy in enumerate(strategies)]
    for round_ in rounds:
        if isinstance(round_, set):
            await asyncio.gather(*(farms[number].scheduler.sweeper.sweep() for number in round_))
            await asyncio.gather(*(farm.catch_up() for farm in farms))
        else:
            await asyncio.gather(*(farm.work(steps) for farm, steps in zip(farms, round_, strict=True)))
    there = {(node, pod_id) for node, pods in (await reserved(store, keys)).items() for pod_id in pods}
    placed = {tuple(key.removeprefix(keys.intents).split("/")) for key in await store.keys(keys.intents)}
    assert placed <= there, "a pod stands without its reservation"
    held = [farm.holds for farm in farms]
    assert set().union(*held) <= there, "a reservation was lost"
    assert sum(map(len, held)) == len(set().union(*held)), "one reservation was given to two farms"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(work, sweeps), min_size=1, max_size=8),
    st.lists(st.sampled_from(["spread", "pack"]), min_size=3, max_size=3),
)
def test_never_overcommits(rounds: list[list[list[Step]] | set[int]], strategies: list[Strategy]) -> None:
    """Never overcommits: after every single write, each node's reservations fit its capacity, whatever farms do
    concurrently. And: no reservation is given to two farms, and none is lost under a pod."""
    asyncio.run(_run(rounds, strategies))
