"""The metrics of requests and jobs, under the names that dashboards use."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from rcfarm.telemetry.kube import PrometheusJobMetrics, RestClientMetrics


def test_requests_have_client_gos_names() -> None:
    """Code, method and host distinguish series; a missing answer has a code of its own."""
    registry = CollectorRegistry()
    metrics = RestClientMetrics(registry, "https://10.0.0.1:6443/cluster")
    for verb, status in (("get", 200), ("watch", 200), ("create", 409), ("replace", 200), ("patch", 0)):
        metrics.request(verb, "pods", status, 0.2)

    def count(code: str, method: str) -> float | None:
        labels = {"code": code, "method": method, "host": "10.0.0.1:6443"}
        return registry.get_sample_value("rest_client_requests_total", labels)

    assert count("200", "GET") == 2
    assert count("409", "POST") == 1
    assert count("200", "PUT") == 1
    assert count("<error>", "PATCH") == 1
    labels = {"verb": "GET", "host": "10.0.0.1:6443", "le": "0.25"}
    assert registry.get_sample_value("rest_client_request_duration_seconds_bucket", labels) == 2
    assert metrics.answered == {("", "pods"): 4}


def test_jobs_have_kubeflows_names() -> None:
    """Children, failed pods and outcomes are counted by kind and namespace."""
    registry = CollectorRegistry()
    metrics = PrometheusJobMetrics(registry)
    for kind in ("Pod", "PodGroup", "PodDisruptionBudget", "Service"):
        metrics.child("TrainJob", "create", kind, "space", ok=True)
        metrics.child("TrainJob", "create", kind, "space", ok=False)
        metrics.child("TrainJob", "delete", kind, "space", ok=True)
    metrics.pod_failed("TrainJob", "space")
    metrics.job("TrainJob", "successful", "space")
    metrics.reconciled("TrainJob", "retry", 0.1)
    metrics.acted("TrainJob", 0.1)

    of_job = {"kind": "TrainJob", "namespace": "space"}
    for name in (
        "created_pods_total", "deleted_pods_total", "created_pod_groups_total", "deleted_pod_groups_total",
        "created_pod_disruption_policies_total", "deleted_pod_disruption_policies_total",
        "succeeded_service_creation_total", "failed_service_creation_total", "failed_pods_total",
    ):  # fmt: skip
        assert registry.get_sample_value(name, of_job) == 1, name
    outcome = {"job_namespace": "space", "framework": "TrainJob"}
    assert registry.get_sample_value("training_operator_jobs_successful_total", outcome) == 1
    child = of_job | {"child": "Pod", "verb": "create", "result": "error"}
    assert registry.get_sample_value("rcfarm_job_child_requests_total", child) == 1
    reconcile = {"kind": "TrainJob", "result": "retry"}
    assert registry.get_sample_value("rcfarm_job_reconcile_duration_seconds_count", reconcile) == 1
    assert registry.get_sample_value("rcfarm_job_action_lag_seconds_count", {"kind": "TrainJob"}) == 1
