"""Commands on a real API server, with hollow nodes and an operator under its Lease."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from store.kube.api.objects import Object, Resource
from store.kube.client.client import KubeClient
from store.kube.leaderelection.election import Election
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.programs.cli import Ran, run, run_process


class Commands:
    """`await commands("list")` is `rcfarm GROUP list`. `lease`: its operator's.

    `processes`: run each command in its own process; always set while an operator runs, whose log would otherwise mix
    with the output.
    """

    def __init__(self, plane: ControlPlane, api: KubeClient, namespace: str, group: str) -> None:
        self.plane, self.api, self.namespace, self.group = plane, api, namespace, group
        self.lease = f"{namespace}/jobs-{secrets.token_hex(3)}"
        self.processes = False

    async def __call__(self, *arguments: str, **environ: str) -> Ran:
        env = {
            "HOME": tempfile.gettempdir(),
            "KUBECONFIG": str(self.plane.kubeconfig),
            "RCFARM_JOBS_LEASE": self.lease,
        } | environ
        return await asyncio.to_thread(run_process if self.processes else run, self.group, *arguments, env=env)

    async def ours(self, *arguments: str) -> Ran:
        """Run a command in the test's namespace."""
        return await self(*arguments, "-n", self.namespace)

    async def create(self, resource: Resource, *bodies: Object) -> None:
        for body in bodies:
            metadata = {**body["metadata"], "namespace": self.namespace}
            await self.api.create(resource, body | {"metadata": metadata}, self.namespace)

    async def until(self, resource: Resource, name: str, reached: Callable[[Object], bool]) -> Object:
        """Wait until the object's stored status fulfils a condition. Return the object."""
        async with asyncio.timeout(60):
            while True:
                obj = await self.api.get(resource, name, self.namespace)
                if reached(obj.get("status") or {}):
                    return obj
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def operator(self, *runs: Callable[[], Awaitable[None]]) -> AsyncIterator[HollowKubelet]:
        """Run nodes with pods, and operators under the Lease, for the test's namespace."""
        kubelet = HollowKubelet(self.api, schedules=True, namespace=self.namespace)
        lease_namespace, _, lease = self.lease.partition("/")
        election = Election(self.api, lease_namespace, lease, "the-leader")

        async def operate() -> None:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(run())  # type: ignore[arg-type]  # all are coroutine functions

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(kubelet.run()), group.create_task(election.run(operate))]
            await kubelet.add_nodes(2, prefix=self.namespace)
            self.processes = True
            try:
                yield kubelet
            finally:
                self.processes = False
                for task in tasks:
                    task.cancel()
        await kubelet.remove_nodes()
