"""Prometheus adapters that more than one role needs."""

from rcfarm.telemetry.kube import PrometheusJobMetrics
from rcfarm.telemetry.prometheus import WorkQueueMetrics

__all__ = ["PrometheusJobMetrics", "WorkQueueMetrics"]
