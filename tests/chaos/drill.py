"""A run of chaos: rounds of faults on one fleet, each with a random generator of its own.

The model: a task takes snapshots of the fleet several times per second; only a rewind suspends it, so that no snapshot
of the tree before is checked against the tree after. Operators work until a round's faults have ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from store.schema.keys import Keys
from tests.chaos.checker import Checker
from tests.chaos.convergence import held_orphans, shortcomings
from tests.chaos.faults import CATALOGUE, LOCAL_AGENTS, REWINDS, Fault, Saves
from tests.chaos.operators import Operators, documents
from tests.chaos.site import FARMS, NODES, ROOT, SERVERS, Site
from tests.chaos.snapshot import Place, Snapshot, entries_of, entry_of, reading

LIMIT = 60.0  # seconds in which the fleet must converge
_LOOK = 0.2  # seconds between two snapshots
_RETRY = 0.5  # seconds between two attempts while a fault still prevents the act
_DAEMONS = (*FARMS, *NODES)
_STOP_ORPHANS = "--set=agent.stop_orphans=true"
_DELETIONS = {"rcs-deleted": "rcs/", "all-deleted": ""}  # removed keys, under the root


@dataclass(frozen=True, slots=True)
class Options:
    """`only`: names of faults and rewinds to choose from; empty: all. `rewind_share`: of the rounds, from 0 to 1.

    `give_up`: seconds after which a fleet that has not converged ends the run.
    """

    seed: int
    only: Collection[str] = ()
    rewind_share: float = 0.3
    give_up: float = 180.0


class Round(NamedTuple):
    """The result of one round. `converged`: seconds after the end of the faults; None if the fleet did not converge."""

    number: int
    faults: list[str]
    rewind: str
    converged: float | None
    seconds: float
    snapshots: int
    events: int
    violations: list[str]


@dataclass(slots=True)
class _Logs:
    """The position up to which each daemon's log was read."""

    read: dict[str, int] = field(default_factory=dict)

    def news(self, name: str, log: Path) -> list[str]:
        """Return the complete lines written since the last call."""
        with log.open("rb") as file:
            file.seek(self.read.get(name, 0))
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.read[name] = self.read.get(name, 0) + len(complete)
        return complete.decode(errors="replace").splitlines()


