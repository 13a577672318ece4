"""An engine that dies, or loses an answer, at every call of a pod's life: to the store, and to the API server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pytest

from controllers.tasks.patterns.kube import KubeDefaults, kube_entry
from controllers.tasks.plugins.pod import PodPlugin
from store.embedded.store import EmbeddedStore
from store.kube.api.errors import Unreachable
from store.kube.api.objects import PODS, Object, Resource, has_ended, name_of
from store.kube.api.protocol import KubeApi, Page, PatchType, Propagation, WatchEvent
from store.kube.memory.kube import MemoryKube
from store.kv.protocol import Unavailable
from store.schema.keys import Keys
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.tasks.engines import World, engine_on, wall
from tests.support.tasks.kube import NAMESPACE
from tests.support.tasks.mortal import Fate, Kind, MortalStore, at_every_moment, succession
from tests.support.waiting import until

pytestmark = pytest.mark.looptime(noop_cycles=0)

KEYS = Keys(shards=2)
T = TypeVar("T")


class MortalKube:
    """A `KubeApi` as a process sees it that `fate` ends. Lists and watches pass no moments."""

    def __init__(self, inner: KubeApi, fate: Fate) -> None:
        self._inner, self._fate = inner, fate

    async def _call(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            await self._fate.passes(f"before {what}")
            answer = await call()
            await self._fate.passes(f"after {what}")
        except Unavailable as error:
            raise Unreachable(str(error)) from error
        return answer

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        return await self._call(f"get {name}", lambda: self._inner.get(resource, name, namespace))

    async def list(self, resource: Resource, namespace: str = "", **query: Any) -> Page:
        return await self._inner.list(resource, namespace, **query)

    @asynccontextmanager
    async def watch(
        self, resource: Resource, namespace: str = "", **query: Any
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        opened: AbstractAsyncContextManager[AsyncIterator[WatchEvent]] = self._inner.watch(resource, namespace, **query)
        async with opened as events:
            yield events

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        return await self._call(f"create {name_of(body)}", lambda: self._inner.create(resource, body, namespace))

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        return await self._call(f"replace {name_of(body)}", lambda: self._inner.replace(resource, body))

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        patch: Object | Sequence[Any],
        *,
        patch_type: PatchType = "merge",
        subresource: str = "",
    ) -> Object:
        return await self._call(
            f"patch {name}", lambda: self._inner.patch(resource, name, namespace, patch, patch_type=patch_type)
        )

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_period: int | None = None,
        propagation: Propagation | None = None,
    ) -> None:
        await self._call(f"delete {name}", lambda: self._inner.delete(resource, name, namespace, uid=uid))

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        return await self._inner.served(resource, fresh=fresh)


class Pods(PodPlugin):
    """The plugin on virtual clocks."""

    clock = staticmethod(wall)
    monotonic = staticmethod(lambda: asyncio.get_running_loop().time())


class Shape(NamedTuple):
    """What pods do, and how the execution ends. `attempts`: pods that it creates. `left`: those that stay."""

    annotations: dict[str, str]
    phase: str
    attempts: int
    left: int
    aborts: bool = False


SHAPES = {
    "success": Shape({"hollow/exit-code": "0", "hollow/run-seconds": "2"}, "PhaseSuccess", 1, 1),
    "retries": Shape({"hollow/exit-code": "3", "hollow/run-seconds": "2"}, "PhasePermanentFailure", 2, 1),
    "abort": Shape({}, "PhaseAborted", 1, 0, aborts=True),
}


async def _live(shape: Shape, fate: Fate) -> None:
    """Let one execution live under the fate, and check its end."""
    store, api = EmbeddedStore(None), MemoryKube(clock=wall, namespaces=[NAMESPACE])
    world, made = World(store, KEYS), Counter[str]()

    def count(resource: Resource, new: Object, old: Object | None) -> None:
        if resource == PODS and old is None:
            made[name_of(new)] += 1

    api.admission = count
    plugins: list[Pods] = []

    def make() -> Pods:
        plugins.append(Pods(KubeDefaults(finalizer=True)))
        return plugins[-1]

    async def engine(name: str, fate: Fate) -> None:
        entry = kube_entry(make, "pod", ("pod",))
        running = engine_on(MortalStore(store, fate), KEYS, entry, kube=MortalKube(api, fate), name=name)
        await running.start()

    containers = [{"name": "main", "image": "example.org/work:1"}]
    config = {"pod": {"metadata": {"annotations": shape.annotations}, "spec": {"containers": containers}}}
    async with succession(engine, fate), HollowKubelet(api, clock=wall, schedules=True).playing(1):
        await world.submit("one", "pod", namespace=NAMESPACE, config=config, retries=1)
        if shape.aborts:
            await world.until_state("one", lambda state: state.phase == "PhaseRunning")
            await world.abort("one")
        state = await world.until_done("one")
        assert state.phase == shape.phase, fate.at
        assert made == {f"one-n0-{attempt}": 1 for attempt in range(shape.attempts)}, fate.at

        async def settled() -> bool:
            pods = (await api.list(PODS, NAMESPACE)).items
            return len(pods) == shape.left and all(map(has_ended, pods))

        await until(settled, f"the pods of {fate.at}")
        assert not any(pod["metadata"].get("finalizers") for pod in (await api.list(PODS, NAMESPACE)).items), fate.at
    for plugin in plugins:
        await plugin.close()
    await store.close()


@pytest.mark.parametrize(
    ("name", "kind"), [("success", "death"), ("retries", "death"), ("abort", "death"), ("retries", "lost")]
)
async def test_every_moment(name: str, kind: Kind) -> None:
    """The same outcome, one pod per attempt, and no pod or finalizer that stays, whatever the moment."""
    await at_every_moment(partial(_live, SHAPES[name]), kind)
