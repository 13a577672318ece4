"""The status of a hollow pod: its containers' states as a kubelet reports them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from store.kube.api.objects import Object, format_time
from tests.support.kube.hollow.behaviour import Ended


@dataclass
class ContainerState:
    """One container. Times in Unix seconds. `last`: the end before the present run."""

    name: str
    image: str
    is_init: bool
    starts: int = 0
    started: float | None = None
    finished: float | None = None
    ended: Ended | None = None
    last: Object | None = None

    def start(self, now: float) -> None:
        if self.ended is not None:
            self.last = self._state()
        self.starts += 1
        self.started, self.finished, self.ended = now, None, None

    def end(self, ended: Ended, now: float) -> None:
        self.finished, self.ended = now, ended

    @property
    def is_running(self) -> bool:
        return self.started is not None and self.ended is None

    @property
    def has_succeeded(self) -> bool:
        return self.ended is not None and self.ended.code == 0

    def report(self) -> Object:
        """Return its `ContainerStatus`."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"hollow://{self.image}",
            "ready": self.has_succeeded if self.is_init else self.is_running,
            "restartCount": max(0, self.starts - 1),
            "state": self._state(),
            **({"lastState": self.last} if self.last else {}),
        }

    def _state(self) -> Object:
        if self.started is None:
            return {"waiting": {"reason": "PodInitializing"}}
        times = {"startedAt": format_time(self.started)}
        if self.ended is None or self.finished is None:
            return {"running": times}
        code, message = self.ended
        end = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", **times}
        optional = {"message": message} if message else {}
        return {"terminated": {**end, **optional, "finishedAt": format_time(self.finished)}}


def containers_of(pod: Object) -> tuple[list[ContainerState], list[ContainerState]]:
    """Return init containers and app containers, none of which has started."""
    spec = pod["spec"]
    return (
        [ContainerState(each["name"], each["image"], True) for each in spec.get("initContainers") or ()],
        [ContainerState(each["name"], each["image"], False) for each in spec["containers"]],
    )


def phase_of(inits: Iterable[ContainerState], apps: Sequence[ContainerState], policy: str) -> str:
    """Return the pod's phase under its restart policy: between two runs of a container the pod is Running."""
    if policy == "Never" and any(each.ended and each.ended.code for each in inits):
        return "Failed"
    if any(each.started is None for each in apps):
        return "Pending"
    has_succeeded = all(each.has_succeeded for each in apps)
    will_restart = policy == "Always" or (policy == "OnFailure" and not has_succeeded)
    if will_restart or any(each.ended is None for each in apps):
        return "Running"
    return "Succeeded" if has_succeeded else "Failed"


def status_of(
    phase: str, inits: Sequence[ContainerState], apps: Sequence[ContainerState], started: float, addresses: Object
) -> Object:
    """Return a `PodStatus` to be merged into the pod's. `addresses`: podIP and its like."""
    is_ready = bool(apps) and all(each.is_running for each in apps)
    conditions = {
        "Initialized": all(each.has_succeeded for each in inits),
        "ContainersReady": is_ready,
        "Ready": is_ready,
    }
    status: dict[str, Any] = {
        "phase": phase,
        "startTime": format_time(started),
        "conditions": [{"type": kind, "status": str(value)} for kind, value in conditions.items()],
        "containerStatuses": [each.report() for each in apps],
    }
    if inits:
        status["initContainerStatuses"] = [each.report() for each in inits]
    return status | addresses
