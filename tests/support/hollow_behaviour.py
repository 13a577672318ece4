"""What the annotations of a pod ask its hollow kubelet for. They may be changed while the pod runs.

    hollow/start-seconds   from the binding until it has an address and its first container starts; 0
    hollow/exit-code       how its containers end; separated by commas: one for each start, the last for all later ones
    hollow/run-seconds     how long its containers run; without an exit code for ever, else 0
    hollow/reason          of the end: "Completed" or "Error" by default; likewise hollow/message and hollow/signal
    hollow/program         a container does not pretend: it runs the program that the kubelet has under this name
    hollow/evict-seconds   so long after its start the pod fails, with hollow/evict-reason, "Evicted" by default
    hollow/stop-seconds    how long it takes to stop when deleted, at most its grace period; 0
    hollow/stop-code       it reports that its containers ended with this code before it goes; by default it just goes
    hollow/stuck           with "true", its deletion never ends

Seconds may be "inf". The first of these for one container are written as `hollow/NAME.exit-code` and so on. What has no
container's name is for the app containers; init containers end at once with 0 unless they are named.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from store.kube.objects import Object, annotations_of

PREFIX = "hollow/"


class Ended(NamedTuple):
    """How a container ended. `reason` "" stands for the usual one."""

    code: int
    reason: str = ""
    message: str = ""
    signal: int = 0


class ContainerPlan(NamedTuple):
    """`seconds` of running, then `end`; or `program`, when that is not ""."""

    seconds: float
    end: Ended
    program: str


class PodPlan(NamedTuple):
    """See the annotations of the module."""

    start_seconds: float
    evict_seconds: float
    evict_reason: str
    stop_seconds: float
    stop_code: int | None
    is_stuck: bool


def pod_plan(pod: Object) -> PodPlan:
    asked = _Asked(pod, "", is_init=False)
    stop_code = asked.text("stop-code")
    return PodPlan(
        asked.seconds("start-seconds", 0.0),
        asked.seconds("evict-seconds", math.inf),
        asked.text("evict-reason") or "Evicted",
        asked.seconds("stop-seconds", 0.0),
        int(stop_code) if stop_code else None,
        asked.text("stuck") == "true",
    )


def container_plan(pod: Object, name: str, *, is_init: bool, starts: int) -> ContainerPlan:
    """What the container `name` does at its start number `starts`, counted from 0."""
    asked = _Asked(pod, name, is_init=is_init)
    codes = [int(code) for code in asked.text("exit-code").split(",") if code.strip()]
    ends = bool(codes) or is_init
    end = Ended(
        codes[min(starts, len(codes) - 1)] if codes else 0,
        asked.text("reason"),
        asked.text("message"),
        int(asked.text("signal") or 0),
    )
    return ContainerPlan(asked.seconds("run-seconds", 0.0 if ends else math.inf), end, asked.text("program"))


class _Asked:
    """Looks annotations up, the container's own first."""

    def __init__(self, pod: Object, container: str, *, is_init: bool) -> None:
        self._annotations = annotations_of(pod)
        self._prefixes = [f"{PREFIX}{container}."] if container else []
        self._prefixes += [] if is_init else [PREFIX]

    def text(self, name: str) -> str:
        found = (self._annotations.get(prefix + name) for prefix in self._prefixes)
        return next((value for value in found if value is not None), "")

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name)
        return float(text) if text else default
