"""Kill engines, many times: `python -m tests.chaos.tasks --kills 1000 --store embedded`.

Operators keep 50 executions alive under two quotas: some retry, some fail, some are aborted, some ask for units by
their plugin. Engines are killed with SIGKILL at random moments and replaced. On the embedded store there is one engine,
with the store's file, and everything is checked between two lives; on Consul there are two, and it is checked all the
time.

What is checked is in the store and in the remote system's own record: no limit is exceeded (neither by grants nor by
jobs that run), no grant belongs to an ended execution, no attempt has two jobs, each execution ends as it must, its
events are numbered without gaps, and whatever neither runs nor has ended says why. A line of JSON reports the result;
the exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.fleet import consul, servers_required
from store.kv import ops
from store.kv.protocol import Store, StoreError
from store.open import open_store
from store.schema.keys import Keys
from store.schema.quota import QuotaGrant, QuotaLimit
from store.schema.records import decode, encode
from store.schema.tasks import AbortRequest, TaskEvent, TaskSpec, TaskState
from tests.support.tasks.drill import PLUGIN, SLOTS_RESOURCE, FileRemote, engine_process, idle_file

LIVE = 50  # executions
LIMITS = {"gpu": 6, SLOTS_RESOURCE: 4}
EMBEDDED_LEASE = 0.5  # seconds
LONGEST_LIFE = 1.5  # seconds from the end of the former session to the kill
CONSUL_LEASE = 2.0
CONSUL_PAUSES = (0.5, 6.0)  # seconds between two kills
DRAIN = 120.0  # seconds in which everything must end after the last kill
DRAIN_LIFE = 1.5  # seconds of an engine on the embedded store at that time, unless it is idle before
FINAL = ("PhaseSuccess", "PhasePermanentFailure", "PhaseAborted")


class Expected(NamedTuple):
    """How an execution must end: the phase, and after how many attempts, unless it is aborted before."""

    phase: str
    attempts: int


SHAPES: list[tuple[Expected, dict[str, object]]] = [
    (Expected("PhaseSuccess", 1), {"outcomes": ["success"]}),
    (Expected("PhaseSuccess", 1), {"outcomes": ["success"]}),
    (Expected("PhaseSuccess", 2), {"outcomes": ["user", "success"]}),
    (Expected("PhaseSuccess", 2), {"outcomes": ["system", "success"]}),
    (Expected("PhasePermanentFailure", 2), {"outcomes": ["user"]}),
]
QUOTAS: list[tuple[dict[str, int], bool]] = [({"gpu": 1}, False), ({"gpu": 2}, False), ({}, True), ({"gpu": 1}, True)]


class Operators:
    """Submit, abort and delete executions, and check what they see. `violations`: what was found."""

    def __init__(self, keys: Keys, remote: FileRemote, seed: int) -> None:
        self.violations: list[str] = []
        self.looks = self.ended = self.aborted = 0
        self.phases = Counter[str]()
        self._keys, self._remote, self._rng = keys, remote, random.Random(seed)
        self._live: dict[str, Expected] = {}
        self._aborted: set[str] = set()
        self._gone: dict[str, int] = {}  # ended executions: their attempts
        self._submitted = 0
        self._suspects: set[tuple[str, int]] = set()

    async def prepare(self, store: Store) -> None:
        for resource, units in LIMITS.items():
            await store.put(self._keys.quota_limit(resource), encode(QuotaLimit(units=units)))

    async def look(self, store: Store, *, still: bool) -> None:
        """Check the quotas and all executions; verify and delete the ended ones. `still`: nothing else writes."""
        keys, self.looks = self._keys, self.looks + 1
        grants = await self._grants(store)
        entries = {entry.key: entry for entry in (await store.list(keys.tasks, consistent=True)).entries}
        states: dict[str, TaskState] = {}
        for execution in list(self._live):
            key = keys.task_state(execution)
            if key not in entries:
                continue
            state = states[execution] = decode(TaskState, key, entries[key].value)
            if state.phase not in (*FINAL, "PhaseRunning") and not state.reasons:
                self._found(f"{execution} is {state.phase} ({state.step}) without a reason")
        suspects = set[tuple[str, int]]()
        for place, (grant, index) in grants.items():
            known = states.get(grant.execution)
            if known is not None and known.step == "done":
                suspects.add((place, index))
        for place, index in suspects if still else suspects & self._suspects:
            self._found(f"{place} (written at {index}) is held by an execution that has ended")
        self._suspects = suspects
        for execution, state in states.items():
            if state.step == "done":
                await self._bury(store, execution, state)

    async def tend(self, store: Store, live: int, aborts: float = 0.01) -> None:
        """Submit until `live` executions are alive, and ask for the abort of some: a share `aborts` of them."""
        writes = []
        while len(self._live) < live:
            self._submitted += 1
            (expected, config), (quotas, slots) = self._rng.choice(SHAPES), self._rng.choice(QUOTAS)
            config = {**config, "seconds": round(self._rng.uniform(0.02, 0.5), 3), "slots": slots, "units": quotas}
            spec = TaskSpec(
                id=f"drill-{self._submitted:06}",
                type=PLUGIN,
                config=config,
                quotas=quotas,
                retries=1,
                fair_key=f"team-{self._submitted % 3}",
                priority=self._rng.choice((0, 0, 1)),
            )
            self._live[spec.id] = expected
            writes.append(ops.create(self._keys.task_spec(spec.id), encode(spec)))
        for start in range(0, len(writes), 60):
            await store.txn(writes[start : start + 60])
        for execution in self._live:
            if self._rng.random() < aborts and execution not in self._aborted:
                await self._abort(store, execution)

    @property
    def live(self) -> int:
        """The number of executions that have not ended."""
        return len(self._live)

    async def check_end(self, store: Store) -> None:
        """Check what must be left when everything has ended: nothing of the executions, and every job's record."""
        for prefix in (self._keys.tasks, self._keys.task_events):
            for key in await store.keys(prefix):
                self._found(f"{key} is left")
        for place in await self._grants(store):
            self._found(f"{place} has leaked")
        for key in await store.keys(self._keys.quotas):
            if "/tickets/" in key:
                self._found(f"{key} has leaked")
        self._check_jobs()

    async def _grants(self, store: Store) -> dict[str, tuple[QuotaGrant, int]]:
        """Return the grants with the indexes at which they were written, and check that no limit is exceeded."""
        found, used = dict[str, tuple[QuotaGrant, int]](), Counter[str]()
        for entry in (await store.list(self._keys.quotas, consistent=True)).entries:
            resource, kind, _ = self._keys.parse_quota(entry.key)
            if kind == "grants":
                grant = decode(QuotaGrant, entry.key, entry.value)
                found[entry.key] = (grant, entry.modify_index)
                used[resource] += grant.units
        for resource, units in used.items():
            if units > LIMITS[resource]:
                self._found(f"{units} units of {resource} are held; its limit is {LIMITS[resource]}")
        return found

    async def _bury(self, store: Store, execution: str, state: TaskState) -> None:
        """Verify how an execution has ended, and delete it."""
        entries = (await store.list(self._keys.events_of(execution))).entries
        events = [decode(TaskEvent, entry.key, entry.value) for entry in entries]
        if [event.n for event in events] != list(range(state.next_event)):
            self._found(f"{execution} has events {[event.n for event in events]} of {state.next_event}")
        finals = [event.phase for event in events if event.phase in FINAL]
        if finals != [state.phase]:
            self._found(f"{execution} ended as {state.phase}, with the final events {finals}")
        expected = self._live.pop(execution)
        ended = Expected(state.phase, state.attempt + 1)
        if ended != expected and not (execution in self._aborted and state.phase == "PhaseAborted"):
            self._found(f"{execution} ended as {ended}, not as {expected}")
        self.ended += 1
        self.phases[state.phase] += 1
        self._gone[execution] = ended.attempts
        await store.delete(self._keys.task_spec(execution))

    async def _abort(self, store: Store, execution: str) -> None:
        key = self._keys.task_spec(execution)
        entry = await store.get(key)
        if entry is None:
            return
        spec = decode(TaskSpec, key, entry.value)
        request = AbortRequest(reason="not needed", by="operator")
        self._aborted.add(execution)
        self.aborted += 1
        edited = msgspec.structs.replace(spec, generation=spec.generation + 1, abort=request)
        await store.txn([ops.cas(key, encode(edited), entry.modify_index)])

    def _check_jobs(self) -> None:
        """Check the remote system's record: one job per attempt, and never more units in use than there are."""
        jobs = defaultdict[tuple[str, int], list[str]](list)
        changes = defaultdict[str, list[tuple[float, int]]](list)
        for key in self._remote.keys():  # noqa: SIM118  # not a mapping
            creations = self._remote.creations(key)
            if len(creations) != 1:
                self._found(f"job {key} was created {len(creations)} times")
            for each in creations[:1]:
                jobs[each.execution, each.attempt].append(key)
                for resource, units in each.units.items():
                    changes[resource] += [(each.at, units), (self._remote.ends(key), -units)]
            if self._remote.ends(key) > time.time():
                self._found(f"job {key} still runs")
        for (execution, attempt), keys in jobs.items():
            if len(keys) > 1 or attempt >= self._gone[execution]:
                self._found(f"attempt {attempt} of {execution}, which had {self._gone[execution]}, has jobs {keys}")
        for execution, attempts in self._gone.items():
            missing = [at for at in range(attempts) if (execution, at) not in jobs]
            if missing and execution not in self._aborted:
                self._found(f"attempts {missing} of {execution} had no job")
        for resource, moments in changes.items():
            used = 0
            for at, units in sorted(moments):
                used += units
                if used > LIMITS[resource]:
                    self._found(f"{used} units of {resource} were in use by jobs at {at}")

    def _found(self, violation: str) -> None:
        self.violations.append(violation)
        print(f"VIOLATION {violation}", flush=True)


