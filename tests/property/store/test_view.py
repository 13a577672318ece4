"""A view shows what the store has, whatever is written by whom, and however late the answers are."""

from __future__ import annotations

import asyncio
import random

import pytest

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op
from store.kv.view import CATCH_UP_SHARE, REFRESH_COST, Change, TreeView, Watched
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.waiting import background, loop_time

pytestmark = pytest.mark.looptime

STEPS, ROUNDS = 25, 4
NAMES = [f"a/{number}" for number in range(8)]
HELD_BACK = ("watch", "watch_keys", "list", "txn")


class Writers:
    """The view's process and another one. `announced`: what the changes of the view add up to."""

    def __init__(self, store: ScriptedStore, rng: random.Random, *, watched: Watched) -> None:
        self.store, self.rng, self.announced = store, rng, dict[str, str]()
        self.view: TreeView[str] = TreeView(
            store,
            "a/",
            lambda key, value: value.decode(),
            on_change=self._note,
            watched=watched,
            clock=loop_time,
            rng=rng,
        )

    def _note(self, changes: list[Change[str]]) -> None:
        for key, _, new, _ in changes:
            if new is None:
                self.announced.pop(key, None)
            else:
                self.announced[key] = new.value

    def some(self) -> list[Op]:
        names = self.rng.sample(NAMES, self.rng.randint(1, 3))
        value = b"%d" % self.rng.randrange(1000)
        return [ops.delete(name) if self.rng.random() < 0.3 else ops.put(name, value) for name in names]

    async def write_own(self) -> None:
        writing = self.some()
        self.view.apply(await self.store.txn(writing), writing)

    async def write_other(self) -> None:
        await self.store.inner.txn(self.some())

    def hold_back(self) -> None:
        verb = self.rng.choice(HELD_BACK)
        if verb not in self.store._answers:
            self.store.keep_back(verb)
            asyncio.get_running_loop().call_later(self.rng.random(), self.store.deliver, verb)


@pytest.mark.parametrize("watched", Watched)
@pytest.mark.parametrize("seed", range(25))
async def test_no_change_is_missed(seed: int, watched: Watched) -> None:
    """After a while without writes the view shows the store's entries, and has announced each of their changes."""
    rng = random.Random(seed)
    inner = EmbeddedStore()
    for name in NAMES[:6]:
        await inner.put(name, b"first")
    writers = Writers(ScriptedStore(inner), rng, watched=watched)
    async with background(writers.view.run()), asyncio.TaskGroup() as group:
        await writers.view.synced()
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                chance = rng.random()
                if chance < 0.5:
                    group.create_task(writers.write_own())
                elif chance < 0.8:
                    await writers.write_other()
                else:
                    writers.hold_back()
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.001, 0.02, 0.3)))
            await asyncio.sleep(2 * REFRESH_COST / CATCH_UP_SHARE + 5.0)
            there = {entry.key: entry.value.decode() for entry in (await inner.list("a/")).entries}
            assert {key: record.value for key, record in writers.view.records.items()} == there
            assert writers.announced == there
