"""Prometheus metrics, in a registry that is passed in: two farms in one process, or two tests, never share one.

Frequent events with a duration (a reconcile, an item of a work queue) are recorded as they happen. Everything else (how
many RCs are owned, how old a view is) is read from the objects at each scrape; see `rcfarm.roles.farm`. The work
queue's metrics have client-go's names, so that its dashboards and alerts work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from controllers.loop.workqueue import QueueMetrics

QUEUE_BUCKETS = tuple(10.0**exponent for exponent in range(-8, 4))  # client-go's, carried on to 1000 s
RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def new_registry(version: str) -> CollectorRegistry:
    """Return a registry with the process's own metrics and the running `version`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("rcfarm_build", "The version that runs.", registry=registry).info({"version": version})
    return registry


class WorkQueueMetrics:
    """The `MetricsProvider` of work queues. A queue that takes an earlier one's name takes over its series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"workqueue_{name}", text, ["name"], registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"workqueue_{name}", text, ["name"], registry=registry, buckets=QUEUE_BUCKETS)

        self._adds = Counter("workqueue_adds_total", "Keys that became dirty.", ["name"], registry=registry)
        self._retries = Counter("workqueue_retries_total", "Delayed adds.", ["name"], registry=registry)
        self._depth = gauge("depth", "Keys that need work.")
        self._unfinished = gauge("unfinished_work_seconds", "Sum of the ages of the work in flight.")
        self._longest = gauge("longest_running_processor_seconds", "Age of the oldest work in flight.")
        self._waited = histogram("queue_duration_seconds", "From a key's becoming dirty until a worker takes it.")
        self._worked = histogram("work_duration_seconds", "From a worker's taking a key until it is done.")

    def queue_metrics(
        self,
        name: str,
        *,
        depth: Callable[[], float],
        unfinished_work: Callable[[], float],
        longest_running_processor: Callable[[], float],
    ) -> QueueMetrics:
        self._depth.labels(name).set_function(depth)
        self._unfinished.labels(name).set_function(unfinished_work)
        self._longest.labels(name).set_function(longest_running_processor)
        return _QueueSeries(
            self._adds.labels(name), self._retries.labels(name), self._waited.labels(name), self._worked.labels(name)
        )


class _QueueSeries:
    """The series of one queue, in the form that the queue calls."""

    def __init__(self, adds: Counter, retries: Counter, waited: Histogram, worked: Histogram) -> None:
        self.added: Callable[[], None] = adds.inc
        self.retried: Callable[[], None] = retries.inc
        self.waited: Callable[[float], None] = waited.observe
        self.worked: Callable[[float], None] = worked.observe


class FarmMetrics:
    """Metrics that a farm records as it works. Without a registry they go into a private one."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        self.registry = registry
        self.workqueue = WorkQueueMetrics(registry)
        self._duration = Histogram(
            "rcfarm_reconcile_duration_seconds",
            "One reconcile of an RC, with its commits, by whether it ended in an error.",
            ["result"],
            registry=registry,
            buckets=RECONCILE_BUCKETS,
        )
        self._done = self._duration.labels("done")
        self._failed = self._duration.labels("error")

    @contextmanager
    def reconciling(self) -> Iterator[None]:
        """Measure one reconcile. An error passes through and is counted as such; a cancellation is not counted."""
        start = time.perf_counter()
        try:
            yield
        except Exception:
            self._failed.observe(time.perf_counter() - start)
            raise
        self._done.observe(time.perf_counter() - start)
