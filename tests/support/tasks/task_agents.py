"""Agents for tests that start no processes: they play the pods of tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from store.kv import ops
from store.kv.protocol import Store, TxnConflict
from store.schema.keys import Keys, PodKey
from store.schema.manifest import parse
from store.schema.records import Exit, Intent, Process, Reality, decode, encode
from tests.support.farm.fleet import Fleet
from tests.support.waiting import background


class TaskAgents:
    """Runs every pod with an intent for `seconds`; its exit code is that of its attempt in `exits`, the last one also
    of further attempts. `started`: how often each pod was started.

    The agent of a dead node starts, stops and reports nothing, and its pods run on. When a pod starts, no other pod of
    its execution may run, except on a dead node.
    """

    def __init__(self, store: Store, keys: Keys, exits: Sequence[int] = (0,), seconds: float = 0.5) -> None:
        self.store, self.keys, self.fleet = store, keys, Fleet(store, keys)
        self.exits, self.seconds = exits, seconds
        self.started: Counter[str] = Counter()
        self._pods: dict[PodKey, asyncio.Task[None]] = {}
        self._running: dict[PodKey, str] = {}  # the execution of each pod whose process runs
        self._alive: dict[str, asyncio.Event] = {}

    @property
    def running(self) -> list[str]:
        """Return the pods whose processes run."""
        return sorted(place.pod_id for place in self._running)

    async def kill(self, node: str) -> None:
        """Let the node's agent die."""
        self._event(node).clear()
        await self.fleet.kill_node(node)

    async def revive(self, node: str) -> None:
        """Start the node's agent again."""
        await self.fleet.add_nodes([node])
        self._event(node).set()

    def _event(self, node: str) -> asyncio.Event:
        if node not in self._alive:
            self._alive[node] = asyncio.Event()
            self._alive[node].set()
        return self._alive[node]

    async def run(self) -> None:
        """Follow the intents until cancelled."""
        index = 0
        async with asyncio.TaskGroup() as group:
            while True:
                listing = await self.store.watch(self.keys.intents, index, 1.0)
                index = listing.index
                wanted = {self.keys.parse_pod(entry.key): entry for entry in listing.entries}
                for place in [*(self._pods.keys() - wanted.keys())]:
                    if self._event(place.node).is_set():
                        self._pods.pop(place).cancel()
                        self._running.pop(place, None)
                        await self.store.delete(self.keys.task_pod(*place))
                for place in [*(wanted.keys() - self._pods.keys())]:
                    if not self._event(place.node).is_set():
                        continue
                    intent = decode(Intent, wanted[place].key, wanted[place].value)
                    self._pods[place] = group.create_task(self._live(place, intent, wanted[place].modify_index))

    async def _live(self, place: PodKey, intent: Intent, index: int) -> None:
        raw = await self.store.get(self.keys.manifest(intent.manifest))
        assert raw is not None, f"the manifest of {place} is gone"
        attempt = int(parse(raw.value).launchables["main"].env["RCFARM_ATTEMPT"])
        code = self.exits[min(attempt, len(self.exits) - 1)]
        for other, execution in self._running.items():
            assert execution != intent.task or not self._event(other.node).is_set(), f"{place} starts beside {other}"
        self.started[place.pod_id] += 1
        self._running[place] = intent.task
        running = Process(state="running", pid=7, started_at="2026-01-01T00:00:00Z")
        ended = Process(state="failed" if code else "completed", started_at="2026-01-01", last_exit=Exit("", code))
        for process, seconds in ((running, self.seconds), (ended, 0.0)):
            if process is ended:
                self._running.pop(place, None)
            await self._event(place.node).wait()
            reality = Reality(
                manifest=intent.manifest, rc="", task=intent.task, state="running", launchables={"main": process}
            )
            guard = ops.check_index(self.keys.intent(*place), index)
            try:
                await self.store.txn([guard, ops.put(self.keys.task_pod(*place), encode(reality))])
            except TxnConflict:  # the intent is gone
                return
            await asyncio.sleep(seconds)


@asynccontextmanager
async def task_agents(
    store: Store, keys: Keys, *nodes: str, exits: Sequence[int] = (0,), seconds: float = 0.5
) -> AsyncIterator[TaskAgents]:
    """Yield running agents of these nodes."""
    agents = TaskAgents(store, keys, exits, seconds)
    await agents.fleet.add_nodes(nodes)
    async with background(agents.run()):
        yield agents
