"""Grant many units through crashes and lost answers: `python -m tests.fuzz_quota --grants 1000000`.

Several engines, each with a ledger, admit and release executions over one in-memory store. The store loses answers
(before or after it applied a transaction, or applies it only later), and engines stop between any two steps; others
take their executions over. A witness beside the store decodes every write independently of the ledger, and counts what
is held. A line of JSON reports the result; the exit code is 1 if a limit or a cap was exceeded, a unit leaked, or an
execution was never granted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from scheduler.quota.draft import Admission, Draft, Request
from scheduler.quota.ledger import QuotaLedger
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, TxnConflict, TxnResult, Unavailable
from store.schema.keys import Keys
from store.schema.quota import QuotaLimit
from store.schema.records import encode

KEYS = Keys()
HOLD = 0.01  # seconds for which units are held, at most
STALL = 30.0  # seconds without a grant that end a run
KINDS = (["gpu"], ["gpu"], ["net"], ["api"], ["api"], ["gpu", "net"], ["api", "net", "gpu"])  # what executions ask for
LIMITS = {
    "gpu": QuotaLimit(units=40, keys={"k0": 6}, project_units=30, weights={"k1": 3.0}),
    "net": QuotaLimit(units=25, namespace_units=20),
    "api": QuotaLimit(units=60),
}


class Broken(AssertionError):
    """A promise of the ledger does not hold; the message names the record."""


class Witness:
    """What is held, from the operations that the store has applied, and checked after each of them."""

    def __init__(self) -> None:
        self.grants = 0
        self.longest_wait = 0.0  # seconds
        self.held: dict[str, dict[str, Any]] = {}
        self._since: dict[str, float] = {}  # when a ticket was written

    def see(self, applied: Sequence[Op]) -> None:
        """Follow a transaction, and check what is held after it."""
        touched: set[str] = set()
        now = time.monotonic()
        for op in sorted(applied, key=lambda op: "/tickets/" in op.key):  # a granted ticket's wait ends with its grant
            parts = op.key.split("/")
            if parts[1] != "quota" or op.verb.startswith("check"):
                continue
            if parts[3] == "grants" and op.verb == "delete":
                self.held.pop(op.key, None)
            elif parts[3] == "grants":
                if op.verb != "cas" or op.key in self.held:
                    raise Broken(f"{op.key} is granted twice")
                self.held[op.key] = json.loads(op.value)
                self.grants += 1
                touched.add(parts[2])
                waited = now - self._since.pop(op.key.replace("/grants/", "/tickets/"), now)
                self.longest_wait = max(self.longest_wait, waited)
            elif parts[3] == "tickets" and op.verb == "delete":
                self._since.pop(op.key, None)
            elif parts[3] == "tickets":
                self._since.setdefault(op.key, now)
        for resource in touched:
            self._check(resource)

    def _check(self, resource: str) -> None:
        limit = LIMITS[resource]
        used: Counter[tuple[str, ...]] = Counter()
        for key, grant in self.held.items():
            if key.split("/")[2] == resource:
                project, units = grant["project"], grant["units"]
                used[()] += units
                used["key", grant["key"]] += units
                used["project", project] += units
                used[project, grant["domain"]] += units
        for scope, units in used.items():
            cap = {0: limit.units, 1: None}.get(len(scope))
            if len(scope) == 2:
                caps = {"key": limit.keys.get(scope[1]), "project": limit.project_units}
                cap = caps.get(scope[0], limit.namespace_units)
            if cap is not None and units > cap:
                raise Broken(f"{units} units of {resource} are held in {scope or 'all'}, of {cap}")


class UnreliableStore:
    """The in-memory store, whose answers get lost."""

    def __init__(self, inner: EmbeddedStore, witness: Witness, rng: random.Random, faults: float) -> None:
        self._inner, self._witness, self._rng, self.faults = inner, witness, rng, faults
        self.lost = 0
        self._late: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def txn(self, writing: Sequence[Op]) -> TxnResult:
        if self._rng.random() >= self.faults:
            return await self._apply(writing)
        self.lost += 1
        kind = self._rng.randrange(3)
        if kind == 0:
            await self._apply(writing)
        elif kind == 1:
            task = asyncio.create_task(self._apply_later(writing))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        raise Unavailable("the answer was lost")

    async def settle(self) -> None:
        """Wait for the transactions that are still to be applied."""
        while self._late:
            await asyncio.wait(self._late)

    async def _apply_later(self, writing: Sequence[Op]) -> None:
        await asyncio.sleep(self._rng.random() * 0.05)
        with suppress(TxnConflict):
            await self._apply(writing)

    async def _apply(self, writing: Sequence[Op]) -> TxnResult:
        result = await self._inner.txn(writing)
        self._witness.see(writing)
        return result


@dataclass(eq=False)
class Execution:
    """An execution that asks for units, holds them for a while and returns them, again and again. Its state is a key
    that each of its transactions replaces by compare-and-swap, as an engine's does."""

    id: str
    requests: list[Request]
    rounds: int = 0
    index: int = 0
    state: bytes = b"idle"
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> str:
        return f"rcfarm/tasks/{self.id}"


