"""What the scheduler reports as it happens; whoever starts it gives the figures their names and a place."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from scheduler.hived.types import SchedulingPhase

Decision: TypeAlias = Literal["bind", "preempt", "wait", "error"]
EvictionResult: TypeAlias = Literal["accepted", "gone", "budget", "failed"]


class SchedulerMetrics(Protocol):
    """Durations in seconds."""

    def decided(self, phase: SchedulingPhase, decision: Decision, seconds: float) -> None:
        """A decision on a pod that had no place yet, and how long it took the single writer."""

    def bound(self, *, forced: bool, ok: bool) -> None:
        """A Binding was posted, on kube-scheduler's call or (`forced`) on our own."""

    def evicted(self, result: EvictionResult) -> None:
        """An Eviction was posted. `budget`: a disruption budget holds it up."""

    def not_recovered(self) -> None:
        """A bound pod was left out because its placement can't be understood."""

    def bound_elsewhere(self) -> None:
        """A pod without a place was found bound, with a placement that another extender has written."""


class NoSchedulerMetrics:
    """Measures nothing."""

    def decided(self, phase: SchedulingPhase, decision: Decision, seconds: float) -> None:
        pass

    def bound(self, *, forced: bool, ok: bool) -> None:
        pass

    def evicted(self, result: EvictionResult) -> None:
        pass

    def not_recovered(self) -> None:
        pass

    def bound_elsewhere(self) -> None:
        pass
