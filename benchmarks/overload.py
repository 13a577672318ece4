"""Farms under overload, and with work that can't be done. Run: python -m benchmarks.overload [NAME …]

A real Consul, farms as processes, nodes and agents as records. Each row gives how late the farm's event loop was (99 %
of the timers, the latest one, and the most processor time between two of them, in milliseconds: a loop that is blocked
for long loses its lease), how much of a core it used, and how often it lost its session.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from benchmarks.fleet import (
    KEYS,
    Delays,
    FarmProcess,
    alive_op,
    consul,
    dead_op,
    farm,
    fill,
    node_name,
    report,
    send,
    servers_required,
    until_intents,
)
from store.consul.store import ConsulStore
from store.kv import ops
from store.kv.protocol import Op
from store.schema.records import RCSpec, RCStatus, decode, encode

FARM = "farm-a"
NODE_LOST_AFTER = 20.0  # seconds
SETTLE = 10.0  # seconds after which an overloaded farm must be quiet


@dataclass
class Watch:
    """Figures of one farm over phases."""

    process: FarmProcess
    figures: dict[str, object] = field(default_factory=dict)

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        """Measure the block."""
        cpu, wall, began = self.process.cpu, time.time(), time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        core = round(100 * (self.process.cpu - cpu) / seconds, 1)
        await asyncio.sleep(1.5)  # until the samples are written
        self.figures[name] = {"core_percent": core, **_words(self.process.delays(wall - 1, wall + seconds))}


def _words(delays: Delays) -> dict[str, float]:
    return {"delay_p99_ms": delays.p99, "delay_max_ms": delays.most, "held_max_ms": delays.held}


async def until_state(store: ConsulStore, count: int, state: str, *, pause: float = 0.5) -> float:
    """Wait until `count` RCs have this state in their status. Return the seconds."""
    began = time.perf_counter()
    async with asyncio.timeout(120):
        while await _in_state(store, state) < count:  # noqa: ASYNC110  # the writer is another process
            await asyncio.sleep(pause)
    return time.perf_counter() - began


async def _in_state(store: ConsulStore, state: str) -> int:
    entries = (await store.list(KEYS.rcs)).entries
    statuses = (decode(RCStatus, e.key, e.value) for e in entries if e.key.endswith("/status"))
    return sum(status.state == state for status in statuses)


async def sessions_lost(store: ConsulStore, farms: Sequence[str] = (FARM,)) -> int:
    """Return how often the farms had to join again."""
    members = [await store.get(KEYS.farm(name)) for name in farms]
    return sum(member.lock_index - 1 if member else 1 for member in members)


async def lost(rcs: int = 10000, nodes: int = 2000) -> None:
    """RCs that want 3 pods each; no agent lives, and after a while the nodes are lost; then all agents come back."""
    async with consul() as (server, store):
        agents = await fill(store, rcs=rcs, replicas=3, nodes=nodes, alive=False)
        with farm(server, settings=[f"farm.node_lost_after={NODE_LOST_AFTER:g}"], sampled=True) as process:
            watch = Watch(process)
            async with watch.phase("start"):
                short = await until_state(store, rcs, "short")
                await asyncio.sleep(3)
            async with watch.phase("dead"):
                await asyncio.sleep(max(1.0, NODE_LOST_AFTER - 1 - (time.perf_counter() - process.started)))
            async with watch.phase("become_lost"):
                await asyncio.sleep(SETTLE)
            async with watch.phase("lost"):
                await asyncio.sleep(40)
            async with watch.phase("back"):
                began = time.perf_counter()
                await send(store, [alive_op(node_name(number), agents) for number in range(nodes)])
                placed = await until_intents(store, rcs * 3, pause=0.2) - began
            failures = await sessions_lost(store)
    report(
        f"lost_{rcs}_on_{nodes}",
        short_seconds=round(short, 1),
        placed_seconds=round(placed, 1),
        sessions_lost=failures,
        **watch.figures,
    )


async def flap(pods: int = 1000, nodes: int = 200) -> None:
    """A node with a pod of each of 1,000 RCs dies and comes back each second."""
    async with consul() as (server, store):
        agents = await fill(store, rcs=pods, replicas=1, nodes=nodes)
        with farm(server, sampled=True) as process:
            await until_intents(store, pods, pause=0.1)
            watch, node = Watch(process), node_name(0)
            before = (await store.list(KEYS.rcs)).index
            async with watch.phase("flapping"):
                for _ in range(30):
                    await store.txn([dead_op(node, agents)])
                    await asyncio.sleep(0.5)
                    await store.txn([alive_op(node, agents)])
                    await asyncio.sleep(0.5)
            entries = (await store.list(KEYS.rcs)).entries
            written, failures = sum(e.modify_index > before for e in entries), await sessions_lost(store)
    report("flap", written=written, sessions_lost=failures, **watch.figures)


async def flap_while_short(rcs: int = 10000, nodes: int = 2000) -> None:
    """The same node, while 10,000 RCs of another pool can't be placed at all."""
    async with consul() as (server, store):
        agents = await fill(store, rcs=rcs, replicas=3, nodes=nodes, selector="pool=db")
        with farm(server, sampled=True) as process:
            await until_state(store, rcs, "short")
            await asyncio.sleep(SETTLE)
            watch, node = Watch(process), node_name(0)
            async with watch.phase("flapping"):
                for _ in range(30):
                    await store.txn([dead_op(node, agents)])
                    await asyncio.sleep(0.5)
                    await store.txn([alive_op(node, agents)])
                    await asyncio.sleep(0.5)
            failures = await sessions_lost(store)
    report("flap_while_short", sessions_lost=failures, **watch.figures)


