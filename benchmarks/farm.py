"""Speed of farms on a real Consul, compared with that Consul's limits. Run: python -m benchmarks.farm [NAME …]

Every figure is measured on a fresh server, with farms as separate processes; `raw` and `bare` are measured in the same
run, so that the ratio to them says more than the seconds. `replicasets-…` beside `start-…` is the same fleet on
Kubernetes' own control plane. Needs the server programs in `$RCFARM_SERVERS` (`.servers`).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from benchmarks import replica_sets
from benchmarks.fleet import KEYS, consul, farm, fill, rc_name, report, send, servers_required, until_intents
from benchmarks.overload import lost, sessions_lost
from controllers.ownership.membership import assignment
from rcfarm.operations.rcs import ReplicationControllers
from store.consul.store import ConsulStore
from store.kv import ops
from store.kv.protocol import Op, SessionSpec
from store.schema import audit
from store.schema.keys import all_shards, shard_of
from store.schema.records import POD_ID_LABEL, RC_ID_LABEL, Intent, Owner, RCSpec, decode, encode

RAW_TRANSACTIONS = 1000
SCALES = 300
CONSUL_INTERVAL = 10.0  # seconds over which Consul counts requests
IDLE_INTERVALS = 3


async def raw() -> None:
    """Transactions of 64 writes of 200 bytes, 12 at once: the rate that limits everything else."""
    async with consul() as (_, store):
        value = b"x" * 200
        writes = [ops.put(f"raw/{number % 5000}", value) for number in range(RAW_TRANSACTIONS * 64)]
        began = time.perf_counter()
        await send(store, writes)
        seconds = time.perf_counter() - began
    report("raw", transactions_per_second=round(RAW_TRANSACTIONS / seconds), operations=64)


async def bare_seconds(store: ConsulStore, replicas: int) -> float:
    """The minimal work of a farm: read the RCs, lock them 63 at a time, place by merged transactions."""
    began = time.perf_counter()
    session = await store.create_session(SessionSpec("bare", ttl=60.0, check_ttl=None))
    entries = (await store.list(KEYS.rcs)).entries
    specs = [decode(RCSpec, entry.key, entry.value) for entry in entries if entry.key.endswith("/spec")]
    owner = encode(Owner("bare", "2026-01-01T00:00:00Z"))
    await send(store, [ops.lock(KEYS.owner(spec.id), owner, session.id) for spec in specs], size=63)
    nodes = sorted({key.split("/")[2] for key in await store.keys(KEYS.nodes)})
    units = [_placement(spec, nodes[:replicas], session.id) for spec in specs]
    per_transaction = 64 // len(units[0])
    merged = [op for unit in units for op in unit]
    await send(store, merged, size=per_transaction * len(units[0]))
    return time.perf_counter() - began


def _placement(spec: RCSpec, nodes: list[str], session: str) -> list[Op]:
    labels = {POD_ID_LABEL: spec.id, RC_ID_LABEL: spec.id}
    intent = encode(Intent(manifest=spec.manifest, rc=spec.id, shard="00", token=1, labels=labels))
    unit = [ops.check_session(KEYS.owner(spec.id), session)]
    for node in nodes:
        unit += [ops.create(KEYS.pod(spec.id, node), encode(labels)), ops.create(KEYS.intent(node, spec.id), intent)]
    return [*unit, audit.event_op(KEYS, "REPLICATION_CONTROLLER_RETARGET", {"rc": spec.id, "nodes": nodes}, actor="b")]


async def start(rcs: int, replicas: int, nodes: int) -> None:
    """Time from the start of the process to all intents, compared with the bare script on its own server."""
    async with consul() as (server, store):
        await fill(store, rcs=rcs, replicas=replicas, nodes=nodes)
        bare = await bare_seconds(store, replicas)
        with farm(server):  # compiles what is not compiled yet
            await _until_members(store, 1)
    async with consul() as (server, store):
        await fill(store, rcs=rcs, replicas=replicas, nodes=nodes)
        with farm(server) as process:
            done = await until_intents(store, rcs * replicas, pause=0.01 if rcs < 5000 else 0.05)
            seconds = done - process.started
            await asyncio.sleep(3)
            rss = process.rss
            stop = process.stop()
    report(
        f"start_{rcs}x{replicas}_on_{nodes}",
        seconds=round(seconds, 2),
        bare_seconds=round(bare, 2),
        ratio=round(seconds / bare, 1),
        rss_mb=round(rss / 1e6),
        stop_seconds=round(stop, 2),
    )


async def scale() -> None:
    """Time from scaling one RC among 1,000 idle ones until its intent exists."""
    async with consul() as (server, store):
        await fill(store, rcs=1000, replicas=3, nodes=300)
        with farm(server):
            await until_intents(store, 3000, pause=0.05)
            await asyncio.sleep(3)
            client = ReplicationControllers(store, KEYS, actor="benchmark")
            took = []
            for number in range(SCALES):
                rc_id = rc_name(number * 3 % 1000)
                began = time.perf_counter()
                await client.set_replicas(rc_id, 4)
                await _until_placed(store, rc_id, 4)
                took.append((time.perf_counter() - began) * 1000)
                await asyncio.sleep(0.02)
    quantiles = statistics.quantiles(took, n=100)
    report("scale_one_of_1000", p50_ms=round(quantiles[49], 1), p99_ms=round(quantiles[98], 1), samples=SCALES)


async def _until_placed(store: ConsulStore, rc_id: str, count: int) -> None:
    """Wait until the RC has this number of placements. Their intents are written in the same transaction."""
    listing = await store.list(KEYS.pod(rc_id, ""))
    while len(listing.entries) < count:
        listing = await store.watch(KEYS.pod(rc_id, ""), listing.index, 10.0)


async def crash() -> None:
    """Time from SIGKILL of a farm that owns half of 1,000 RCs until the other owns all and has scaled an orphan."""
    async with consul() as (server, store):
        await fill(store, rcs=1000, replicas=3, nodes=300)
        with farm(server, "farm-a") as victim, farm(server, "farm-b"):
            await until_intents(store, 3000, pause=0.05)
            shares = await _until_shared(store)
            client = ReplicationControllers(store, KEYS, actor="benchmark")
            orphans = [rc_id for rc_id, owner in (await _owners(store)).items() if owner == "farm-a"]
            began = time.perf_counter()
            victim.kill()
            await asyncio.gather(*(client.set_replicas(rc_id, 4) for rc_id in orphans[:100]))
            owned = await _until_owned_by(store, "farm-b") - began
            reconciled = await until_intents(store, 3100, pause=0.02) - began
    report(
        "crash_takeover",
        owned_seconds=round(owned, 2),
        reconciled_seconds=round(reconciled, 2),
        orphans=shares["farm-a"],
    )


async def balance() -> None:
    """10,000 RCs shared by 2, 3, 5, 8, 16 farms: the largest share and the mean, and the time from the last join until
    every RC is owned by the farm that prefers its shard."""
    sizes = (2, 3, 5, 8, 16)
    ratios, settled, moved = dict[int, float](), dict[int, float](), dict[int, int]()
    names = ["farm-00"]
    async with consul(max_connections=2000) as (server, store):  # all farms share one address here
        await fill(store, rcs=10000, replicas=1, nodes=500)
        with ExitStack() as farms:
            farms.enter_context(farm(server, names[0]))
            await until_intents(store, 10000, pause=0.5)
            for size in sizes:
                before = await _owners(store)
                while len(names) < size:
                    names.append(f"farm-{len(names):02}")
                    farms.enter_context(farm(server, names[-1]))
                await _until_members(store, size)
                began = time.perf_counter()
                owners = await _until_settled(store, names)
                settled[size] = round(time.perf_counter() - began, 1)
                ratios[size] = round(max(Counter(owners.values()).values()) * size / len(owners), 2)
                moved[size] = sum(owners[rc_id] != before[rc_id] for rc_id in owners)
            failures = await sessions_lost(store, names)
    report("balance_10000", busiest_over_mean=ratios, settled_seconds=settled, moved=moved, sessions_lost=failures)


async def _until_members(store: ConsulStore, count: int) -> None:
    index = 0
    async with asyncio.timeout(60):
        while True:
            listing = await store.watch(KEYS.farms, index, 10.0)
            if sum(entry.session is not None for entry in listing.entries) >= count:
                return
            index = listing.index


async def _until_settled(store: ConsulStore, farms: Sequence[str]) -> dict[str, str]:
    """Wait until every RC is owned by the farm that prefers its shard. Return the farm of each."""
    preferred = assignment(all_shards(KEYS.shards), farms)
    async with asyncio.timeout(120):
        while True:
            owners = await _owners(store)
            if all(owner == preferred[shard_of(rc_id, KEYS.shards)] for rc_id, owner in owners.items()):
                return owners
            await asyncio.sleep(0.2)


async def _owners(store: ConsulStore) -> dict[str, str]:
    """Return the farm that holds each RC, or ""."""
    owners = {}
    for entry in (await store.list(KEYS.rcs)).entries:
        if entry.key.endswith("/owner"):
            owners[entry.key.split("/")[-2]] = decode(Owner, entry.key, entry.value).farm if entry.session else ""
    return owners


async def _until_shared(store: ConsulStore) -> dict[str, int]:
    """Wait until both farms own their part and no hand-over is in progress. Return how many RCs each owns."""
    before: dict[str, str] = {}
    async with asyncio.timeout(120):
        while True:
            await asyncio.sleep(3)
            owners = await _owners(store)
            if owners == before and len(set(owners.values())) == 2 and "" not in owners.values():
                return {name: list(owners.values()).count(name) for name in set(owners.values())}
            before = owners


async def _until_owned_by(store: ConsulStore, farm_name: str) -> float:
    """Wait until one farm owns every RC. Return that time."""
    index = 0
    async with asyncio.timeout(60):
        while set((await _owners(store)).values()) != {farm_name}:
            index = (await store.watch(KEYS.rcs, index, 1.0)).index
    return time.perf_counter()


async def idle() -> None:
    """An idle farm with 10,000 RCs: requests per second, share of a core, resident memory."""
    async with consul() as (server, store):
        await fill(store, rcs=10000, replicas=3, nodes=2000)
        with farm(server) as process:
            await until_intents(store, 30000, pause=0.5)
            await asyncio.sleep(15)
            requests, cpu, began = 0.0, process.cpu, time.perf_counter()
            for _ in range(IDLE_INTERVALS):
                await asyncio.sleep(CONSUL_INTERVAL)
                requests += _requests(server.request("GET", "/v1/agent/metrics"))
            seconds, rss = time.perf_counter() - began, process.rss
            cpu = process.cpu - cpu
    report(
        "idle_10000",
        requests_per_second=round(requests / IDLE_INTERVALS / CONSUL_INTERVAL, 1),
        core_percent=round(100 * cpu / seconds, 2),
        rss_mb=round(rss / 1e6),
    )


def _requests(metrics: dict[str, list[dict[str, object]]]) -> float:
    """Return the number of requests that Consul's HTTP interface has answered in its last full interval."""
    return float(sum(int(str(s["Count"])) for s in metrics["Samples"] if str(s["Name"]).startswith("consul.http.")))


BENCHMARKS: dict[str, Callable[[], Awaitable[None]]] = {
    "raw": raw,
    "start-200": lambda: start(200, 3, 300),
    "start-1000": lambda: start(1000, 5, 1000),
    "start-10000": lambda: start(10000, 3, 2000),
    "scale": scale,
    "crash": crash,
    "idle": idle,
    "lost": lost,
    "balance": balance,
    "replicasets-200": lambda: replica_sets.start(200, 3, 300),
    "replicasets-1000": lambda: replica_sets.start(1000, 5, 1000),
}


async def main(names: list[str]) -> None:
    for name in names or BENCHMARKS:
        await BENCHMARKS[name]()


if __name__ == "__main__":
    with servers_required():
        asyncio.run(main(sys.argv[1:]))
