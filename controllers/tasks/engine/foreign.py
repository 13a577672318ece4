"""How far executions in the shards of other engines are, for those of this engine that depend on them.

The model: this engine has no view of these shards. The state of each such execution is watched by a blocking query of
its own, so its end wakes its dependents at once; `WATCHES` are watched at most, because every query holds a connection.
The others, and those that have ended and may run again, are read every `LOOK` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

from controllers.tasks.engine.workshop import Dependency
from store.kv.protocol import BadRecord, Entry, Store, StoreError
from store.schema.keys import Keys
from store.schema.records import decode
from store.schema.tasks import TaskState

WATCHES = 8
LOOK = 2.0  # seconds between reads of executions that are not watched
WAIT = 60.0  # seconds that a query lasts
ABSENT_PAUSE = 0.2  # seconds between queries of an absent state: Consul ends them with every write, to whatever key
ENDED = ("succeeded", "failed")


def status_of(state: TaskState | None) -> Dependency | None:
    """Return how far an execution is; None if no engine has begun it."""
    if state is None:
        return None
    if state.step != "done":
        return "pending"
    return "succeeded" if state.phase == "PhaseSuccess" else "failed"


class ForeignExecutions:
    """Run `run()` once. `wanted()`: the ids that matter now. `on_end(execution)`: it has ended, and `status` says how.
    Call `look` when an id was added."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        wanted: Callable[[], Set[str]],
        on_end: Callable[[str], object],
        log: Any,
    ) -> None:
        self._store, self._keys, self._wanted, self._on_end, self._log = store, keys, wanted, on_end, log
        self._known: dict[str, Dependency | None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._added = asyncio.Event()

    def status(self, execution: str) -> Dependency | None:
        """Return how far an execution is, as last seen; None if no engine has begun it, or nothing is known yet."""
        return self._known.get(execution)

    def look(self) -> None:
        """Watch what was added, if a watch is free."""
        if len(self._watches) < WATCHES:
            self._added.set()

    async def run(self) -> None:
        """Follow the executions until cancelled."""
        now, read_at = asyncio.get_running_loop().time, 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                self._added.clear()
                wanted = self._wanted()
                self._known = {each: status for each, status in self._known.items() if each in wanted}
                for each, watch in list(self._watches.items()):
                    if watch.done() or each not in wanted:
                        self._watches.pop(each).cancel()
                reads = now() >= read_at
                if reads:
                    read_at = now() + LOOK
                unwatched = []
                for each in wanted - self._watches.keys():
                    if len(self._watches) < WATCHES and self._known.get(each) not in ENDED:
                        self._watches[each] = group.create_task(self._watch(each))
                    else:
                        unwatched.append(each)
                for each in unwatched if reads else ():
                    try:
                        self._learn(each, await self._store.get(self._keys.task_state(each)))
                    except StoreError as error:
                        self._log.info("A dependency could not be read", execution=each, error=str(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK):
                        await self._added.wait()

    async def _watch(self, execution: str) -> None:
        """Follow one execution until it has ended."""
        key, index = self._keys.task_state(execution), 0
        while True:
            try:
                listing = await self._store.watch(key, index, WAIT)
            except StoreError as error:
                self._log.info("A dependency could not be read", execution=execution, error=str(error))
                index = 0
                await asyncio.sleep(LOOK)
                continue
            index = listing.index if listing.index >= index else 0
            entry = next((each for each in listing.entries if each.key == key), None)
            self._learn(execution, entry)
            if self._known.get(execution) in ENDED:
                self._added.set()
                return
            if entry is None:
                await asyncio.sleep(ABSENT_PAUSE)

    def _learn(self, execution: str, entry: Entry | None) -> None:
        try:
            status = status_of(decode(TaskState, entry.key, entry.value) if entry else None)
        except BadRecord as error:
            self._log.info("A dependency could not be read", execution=execution, error=str(error))
            return
        former, self._known[execution] = self._known.get(execution), status
        if status != former and status in ENDED:
            self._on_end(execution)
