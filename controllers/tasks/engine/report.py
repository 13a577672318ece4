"""What an engine publishes about itself, in its member record: what it has paused, and what it has in hand.

`rcfarm status`, `rcfarm task explain` and the doctor read it, so that they need not read every execution. A pause is
written at once, and the rest at calm intervals, whose cost is bounded. An engine in which nothing changes writes
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from controllers.ownership.membership import Membership
from controllers.tasks.engine.endings import Endings
from controllers.tasks.engine.executions import Executions
from controllers.tasks.engine.outbox import Outbox
from controllers.tasks.registry import Plugins
from store.kv.group_commit import GroupCommit
from store.kv.protocol import StoreError
from store.schema.tasks import EngineLoad, EngineMember, EnginePause
from store.timing import give_way

PUBLISH_INTERVAL = 1.0  # seconds between two writes
LOAD_INTERVAL = 5.0  # seconds between two counts of executions, at least
LOAD_SHARE = 0.002  # of one core, for counting
MAX_TYPES = 50  # types of a paused plugin that are published
CLEANING = "cleaning"  # stands for the phase of an execution that is being cleaned up


class Report:
    """The report of one engine under one session. `pauses_changed`: set whenever something is paused or goes on."""

    def __init__(
        self,
        membership: Membership[EngineMember],
        session: str,
        executions: Executions,
        endings: Endings,
        outbox: Outbox,
        commits: GroupCommit,
        plugins: Plugins,
        pauses_changed: asyncio.Event,
        log: Any,
    ) -> None:
        self._membership, self._session, self._executions = membership, session, executions
        self._endings = endings
        self._outbox, self._commits, self._plugins, self._log = outbox, commits, plugins, log
        self._pauses_changed = pauses_changed
        self._counted: tuple[int, int, int] | None = None
        self._interval = LOAD_INTERVAL
        self._load = EngineLoad()

    async def run(self) -> None:
        """Keep the member record current until cancelled."""
        membership = self._membership
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._pauses_changed.wait()
            self._pauses_changed.clear()
            await self._count()
            me = msgspec.structs.replace(membership.me, pauses=tuple(self.pauses()), load=self._load)
            if me != membership.me:
                try:
                    await membership.publish(me, self._session)
                except StoreError as error:
                    self._log.info("The engine's report was not published; retrying", error=str(error))
                    self._pauses_changed.set()
            await asyncio.sleep(PUBLISH_INTERVAL)

    def pauses(self) -> list[EnginePause]:
        """Return what is paused now, plugins first."""
        found = [
            EnginePause(
                kind="plugin",
                name=plugin,
                calls=calls,
                types=tuple(self._plugins.types_of(plugin)[:MAX_TYPES]),
                **asdict(pause),
            )
            for (plugin, calls), circuit in self._executions.circuits.items()
            if (pause := circuit.pause) is not None
        ]
        return found + [
            EnginePause(kind="sink", name=sink, **asdict(pause))
            for sink, pause in self._outbox.pauses.items()
            if pause is not None
        ]

    async def _count(self) -> None:
        """Count the executions, unless nothing was written since the last time."""
        held = self._executions.held
        marks = (self._commits.transactions, len(held), len(self._outbox))
        if marks == self._counted:
            return
        self._counted = marks
        phases, waits, spent = Counter[str](), Counter[str](), 0.0
        every = list(held.values())
        for first in range(0, len(every), 1000):
            began = time.perf_counter()
            for live in every[first : first + 1000]:
                state = live.state.state
                if state is not None and state.step != "done":
                    phases[CLEANING if state.step == "cleaning" else state.phase.removeprefix("Phase")] += 1
                    waits.update(wait.code for wait in state.reasons)
            spent += time.perf_counter() - began
            await give_way()
        self._interval = max(LOAD_INTERVAL, spent / LOAD_SHARE)
        self._load = EngineLoad(
            owned=len(held),
            phases=dict(phases),
            waits=dict(waits),
            undelivered=len(self._outbox),
            failures=tuple(self._endings.failures.values()),
        )
