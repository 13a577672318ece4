"""What `rcfarm extender` records as it works."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from scheduler.hived.pod_states import ExtenderCall
from scheduler.hived.reload import ReloadResult
from scheduler.hived.scheduler_metrics import Decision, EvictionResult
from scheduler.hived.types import SchedulingPhase
from scheduler.hived.web_server import CallResult

DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class ExtenderMetrics:
    """The `SchedulerMetrics` and `CallMetrics` of an extender, and what its configuration file's watcher tells."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rcfarm_hived_{name}", text, labels, registry=registry)

        self._decisions = Histogram(
            "rcfarm_hived_decision_duration_seconds",
            "Decisions on pods without a place, by kube-scheduler's phase and by what was decided.",
            ["phase", "decision"],
            registry=registry,
            buckets=DECISION_BUCKETS,
        )
        self._calls = Histogram(
            "rcfarm_hived_call_duration_seconds",
            "Calls of kube-scheduler, until they were answered; by whose fault it was if they failed.",
            ["call", "result"],
            registry=registry,
            buckets=CALL_BUCKETS,
        )
        self._bindings = counter(
            "bindings_total",
            "Bindings posted; forced are those that kube-scheduler did not ask for.",
            "forced",
            "result",
        )
        self._evictions = counter("evictions_total", "Evictions of victims posted by us.", "result")
        self._left_out = counter("not_recovered_total", "Bound pods left out: their placement can't be understood.")
        self._elsewhere = counter(
            "foreign_bindings_total", "Pods found bound by another extender: there must be one that decides."
        )
        self._reloads = counter("config_reloads_total", "New contents of the configuration file.", "result")

    def decided(self, phase: SchedulingPhase, decision: Decision, seconds: float) -> None:
        self._decisions.labels(phase, decision).observe(seconds)

    def bound(self, *, forced: bool, ok: bool) -> None:
        self._bindings.labels(str(forced).lower(), "ok" if ok else "error").inc()

    def evicted(self, result: EvictionResult) -> None:
        self._evictions.labels(result).inc()

    def not_recovered(self) -> None:
        self._left_out.inc()

    def bound_elsewhere(self) -> None:
        self._elsewhere.inc()

    def answered(self, call: ExtenderCall, result: CallResult, seconds: float) -> None:
        self._calls.labels(call, result).observe(seconds)

    def reloaded(self, result: ReloadResult) -> None:
        self._reloads.labels(result).inc()
