"""Training jobs on an API server in memory, with hollow nodes, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from controllers.training.kind import TrainingJobs
from controllers.training.pytorch import AUTOSCALERS
from store.kube.api.objects import EVENTS, PODS, SERVICES, Object, Resource, labels_of, name_of, phase_of
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.train_jobs import loop_clock, memory_kube, operate, running
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.training.manifests import environment
from tests.support.waiting import until


class Cluster:
    """`operator`: the one that runs; `kubelet`: that of all nodes."""

    def __init__(self, api: MemoryKube, operator: TrainingJobs, kubelet: HollowKubelet) -> None:
        self.api, self.operator, self.kubelet = api, operator, kubelet
        self.resource: Resource = operator.resource

    async def create(self, job: Object) -> Object:
        return await self.api.create(self.resource, job, "default")

    async def job(self, name: str) -> Object:
        return await self.api.get(self.resource, name, "default")

    async def patch(self, name: str, spec: Object) -> None:
        await self.api.patch(self.resource, name, "default", {"spec": spec})

    async def condition(self, name: str, kind: str, within: float = 120.0) -> Object:
        """Wait for a condition that is true."""

        async def found() -> Object | None:
            conditions = ((await self.job(name)).get("status") or {}).get("conditions") or ()
            return next((each for each in conditions if (each["type"], each["status"]) == (kind, "True")), None)

        entry: Object = await until(found, f"{name} is {kind}", within=within)
        return entry

    async def named(self, resource: Resource) -> dict[str, Object]:
        """Return the objects of a kind by name."""
        return {name_of(obj): obj for obj in (await self.api.list(resource, "default")).items}

    async def pods(self) -> dict[str, Object]:
        return await self.named(PODS)

    async def pod(self, name: str) -> Object | None:
        return (await self.pods()).get(name)

    async def is_empty(self) -> bool:
        """Return whether there is no pod."""
        return not await self.pods()

    async def all_running(self, count: int) -> dict[str, Object]:
        """Wait until this number of pods exists, and all of them run."""

        async def complete() -> tuple[dict[str, Object]] | None:
            pods = await self.pods()
            return (pods,) if len(pods) == count and all(phase_of(pod) == "Running" for pod in pods.values()) else None

        (found,) = await until(complete, f"{count} pods run")
        return dict(found)

    async def services(self) -> dict[str, Object]:
        return await self.named(SERVICES)

    async def plan(self, pod: str, **asked: str) -> None:
        """Change what the hollow kubelet does with a pod: `exit_code="0", run_seconds="0"` ends it."""
        annotations = {f"hollow/{name.replace('_', '-')}": value for name, value in asked.items()}
        await self.api.patch(PODS, pod, "default", {"metadata": {"annotations": annotations}})

    async def variable(self, pod: str, name: str) -> str | None:
        """Return an environment variable of a pod's first container, as a program in it would see it."""
        return dict(environment((await self.pods())[pod])).get(name)

    async def labels(self, pod: str) -> dict[str, str]:
        return dict(labels_of((await self.pods())[pod]))

    async def events(self) -> list[tuple[str, str, str]]:
        """Return type, reason and message of all Events."""
        return [(each["type"], each["reason"], each["message"]) for each in (await self.named(EVENTS)).values()]


@asynccontextmanager
async def cluster(kind: type[TrainingJobs], *others: Resource, **parameters: Any) -> AsyncIterator[Cluster]:
    """Run an operator of this kind and the kubelet of four nodes for the duration of the block. `others`: what the API
    server knows, too."""
    api = memory_kube()
    for other in (AUTOSCALERS, *others):
        api.register(other, has_status=True)
    api.register(kind.resource, has_status=True)
    kubelet = HollowKubelet(api, clock=lambda: loop_clock().timestamp(), schedules=True)
    await kubelet.add_nodes(4)
    operator = operate(api, kind, **parameters)
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(kubelet.run())
        try:
            async with running(operator):
                yield Cluster(api, operator, kubelet)
        finally:
            playing.cancel()
