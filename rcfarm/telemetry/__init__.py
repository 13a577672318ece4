"""Prometheus adapters that more than one role needs.

`PrometheusJobMetrics` is imported at first use: with it come the informers, which farms do without.
"""

from typing import TYPE_CHECKING

from rcfarm.telemetry.prometheus import WorkQueueMetrics
from store.imports import at_first_use

if TYPE_CHECKING:
    from rcfarm.telemetry.kube import PrometheusJobMetrics

__all__ = ["PrometheusJobMetrics", "WorkQueueMetrics"]

__getattr__ = at_first_use(__name__, {"PrometheusJobMetrics": "kube"})