class Drill:
    """One fleet and its rounds. Use `running`, then `play` round by round."""

    def __init__(self, site: Site, options: Options) -> None:
        self.keys = Keys(ROOT)
        self.checker = Checker(self.keys)
        self.operators = Operators(site, self.keys, self.checker, random.Random(f"{options.seed}/operators"))
        self._site, self._options = site, options
        self._saves = Saves(site, site.directory / "saves")
        self._logs = _Logs()
        self._looking = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._rewound = self._emptied = False
        self.replayed = 0  # decisions that were decided once more, to the same bytes
        self._cleared = set[str]()  # agents that were started to stop orphans
        self._server = SERVERS[0]  # the one that answered last

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the fleet, create RCs and wait until all of it has converged; end everything after the block."""
        try:
            await self._site.start()
            while shortcomings(await self._snapshot(), (), FARMS, NODES):
                await asyncio.sleep(_RETRY)
            await self.operators.populate()
            if await self._converge() is None:
                raise RuntimeError(f"the fleet did not converge before the first fault: {self.checker.violations}")
            await self._saves.save(0)
            async with asyncio.TaskGroup() as group:  # a failure of the look ends the run
                looking = group.create_task(self._look())
                try:
                    yield
                finally:
                    looking.cancel()
                    await self._stop_operators()
            await asyncio.gather(*map(self._replay, FARMS))
        finally:
            await self.operators.close()
            await self._site.close()

    async def play(self, number: int) -> Round:
        """Play one round. The same seed and number give the same round, as far as the fleet behaves the same."""
        rng = random.Random(f"{self._options.seed}/{number}")
        began, snapshots, known = time.monotonic(), self.checker.snapshots, len(self.checker.violations)
        events, rewind = len(self.checker.events), self._choose_rewind(rng)
        faults = self._choose_faults(rng, rewind)
        self._emptied = self._emptied or rewind == "all-deleted"
        self.checker.may_brake, self._rewound = self._rewound or bool(rewind), bool(rewind)
        self._note(f"round {number}: {', '.join([rewind, *(fault.name for fault in faults)])}")
        self._start_operators()
        rewinds_first = rewind in _DELETIONS or rng.random() < 0.5
        if rewind and rewinds_first:
            await self._rewind(rewind, rng)
        await self._hurt(faults, rng)
        if rewind and not rewinds_first:
            await self._rewind(rewind, rng)
        await self._stop_operators()
        await self._site.rejoin()
        converged = await self._converge()
        if converged is not None:
            await self._check_audit()
            await self.operators.ask()
        self._check_logs()
        await self._restart_cleared()
        if number % 3 == 0:
            await self._saves.save(number)
        return Round(
            number,
            [fault.name for fault in faults],
            rewind,
            converged,
            time.monotonic() - began,
            self.checker.snapshots - snapshots,
            len(self.checker.events) - events,
            self.checker.violations[known:],
        )

    def _choose_rewind(self, rng: random.Random) -> str:
        allowed = [name for name in REWINDS if not self._options.only or name in self._options.only]
        chosen = rng.choice(allowed) if allowed else ""
        return chosen if rng.random() < self._options.rewind_share else ""

    def _choose_faults(self, rng: random.Random, rewind: str) -> list[Fault]:
        catalogue = CATALOGUE | (LOCAL_AGENTS if self._site.local_agents else {})
        allowed = [name for name in catalogue if not self._options.only or name in self._options.only]
        taken = set(SERVERS) if rewind else set[str]()
        chosen: list[Fault] = []
        for name in rng.sample(allowed, min(rng.choice([1, 2, 2, 3]), len(allowed))):
            fault = catalogue[name](self._site, rng)
            if not taken & fault.targets:
                taken |= fault.targets
                chosen.append(fault)
        return chosen

    async def _hurt(self, faults: list[Fault], rng: random.Random) -> None:
        """Begin the faults, wait, and end them."""
        for fault in faults:
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await fault.begin()
        await asyncio.sleep(rng.choice([rng.uniform(0.5, 5.0), rng.uniform(3.0, 6.0), rng.uniform(0.5, 14.0)]))
        await self._site.network.heal()
        for fault in rng.sample(faults, len(faults)):
            await fault.end()

    async def _rewind(self, kind: str, rng: random.Random) -> None:
        """Rewind the tree, with no operator at work."""
        await self._stop_operators()
        server = rng.choice(SERVERS)
        if kind in _DELETIONS:
            await self._delete(f"{self.keys.root}/{_DELETIONS[kind]}", server, rng)
        else:
            async with self._looking:
                source = self._saves.choose(kind, rng)
                if kind == "snapshot-restore":
                    while (await self._site.consul("snapshot", "restore", str(source), server=server)).code != 0:
                        await asyncio.sleep(_RETRY)
                else:
                    await self._site.load_data(source)
                self.checker.new_history()
        self._start_operators()

    async def _delete(self, prefix: str, server: str, rng: random.Random) -> None:
        """Simulate an operator's accident, and its remedy: apply everything again."""
        async with self._looking:
            snapshot, processes = await self._snapshot(), self._site.pod_processes()
            files = documents(snapshot, await self._manifests())
            while (await self._site.consul("kv", "delete", "-recurse", prefix, server=server)).code != 0:
                await asyncio.sleep(_RETRY)
            self.checker.new_history(without_rcs=True)
        await asyncio.sleep(rng.uniform(0.0, 6.0))
        while not await self.operators.apply(files, server=server):
            await asyncio.sleep(_RETRY)
        if prefix == self.keys.rcs and await self._placed_again(snapshot):
            wanted = _wanted(snapshot)
            kept = [process for process in processes if (process.node, process.pod_id) in wanted]
            self.checker.check_taken_up(kept, self._site.pod_processes())

    async def _placed_again(self, lost: Snapshot) -> bool:
        """Wait until farms have placed what they had placed; return whether they did in time."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if _wanted(lost).items() <= _wanted(await self._snapshot()).items():
                return True
            await asyncio.sleep(_RETRY)
        return False

    def _start_operators(self) -> None:
        self._working = asyncio.create_task(self.operators.work())

    async def _replay(self, farm: str) -> None:
        """Have every decision that a farm has logged decided once more."""
        log = str(self._site.decisions(farm))
        ran = await self._site.command("replay", "--all", "--log", log, "--output", "json", server=SERVERS[0])
        summary = json.loads(ran.out) if ran.out else {"identical": 0}
        self.replayed += summary["identical"]
        if ran.code != 0 or not summary["identical"]:
            self.checker.crashed(f"rcfarm replay of {farm}: exit code {ran.code}: {ran.out[-1000:]} {ran.err[-1000:]}")

    async def _stop_operators(self) -> None:
        if self._working is not None:
            self._working.cancel()
            with suppress(asyncio.CancelledError):
                await self._working
            self._working = None

    async def _look(self) -> None:
        """Check snapshots repeatedly until cancelled."""
        while True:
            async with self._looking:
                with suppress(aiohttp.ClientError, TimeoutError):
                    snapshot = await self._read()
                    self.checker.see(snapshot)
                    self.operators.know(snapshot)
                self.checker.see_processes(self._site.pod_processes())
            for name, program in self._site.programs.items():
                code = program.take_exit()
                if code is not None:
                    self.checker.ended(name, code)
                    program.start()
            await asyncio.sleep(_LOOK)

    async def _converge(self) -> float | None:
        """Return the seconds until the fleet had converged, or None on timeout."""
        began, missing, late = time.monotonic(), list[str](), False
        since: float | None = None
        while (spent := time.monotonic() - began) < self._options.give_up:
            snapshot = await self._snapshot()
            missing = shortcomings(snapshot, self._site.pod_processes(), FARMS, NODES)
            self._note(f"{spent:.1f} s: {'; '.join(missing) or 'converged'}")
            if not missing and since is not None:
                if late:
                    self.checker.not_converged(f"not within {LIMIT:g} s, but after {since:.0f} s")
                return since
            since = None if missing else spent
            if snapshot.entry(self.keys.brake):
                await self.operators.release_brake(server=await self._site.leader() or SERVERS[0])
            for rc in snapshot.waiting_rollouts():
                await self.operators.resume(rc, server=await self._site.leader() or SERVERS[0])
            await self._clear_orphans(snapshot)
            if spent > LIMIT and not late:
                late = True
                self.checker.not_converged(f"not within {LIMIT:g} s: {'; '.join(missing)}")
            await asyncio.sleep(_RETRY)
        self.checker.not_converged(f"not within {self._options.give_up:g} s: {'; '.join(missing)}")
        return None

    def _note(self, what: str) -> None:
        """Record what was missing, to explain a slow round."""
        with (self._site.directory / "convergence.log").open("a") as log:
            log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {what}\n")

    async def _clear_orphans(self, snapshot: Snapshot) -> None:
        """Do the operator's part after everything was deleted: pods without an RC on their node are kept until the
        agent is started once to stop them."""
        orphans = {node for node, _ in held_orphans(snapshot)} if self._emptied else set[str]()
        await asyncio.gather(*(self._restart(node, _STOP_ORPHANS) for node in orphans - self._cleared))
        self._cleared |= orphans

    async def _restart_cleared(self) -> None:
        """Restart normally the agents that were started to stop orphans."""
        await asyncio.gather(*(self._restart(node) for node in self._cleared))
        self._cleared.clear()

    async def _restart(self, node: str, *options: str) -> None:
        agent = self._site.programs[node]
        await agent.stop()
        agent.start(*options)

    async def _check_audit(self) -> None:
        async with self._looking:
            snapshot = await self._snapshot()
            answer = await self._ask("GET", f"/v1/kv/{self.keys.audit}?recurse&consistent")
            self.checker.check_audit([entry_of(item) for item in answer], snapshot)

    async def _manifests(self) -> dict[str, bytes]:
        answer = await self._ask("GET", f"/v1/kv/{self.keys.manifests}?recurse&consistent")
        entries = [entry_of(item) for item in answer]
        return {entry.key.removeprefix(self.keys.manifests): entry.value for entry in entries}

    def _check_logs(self) -> None:
        """Check that no daemon logged an unexpected error."""
        for name in _DAEMONS:
            for line in self._logs.news(name, self._site.programs[name].log_file):
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    self.checker.crashed(f"{name} wrote {line!r}")
                else:
                    if "exception" in event:
                        self.checker.crashed(f"{name}: {event['event']}: {event['exception'][-1000:]}")

    async def _snapshot(self) -> Snapshot:
        """Return a snapshot, however long it takes."""
        return Snapshot(self.keys, entries_of(await self._ask("PUT", "/v1/txn?consistent", reading(self.keys))))

    async def _read(self) -> Snapshot:
        """Return a snapshot. Raises when no server answers."""
        answer = await self._ask_once("PUT", "/v1/txn?consistent", reading(self.keys))
        return Snapshot(self.keys, entries_of(answer))

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                return await self._ask_once(method, path, body)
            await asyncio.sleep(_RETRY)

    async def _ask_once(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the server that answered last, then the others."""
        for server in sorted(SERVERS, key=lambda name: name != self._server):
            with suppress(aiohttp.ClientError, TimeoutError):
                answer = await self._site.request(server, method, path, body)
                self._server = server
                return answer
        raise TimeoutError("no server answers")


def _wanted(snapshot: Snapshot) -> dict[Place, str]:
    """Return the manifests of the pods of enabled RCs, placed and ordered as their specs say."""
    found = {}
    for place, intent in snapshot.intents.items():
        spec, is_placed = snapshot.specs.get(intent.rc), (intent.rc, place[0]) in snapshot.placements
        if spec and is_placed and not spec.disabled and not spec.deleting and spec.manifest == intent.manifest:
            found[place] = intent.manifest
    return found
