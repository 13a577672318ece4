"""A web-API plugin whose engine dies, or loses an answer, before and after each call to the store or the job API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

import pytest

from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.patterns.remote import RemoteTransient, WebApiConfig
from controllers.tasks.patterns.webapi import Created, ReadContext, Recovery
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Unavailable
from store.schema.keys import Keys
from store.schema.tasks import TaskState
from tests.support.tasks.engines import World, engine_on
from tests.support.tasks.job_api import ApiPlugin, JobApi, capped, entry
from tests.support.tasks.mortal import Fate, MortalStore

pytestmark = pytest.mark.looptime(noop_cycles=0)

KEYS = Keys(shards=2)
T = TypeVar("T")
CONFIG = WebApiConfig(resource_quotas={"licence": 1})


class MortalPlugin(ApiPlugin):
    """Passes a moment before and after each call. A lost answer is a lost connection."""

    def __init__(self, api: JobApi, fate: Fate, can: Recovery) -> None:
        super().__init__(api, CONFIG, can=can, licence=capped())
        self.fate = fate

    async def create(self, context: TaskExecutionContext, key: str) -> Created[dict[str, Any]]:
        return await self._passing("create", lambda: super(MortalPlugin, self).create(context, key))

    async def find(self, context: TaskExecutionContext, key: str) -> Created[dict[str, Any]] | None:
        return await self._passing("find", lambda: super(MortalPlugin, self).find(context, key))

    async def get_many(self, jobs: Sequence[tuple[ReadContext, Any]]) -> Sequence[dict[str, Any] | Exception]:
        return await self._passing("get", lambda: super(MortalPlugin, self).get_many(jobs))

    async def delete(self, context: TaskExecutionContext, meta: Any, reason: str) -> None:
        await self._passing("delete", lambda: super(MortalPlugin, self).delete(context, meta, reason))

    async def _passing(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            await self.fate.passes(f"before {what}")
            answer = await call()
            await self.fate.passes(f"after {what}")
        except Unavailable as error:
            raise RemoteTransient(str(error)) from error
        return answer


async def _live(fate: Fate, can: Recovery, *, aborts: bool) -> int:
    """Let an execution that needs a unit live under the fate, check its end, and return the number of moments."""
    store = EmbeddedStore(None)
    world, api = World(store, KEYS), JobApi(seconds=1e6 if aborts else 0.5)

    def engine(name: str, fate: Fate) -> asyncio.Task[None]:
        plugin = entry(MortalPlugin(api, fate, can))
        return asyncio.create_task(engine_on(MortalStore(store, fate), KEYS, plugin, name=name, call_timeout=0).start())

    async def successor() -> None:
        await fate.dead.wait()
        mortals.append(engine("engine-b", Fate()))

    def is_held(state: TaskState) -> bool:
        return [wait.code for wait in state.reasons] == ["RemoteUnknown"]

    mortals = [engine("engine-a", fate)]
    waiting = asyncio.create_task(successor())
    try:
        await world.submit("one", "api")
        state = await world.until_state(
            "one",
            lambda state: state.step == "done" or is_held(state) or (aborts and state.phase == "PhaseRunning"),
        )
        if aborts or is_held(state):
            assert aborts or can is Recovery.UNKNOWN, fate.at
            await world.abort("one")
        assert (await world.until_done("one")).phase == ("PhaseSuccess" if state.step == "done" else "PhaseAborted")
        assert all(count == 1 for count in api.made.values()), fate.at
        assert len(api.made) == 1 or can is Recovery.UNKNOWN, fate.at
        if aborts and can is not Recovery.UNKNOWN:
            assert api.jobs == {}, fate.at
        assert await world.holders() == [], fate.at
    finally:
        for task in (waiting, *mortals):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(waiting, *mortals, return_exceptions=True)
        await store.close()
    return fate.moments


@pytest.mark.parametrize("kind", ["death", "lost"])
@pytest.mark.parametrize(
    ("can", "aborts"), [(Recovery.FIND, False), (Recovery.CREATE_AGAIN, True), (Recovery.UNKNOWN, False)]
)
async def test_every_moment(can: Recovery, aborts: bool, kind: Literal["death", "lost"]) -> None:
    """Never two jobs of an attempt, no job left after an abort, no unit leaked. An API that can do nothing about a lost
    answer has the operator asked instead."""
    moments = await _live(Fate(), can, aborts=aborts)
    assert moments > 20
    for moment in range(moments):
        await _live(Fate(moment, kind), can, aborts=aborts)
