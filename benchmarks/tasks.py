"""Speed of the task engine, beside the raw rate of its store in the same run. Run: python -m benchmarks.tasks [ROW …]

Rows end in `-embedded` (a SQLite file, in the engine's process) or `-consul` (a fresh server, on the same cores). One
JSON line per row. Needs the server programs in `$RCFARM_SERVERS` (`.servers`) for Consul; `light-peers` needs the
Python of an environment with `dbos` and `prefect` in `$RCFARM_PEERS`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import structlog

from benchmarks.fleet import consul, report, servers_required
from controllers.tasks.api.phase import Transition, do_transition, phase_info_running, phase_info_success
from controllers.tasks.api.plugin import PluginProperties, TaskExecutionContext
from controllers.tasks.engine.engine import Engine, EngineSettings
from rcfarm.daemon.daemon import freeze_all, freeze_survivors
from rcfarm.roles.farm import COLLECTIONS, LEAST_SURVIVORS
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, Op, Store
from store.open import open_store
from store.schema.keys import Keys
from store.schema.quota import QuotaLimit
from store.schema.records import decode, encode
from store.schema.tasks import TaskEvent, TaskOwner, TaskSpec, TaskState
from tests.support.tasks.engines import engine_on, running

KEYS = Keys()
WRITERS = 12  # transactions on their way at once
RAW_TRANSACTIONS = 500
ROUNDS_EXECUTIONS = 3000
LAPS = 8
HANDOVERS = 400
WAKE_EXECUTIONS = 1000
WAKE_RATE = 1000  # signals per second
WAKE_SECONDS = 10
IDLE_EXECUTIONS = 100_000
IDLE_SECONDS = 30.0
QUIET_PAUSE = 5.0  # seconds
ORPHANS = 1000
LIGHT_TASKS = 400
PATIENCE = 900.0  # seconds that a row may take


class BenchPlugin:
    """Runs `laps` rounds per execution, each with an event, then succeeds; `laps` below 0: runs until it is signalled.

    `on_call(execution, laps done)` is called first."""

    def __init__(self, on_call: Callable[[str, int], None] = lambda execution, laps: None) -> None:
        self._on_call = on_call

    def get_id(self) -> str:
        return "bench"

    def get_properties(self) -> PluginProperties:
        return PluginProperties()

    async def handle(self, context: TaskExecutionContext) -> Transition:
        execution = context.task_execution_metadata.get_owner_id().name
        done, _ = context.plugin_state_reader.get(int)
        done = done or 0
        self._on_call(execution, done)
        laps = int((await context.task_reader.read()).config.get("laps", 0))
        if done == laps:
            return do_transition(phase_info_success())
        context.plugin_state_writer.put(1, done + 1)
        if laps > 0:
            context.task_refresh_indicator()
        return do_transition(phase_info_running(done % 1_000_000))

    async def abort(self, context: TaskExecutionContext) -> None:
        return

    async def finalize(self, context: TaskExecutionContext) -> None:
        return


@asynccontextmanager
async def embedded() -> AsyncIterator[Store]:
    with tempfile.TemporaryDirectory() as directory:
        store = EmbeddedStore(Path(directory) / "store.db")
        try:
            yield store
        finally:
            await store.close()


@asynccontextmanager
async def on_consul() -> AsyncIterator[Store]:
    async with consul() as (_, store):
        yield store


STORES: dict[str, Callable[[], Any]] = {"embedded": embedded, "consul": on_consul}


def engine_of(store: Store, plugin: BenchPlugin, **settings: Any) -> Engine:
    """Return an engine with the settings that engines have by default, not those of tests."""
    concurrency = EngineSettings(name="default").concurrency
    return engine_on(store, KEYS, plugin, virtual=False, concurrency=concurrency, **settings)


async def send(store: Store, writes: Sequence[Op]) -> None:
    """Apply independent operations, merged into transactions, several at once."""
    slots = asyncio.Semaphore(WRITERS)

    async def one(batch: Sequence[Op]) -> None:
        async with slots:
            await store.txn(batch)

    starts = range(0, len(writes), MAX_TXN_OPS)
    await asyncio.gather(*(one(writes[start : start + MAX_TXN_OPS]) for start in starts))


async def raw_rate(store: Store) -> int:
    """Return transactions of 64 writes of 200 bytes per second, 12 at once."""
    value = b"x" * 200
    writes = [ops.put(f"raw/{number % 5000}", value) for number in range(RAW_TRANSACTIONS * MAX_TXN_OPS)]
    began = time.perf_counter()
    await send(store, writes)
    seconds = time.perf_counter() - began
    await store.txn([ops.delete_tree("raw/")])
    return round(RAW_TRANSACTIONS / seconds)


def spec_of(number: int, **fields: Any) -> TaskSpec:
    return TaskSpec(id=f"execution-{number:06}", type="bench", **fields)


async def submit(store: Store, specs: Sequence[TaskSpec]) -> None:
    await send(store, [ops.create(KEYS.task_spec(spec.id), encode(spec)) for spec in specs])


async def set_quota(store: Store, resource: str, units: int) -> None:
    await store.put(KEYS.quota_limit(resource), encode(QuotaLimit(units=units)))


async def until(holds: Callable[[], Awaitable[bool] | bool], *, pause: float) -> None:
    """Wait until a condition, which may be asynchronous, holds. `pause`: seconds between looks."""
    async with asyncio.timeout(PATIENCE):
        while True:
            held = holds()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(pause)


async def events(store: Store) -> int:
    return len(await store.keys(KEYS.task_events))


async def until_events(store: Store, count: int, *, pause: float) -> None:
    """Wait until that many events exist."""

    async def exist() -> bool:
        return await events(store) >= count

    await until(exist, pause=pause)


async def until_ended(store: Store, count: int, *, pause: float) -> None:
    """Wait until that many executions have ended."""

    async def ended() -> bool:
        entries = (await store.list(KEYS.tasks)).entries
        states = (decode(TaskState, each.key, each.value) for each in entries if each.key.endswith("/state"))
        return sum(state.step == "done" for state in states) >= count

    await until(ended, pause=pause)


async def until_working(engine: Engine) -> None:
    """Wait until the engine watches its shards."""
    await until(lambda: engine.term is not None and bool(engine.term.ownership.shards), pause=0.05)
    await asyncio.sleep(1)


def load() -> float:
    return round(os.getloadavg()[0], 1)


def milliseconds(samples: Sequence[float]) -> dict[str, float]:
    quantiles = statistics.quantiles(samples, n=100)
    return {"p50_ms": round(quantiles[49] * 1000, 1), "p99_ms": round(quantiles[98] * 1000, 1)}


async def rounds(kind: str) -> None:
    """Rounds with state and event in one fenced transaction, per second. `quota`: executions that are admitted and end,
    so that each round takes or returns a unit in the same transaction; `plain`: rounds of executions that run. What an
    execution writes beside its rounds, such as the end of its clean-up, takes time and is not counted as a round."""
    async with STORES[kind]() as store:
        raw = await raw_rate(store)
        await set_quota(store, "gpu", 1_000_000)
        quota = await measured_rounds(store, "quota", 0, ROUNDS_EXECUTIONS)
        plain = await measured_rounds(store, "plain", LAPS, ROUNDS_EXECUTIONS // LAPS)
    report(f"rounds-{kind}", raw_transactions_per_second=raw, **quota, **plain, load=load())


async def measured_rounds(store: Store, name: str, laps: int, count: int) -> dict[str, float]:
    """Let executions live, from the start of the engine to the end of the last one."""
    await submit(store, [spec_of(at, quotas={"gpu": 1}, config={"laps": laps}) for at in range(count)])
    calls: list[str] = []
    engine = engine_of(store, BenchPlugin(lambda execution, laps: calls.append(execution)))

    def ended() -> bool:
        return len(calls) == count * (laps + 1) and not (engine.term and engine.term.ownership.held)

    async with running(engine):
        cpu, began = time.process_time(), time.perf_counter()
        await until(ended, pause=0.005)
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        assert engine.term is not None
        writes = engine.term.commits.units + engine.ledger.changes
    done = await events(store)
    await store.txn([ops.delete_tree(KEYS.tasks), ops.delete_tree(KEYS.task_events)])
    return {
        f"{name}_rounds_per_second": round(done / seconds),
        f"{name}_rounds_per_core_second": round(done / cpu),
        f"{name}_writes_per_round": round(writes / done, 2),
    }


async def handover(kind: str) -> None:
    """One unit, and two engines with one execution after the other: from the report of the holder's success until the
    plugin is called for the next holder."""
    samples = dict[str, list[float]](same=[], other=[])
    async with STORES[kind]() as store:
        await set_quota(store, "gpu", 1)
        await submit(store, [spec_of(at, quotas={"gpu": 1}) for at in range(HANDOVERS)])
        last: list[tuple[str, float]] = []

        def began(engine: str, execution: str, laps: int) -> None:
            now = time.perf_counter()
            if last:
                holder, ended = last.pop()
                samples["same" if holder == engine else "other"].append(now - ended)
            last.append((engine, now))

        names = ("engine-a", "engine-b")
        engines = [engine_of(store, BenchPlugin(partial(began, name)), name=name) for name in names]
        async with running(*engines):
            await until_ended(store, HANDOVERS, pause=0.5)
    report(
        f"handover-{kind}",
        **milliseconds(samples["same"] + samples["other"]),
        same_engine=milliseconds(samples["same"]),
        other_engine=milliseconds(samples["other"]),
        samples=len(samples["same"]) + len(samples["other"]),
        load=load(),
    )


class Arrivals:
    """A sink that notes when an execution's event has left the store."""

    name = "arrivals"

    def __init__(self, arrived: Callable[[str, TaskEvent], None]) -> None:
        self._arrived = arrived

    async def send(self, spec: TaskSpec, event: TaskEvent) -> None:
        self._arrived(spec.id, event)

    async def close(self) -> None:
        return