class Drill:
    """Engines that are killed. `kills` counts them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.keys = Keys(shards=8)
        self.operators = Operators(self.keys, FileRemote(directory / "remote"), seed)
        self.kills = self._engines = 0
        self._directory, self._rng = directory, random.Random(seed)
        self._processes: list[BaseProcess] = []

    def start(self, url: str, lease: float) -> BaseProcess:
        self._engines += 1
        name = f"engine-{self._engines % 20}"
        process = engine_process(url, self.keys, name, self._directory, lease=lease)
        self._processes = [each for each in self._processes if each.is_alive()] + [process]
        return process

    def kill(self, process: BaseProcess) -> None:
        if not process.is_alive():
            self.operators.violations.append(f"an engine ended alone with exit code {process.exitcode}")
        process.kill()
        process.join()
        self.kills += 1

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def embedded(self, kills: int, live: int = LIVE) -> None:
        """One engine at a time on a store in a file, which is opened for the checks between two lives."""
        url = f"embedded:{self._directory}"
        asyncio.run(self._between(url, first=True, live=live))
        began = time.monotonic()
        while self.kills < kills:
            process = self.start(url, EMBEDDED_LEASE)
            time.sleep(EMBEDDED_LEASE + self._rng.uniform(0, LONGEST_LIFE))
            self.kill(process)
            asyncio.run(self._between(url, live=live))
            if self.kills % 50 == 0:
                self.progress(began)
        until, lives = time.monotonic() + DRAIN, 0
        while lives < 2 and time.monotonic() < until:  # the last one removes what the operators have deleted
            lives = lives + 1 if not self.operators.live else 0
            process = self.start(url, EMBEDDED_LEASE)
            idle, end = idle_file(self._directory, process.name), time.monotonic() + EMBEDDED_LEASE + DRAIN_LIFE
            while not idle.exists() and time.monotonic() < end:
                time.sleep(0.02)
            self.kill(process)
            asyncio.run(self._between(url, last=lives == 2))
        if self.operators.live:
            self.operators.violations.append(f"{self.operators.live} executions have not ended")

    async def _between(self, url: str, *, live: int = 0, first: bool = False, last: bool = False) -> None:
        store = open_store(url)
        try:
            if first:
                await self.operators.prepare(store)
            await self.operators.look(store, still=True)
            await self.operators.tend(store, live)
            if last:
                await self.operators.check_end(store)
        finally:
            await store.close()

    async def on_consul(self, kills: int) -> None:
        """Two engines; one of them, at times both, are killed and replaced at once."""
        began = time.monotonic()
        async with consul() as (server, store):
            await self.operators.prepare(store)
            engines = [self.start(server.url, CONSUL_LEASE) for _ in range(2)]
            next_kill = time.monotonic() + 5
            while self.kills < kills:
                await self._observe(store, LIVE)
                if time.monotonic() >= next_kill:
                    for at in self._rng.choice(((0,), (1,), (0,), (1,), (0, 1))):
                        self.kill(engines[at])
                        engines[at] = self.start(server.url, CONSUL_LEASE)
                    next_kill = time.monotonic() + self._rng.uniform(*CONSUL_PAUSES)
                    if self.kills % 10 == 0:
                        self.progress(began)
            until = time.monotonic() + DRAIN
            while self.operators.live and time.monotonic() < until:
                await self._observe(store, 0)
            await asyncio.sleep(5)
            if self.operators.live:
                self.operators.violations.append(f"{self.operators.live} executions have not ended")
            else:
                await self.operators.check_end(store)

    async def _observe(self, store: Store, live: int) -> None:
        try:
            await self.operators.look(store, still=False)
            await self.operators.tend(store, live, aborts=0.002)
        except StoreError as error:
            print(f"operators: {error!r}", flush=True)
        await asyncio.sleep(0.1)

    def progress(self, began: float) -> None:
        operators = self.operators
        print(
            f"{self.kills} kills in {time.monotonic() - began:.0f} s: {operators.ended} executions have ended, "
            f"{len(operators.violations)} violations",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.tasks", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--store", choices=("embedded", "consul"), default="embedded")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="rcfarm-drill-"))
    drill, began = Drill(directory, options.seed), time.monotonic()
    try:
        if options.store == "embedded":
            drill.embedded(options.kills)
        else:
            with servers_required():
                asyncio.run(drill.on_consul(options.kills))
    finally:
        drill.stop()
    operators = drill.operators
    report = {
        "store": options.store,
        "kills": drill.kills,
        "ended": operators.ended,
        "phases": operators.phases,
        "abort_requests": operators.aborted,
        "looks": operators.looks,
        "seconds": round(time.monotonic() - began),
        "violations": operators.violations,
    }
    print(json.dumps(report), flush=True)
    if operators.violations:
        print(f"kept: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
