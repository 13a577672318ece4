"""What the extender reports: measurements, as metrics of the process that starts it, and Kubernetes Events on pods."""

from __future__ import annotations

from typing import Literal, TypeAlias

from controllers.extender.pod_states import ExtenderCall
from scheduler.hived.algorithm import SchedulingPhase
from store.kube.api.objects import PODS, Object
from store.kube.events import Recorder, Severity

Outcome: TypeAlias = Literal["bind", "preempt", "wait", "error"]
EvictionResult: TypeAlias = Literal["accepted", "gone", "budget", "failed"]
CallResult: TypeAlias = Literal["ok", "user_error", "platform_error", "not_now"]


class Metrics:
    """Receives measurements; this base class drops them. Durations are in seconds."""

    def answered(self, call: ExtenderCall, result: CallResult, seconds: float) -> None:
        """Record an answered call of kube-scheduler and the time since its headers arrived."""

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


def write_event(recorder: Recorder | None, pod: Object, severity: Severity, reason: str, message: str) -> None:
    """Write an Event on a pod; without a recorder do nothing. `reason`: a CamelCase identifier."""
    if recorder is not None:
        recorder.event(pod, severity, reason, message, api_version=PODS.api_version, kind=PODS.kind)