async def wake(kind: str) -> None:
    """From a signal until the plugin is called, and until the round's event is committed and has left the outbox, at
    `WAKE_RATE` signals per second to random executions."""
    rng = random.Random(1)
    signalled = dict[str, float]()
    called, delivered = list[float](), list[float]()

    def on_call(execution: str, laps: int) -> None:
        if execution in signalled:
            called.append(time.perf_counter() - signalled[execution])

    def arrived(execution: str, event: TaskEvent) -> None:
        if execution in signalled:
            delivered.append(time.perf_counter() - signalled.pop(execution))

    async with STORES[kind]() as store:
        specs = [spec_of(at, config={"laps": -1}) for at in range(WAKE_EXECUTIONS)]
        await submit(store, specs)
        engine = engine_of(store, BenchPlugin(on_call), sinks=[Arrivals(arrived)])
        async with running(engine):
            await until_events(store, WAKE_EXECUTIONS, pause=0.1)
            await asyncio.sleep(2)
            cpu, began, sent, late = time.process_time(), time.perf_counter(), 0, 0
            while sent < WAKE_RATE * WAKE_SECONDS:
                due = min(int((time.perf_counter() - began) * WAKE_RATE), WAKE_RATE * WAKE_SECONDS)
                for _ in range(due - sent):
                    execution = specs[rng.randrange(WAKE_EXECUTIONS)].id
                    if execution in signalled:
                        late += 1
                        continue
                    signalled[execution] = time.perf_counter()
                    engine.enqueue(execution)
                sent = due
                await asyncio.sleep(0.001)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            await asyncio.sleep(1)
    report(
        f"wake-{kind}",
        called=milliseconds(called),
        committed_and_sent=milliseconds(delivered),
        rounds_per_second=round(len(called) / seconds),
        still_in_a_round=late,
        core_percent=round(100 * cpu / seconds),
        load=load(),
    )


