"""Metrics of work queues and reconciles."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from controllers.loop.workqueue import WorkQueue
from rcfarm.telemetry.prometheus import FarmMetrics, new_registry


def sample(registry: CollectorRegistry, series: str, /, **labels: str) -> float | None:
    return registry.get_sample_value(series, labels)


async def test_a_work_queue_has_client_go_s_metrics() -> None:
    """Names, label and meaning are those that client-go's dashboards expect."""
    now = 0.0
    metrics = FarmMetrics()
    queue = WorkQueue[str]("rcs", clock=lambda: now, metrics=metrics.workqueue)
    queue.add("a")
    queue.add("b")
    now = 3.0
    await queue.get()
    now = 5.0

    def value(name: str) -> float | None:
        return sample(metrics.registry, f"workqueue_{name}", name="rcs")

    assert value("depth") == 1
    assert value("adds_total") == 2
    assert value("queue_duration_seconds_sum") == 3.0
    assert value("unfinished_work_seconds") == value("longest_running_processor_seconds") == 2.0
    queue.done("a")
    assert value("work_duration_seconds_sum") == 2.0
    assert value("longest_running_processor_seconds") == 0.0
    queue.add_after("a", 0)
    assert value("retries_total") == 1


async def test_the_next_queue_of_a_name_goes_on_with_its_series() -> None:
    """A farm makes a new queue under each session: counters go on, gauges show the new queue."""
    metrics = FarmMetrics()
    for keys in ("abc", "x"):
        queue = WorkQueue[str]("rcs", metrics=metrics.workqueue)
        for key in keys:
            queue.add(key)

    assert sample(metrics.registry, "workqueue_adds_total", name="rcs") == 4
    assert sample(metrics.registry, "workqueue_depth", name="rcs") == 1


async def test_reconciles_are_counted_by_their_result() -> None:
    """A failure is counted as such and its error passes through; a cancellation is not counted."""
    metrics = FarmMetrics()
    with metrics.reconciling():
        pass
    with pytest.raises(ValueError, match="no"), metrics.reconciling():
        raise ValueError("no")
    with pytest.raises(asyncio.CancelledError), metrics.reconciling():
        raise asyncio.CancelledError

    assert sample(metrics.registry, "rcfarm_reconcile_duration_seconds_count", result="done") == 1
    assert sample(metrics.registry, "rcfarm_reconcile_duration_seconds_count", result="error") == 1


def test_registries_are_independent() -> None:
    """Two farms in one process each have their own figures."""
    first, second = new_registry("1.0"), new_registry("2.0")
    FarmMetrics(first)
    FarmMetrics(second)

    assert b'rcfarm_build_info{version="1.0"} 1.0' in generate_latest(first)
    assert b"process_resident_memory_bytes" in generate_latest(second)
