"""Frameworks on a real control plane: with its scheduler, hollow kubelets, and `rcfarm jobs` as a process."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from controllers.framework.barrier.barrier import Config, FrameworkBarrier
from store.kube.api.objects import PODS, Object, uid_of
from store.kube.client.client import KubeClient
from tests.support.framework.cluster import Frameworks, tasks_of
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.behaviour import Ended
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.hollow.pod import ContainerRun, Program
from tests.support.kube.hollow.programs import process
from tests.support.waiting import until

NODE_LABEL = "test"  # which test's nodes a pod may run on
HASTE = 3  # seconds that the hasty barrier waits


class RealFrameworks(Frameworks):
    """Frameworks whose pods run on nodes of their own. `directory`: where their files are."""

    def __init__(self, api: KubeClient, kubelet: HollowKubelet, namespace: str, directory: Path) -> None:
        super().__init__(api, namespace, patience=60.0)
        self.kubelet, self.directory = kubelet, directory
        self.nodes = secrets.token_hex(4)

    async def add_nodes(self, count: int, *, capacity: Mapping[str, str] | None = None) -> None:
        await self.kubelet.add_nodes(count, labels={NODE_LABEL: self.nodes}, capacity=capacity)

    async def create(self, body: Object) -> Object:
        """Create a Framework as written, except for the namespace, and the nodes that its pods may run on."""
        body["metadata"]["namespace"] = self.namespace
        for role in body["spec"]["taskRoles"]:
            role["task"]["pod"]["spec"]["nodeSelector"] = {NODE_LABEL: self.nodes}
        return await super().create(body)

    async def annotate_pods(self, name: str, annotations: Mapping[str, str]) -> None:
        """Change what the pods do."""
        for pod in await self.pods(name):
            await self.api.patch(PODS, pod, self.namespace, {"metadata": {"annotations": dict(annotations)}})

    async def finish(self, name: str) -> None:
        """Make the pods succeed."""
        await self.annotate_pods(name, {"hollow/exit-code": "0", "hollow/run-seconds": "0"})

    async def until_event(self, name: str, reason: str) -> None:
        """Wait for an Event about the Framework."""

        async def is_there() -> bool:
            return reason in await self.events(name)

        await until(is_there, f"{name}'s Event {reason}")

    async def until_completed(self, name: str) -> Object:
        """Wait for the end. Return the status. Nothing of the attempt is left then."""
        status = await self.until_state(name, "Completed")
        assert await self.pods(name) == {}
        assert await self.config_map(name) is None
        return status


@asynccontextmanager
async def real_frameworks(plane: ControlPlane, namespace: str, directory: Path) -> AsyncIterator[RealFrameworks]:
    """Yield an administrator's view of a namespace, and a kubelet for its pods, whose programs are barriers."""
    environ = {"KUBECONFIG": str(plane.kubeconfig), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    programs = {"barrier": process(["frameworkbarrier"], directory=directory, environ=environ)}
    programs["hasty-barrier"] = hasty_barrier(plane.kubeconfig, directory)
    async with (
        await KubeClient.connect(str(plane.kubeconfig)) as api,
        HollowKubelet(api, namespace=namespace, programs=programs).playing() as kubelet,
    ):
        yield RealFrameworks(api, kubelet, namespace, directory)


def hasty_barrier(kubeconfig: Path, directory: Path) -> Program:
    """Return a program: the barrier in this process, with a shorter time limit than can be configured."""

    async def run(container: ContainerRun) -> Ended:
        place = directory / uid_of(container.pod)
        place.mkdir(parents=True)
        asked = Config.from_environ({**container.env, "KUBECONFIG": str(kubeconfig)})
        return Ended(
            int(
                await FrameworkBarrier(
                    replace(asked, barrier_check_timeout_sec=HASTE), output_dir=place, say=lambda line: None
                ).run()
            )
        )

    return run


def codes_of(status: Object, role: str) -> list[int | None]:
    """Return how the tasks of a role ended."""
    return [(task["attemptStatus"]["completionStatus"] or {}).get("code") for task in tasks_of(status, role)]