async def serve(url: str, name: str) -> None:
    """Run an engine on a store until it is killed."""
    store = open_store(url)
    await engine_of(store, BenchPlugin(), name=name).start()


class EngineProgram:
    """`serve` as a process."""

    def __init__(self, url: str, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.tasks", "serve", url, name]
        self.process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_running():
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def idle() -> None:
    """An engine on Consul with 100,000 live executions: seconds to claim all and run their first rounds, seconds until
    its views have read again what it wrote, then resident memory and share of a core while nothing happens."""
    async with consul() as (server, store):
        await submit(store, [spec_of(at, config={"laps": -1}) for at in range(IDLE_EXECUTIONS)])
        began = time.perf_counter()
        with EngineProgram(server.url, "engine-a") as engine:
            await until_events(store, IDLE_EXECUTIONS, pause=5)
            seconds = time.perf_counter() - began
            settled = await until_quiet(engine)
            cpu, began = engine.cpu, time.perf_counter()
            await asyncio.sleep(IDLE_SECONDS)
            share = 100 * (engine.cpu - cpu) / (time.perf_counter() - began)
            rss = engine.process.memory_info().rss
    report(
        "idle",
        executions=IDLE_EXECUTIONS,
        rss_mb=round(rss / 1e6),
        core_percent=round(share, 2),
        first_rounds_seconds=round(seconds, 1),
        settled_seconds=round(settled, 1),
        load=load(),
    )


async def until_quiet(engine: EngineProgram) -> float:
    """Wait until the engine uses less than a twentieth of a core. Return the seconds that it took."""
    began, last = time.perf_counter(), engine.cpu

    def quiet() -> bool:
        nonlocal last
        used, last = engine.cpu - last, engine.cpu
        return 0 < used < QUIET_PAUSE / 20

    await asyncio.sleep(QUIET_PAUSE)
    await until(quiet, pause=QUIET_PAUSE)
    return time.perf_counter() - began


async def takeover() -> None:
    """Two engines on Consul that share 1,000 live executions; one is killed with SIGKILL. Seconds until the other has
    run its first round of an orphan, and of all."""
    async with consul() as (server, store):
        await submit(store, [spec_of(at, config={"laps": -1}) for at in range(ORPHANS)])
        with EngineProgram(server.url, "engine-a") as victim, EngineProgram(server.url, "engine-b"):
            orphans = await until_shared(store)
            await asyncio.sleep(1)
            before, killed = await events(store), time.time()
            victim.kill()
            await until_events(store, before + orphans, pause=0.2)
            entries = (await store.list(KEYS.task_events)).entries
            moments = [decode(TaskEvent, each.key, each.value).at for each in entries]
    after = [at - killed for at in moments if at > killed]
    report(
        "takeover", first_seconds=round(min(after), 2), all_seconds=round(max(after), 2), orphans=orphans, load=load()
    )


async def until_shared(store: Store) -> int:
    """Wait until both engines own their part and every execution runs. Return how many the first one owns."""
    before: dict[str, int] = {}
    async with asyncio.timeout(PATIENCE):
        while True:
            await asyncio.sleep(2)
            entries = (await store.list(KEYS.tasks)).entries
            owners = [decode(TaskOwner, each.key, each.value).engine for each in entries if each.session]
            states = sum(each.key.endswith("/state") for each in entries)
            shares = dict(Counter(owners))
            if len(owners) == states == ORPHANS and len(shares) == 2 and shares == before:
                return shares["engine-a"]
            before = shares


async def light(kind: str) -> None:
    """Wall time of 400 tasks that do nothing, from their submission until all have ended; one engine that runs."""
    async with STORES[kind]() as store:
        engine = engine_of(store, BenchPlugin())
        async with running(engine):
            await until_working(engine)
            began = time.perf_counter()
            await submit(store, [spec_of(at) for at in range(LIGHT_TASKS)])
            await until_ended(store, LIGHT_TASKS, pause=0.01)
            seconds = time.perf_counter() - began
    report(f"light-{kind}", tasks=LIGHT_TASKS, seconds=round(seconds, 2), load=load())


def peers() -> None:
    """The same on DBOS and Prefect, each in a process of its own."""
    python = os.environ.get("RCFARM_PEERS")
    if not python:
        sys.exit("error: RCFARM_PEERS names no Python; make one with `pip install dbos prefect`")
    for name in ("dbos", "prefect"):
        with tempfile.TemporaryDirectory() as directory:
            script = Path(__file__).with_name("task_peers.py")
            environ = {**os.environ, "PREFECT_HOME": directory, "DO_NOT_TRACK": "1", "PREFECT_LOGGING_LEVEL": "ERROR"}
            command = [python, str(script), name, str(LIGHT_TASKS)]
            done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr[-2000:], file=sys.stderr)
                continue
        report(f"light-{name}", tasks=LIGHT_TASKS, **json.loads(done.stdout.splitlines()[-1]), load=load())


ROWS: dict[str, Callable[[], Awaitable[None]]] = {
    **{f"{row.__name__}-{kind}": partial(row, kind) for row in (rounds, handover, wake, light) for kind in STORES},
    "takeover": takeover,
    "idle": idle,
    "light-peers": partial(asyncio.to_thread, peers),
}


async def main(names: list[str]) -> None:
    freeze_survivors(thresholds=COLLECTIONS, least=LEAST_SURVIVORS)  # as the roles do
    freeze_all(collect_before=False)
    if names[:1] == ["serve"]:
        await serve(*names[1:])
    for name in names or ROWS:
        await ROWS[name]()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with servers_required():
        asyncio.run(main(sys.argv[1:]))
