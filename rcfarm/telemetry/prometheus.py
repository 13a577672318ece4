"""Prometheus metrics, in a registry that is passed in: two farms in one process, or two tests, never share one.

Frequent events with a duration (a reconcile, an item of a work queue) are recorded as they happen. Everything else (how
many RCs are owned, how old a view is) is read from the objects at each scrape; see `rcfarm.roles.farm`. The work
queue's metrics have client-go's names, so that its dashboards and alerts work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from controllers.loop.workqueue import QueueMetrics
from store.kv.protocol import Store
from store.schema.records import AnalysisOutcome

QUEUE_BUCKETS = tuple(10.0**exponent for exponent in range(-8, 4))  # client-go's, carried on to 1000 s
RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Family = GaugeMetricFamily | CounterMetricFamily
P = ParamSpec("P")
T = TypeVar("T")


def new_registry(version: str) -> CollectorRegistry:
    """Return a registry with the process's own metrics and the running `version`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("rcfarm_build", "The version that runs.", registry=registry).info({"version": version})
    return registry


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a value that is read at the scrape."""
    return GaugeMetricFamily(name, text, value=float(value))


def counter(name: str, text: str, value: float) -> Metric:
    """Return a count that is read at the scrape."""
    return CounterMetricFamily(name, text, value=float(value))


def labelled(
    name: str, text: str, label: str, values: Mapping[Any, float], kind: type[Family] = GaugeMetricFamily
) -> Metric:
    """Return one series for each value."""
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


class WorkQueueMetrics:
    """The `MetricsProvider` of work queues. A queue that takes an earlier one's name takes over its series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, namespace="workqueue", labelnames=["name"], registry=registry)
        histogram = partial(
            Histogram, namespace="workqueue", labelnames=["name"], registry=registry, buckets=QUEUE_BUCKETS
        )

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
        self._analyses = Counter(
            "rcfarm_analysis_runs_total",
            "Runs of analyses of rollouts, by outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in get_args(AnalysisOutcome):
            self._analyses.labels(outcome)
        self._notifications = Counter(
            "rcfarm_notifications_total",
            "Events about incidents that were sent, or could not be sent.",
            ["result"],
            registry=registry,
        )
        for result in ("sent", "failed"):
            self._notifications.labels(result)
        self._done = self._duration.labels("done")
        self._failed = self._duration.labels("error")

    def analysed(self, outcome: AnalysisOutcome) -> None:
        """Count a run of an analysis."""
        self._analyses.labels(outcome).inc()

    def notified(self, result: Literal["sent", "failed"]) -> None:
        """Count an attempt to send an event about an incident."""
        self._notifications.labels(result).inc()

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


def _measured(
    method: Callable[Concatenate[Store, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[MeteredStore, P], Coroutine[Any, Any, T]]:
    """Return the method of a `MeteredStore` that passes on the calls of this method, with their measures."""
    verb = method.__name__
    kind = "watch" if verb.startswith("watch") else "call"

    async def call(self: MeteredStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        in_use = self.connections.labels(kind)
        start = time.perf_counter()
        in_use.inc()
        try:
            result: T = await getattr(self.store, verb)(*args, **kwargs)
        except Exception as error:
            self.errors.labels(verb, type(error).__name__).inc()
            raise
        finally:
            in_use.dec()
        if kind == "call":
            self.duration.labels(verb).observe(time.perf_counter() - start)
        return result

    return call


class MeteredStore:
    """Wraps a store. A call in flight is a connection in use; a watch holds one for as long as it waits."""

    def __init__(self, store: Store, registry: CollectorRegistry) -> None:
        self.store = store
        self.duration = Histogram(
            "rcfarm_store_request_duration_seconds",
            "Calls to the store that were answered, by verb, without watches.",
            ["verb"],
            registry=registry,
            buckets=STORE_BUCKETS,
        )
        self.errors = Counter(
            "rcfarm_store_errors_total",
            "Calls that ended in an error, by verb and error; TxnConflict and OwnershipLost are refused transactions.",
            ["verb", "error"],
            registry=registry,
        )
        self.connections = Gauge(
            "rcfarm_store_connections_in_use",
            "Calls and watches in flight: a connection each.",
            ["kind"],
            registry=registry,
        )

    get = _measured(Store.get)
    list = _measured(Store.list)
    keys = _measured(Store.keys)
    put = _measured(Store.put)
    delete = _measured(Store.delete)
    txn = _measured(Store.txn)
    watch = _measured(Store.watch)
    watch_keys = _measured(Store.watch_keys)
    create_session = _measured(Store.create_session)
    renew_session = _measured(Store.renew_session)
    destroy_session = _measured(Store.destroy_session)
    session_info = _measured(Store.session_info)

    async def close(self) -> None:
        """See `Store.close`."""
        await self.store.close()
