"""Metrics of the roles on Kubernetes.

Those of requests and jobs are recorded as events happen; those of elections, informers and Kubernetes' Events are read
at each scrape. Metrics of requests have client-go's names, and those of jobs the names of Kubeflow's operators, so that
dashboards and alerts made for Go programs work; the labels kind and namespace are our addition. Others are called
`rcfarm_job_…`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, get_args
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from controllers.loop.control_loop import ChildVerb, JobOutcome, ReconcileResult
from store.kube.events import EventRecorder
from store.kube.informer.informer import Informer
from store.kube.leaderelection.election import Election

REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # client-go's
RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
NO_ANSWER = "<error>"  # client-go's code for it

_METHODS = {"create": "POST", "replace": "PUT", "patch": "PATCH", "delete": "DELETE"}
_PLURALS = {"Pod": "pods", "PodDisruptionBudget": "pod_disruption_policies", "PodGroup": "pod_groups"}


class RestClientMetrics:
    """The `RequestMetrics` of all clients of a process.

    `answered`: requests that got an answer, by resource. `host`: the host and port of the API server.
    """

    def __init__(self, registry: CollectorRegistry, server: str) -> None:
        self.answered: collections.Counter[str] = collections.Counter()
        self.host = urlsplit(server).netloc
        self._requests = Counter(
            "rest_client_requests_total",
            "HTTP requests, by status code and method.",
            ["code", "method", "host"],
            registry=registry,
        )
        self._duration = Histogram(
            "rest_client_request_duration_seconds",
            "From sending a request until the headers of its answer, by method.",
            ["verb", "host"],
            registry=registry,
            buckets=REQUEST_BUCKETS,
        )

    def request(self, verb: str, resource: str, status: int, seconds: float) -> None:
        method = _METHODS.get(verb, "GET")
        self.answered[resource] += bool(status)
        self._requests.labels(str(status) if status else NO_ANSWER, method, self.host).inc()
        self._duration.labels(method, self.host).observe(seconds)


class PrometheusJobMetrics:
    """The `JobMetrics` of controllers; one for all kinds of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels or ("kind", "namespace"), registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=RECONCILE_BUCKETS)

        verbs: tuple[ChildVerb, ...] = get_args(ChildVerb)
        self._named = {
            (verb, kind): counter(f"{verb}d_{plural}_total", f"{kind}s that were {verb}d.")
            for verb in verbs
            for kind, plural in _PLURALS.items()
        }
        self._services = {
            True: counter("succeeded_service_creation_total", "Services that were created."),
            False: counter("failed_service_creation_total", "Services that could not be created."),
        }
        self._failed_pods = counter("failed_pods_total", "Failed pods of jobs.")
        self._requests = counter(
            "rcfarm_job_child_requests_total",
            "Creations and deletions of jobs' children, by result (ok or error).",
            "kind", "namespace", "child", "verb", "result",
        )  # fmt: skip
        self._jobs = {
            outcome: counter(
                f"training_operator_jobs_{outcome}_total", f"Jobs: {outcome}.", "job_namespace", "framework"
            )
            for outcome in get_args(JobOutcome)
        }
        self._reconciled = histogram(
            "rcfarm_job_reconcile_duration_seconds", "One run of a job's key, by its result.", "kind", "result"
        )
        self._lag = histogram(
            "rcfarm_job_action_lag_seconds", "From the event that woke a job to the first request for it.", "kind"
        )

    def child(self, job_kind: str, verb: ChildVerb, kind: str, namespace: str, *, ok: bool) -> None:
        self._requests.labels(job_kind, namespace, kind, verb, "ok" if ok else "error").inc()
        if (verb, kind) == ("create", "Service"):
            self._services[ok].labels(job_kind, namespace).inc()
        elif ok and (named := self._named.get((verb, kind))):
            named.labels(job_kind, namespace).inc()

    def pod_failed(self, job_kind: str, namespace: str) -> None:
        self._failed_pods.labels(job_kind, namespace).inc()

    def job(self, job_kind: str, outcome: JobOutcome, namespace: str) -> None:
        self._jobs[outcome].labels(namespace, job_kind).inc()

    def reconciled(self, job_kind: str, result: ReconcileResult, seconds: float) -> None:
        self._reconciled.labels(job_kind, result).observe(seconds)

    def acted(self, job_kind: str, lag: float) -> None:
        self._lag.labels(job_kind).observe(lag)


