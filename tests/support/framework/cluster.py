"""A cluster in memory and in virtual time: hollow nodes, and a Framework operator that can be killed and replaced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from controllers.framework.api.types import FRAMEWORK_NAME, FRAMEWORKS
from controllers.framework.config import FrameworkConfig, shipped_config
from controllers.framework.operator import FrameworkOperator
from controllers.loop.control_loop import JobMetrics
from store.kube.api.errors import NotFound
from store.kube.api.objects import CONFIG_MAPS, EVENTS, PODS, Object, name_of
from store.kube.api.protocol import KubeApi
from store.kube.events import EventRecorder
from store.kube.memory.kube import MemoryKube
from tests.support.kube.hollow.kubelet import HollowKubelet

EPOCH = 1_700_000_000.0  # Unix seconds at which the loop's clock is 0
NAMESPACE = "default"


def now() -> float:
    """Return Unix seconds on the loop's clock."""
    return EPOCH + asyncio.get_running_loop().time()


def role(name: str, tasks: int, *, annotations: Mapping[str, str] | None = None, **fields: Any) -> Object:
    """Return a task role. `annotations` say what its hollow pods do; by default they run for 5 s and succeed. `fields`:
    `retry`, `policy`, `grace` and `init`, the names of its init containers."""
    plan = {"hollow/exit-code": "0", "hollow/run-seconds": "5"} if annotations is None else dict(annotations)
    pod: Object = {
        "metadata": {"annotations": plan},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "example.org/task:1"}]},
    }
    if fields.get("init"):
        pod["spec"]["initContainers"] = [{"name": name, "image": "example.org/init:1"} for name in fields["init"]]
    task: Object = {"pod": pod, "retryPolicy": fields.get("retry") or {}}
    if "grace" in fields:
        task["podGracefulDeletionTimeoutSec"] = fields["grace"]
    made: Object = {"name": name, "taskNumber": tasks, "task": task}
    if "policy" in fields:
        made["frameworkAttemptCompletionPolicy"] = fields["policy"]
    return made


def framework(name: str, *roles: Object, **spec: Any) -> Object:
    """Return a Framework; `spec` adds to or replaces fields of its spec."""
    return {
        "apiVersion": FRAMEWORKS.api_version,
        "kind": FRAMEWORKS.kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"executionType": "Start", "taskRoles": list(roles), **spec},
    }


class Frameworks:
    """The Frameworks of one namespace of `api`. `patience`: seconds of the loop that a condition may take."""

    def __init__(self, api: KubeApi, namespace: str, patience: float) -> None:
        self.api, self.namespace, self.patience = api, namespace, patience

    async def create(self, body: Object) -> Object:
        return await self.api.create(FRAMEWORKS, body, self.namespace)

    async def patch(self, name: str, spec: Object) -> None:
        await self.api.patch(FRAMEWORKS, name, self.namespace, {"spec": spec})

    async def get(self, name: str) -> Object:
        return await self.api.get(FRAMEWORKS, name, self.namespace)

    async def status(self, name: str) -> Object:
        found: Object = (await self.get(name)).get("status") or {}
        return found

    async def tasks(self, name: str, role_name: str) -> list[Object]:
        return tasks_of(await self.status(name), role_name)

    async def pods(self, name: str) -> dict[str, Object]:
        page = await self.api.list(PODS, self.namespace, label_selector=f"{FRAMEWORK_NAME}={name}")
        return {name_of(pod): pod for pod in page.items}

    async def config_map(self, name: str) -> Object | None:
        try:
            return await self.api.get(CONFIG_MAPS, f"{name}-attempt", self.namespace)
        except NotFound:
            return None

    async def events(self, name: str) -> list[str]:
        """Return the reasons of the Events about a Framework, in order."""
        page = await self.api.list(EVENTS, self.namespace, field_selector=f"involvedObject.name={name}")
        return [str(event["reason"]) for event in page.items]

    async def until(self, name: str, condition: Callable[[Object], object], what: str = "as expected") -> Object:
        """Wait until the Framework meets the condition. Return its status."""
        deadline = now() + self.patience
        while True:
            status = await self.status(name)
            if status and condition(status):
                return status
            assert now() < deadline, f"{name} is not {what}, but {status}"
            await asyncio.sleep(0.05)

    async def until_state(self, name: str, state: str) -> Object:
        return await self.until(name, lambda status: status["state"] == state, state)


def tasks_of(status: Object, role: str) -> list[Object]:
    roles = status["attemptStatus"]["taskRoleStatuses"]
    found: list[Object] = next((each["taskStatuses"] for each in roles if each["name"] == role), [])
    return found


class Cluster(Frameworks):
    """`api` is the server; the operator sees it through `start_operator`."""

    api: MemoryKube

    def __init__(self, config: FrameworkConfig | None = None, *, nodes: int = 2, **kubelet: Any) -> None:
        self.config = config or shipped_config()
        is_native = self.config.native_mode
        super().__init__(MemoryKube(clock=now, rng=random.Random(1)), NAMESPACE, patience=4000.0)
        self.api.register(FRAMEWORKS, has_status=is_native)
        self.kubelet = HollowKubelet(self.api, clock=now, schedules=True, **kubelet)
        self.operator: FrameworkOperator | None = None
        self.clock: Callable[[], float] = now  # the operator's
        self.metrics: JobMetrics | None = None
        self._nodes = nodes
        self._running: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self, *, operator: bool = True) -> AsyncIterator[Cluster]:
        """Run nodes, kubelet and, unless disabled, an operator, until the end of the block."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            kubelet = group.create_task(self.kubelet.run())
            await self.kubelet.add_nodes(self._nodes)
            if operator:
                self.start_operator()
            try:
                yield self
            finally:
                await self.kill_operator()
                kubelet.cancel()

    def start_operator(self, api: KubeApi | None = None) -> None:
        """Start a new operator, with nothing but what is stored. `api`: its view of the server."""
        assert self._group is not None, "the cluster is not running"
        seen = api or self.api
        recorder = EventRecorder(seen, "rcfarm", clock=self.clock, rng=random.Random(2))
        self.operator = FrameworkOperator(
            seen, self.config, recorder, metrics=self.metrics, clock=self.clock, rng=random.Random(3)
        )
        self._running = [self._group.create_task(self.operator.run()), self._group.create_task(recorder.run())]

    async def kill_operator(self) -> None:
        """Kill the operator at once."""
        for task in self._running:
            task.cancel()
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []
