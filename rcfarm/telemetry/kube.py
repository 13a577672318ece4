"""Metrics of the roles on Kubernetes.

Those of requests and jobs are recorded as events happen; those of elections, informers and Kubernetes' Events are read
at each scrape. Metrics of requests have client-go's names, and those of jobs the names of Kubeflow's operators, so that
dashboards and alerts made for Go programs work; the labels kind and namespace are our addition. Others are called
`rcfarm_job_…`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import get_args
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from controllers.loop.control_loop import ChildVerb, JobOutcome, ReconcileResult
from rcfarm.telemetry.prometheus import RECONCILE_BUCKETS, Family, labelled
from store.kube.events import EventRecorder
from store.kube.informer.informer import Informer
from store.kube.leaderelection.election import Election

REQUEST_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)  # client-go's
NO_ANSWER = "<error>"  # client-go's code for it

SCOPE: ContextVar[str] = ContextVar("scope", default="")
"""On whose behalf a task and the tasks that it starts make requests; set by roles that do several kinds of work."""

_METHODS = {"create": "POST", "replace": "PUT", "patch": "PATCH", "delete": "DELETE"}
_PLURALS = {"Pod": "pods", "PodDisruptionBudget": "pod_disruption_policies", "PodGroup": "pod_groups"}


class RestClientMetrics:
    """The `RequestMetrics` of all clients of a process.

    `answered`: requests that got an answer, by the scope of the task that made them and by resource. `host`: the host
    and port of the API server.
    """

    def __init__(self, registry: CollectorRegistry, server: str) -> None:
        self.answered: collections.Counter[tuple[str, str]] = collections.Counter()
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
        self.answered[SCOPE.get(), resource] += bool(status)
        self._requests.labels(str(status) if status else NO_ANSWER, method, self.host).inc()
        self._duration.labels(method, self.host).observe(seconds)


class PrometheusJobMetrics:
    """The `JobMetrics` of controllers; one for all kinds of a process. `frameworks`: the value of the label `framework`
    by kind, where it is not the kind."""

    def __init__(self, registry: CollectorRegistry, frameworks: Mapping[str, str] | None = None) -> None:
        self._frameworks = frameworks or {}
        counter, labels = partial(Counter, registry=registry), ("kind", "namespace")
        histogram = partial(Histogram, registry=registry, buckets=RECONCILE_BUCKETS)
        verbs: tuple[ChildVerb, ...] = get_args(ChildVerb)
        self._named = {
            (verb, kind): counter(f"{verb}d_{plural}_total", f"{kind}s that were {verb}d.", labels)
            for verb in verbs
            for kind, plural in _PLURALS.items()
        }
        self._services = {
            True: counter("succeeded_service_creation_total", "Services that were created.", labels),
            False: counter("failed_service_creation_total", "Services that could not be created.", labels),
        }
        self._failed_pods = counter("failed_pods_total", "Failed pods of jobs.", labels)
        self._requests = counter(
            "rcfarm_job_child_requests_total",
            "Creations and deletions of jobs' children, by result (ok or error).",
            (*labels, "child", "verb", "result"),
        )
        self._jobs = {
            outcome: counter(
                f"training_operator_jobs_{outcome}_total", f"Jobs: {outcome}.", ("job_namespace", "framework")
            )
            for outcome in get_args(JobOutcome)
        }
        self._reconciled = histogram(
            "rcfarm_job_reconcile_duration_seconds", "One run of a job's key, by its result.", ("kind", "result")
        )
        self._lag = histogram(
            "rcfarm_job_action_lag_seconds", "From the event that woke a job to the first request for it.", ("kind",)
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
        self._jobs[outcome].labels(namespace, self._frameworks.get(job_kind, job_kind)).inc()

    def reconciled(self, job_kind: str, result: ReconcileResult, seconds: float) -> None:
        self._reconciled.labels(job_kind, result).observe(seconds)

    def acted(self, job_kind: str, lag: float) -> None:
        self._lag.labels(job_kind).observe(lag)


def election_metrics(election: Election | None) -> Iterator[Metric]:
    """Yield the election's metrics; none without an election."""
    if election is not None:
        leading = {election.name: election.is_leader}
        yield labelled("leader_election_master_status", "1 while we lead.", "name", leading)


def event_metrics(*recorders: EventRecorder) -> Metric:
    results = ("written", "skipped", "dropped", "rejected", "abandoned")
    return labelled(
        "rcfarm_kube_events",
        "Events about objects: written, skipped as too many of one object, dropped because too many waited, "
        "rejected by the API server, abandoned without its answer.",
        "result",
        {result: sum(getattr(recorder, result) for recorder in recorders) for result in results},
        CounterMetricFamily,
    )


def informer_metrics(informers: Iterable[Informer]) -> Iterator[Metric]:
    """Yield one series per resource; several namespaces are one series, with the worst age."""
    by_resource: dict[str, list[Informer]] = collections.defaultdict(list)
    for informer in informers:
        by_resource[informer.resource.plural].append(informer)
    ages = {
        resource: max(seen)
        for resource, group in by_resource.items()
        if (seen := [informer.age for informer in group if informer.last_seen is not None])
    }
    yield labelled("rcfarm_informer_age_seconds", "Seconds since the API server last answered.", "resource", ages)
    for kind, name, text, read in _INFORMER_SUMS:
        sums = {resource: sum(map(read, group)) for resource, group in by_resource.items()}
        yield labelled(f"rcfarm_informer_{name}", text, "resource", sums, kind)
    yield _reasons("rcfarm_informer_lists", "Lists, by why they were made.", by_resource, "lists")
    yield _reasons("rcfarm_informer_watches", "Watches, by why they were begun.", by_resource, "watches")


_INFORMER_SUMS: tuple[tuple[type[Family], str, str, Callable[[Informer], int]], ...] = (
    (GaugeMetricFamily, "objects", "Objects in the cache.", len),
    (GaugeMetricFamily, "failing", "Caches that can't be kept current at present.", lambda each: bool(each.problem)),
    (CounterMetricFamily, "malformed", "Undecodable objects, which were left out.", lambda each: each.malformed),
    (
        GaugeMetricFamily,
        "unreadable",
        "Undecodable objects that exist now; the log names them.",
        lambda each: len(each.unreadable),
    ),
    (
        CounterMetricFamily,
        "handler_failures",
        "Changes that a handler failed on; the log has the traceback.",
        lambda each: each.handler_failures,
    ),
    (CounterMetricFamily, "events", "Events of watches.", lambda each: each.stats.events),
)


def _reasons(name: str, text: str, by_resource: dict[str, list[Informer]], attribute: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=["resource", "reason"])
    for resource, group in by_resource.items():
        total: collections.Counter[str] = collections.Counter()
        for informer in group:
            total.update(getattr(informer.stats, attribute))
        for reason, count in total.items():
            family.add_metric([resource, reason], count)
    return family
