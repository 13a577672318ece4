"""One pod on a hollow node, from its binding to its end.

The model: `run` is one task per pod, and owns a second one that plays the containers and reports what they do. When the
pod is evicted or has had its time to stop, that one is cancelled, and the pod reported as failed, or deleted for good.
A pod that is gone, or has a successor, is not written any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from store.kube.api.errors import Conflict, Invalid, KubeError, NotFound
from store.kube.api.objects import PODS, Object, is_deleting, name_of, namespace_of, uid_of
from store.kube.api.protocol import KubeApi
from tests.support.kube.hollow.behaviour import ContainerPlan, Ended, container_plan, environment, pod_plan
from tests.support.kube.hollow.status import ContainerState, containers_of, phase_of, status_of

TICK = 1e-3  # seconds that a timer may ring early
RETRY = 0.2  # seconds after a call that failed
KILLED = 137
EVICTED = "The node was low on a resource."
_FINISHED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class ContainerRun:
    """The input of a program: the present pod, the container's spec, its environment. `starts` counts from 0."""

    pod: Object
    container: Object
    env: dict[str, str]
    starts: int


Program = Callable[[ContainerRun], Coroutine[Any, Any, Ended]]  # cancelled when the pod is deleted


@dataclass(slots=True)
class Host:
    """State shared by the pods of one kubelet. `calls`: bounds the concurrent calls. `clock`: Unix seconds."""

    api: KubeApi
    clock: Callable[[], float]
    programs: Mapping[str, Program]
    calls: asyncio.Semaphore
    restart_delay: float


class PodRun:
    """Plays `pod` with these addresses (podIP and its like)."""

    def __init__(self, pod: Object, host: Host, addresses: Object) -> None:
        self.pod = pod
        self._host = host
        self._addresses = addresses
        self._inits, self._apps = containers_of(pod)
        self._started: float | None = None
        self._stop_asked: float | None = None
        self._failure: Object = {}
        self._is_gone = self._has_crashed = False
        self._changed = asyncio.Event()
        self._unreported = False
        self._reporting = asyncio.Lock()
        self._note_deletion()

    def update(self, pod: Object) -> None:
        """Take over another state of the pod."""
        self.pod = pod
        self._note_deletion()
        self._wake()

    def fail(self, reason: str, message: str) -> None:
        """Let the node fail the pod, as an eviction does."""
        self._failure = {"phase": "Failed", "reason": reason, "message": message}
        self._wake()

    async def run(self) -> None:
        """Run until the pod is gone. Raises a program's exception."""
        playing = asyncio.create_task(self._play(), name=f"containers of {name_of(self.pod)}")
        playing.add_done_callback(self._note_crash)
        try:
            await self._pass_time(self._left_to_live)
        finally:
            playing.cancel()
            await asyncio.wait([playing])
        if self._has_crashed:
            playing.result()
        if not is_deleting(self.pod):
            for container in (*self._inits, *self._apps):
                if container.is_running:
                    container.end(Ended(KILLED), self._host.clock())
            await self._report()
            await self._pass_time(self._left_to_stop)
        name, namespace, uid = name_of(self.pod), namespace_of(self.pod), uid_of(self.pod)
        await self._call(lambda: self._host.api.delete(PODS, name, namespace, uid=uid, grace_period=0))

    def _left_to_live(self) -> float:
        """Return the seconds until the containers are stopped."""
        if self._is_gone or self._failure or self._has_crashed:
            return 0.0
        if is_deleting(self.pod):
            return self._left_to_stop()
        return math.inf

    def _left_to_stop(self) -> float:
        """Return the seconds until the pod is deleted finally; infinite before its deletion."""
        plan = pod_plan(self.pod)
        if self._stop_asked is None or plan.is_stuck:
            return math.inf
        grace_ends = datetime.fromisoformat(self.pod["metadata"]["deletionTimestamp"]).timestamp()
        return min(self._stop_asked + plan.stop_seconds, grace_ends) - self._host.clock()

    def _note_deletion(self) -> None:
        if is_deleting(self.pod) and self._stop_asked is None:
            self._stop_asked = self._host.clock()

    def _note_crash(self, playing: asyncio.Task[None]) -> None:
        self._has_crashed = not playing.cancelled() and playing.exception() is not None
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _play(self) -> None:
        """Run the init containers one after the other, then the app containers side by side."""
        if (self.pod.get("status") or {}).get("phase") in _FINISHED:
            return
        await self._pass_time(lambda: pod_plan(self.pod).start_seconds)
        self._started = self._host.clock()
        self._wake()
        for container in self._inits:
            container.start(self._host.clock())
            await self._report()
            await self._finish(container)
            if not container.has_succeeded:
                await self._report()
                return
        for container in self._apps:
            container.start(self._host.clock())
        await self._report()
        async with asyncio.TaskGroup() as group:
            for container in self._apps:
                group.create_task(self._finish_and_report(container))

    async def _finish_and_report(self, container: ContainerState) -> None:
        await self._finish(container)
        await self._report()

    async def _finish(self, container: ContainerState) -> None:
        """Run a started container until it ends and is not to be started again."""
        while True:
            ended = await self._execute(container)
            container.end(ended, self._host.clock())
            if not self._restarts(container, ended):
                return
            await self._report()
            await asyncio.sleep(self._host.restart_delay)
            container.start(self._host.clock())
            await self._report()

    def _restarts(self, container: ContainerState, ended: Ended) -> bool:
        policy = self.pod["spec"].get("restartPolicy", "Always")
        return policy != "Never" and (ended.code != 0 or (policy == "Always" and not container.is_init))

    async def _execute(self, container: ContainerState) -> Ended:
        starts = container.starts - 1

        def plan() -> ContainerPlan:  # as the pod's annotations are now
            return container_plan(self.pod, container.name, is_init=container.is_init, starts=starts)

        if program := plan().program:
            spec = self.pod["spec"]
            found = [*(spec.get("initContainers") or ()), *spec["containers"]]
            own = next(each for each in found if each["name"] == container.name)
            seen = self.pod | {"status": (self.pod.get("status") or {}) | self._addresses}
            return await self._host.programs[program](ContainerRun(seen, own, environment(seen, own), starts))
        await self._pass_time(lambda: plan().seconds)
        return plan().end

    async def _pass_time(self, seconds: Callable[[], float]) -> None:
        """Wait for this time, computed again at each change of the pod."""
        now = asyncio.get_running_loop().time
        began = now()
        while (left := began + seconds() - now()) > TICK:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(left) else left):  # wait_for may lose a cancellation
                    await self._changed.wait()

    async def _report(self) -> None:
        """Write the present status; waiting reports are combined into one."""
        self._unreported = True
        async with self._reporting:
            if not self._unreported:
                return
            self._unreported = False
            phase = phase_of(self._inits, self._apps, self.pod["spec"].get("restartPolicy", "Always"))
            status = status_of(phase, self._inits, self._apps, self._started or 0.0, self._addresses) | self._failure
            patch = {"metadata": {"uid": uid_of(self.pod)}, "status": status}
            name, namespace, api = name_of(self.pod), namespace_of(self.pod), self._host.api
            await self._call(
                lambda: api.patch(PODS, name, namespace, patch, patch_type="strategic", subresource="status")
            )

    async def _call(self, call: Callable[[], Awaitable[object]]) -> None:
        """Retry a call until the server accepts it, or answers that the pod is gone."""
        while not self._is_gone:
            try:
                async with self._host.calls:
                    await call()
            except (NotFound, Conflict, Invalid):
                self._is_gone = True
                self._wake()
            except KubeError:
                await asyncio.sleep(RETRY)
            else:
                return
