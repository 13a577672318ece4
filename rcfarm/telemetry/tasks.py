"""Metrics of a task engine: what it records as it works (plugins' calls, the outbox, what plugins measure themselves),
and what is read at a scrape of schedules and ended executions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from controllers.tasks.api.plugin import MetricsScope
from controllers.tasks.engine.engine import EngineMetrics, Term
from controllers.tasks.engine.guard import GuardMetrics, Verb
from controllers.tasks.engine.outbox import OutboxMetrics
from rcfarm.telemetry.prometheus import RECONCILE_BUCKETS, WorkQueueMetrics, counter, gauge, labelled

_NAME = re.compile(r"[^a-zA-Z0-9_]")


class _Calls(GuardMetrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Histogram(
            "rcfarm_task_call_duration_seconds",
            "One call of a plugin, by how it ended.",
            ["plugin", "verb", "outcome"],
            registry=registry,
            buckets=RECONCILE_BUCKETS,
        )
        self._held = Counter(
            "rcfarm_task_loop_held_seconds",
            "Seconds for which a plugin's call blocked the event loop, in turns above a quarter of a second.",
            ["plugin"],
            registry=registry,
        )

    def called(self, plugin: str, verb: Verb, seconds: float, outcome: str) -> None:
        self._calls.labels(plugin, verb, outcome).observe(seconds)

    def held(self, plugin: str, seconds: float) -> None:
        self._held.labels(plugin).inc(seconds)


class _Events(OutboxMetrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._sent = Counter("rcfarm_task_events_sent", "Events that a sink has taken.", ["sink"], registry=registry)
        self._failed = Counter(
            "rcfarm_task_event_failures",
            "Attempts to send an event that failed; refused events are not sent again.",
            ["sink", "refused"],
            registry=registry,
        )

    def sent(self, sink: str) -> None:
        self._sent.labels(sink).inc()

    def failed(self, sink: str, *, refused: bool) -> None:
        self._failed.labels(sink, str(refused).lower()).inc()


class PluginScope(MetricsScope):
    """The metrics of one plugin, as `rcfarm_task_plugin_NAME` with the label `plugin`. A name that is used again with
    another kind or with other labels is ignored."""

    def __init__(self, plugin: str, prefix: str, registry: CollectorRegistry, known: dict[str, object]) -> None:
        self._plugin, self._prefix, self._registry, self._known = plugin, prefix, registry, known

    def sub_scope(self, name: str) -> MetricsScope:
        return PluginScope(self._plugin, f"{self._prefix}_{_clean(name)}", self._registry, self._known)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        if isinstance(metric := self._metric(Counter, name, labels), Counter):
            metric.labels(self._plugin, *labels.values()).inc(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        if isinstance(metric := self._metric(Gauge, name, labels), Gauge):
            metric.labels(self._plugin, *labels.values()).set(value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        if isinstance(metric := self._metric(Histogram, name, labels), Histogram):
            metric.labels(self._plugin, *labels.values()).observe(seconds)

    def _metric(self, kind: type[Counter] | type[Gauge] | type[Histogram], name: str, labels: dict[str, str]) -> object:
        full, names = f"{self._prefix}_{_clean(name)}", ["plugin", *labels]
        found = self._known.get(full)
        if found is None:
            found = self._known[full] = kind(full, "Measured by plugins.", names, registry=self._registry)
        fits = isinstance(found, Counter | Gauge | Histogram) and list(found._labelnames) == names
        return found if fits else None


def _clean(name: str) -> str:
    return _NAME.sub("_", name)


def engine_metrics(registry: CollectorRegistry, workqueue: WorkQueueMetrics | None = None) -> EngineMetrics:
    """Return where an engine's measurements go. `workqueue`: that of the registry, if it has one."""
    known: dict[str, object] = {}
    return EngineMetrics(
        workqueue=workqueue or WorkQueueMetrics(registry),
        guard=_Calls(registry),
        outbox=_Events(registry),
        plugins=lambda plugin: PluginScope(plugin, "rcfarm_task_plugin", registry, known),
    )


def schedule_metrics(term: Term | None) -> Iterator[Metric]:
    """Yield the metrics of schedules, of the engine that begins their runs; and when they last succeeded, of the one
    that retains executions."""
    scheduler = term.scheduler if term else None
    known = scheduler.specs() if scheduler else {}
    leader = scheduler if scheduler and scheduler.leads else None
    runs: dict[str, float] = dict.fromkeys(known if leader else (), 0)  # a series that begins above 0 has no increase
    runs.update(scheduler.begun if scheduler else {})
    yield labelled("rcfarm_schedule_runs", "Runs of a schedule that began.", "schedule", runs, CounterMetricFamily)
    skipped = CounterMetricFamily(
        "rcfarm_schedule_skipped_runs",
        "Runs that did not begin: Missed, Overlap, DeadlinePassed, Replaced or IdTaken.",
        labels=["schedule", "reason"],
    )
    skips: dict[tuple[str, str], float] = {
        (name, code): 0 for name in known if leader for code in ("Missed", "Overlap")
    }
    skips.update(scheduler.skipped if scheduler else {})
    for (name, code), number in skips.items():
        skipped.add_metric([name, code], number)
    yield skipped
    yield labelled(
        "rcfarm_schedule_next_run_timestamp_seconds",
        "Moment of the next run; in the past, it is overdue.",
        "schedule",
        leader.next_runs if leader else {},
    )
    states = leader.states() if leader else {}
    yield labelled(
        "rcfarm_schedule_last_run_timestamp_seconds",
        "Moment of the newest run that began.",
        "schedule",
        {name: state.last_moment for name, state in states.items() if state.last_moment},
    )
    archive = term.retention.archive if term else None
    yield labelled(
        "rcfarm_schedule_last_success_timestamp_seconds",
        "End of the newest successful execution of a schedule.",
        "schedule",
        {name: at for name, at in (archive.successes if archive else {}).items() if name in known},
    )


def retention_metrics(term: Term | None) -> Iterator[Metric]:
    """Yield the metrics of ended executions; their number of the engine that removes them."""
    retention = term.retention if term else None
    archive = retention.archive if retention else None
    yield gauge("rcfarm_retention_leader", "1 for the engine that removes ended executions.", archive is not None)
    yield gauge(
        "rcfarm_ended_executions",
        "Ended executions that are kept; 0 unless it leads.",
        len(archive.ended) if archive else 0,
    )
    yield counter("rcfarm_retention_removed", "Ended executions removed.", retention.removed if retention else 0)