class Engine:
    """A ledger, and the executions that the engine owns, each in a task."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.executions: dict[str, Execution] = {}
        self.ledger = QuotaLedger(
            world.store,
            KEYS,
            mine=self.executions.__contains__,
            on_granted=self._granted,
            rng=random.Random(world.rng.random()),
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = asyncio.create_task(self.ledger.run())
        self._running.add_done_callback(world.ended)

    def own(self, execution: Execution) -> None:
        """Take the execution over and drive it."""
        self.executions[execution.id] = execution
        task = asyncio.create_task(self._drive(execution))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self.world.ended)

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    async def crash(self) -> list[Execution]:
        """Stop at once, wherever each execution stands, and return them."""
        tasks = {self._running, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return list(self.executions.values())

    def _granted(self, execution: str) -> None:
        if execution in self.executions:
            self.executions[execution].woken.set()

    async def _drive(self, execution: Execution) -> None:
        await self.ledger.view.synced()
        rng = self.world.rng
        while True:  # read what the former owner, or a transaction without an answer, has left
            try:
                await self.ledger.current()
                entry = await self.world.store.get(execution.key)
                execution.index, execution.state = (entry.modify_index, entry.value[:4]) if entry else (0, b"idle")
                if self.world.closing and execution.state == b"idle":
                    return
                while not self.world.closing or execution.state != b"idle":
                    if execution.state == b"held":
                        await asyncio.sleep(rng.random() * HOLD)
                        await self._release(execution)
                    else:
                        await self._admit(execution)
            except (Unavailable, TxnConflict):
                continue

    async def _admit(self, execution: Execution) -> None:
        found: list[Admission] = []
        execution.woken.clear()

        def change(draft: Draft) -> Sequence[Op]:
            found[:] = [draft.admit(execution.requests)]
            return [self._write(execution, b"held" if found[0].granted else b"wait")]

        await self._transact(execution, change, lambda: b"held" if found[0].granted else b"wait")
        if not found[0].granted:
            if self.world.rng.random() < 0.02:  # it is withdrawn instead
                await self._release(execution)
            else:
                await execution.woken.wait()

    async def _release(self, execution: Execution) -> None:
        def change(draft: Draft) -> Sequence[Op]:
            assert draft.release(execution.id) == 0
            return [self._write(execution, b"idle")]

        await self._transact(execution, change, lambda: b"idle")
        execution.rounds += 1

    def _write(self, execution: Execution, state: bytes) -> Op:
        return ops.cas(execution.key, state + str(self.world.step()).encode(), execution.index)

    async def _transact(self, execution: Execution, change: Any, state: Any) -> None:
        result = await self.ledger.transact(change)
        execution.index = next(entry.modify_index for entry in result.entries if entry.key == execution.key)
        execution.state = state()


class World:
    """Engines and executions over one store, until enough was granted."""

    def __init__(self, seed: int, *, engines: int, executions: int, faults: float = 0.01) -> None:
        self.rng = random.Random(seed)
        self.witness = Witness()
        self.inner = EmbeddedStore()
        self.store = UnreliableStore(self.inner, self.witness, self.rng, faults)
        self.closing = False
        self.crashes = self._steps = 0
        self.failure: BaseException | None = None
        self._count = engines
        self.executions = [self._execution(number) for number in range(executions)]
        self.engines: list[Engine] = []

    def step(self) -> int:
        self._steps += 1
        return self._steps

    def ended(self, task: asyncio.Task[None]) -> None:
        """Keep the first error of any task."""
        if not task.cancelled() and task.exception() and self.failure is None:
            self.failure = task.exception()

    def _execution(self, number: int) -> Execution:
        token = f"e{number}"
        resources = self.rng.choice(
            (["gpu"], ["gpu"], ["net"], ["api"], ["api"], ["gpu", "net"], ["api", "net", "gpu"])
        )
        requests = [
            Request(
                resource=name,
                token=token,
                execution=token,
                units=self.rng.choice((1, 1, 1, 2, 5)),
                key=f"k{number % 4}",
                project=f"p{number % 2}",
                domain=f"d{number % 2}",
            )
            for name in resources
        ]
        return Execution(token, requests)

    async def run(self, grants: int, *, crash_every: int, seconds: float = 3600.0) -> dict[str, object]:
        """Grant at least `grants` times with a crash after every `crash_every`, or for `seconds`; then let all end."""
        for name, limit in LIMITS.items():
            await self.inner.put(KEYS.quota_limit(name), encode(limit))
        began = time.monotonic()
        self.engines = [Engine(self) for _ in range(self._count)]
        for number, execution in enumerate(self.executions):
            self.engines[number % self._count].own(execution)
        next_crash = crash_every
        while self.witness.grants < grants and time.monotonic() - began < seconds:
            await self._progress(min(grants, next_crash))
            if self.witness.grants >= next_crash:
                next_crash += crash_every
                await self._crash_one()
        self.store.faults = 0.0
        await self.store.settle()  # else an execution may be admitted after its owner has seen it idle
        self.closing = True
        for execution in self.executions:
            execution.woken.set()
        await self._until_all_idle()
        left = await self._leftovers()
        for engine in self.engines:
            await engine.crash()
        await self.inner.close()
        if self.failure:
            raise self.failure
        if left:
            raise Broken(f"leaked: {left[:5]}")
        return {
            "grants": self.witness.grants,
            "crashes": self.crashes,
            "lost_answers": self.store.lost,
            "transactions": sum(engine.ledger.transactions for engine in self.engines),
            "conflicts": sum(engine.ledger.conflicts for engine in self.engines),
            "fewest_rounds": min(execution.rounds for execution in self.executions),
            "longest_wait_s": round(self.witness.longest_wait, 2),
            "seconds": round(time.monotonic() - began, 1),
        }

    async def _progress(self, target: int) -> None:
        seen, at = self.witness.grants, time.monotonic()
        while self.witness.grants < target and self.failure is None:
            await asyncio.sleep(0.002)
            if self.witness.grants > seen:
                seen, at = self.witness.grants, time.monotonic()
            elif time.monotonic() - at > STALL:
                raise Broken(f"no grant for {STALL} s after {seen}")
        if self.failure:
            raise self.failure

    async def _crash_one(self) -> None:
        self.crashes += 1
        victim = self.rng.randrange(self._count)
        orphans = await self.engines[victim].crash()
        self.engines[victim] = Engine(self)
        for execution in orphans:
            execution.woken.clear()
            self.engines[self.rng.randrange(self._count)].own(execution)

    async def _until_all_idle(self) -> None:
        async with asyncio.timeout(STALL):
            while any(engine.is_busy for engine in self.engines) and self.failure is None:
                for execution in self.executions:
                    execution.woken.set()
                await asyncio.sleep(0.01)

    async def _leftovers(self) -> list[str]:
        keys = await self.inner.keys(KEYS.quotas)
        return [key for key in keys if "/grants/" in key or "/tickets/" in key]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--grants", type=int, default=20_000)
    parser.add_argument("--crash-every", type=int, default=1000, help="grants")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end earlier")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--executions", type=int, default=80)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="repeats the choices of a run")
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    world = World(chosen.seed, engines=chosen.engines, executions=chosen.executions)
    try:
        found = asyncio.run(world.run(chosen.grants, crash_every=chosen.crash_every, seconds=chosen.seconds))
    except Broken as error:
        found = {"broken": str(error), "grants": world.witness.grants}
    print(json.dumps({"seed": chosen.seed, **found}), flush=True)
    return int("broken" in found)


if __name__ == "__main__":
    sys.exit(main())
