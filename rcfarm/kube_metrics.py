"""Metrics of control loops on Kubernetes, recorded as things happen.

Requests carry client-go's names, and what happens to jobs those of Kubeflow's operators, so that dashboards and alerts
made for Go programs fit; theirs have no labels for kind and namespace. What has no such name is called `rcfarm_job_…`.
"""

from __future__ import annotations

import collections
from typing import get_args
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram

from controllers.job_metrics import ChildVerb, JobOutcome, ReconcileResult

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
        self._failed_pods = counter("failed_pods_total", "Pods of jobs that were seen to have failed.")
        self._requests = counter(
            "rcfarm_job_child_requests_total",
            "Creations and deletions of what belongs to jobs, by their result (ok or error).",
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
