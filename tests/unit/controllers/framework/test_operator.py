"""Syncs of one Framework against an in-memory API server, with caches that the test fills."""

from __future__ import annotations

import random

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.config import FrameworkConfig
from controllers.framework.operator import FrameworkSync, Views
from controllers.framework.reporting import History
from controllers.loop.control_loop import NoJobMetrics
from controllers.loop.workqueue import WorkQueue
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, Resource, key_of, name_of, uid_of
from store.kube.events import EventRecorder
from store.kube.memory.kube import Call, MemoryKube
from tests.support.framework.cluster import NAMESPACE, framework, now, role

pytestmark = pytest.mark.looptime

KEY = f"{NAMESPACE}/job"


class Cached:
    """A cache of one resource. It shows the server's state as of the last `catch_up`, without the objects in `hidden`,
    by UID."""

    def __init__(self, api: MemoryKube, resource: Resource) -> None:
        self._api, self._resource = api, resource
        self._objects: dict[str, Object] = {}
        self.hidden: set[str] = set()

    async def catch_up(self) -> None:
        self._objects = {key_of(obj): obj for obj in (await self._api.list(self._resource, NAMESPACE)).items}

    def get(self, key: str) -> Object | None:
        found = self._objects.get(key)
        return None if found is None or uid_of(found) in self.hidden else found

    def by_index(self, index: str, value: str) -> list[Object]:
        return [obj for obj in self._objects.values() if uid_of(obj) not in self.hidden]


async def test_pods_that_a_late_cache_lacks_are_read_once_per_sync() -> None:
    """The cache loses a second pod while the first one is read: two reads and one look later, instead of one read after
    the other for as long as the cache is late."""
    api = MemoryKube(clock=now, rng=random.Random(1))
    api.register(FRAMEWORKS, has_status=False)
    await api.create(FRAMEWORKS, framework("job", role("worker", 3)), NAMESPACE)
    caches = [Cached(api, resource) for resource in (FRAMEWORKS, CONFIG_MAPS, PODS)]
    pods = caches[-1]
    queue: WorkQueue[str] = WorkQueue("frameworks")
    sync = FrameworkSync(
        api,
        FrameworkConfig(),
        lambda namespace: Views(*caches),
        queue,
        EventRecorder(api, "test", clock=now),
        History(FrameworkConfig()),
        NoJobMetrics(),
        clock=now,
    )
    for _ in range(3):
        for cache in caches:
            await cache.catch_up()
        await sync.sync(KEY)
    first, second, _ = (await api.list(PODS, NAMESPACE)).items
    reads: list[str] = []

    def falls_further_behind(call: Call) -> None:
        if call.verb == "get" and call.resource is PODS:
            reads.append(call.name)
            pods.hidden.add(uid_of(second))

    api.before_call = falls_further_behind
    pods.hidden.add(uid_of(first))
    await sync.sync(KEY)
    assert reads == [name_of(first), name_of(second)]
    assert len(queue) == 0, "it is looked at again later, not at once"