def election_metrics(election: Election | None) -> Iterator[Metric]:
    """Yield the election's metrics; none without an election."""
    if election is not None:
        leading = GaugeMetricFamily("leader_election_master_status", "1 while we lead.", labels=["name"])
        leading.add_metric([election.name], float(election.is_leader))
        yield leading


def event_metrics(recorder: EventRecorder) -> Metric:
    family = CounterMetricFamily(
        "rcfarm_kube_events",
        "Events about objects: written, skipped as too many of one object, dropped because too many waited, "
        "rejected by the API server, abandoned without its answer.",
        labels=["result"],
    )
    for result in ("written", "skipped", "dropped", "rejected", "abandoned"):
        family.add_metric([result], getattr(recorder, result))
    return family


class _Family(Protocol):
    def add_metric(self, labels: list[str], value: float) -> None: ...


def informer_metrics(informers: Iterable[Informer]) -> Iterator[Metric]:
    """Yield one series per resource; several namespaces are one series, with the worst age."""
    by_resource: dict[str, list[Informer]] = collections.defaultdict(list)
    for informer in informers:
        by_resource[informer.resource.plural].append(informer)

    def each(family: _Family, read: Callable[[list[Informer]], float]) -> None:
        for resource, group in by_resource.items():
            family.add_metric([resource], read(group))

    ages = GaugeMetricFamily(
        "rcfarm_informer_age_seconds", "Seconds since the API server last answered.", labels=["resource"]
    )
    for resource, group in by_resource.items():
        if seen := [informer.age for informer in group if informer.last_seen is not None]:
            ages.add_metric([resource], max(seen))
    objects = GaugeMetricFamily("rcfarm_informer_objects", "Objects in the cache.", labels=["resource"])
    each(objects, lambda group: sum(map(len, group)))
    failing = GaugeMetricFamily(
        "rcfarm_informer_failing", "Caches that can't be kept current at present.", labels=["resource"]
    )
    each(failing, lambda group: sum(bool(informer.problem) for informer in group))
    malformed = CounterMetricFamily(
        "rcfarm_informer_malformed", "Undecodable objects, which were left out.", labels=["resource"]
    )
    each(malformed, lambda group: sum(informer.malformed for informer in group))
    unreadable = GaugeMetricFamily(
        "rcfarm_informer_unreadable",
        "Undecodable objects that exist now; the log names them.",
        labels=["resource"],
    )
    each(unreadable, lambda group: sum(len(informer.unreadable) for informer in group))
    failures = CounterMetricFamily(
        "rcfarm_informer_handler_failures",
        "Changes that a handler failed on; the log has the traceback.",
        labels=["resource"],
    )
    each(failures, lambda group: sum(informer.handler_failures for informer in group))
    events = CounterMetricFamily("rcfarm_informer_events", "Events of watches.", labels=["resource"])
    each(events, lambda group: sum(informer.stats.events for informer in group))
    yield from (ages, objects, failing, malformed, unreadable, failures, events)
    yield _reasons("rcfarm_informer_lists", "Lists, by why they were made.", by_resource, "lists")
    yield _reasons("rcfarm_informer_watches", "Watches, by why they were begun.", by_resource, "watches")


def _reasons(name: str, text: str, by_resource: dict[str, list[Informer]], attribute: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=["resource", "reason"])
    for resource, group in by_resource.items():
        total: collections.Counter[str] = collections.Counter()
        for informer in group:
            total.update(getattr(informer.stats, attribute))
        for reason, count in total.items():
            family.add_metric([resource, reason], count)
    return family
