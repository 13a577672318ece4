"""Speed of daemon sets on a real Consul. Run: python -m benchmarks.daemon_sets

    placing   50 sets on 2,000 nodes: from the start of the farm until all 100,000 pods have their intents
    joining   one node after the other joins this fleet: until it has the intents of all sets; with the farm's processor
              time for each, which includes the whole plans that follow
    bare      as many placements and intents written by this program alone: what the store itself takes

There are no agents; nodes are records under one session. Needs the server programs in `$RCFARM_SERVERS`.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks.fleet import KEYS, alive_op, consul, farm, fill, node_name, rc_name, report, send, servers_required
from store.consul.store import ConsulStore
from store.kv import ops
from store.schema.records import ALL_NODES, NodeSpec, encode

SETS, NODES, JOINING = 50, 2000, 100
TREES, VALUE = ("pods", "intent"), b"." * 200  # bytes, as an intent has
BARE = KEYS.root + "-bare"  # a tree that no farm reads
PAUSE = 0.5  # seconds between two nodes that join


async def main() -> None:
    async with consul() as (server, store):
        session = await fill(store, rcs=SETS, replicas=ALL_NODES, nodes=NODES)
        began = time.perf_counter()
        with farm(server) as process:
            async with asyncio.timeout(300):
                while len(await store.keys(KEYS.intents)) < SETS * NODES:  # noqa: ASYNC110  # another process writes
                    await asyncio.sleep(1)
            report("placing", seconds=round(time.perf_counter() - began, 1), rss_mb=round(process.rss / 1e6))
            await asyncio.sleep(10)
            busy = process.process.cpu_times()
            await asyncio.sleep(10)
            now = process.process.cpu_times()
            idle = (now.user + now.system - busy.user - busy.system) / 10
            cpu = process.cpu
            latencies = [await _joined(store, session, node_name(NODES + number)) for number in range(JOINING)]
            report(
                "joining",
                **_quantiles(latencies),
                cpu_ms=round((process.cpu - cpu) / JOINING * 1000),
                idle_core_percent=round(idle * 100, 1),
                rss_mb=round(process.rss / 1e6),
            )
        report("bare", **_quantiles([await _written(store, node_name(number)) for number in range(JOINING)]))


def _quantiles(latencies: list[float]) -> dict[str, int]:
    quantiles = statistics.quantiles(latencies, n=100)
    return {"p50_ms": round(quantiles[49] * 1000), "p99_ms": round(quantiles[98] * 1000)}


async def _written(store: ConsulStore, node: str) -> float:
    """Return the seconds that two keys for each set take."""
    await asyncio.sleep(PAUSE)
    began = time.perf_counter()
    keys = [f"{BARE}/{tree}/{node}/{rc_name(number)}" for number in range(SETS) for tree in TREES]
    await send(store, [ops.put(key, VALUE) for key in keys])
    return time.perf_counter() - began


async def _joined(store: ConsulStore, session: str, node: str) -> float:
    """Register a node, in one transaction as an agent does. Return the seconds from the registration until the node
    has an intent of each set."""
    await asyncio.sleep(PAUSE)
    spec = encode(NodeSpec(name=node, labels={"pool": "web"}))
    await send(store, [ops.put(KEYS.node_spec(node), spec), alive_op(node, session)])
    began, index = time.perf_counter(), 0
    while True:
        listing = await store.watch(KEYS.node_intents(node), index, 10.0)
        index = listing.index
        if len(listing.entries) >= SETS:
            return time.perf_counter() - began


if __name__ == "__main__":
    with servers_required():
        asyncio.run(main())
