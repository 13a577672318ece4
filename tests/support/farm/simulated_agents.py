"""Agents for tests that start no processes: every pod with an intent runs at once, unless it is configured as sick.

They keep the contract of the real agent: `alive`, health and reality are written under the agents' session; when an
intent is gone, the pod "stops", and its health and reality are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store, TxnConflict
from store.schema.keys import Keys
from store.schema.records import Health, HealthState, Intent, Labels, Process, Reality, decode, encode
from tests.support.farm.fleet import Fleet
from tests.support.waiting import background


class SimulatedAgents:
    """Plays the agents of all nodes of a `Fleet`. `sick`: the health of pods by node, instead of passing."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self.store, self.keys = store, keys
        self.fleet = Fleet(store, keys)
        self.sick: dict[str, HealthState] = {}
        self.stopping = asyncio.Event()  # cleared: pods without an intent go on running
        self.stopping.set()
        self._running: dict[tuple[str, str], Intent] = {}

    async def run(self) -> None:
        """Follow the intents until cancelled."""
        index = 0
        while True:
            listing = await self.store.watch(self.keys.intents, index, 60.0)
            index = listing.index
            for place in self._running.keys() - {self._place(entry.key) for entry in listing.entries}:
                if intent := self._running.pop(place, None):
                    await self._stop(*place, intent)
            for entry in listing.entries:
                with contextlib.suppress(BadRecord, TxnConflict):  # no intent, or an outdated one
                    await self._obey(self._place(entry.key), entry)

    async def heal(self) -> None:
        """From now on, every pod passes."""
        self.sick.clear()
        for node, pod_id in list(self._running):
            self._running.pop((node, pod_id), None)
            if entry := await self.store.get(self.keys.intent(node, pod_id)):
                with contextlib.suppress(BadRecord, TxnConflict):
                    await self._obey((node, pod_id), entry)

    async def _obey(self, place: tuple[str, str], entry: Entry) -> None:
        intent, old = decode(Intent, entry.key, entry.value), self._running.get(place)
        if old != intent:
            first = [ops.check_index(entry.key, entry.modify_index)]
            if old is not None and old.rc != intent.rc:  # the pod went over to another RC
                first.append(ops.delete(self.keys.health(old.rc, place[0])))
            await self._start(*place, intent, first)
            self._running[place] = intent

    def _place(self, key: str) -> tuple[str, str]:
        node, _, pod_id = key.removeprefix(self.keys.intents).partition("/")
        return node, pod_id

    async def _start(self, node: str, pod_id: str, intent: Intent, first: Sequence[Op]) -> None:
        health = self.sick.get(node, "passing")
        passes = health == "passing"
        process = Process(state="running" if passes else "backoff", pid=4711, reason="" if passes else "exit code 1")
        reality = Reality(manifest=intent.manifest, rc=intent.rc, state="running", launchables={"main": process})
        verdict = Health(health, intent.manifest, "" if passes else "connection refused")
        await self.store.txn(
            [
                *first,
                ops.put(self.keys.reality(node, pod_id), encode(reality)),
                ops.lock(self.keys.health(intent.rc, node), encode(verdict), self.fleet.session_of(node)),
            ]
        )

    async def _stop(self, node: str, pod_id: str, intent: Intent) -> None:
        await self.stopping.wait()
        gone: list[Op] = [ops.delete(self.keys.reality(node, pod_id)), ops.delete(self.keys.health(intent.rc, node))]
        await self.store.txn(gone)


@contextlib.asynccontextmanager
async def running_agents(store: Store, keys: Keys, nodes: Mapping[str, Labels]) -> AsyncIterator[SimulatedAgents]:
    """Yield running agents of nodes with these labels."""
    agents = SimulatedAgents(store, keys)
    for node, labels in nodes.items():
        await agents.fleet.add_nodes([node], labels)
    async with background(agents.run()):
        yield agents