async def nothing_matches(rcs: int = 5000, nodes: int = 200) -> None:
    """RCs with distinct selectors that match no node."""
    async with consul() as (server, store):
        await fill(store, rcs=rcs, replicas=3, nodes=nodes, selector="pool=nowhere{}")
        with farm(server, sampled=True) as process:
            watch = Watch(process)
            async with watch.phase("start"):
                short = await until_state(store, rcs, "short")
            await asyncio.sleep(SETTLE)
            async with watch.phase("idle"):
                await asyncio.sleep(40)
            failures = await sessions_lost(store)
    report("nothing_matches", short_seconds=round(short, 1), sessions_lost=failures, **watch.figures)


async def huge(replicas: int = 100_000, nodes: int = 2000) -> None:
    """One RC that asks for 100,000 pods."""
    async with consul() as (server, store):
        await fill(store, rcs=1, replicas=replicas, nodes=nodes)
        with farm(server, sampled=True) as process:
            watch = Watch(process)
            async with watch.phase("placing"):
                done = await until_intents(store, nodes, pause=0.02)
            async with watch.phase("idle"):
                await asyncio.sleep(35)
            seconds, failures = done - process.started, await sessions_lost(store)
    report("huge", placed_seconds=round(seconds, 1), sessions_lost=failures, **watch.figures)


async def changes(rate: int = 1000, seconds: int = 30, rcs: int = 1000) -> None:
    """1,000 changes of specs per second."""
    async with consul() as (server, store):
        await fill(store, rcs=rcs, replicas=1, nodes=100)
        with farm(server, sampled=True) as process:
            await until_intents(store, rcs, pause=0.1)
            await until_state(store, rcs, "progressing")  # no agent reports health here
            entries = (await store.list(KEYS.rcs)).entries
            specs = [decode(RCSpec, entry.key, entry.value) for entry in entries if entry.key.endswith("/spec")]
            watch, began = Watch(process), time.perf_counter()
            async with watch.phase("changing"):
                for number in range(seconds * 10):
                    chosen = [specs[(number * rate // 10 + i) % rcs] for i in range(rate // 10)]
                    await send(store, [_changed(spec, 1 + number) for spec in chosen])
                    await asyncio.sleep(max(0.0, began + (number + 1) / 10 - time.perf_counter()))
            took, last = time.perf_counter() - began, time.perf_counter()
            async with asyncio.timeout(60):
                while not await _all_acted_on(store):  # noqa: ASYNC110  # the writer is another process
                    await asyncio.sleep(0.1)
            caught_up, failures = time.perf_counter() - last, await sessions_lost(store)
    report(
        "changes",
        per_second=round(seconds * rate / took),
        caught_up_seconds=round(caught_up, 1),
        sessions_lost=failures,
        **watch.figures,
    )


def _changed(spec: RCSpec, generation: int) -> Op:
    return ops.put(KEYS.spec(spec.id), encode(msgspec.structs.replace(spec, generation=generation + spec.generation)))


async def _all_acted_on(store: ConsulStore) -> bool:
    entries = {entry.key: entry for entry in (await store.list(KEYS.rcs)).entries}
    specs = [decode(RCSpec, key, entry.value) for key, entry in entries.items() if key.endswith("/spec")]
    statuses = [decode(RCStatus, KEYS.status(spec.id), entries[KEYS.status(spec.id)].value) for spec in specs]
    return all(status.generation == spec.generation for spec, status in zip(specs, statuses, strict=True))


BENCHMARKS: dict[str, Callable[[], Awaitable[None]]] = {
    "lost": lost,
    "flap": flap,
    "flap-while-short": flap_while_short,
    "nothing-matches": nothing_matches,
    "huge": huge,
    "changes": changes,
}


async def main(names: list[str]) -> None:
    for name in names or BENCHMARKS:
        await BENCHMARKS[name]()


if __name__ == "__main__":
    with servers_required():
        asyncio.run(main(sys.argv[1:]))
