"""Speed of rollouts on a real Consul, and of plans. Run: python -m benchmarks.rollout [NAME …]

    latency   one RC of 100 pods, one at a time: from the health of a changed pod to the intent of the next one
    roll      one RC of 1,000 pods on 1,000 nodes, a quarter at a time: until all have the new manifest and pass
    log       3,000 RCs placed, and the rollout of `roll`, with and without a decision log, in turn: seconds, bytes
    preview   the preview of one rollout of 1,000 pods, by waves and one by one, without a store
    plan      `rcfarm plan` of 10,000 RCs on 2,000 nodes, a hundred of which would change (claimed: 3 s, 500 MB), and
              of one of them (claimed: 150 ms more than to list an empty store), and `rcfarm what-if` over all: each
              command in a process of its own. `reading_files` is the part of the plan that reads the YAML

The agents are one client here, which gives a pod its health as soon as its intent is seen. `bare` is the same number of
writes of intents and health by a plain script, on its own server. Needs the server programs in `$RCFARM_SERVERS`.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.fleet import (
    KEYS,
    as_installed,
    consul,
    farm,
    fill,
    node_name,
    rc_manifest,
    rc_name,
    report,
    send,
    servers_required,
    until_intents,
)
from rcfarm.cli.kit.options import read_files
from rcfarm.farm.preview import PreviewInput, preview
from rcfarm.farm.replay import read, segments
from rcfarm.operations import rc_apply
from rcfarm.operations.rcs import ReplicationControllers
from scheduler.protocol import Eligibility
from store.consul.store import ConsulStore
from store.kv import ops
from store.schema.manifest import digest
from store.schema.records import Health, Intent, RCSpec, Rollout, UpdatePolicy, decode, encode

RC = rc_name(0)
LOG_RUNS = 9
CHANGED = b'{"id":"rc00000","launchables":{"main":{"command":["serve","better"]}}}'


class Agents:
    """The agents of all nodes: give each pod the health that its intent asks for. `latencies`: seconds from the last
    health that was written to the intents that followed."""

    def __init__(self, store: ConsulStore, session: str) -> None:
        self.latencies: list[float] = []
        self._store, self._session = store, session
        self._healthy: dict[str, str] = {}

    async def until_all(self, manifest: str, count: int) -> None:
        """Act until this number of pods have the manifest and pass."""
        index, written = 0, 0.0
        while sum(found == manifest for found in self._healthy.values()) < count:
            listing = await self._store.watch(KEYS.intents, index, 10.0)
            index, seen = listing.index, time.perf_counter()
            ordered = {
                KEYS.parse_pod(entry.key).node: decode(Intent, entry.key, entry.value).manifest
                for entry in listing.entries
            }
            changed = [node for node, wanted in ordered.items() if self._healthy.get(node) != wanted]
            if changed and written:
                self.latencies.append(seen - written)
            self._healthy |= {node: ordered[node] for node in changed}
            await send(
                self._store,
                [
                    ops.lock(KEYS.health(RC, node), encode(Health("passing", ordered[node])), self._session)
                    for node in changed
                ],
            )
            written = time.perf_counter() if changed else written


class Rolled(NamedTuple):
    """`seconds`: from the change until the rollout is done; `cpu`: processor time that the farm has spent on it."""

    seconds: float
    cpu: float
    agents: Agents


async def rolled_out(pods: int, policy: UpdatePolicy, settings: Sequence[str] = ()) -> Rolled:
    """Roll a change out to all pods of an RC. `settings`: of the farm."""
    async with consul() as (server, store):
        session = await fill(store, rcs=1, replicas=pods, nodes=pods)
        with farm(server, settings=settings) as process:
            await until_intents(store, pods, pause=0.05)
            agents, client = Agents(store, session), ReplicationControllers(store, KEYS, actor="benchmark")
            await agents.until_all((await client.get(RC)).manifest, pods)
            await asyncio.sleep(2)
            agents.latencies.clear()
            began, spent = time.perf_counter(), process.cpu
            spec = await client.update(RC, lambda old: _changed(old, policy), raw_manifest=CHANGED)
            await agents.until_all(spec.manifest, pods)
            await _until_done(store)
            seconds, cpu = time.perf_counter() - began, process.cpu - spent
            process.stop()
            return Rolled(seconds, cpu, agents)


def _changed(spec: RCSpec, policy: UpdatePolicy) -> RCSpec:
    from msgspec.structs import replace

    return replace(spec, manifest=digest(CHANGED), update=policy)


async def _until_done(store: ConsulStore) -> None:
    index = 0
    while True:
        listing = await store.watch(KEYS.rollout(RC), index, 10.0)
        index = listing.index
        if any(decode(Rollout, entry.key, entry.value).state == "done" for entry in listing.entries):
            return


async def latency() -> None:
    policy = UpdatePolicy(canary="0", max_unavailable="1", min_healthy_time=0.0)
    agents = (await rolled_out(100, policy)).agents
    quantiles = statistics.quantiles((seconds * 1000 for seconds in agents.latencies), n=100)
    report("next_wave", p50_ms=round(quantiles[49], 1), p99_ms=round(quantiles[98], 1), samples=len(agents.latencies))


async def roll() -> None:
    policy = UpdatePolicy(canary="0", max_unavailable="25%", min_healthy_time=0.0)
    seconds, _, agents = await rolled_out(1000, policy)
    async with consul() as (_, store):
        session = await fill(store, rcs=1, replicas=1000, nodes=1000)
        intent, health = encode(Intent(manifest="0" * 64, rc=RC, shard="00")), encode(Health("passing", "0" * 64))
        began = time.perf_counter()
        await send(store, [ops.put(KEYS.intent(node_name(number), RC), intent) for number in range(1000)])
        await send(store, [ops.lock(KEYS.health(RC, node_name(number)), health, session) for number in range(1000)])
        bare = time.perf_counter() - began
    report("roll_1000", seconds=round(seconds, 2), bare_seconds=round(bare, 2), waves=len(agents.latencies))


async def placed(settings: Sequence[str]) -> tuple[float, float]:
    """Return the seconds from the start of a farm until it has placed 3,000 RCs, and its processor time."""
    async with consul() as (server, store):
        await fill(store, rcs=3000, replicas=3, nodes=300)
        with farm(server, settings=settings) as process:
            seconds, cpu = await until_intents(store, 9000, pause=0.05) - process.started, process.cpu
            process.stop()
            return seconds, cpu


async def log() -> None:
    policy = UpdatePolicy(canary="0", max_unavailable="25%", min_healthy_time=0.0)

    async def rolled(settings: Sequence[str]) -> tuple[float, float]:
        return (await rolled_out(1000, policy, settings))[:2]

    for name, run in (("log_start_3000", placed), ("log_roll_1000", rolled)):
        plain, logged, size, count = list[tuple[float, float]](), list[tuple[float, float]](), 0, 0
        for _ in range(LOG_RUNS):
            plain.append(await run(()))
            with tempfile.TemporaryDirectory() as directory:
                logged.append(await run([f"farm.decision_log={directory}"]))
                files = segments(Path(directory))
                size += sum(path.stat().st_size for path in files)
                count += sum(1 for path in files for _ in read(path, sys.exit))
        report(
            name,
            seconds=[round(seconds, 2) for seconds, _ in plain],
            logged_seconds=[round(seconds, 2) for seconds, _ in logged],
            ratio=round(_median(logged, 0) / _median(plain, 0), 3),
            cpu_ratio=round(_median(logged, 1) / _median(plain, 1), 3),
            decisions=count // LOG_RUNS,
            bytes_per_decision=round(size / count),
        )


def _median(runs: list[tuple[float, float]], column: int) -> float:
    return statistics.median(run[column] for run in runs)


async def preview_one() -> None:
    nodes = [node_name(number) for number in range(2000)]
    eligibility = Eligibility(frozenset(nodes), tuple(nodes))
    current = dict.fromkeys(nodes[:1000], "old")
    figures: dict[str, object] = {}
    for name, policy in (("by_5_percent_ms", UpdatePolicy(max_unavailable="5%")), ("one_by_one_ms", UpdatePolicy())):
        spec = RCSpec(id=RC, manifest="new", replicas_desired=1000, revision=2, update=policy)
        began = time.perf_counter()
        preview(PreviewInput(spec, eligibility, current, frozenset(current), now=1.8e9))
        figures[name] = round((time.perf_counter() - began) * 1000)
    report("preview_1000", **figures)


async def plan() -> None:
    rcs, replicas, nodes = 10_000, 3, 2000
    async with consul() as (server, store):
        session = await fill(store, rcs=rcs, replicas=replicas, nodes=nodes)
        writes = []
        for number in range(rcs):
            rc_id, manifest = rc_name(number), digest(rc_manifest(number))
            for node in (node_name((number + offset) % nodes) for offset in range(replicas)):
                labels = {"pod_id": rc_id, "rc_id": rc_id}
                intent = Intent(manifest=manifest, rc=rc_id, shard="00", labels=labels)
                writes += [
                    ops.put(KEYS.pod(rc_id, node), encode(labels)),
                    ops.put(KEYS.intent(node, rc_id), encode(intent)),
                    ops.lock(KEYS.health(rc_id, node), encode(Health("passing", manifest)), session),
                ]
        await send(store, writes)
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            for number in range(rcs):  # a file has at most 100,000 values
                with (folder / f"{number // 2500}.yaml").open("a") as file:
                    file.write(_document(number, "better" if number % 100 == 0 else ""))
            (folder / "one").write_text(_document(0, "better"))
            began = time.perf_counter()
            for name, raw in read_files([folder]):
                rc_apply.load(name, raw)
            reading_files = time.perf_counter() - began
            started = _measured(["rc", "list", "--root", "empty"], server.url)
            whole = _measured(["plan", "-f", str(folder)], server.url, expected=2)
            one = _measured(["plan", "-f", str(folder / "one")], server.url, expected=2)
            lost = _measured(["what-if", "--lose", node_name(7)], server.url, expected=3)
            more = _measured(["what-if", "--set", "replicas=4"], server.url, expected=2)
    report("plan_10000", seconds=whole[0], mb=whole[1], reading_files=round(reading_files, 2))
    report("plan_one_of_10000", ms=round((one[0] - started[0]) * 1000), with_start_ms=round(one[0] * 1000), mb=one[1])
    report("what_if_10000", lose_seconds=lost[0], set_seconds=more[0], mb=max(lost[1], more[1]))


def _document(number: int, argument: str = "") -> str:
    rc_id, command = rc_name(number), f"[serve, {argument}]" if argument else "[serve]"
    manifest = f"{{id: {rc_id}, launchables: {{main: {{command: {command}}}}}}}"
    return f"---\nid: {rc_id}\nreplicas: 3\nnode_selector: pool=web\nmanifest: {manifest}\n"


def _measured(arguments: list[str], store: str = "", *, expected: int = 0) -> tuple[float, int]:
    """Run a command. Return its seconds from start to end, the best of three, and the memory that it had at most, in
    MB."""
    command = [sys.executable, "-m", "rcfarm", *arguments, *(["--store", store] if store else [])]
    environ = as_installed()
    best, most = float("inf"), 0
    for _ in range(3):
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
        _, status, used = os.wait4(process.pid, 0)
        best, most = min(best, time.perf_counter() - began), max(most, used.ru_maxrss)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != expected:
            raise SystemExit(f"error: {' '.join(command)} exited with {process.returncode}")
    return round(best, 2), round(most / 1024)


BENCHMARKS: dict[str, Callable[[], Awaitable[None]]] = {
    "latency": latency,
    "roll": roll,
    "log": log,
    "preview": preview_one,
    "plan": plan,
}


async def main(names: list[str]) -> None:
    for name in names or BENCHMARKS:
        await BENCHMARKS[name]()


if __name__ == "__main__":
    with servers_required():
        asyncio.run(main(sys.argv[1:]))
