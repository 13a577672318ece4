"""A task plugin over an API server: what a test changes in the cluster, and what an engine makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Self, TypeVar

from controllers.tasks.api.plugin import PluginEntry
from controllers.tasks.patterns.kube import KubePlugin
from store.embedded.store import EmbeddedStore
from store.kube.api.errors import Forbidden
from store.kube.api.objects import PODS, Object, Resource, name_of
from store.kube.api.protocol import KubeApi
from store.quantity import parse_quantity
from store.schema.keys import Keys
from store.schema.tasks import TaskEvent, TaskState
from tests.support.tasks.engines import World, engine_on, running, wall
from tests.support.waiting import loop_time, until

NAMESPACE = "team"
POD = {"spec": {"containers": [{"name": "main", "image": "example.org/work:1"}]}}


Api = TypeVar("Api", bound=KubeApi)


def wants(cpu: str) -> dict[str, Any]:
    """Return the configuration of a pod that asks for processors."""
    container = {"name": "main", "image": "example.org/work:1", "resources": {"requests": {"cpu": cpu}}}
    return {"pod": {"spec": {"containers": [container]}}}


class Stage(World, Generic[Api]):
    """An engine with one plugin, and the cluster that the test plays. Without `virtual`, clocks are real."""

    def __init__(
        self,
        plugin: KubePlugin,
        api: Api,
        resource: Resource = PODS,
        *,
        namespace: str = NAMESPACE,
        virtual: bool = True,
    ) -> None:
        super().__init__(EmbeddedStore(), Keys(shards=2))
        self.plugin, self.api, self.resource, self.namespace = plugin, api, resource, namespace
        self._virtual, self._status = virtual, "status" if resource == PODS else ""
        if virtual:
            vars(plugin).update(clock=wall, monotonic=loop_time)

    def entry(self) -> PluginEntry:
        async def load(setup: Any) -> KubePlugin:
            await self.plugin.load(setup)
            return self.plugin

        return PluginEntry(self.plugin.id, (self.plugin.id,), load)

    @contextlib.asynccontextmanager
    async def playing(self, *, has_cluster: bool = True, **settings: Any) -> AsyncIterator[Self]:
        """Run the engine, and the plugin's watches, for the duration of the block."""
        kube = self.api if has_cluster else None
        engine = engine_on(self.store, self.keys, self.entry(), kube=kube, virtual=self._virtual, **settings)
        try:
            async with running(engine):
                yield self
        finally:
            await self.plugin.close()

    async def start(self, name: str = "job", config: dict[str, Any] | None = None, **fields: Any) -> None:
        await self.submit(name, self.plugin.id, namespace=self.namespace, config=config or {"pod": POD}, **fields)

    async def objects(self) -> list[Object]:
        return list((await self.api.list(self.resource, self.namespace)).items)

    async def object(self) -> Object:
        """Wait for the only object."""
        [obj] = await until(self.objects, "the object")
        return dict(obj)

    async def started(self, name: str = "job", config: dict[str, Any] | None = None, **fields: Any) -> Object:
        """Submit an execution. Return its object, the only one."""
        await self.start(name, config, **fields)
        return await self.object()

    async def running(self, config: dict[str, Any] | None = None, **fields: Any) -> Object:
        """Submit an execution, and let its pod run. Return the pod."""
        pod = await self.started(config=config, **fields)
        await self.report(pod, {"phase": "Running"})
        await self.until_phase("Running")
        return pod

    async def succeed(self, pod: Object) -> TaskState:
        """Let the pod succeed. Return how the execution ended."""
        await self.report(pod, {"phase": "Succeeded"})
        return await self.until_done("job")

    async def report(self, obj: Object, status: Object) -> None:
        """Write the object's status, as a kubelet or an operator does."""
        await self.api.patch(self.resource, name_of(obj), self.namespace, {"status": status}, subresource=self._status)

    async def phases(self, task_id: str) -> list[str]:
        """Return the phases that events show, without those that only show more of the same phase."""
        found = await super().phases(task_id)
        return [phase for n, phase in enumerate(found) if n == 0 or phase != found[n - 1]]

    async def created(self, name: str) -> Object:
        """Wait for the object of that name."""

        async def found() -> Object | None:
            return next((each for each in await self.objects() if name_of(each) == name), None)

        obj: Object = await until(found, name)
        return obj

    async def last_event(self, name: str = "job") -> TaskEvent:
        return (await self.events(name))[-1]

    async def until_phase(self, phase: str, name: str = "job") -> TaskEvent:
        """Wait until the execution shows the phase. (It is Queued from the start.)"""
        await self.until_state(name, lambda state: state.phase == f"Phase{phase}")
        return await self.last_event(name)


def cpu_quota(limit: Callable[[], str]) -> Callable[[Resource, Object, Object | None], None]:
    """Return an admission that refuses pods as a ResourceQuota without any use would: those above `limit()`."""

    def admit(resource: Resource, new: Object, old: Object | None) -> None:
        if resource != PODS or old is not None:
            return
        asked = new["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        if parse_quantity(asked) > parse_quantity(limit()):
            raise Forbidden(
                f'pods "{name_of(new)}" is forbidden: exceeded quota: team, requested: requests.cpu={asked}, '
                "used: requests.cpu=3, limited: requests.cpu=4",
                status=403,
                reason="Forbidden",
            )

    return admit
