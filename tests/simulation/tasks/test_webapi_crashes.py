"""A web-API plugin whose engine dies, or loses an answer, before and after each call to the store or the job API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

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
from tests.support.tasks.mortal import Fate, Kind, MortalStore, at_every_moment, succession

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


async def _live(can: Recovery, aborts: bool, fate: Fate) -> None:
    """Let an execution that needs a unit live under the fate, and check its end."""
    store = EmbeddedStore(None)
    world, api = World(store, KEYS), JobApi(seconds=1e6 if aborts else 0.5)

    async def engine(name: str, fate: Fate) -> None:
        plugin = entry(MortalPlugin(api, fate, can))
        await engine_on(MortalStore(store, fate), KEYS, plugin, name=name, call_timeout=0).start()

    def is_held(state: TaskState) -> bool:
        return [wait.code for wait in state.reasons] == ["RemoteUnknown"]

    async with succession(engine, fate):
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
    await store.close()


@pytest.mark.parametrize("kind", ["death", "lost"])
@pytest.mark.parametrize(
    ("can", "aborts"), [(Recovery.FIND, False), (Recovery.CREATE_AGAIN, True), (Recovery.UNKNOWN, False)]
)
async def test_every_moment(can: Recovery, aborts: bool, kind: Kind) -> None:
    """Never two jobs of an attempt, no job left after an abort, no unit leaked. An API that can do nothing about a lost
    answer has the operator asked instead."""
    await at_every_moment(partial(_live, can, aborts), kind, least=21)
