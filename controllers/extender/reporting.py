"""What the scheduler reports: measurements, as metrics of the process that starts it, and Kubernetes Events on pods."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from scheduler.hived.protocol import SchedulingPhase
from store.kube.api.objects import PODS, Object
from store.kube.events import Recorder, Severity

Outcome: TypeAlias = Literal["bind", "preempt", "wait", "error"]
EvictionResult: TypeAlias = Literal["accepted", "gone", "budget", "failed"]


class SchedulerMetrics(Protocol):
    """Receives measurements. Durations are in seconds."""

    def decided(self, phase: SchedulingPhase, decision: Outcome, seconds: float) -> None:
        """Record a decision on a pod without a place, and the time that it took the single writer."""

    def bound(self, *, forced: bool, ok: bool) -> None:
        """Record a posted Binding, for kube-scheduler's call or (`forced`) without one."""

    def evicted(self, result: EvictionResult) -> None:
        """Record a posted Eviction. `budget`: blocked by a disruption budget."""

    def not_recovered(self) -> None:
        """Record a bound pod that was left out because its placement is unreadable."""

    def bound_elsewhere(self) -> None:
        """Record a pod that was bound with a placement written by another extender."""


class NoSchedulerMetrics:
    """Measures nothing."""

    def decided(self, phase: SchedulingPhase, decision: Outcome, seconds: float) -> None:
        pass

    def bound(self, *, forced: bool, ok: bool) -> None:
        pass

    def evicted(self, result: EvictionResult) -> None:
        pass

    def not_recovered(self) -> None:
        pass

    def bound_elsewhere(self) -> None:
        pass


class PodEvents:
    """Writes Events on pods; does nothing without a recorder."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def event(self, pod: Object, severity: Severity, reason: str, message: str) -> None:
        """Write an Event. `reason`: a CamelCase identifier."""
        if self._recorder is not None:
            self._recorder.event(pod, severity, reason, message, api_version=PODS.api_version, kind=PODS.kind)
