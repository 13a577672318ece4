"""The metrics that the operator of Frameworks records, over whole lives in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.loop.control_loop import ChildVerb, JobOutcome, ReconcileResult
from store.kube.api.objects import CONFIG_MAPS
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, role

pytestmark = pytest.mark.looptime

FAILS_ONCE = {"hollow/exit-code": "7", "hollow/run-seconds": "5"}


class RecordedMetrics:
    """Metrics that keep every record."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.children: Counter[str] = Counter()
        self.failed_pods = 0
        self.lags: list[float] = []

    def child(self, job_kind: str, verb: ChildVerb, kind: str, namespace: str, *, ok: bool) -> None:
        self.children[f"{verb} {kind} {'ok' if ok else 'error'}"] += 1

    def pod_failed(self, job_kind: str, namespace: str) -> None:
        self.failed_pods += 1

    def job(self, job_kind: str, outcome: JobOutcome, namespace: str) -> None:
        assert (job_kind, namespace) == ("Framework", NAMESPACE)
        self.jobs.append(outcome)

    def reconciled(self, job_kind: str, result: ReconcileResult, seconds: float) -> None:
        assert seconds >= 0

    def acted(self, job_kind: str, lag: float) -> None:
        self.lags.append(lag)


def metered() -> tuple[Cluster, RecordedMetrics]:
    cluster = Cluster()
    cluster.metrics = recorded = RecordedMetrics()
    return cluster, recorded


async def test_a_life_is_counted_once() -> None:
    """Created, retried once, successful or failed, deleted; each pod and ConfigMap is counted by its outcome."""
    cluster, recorded = metered()
    async with cluster.running():
        retry = {"retryPolicy": {"fancyRetryPolicy": False, "maxRetryCount": 1}}
        policy = {"minFailedTaskCount": 1, "minSucceededTaskCount": -1}
        await cluster.create(framework("train", role("worker", 2, annotations=FAILS_ONCE, policy=policy), **retry))
        await cluster.until_state("train", "Completed")
        assert recorded.jobs == ["created", "restarted", "failed"]
        assert recorded.children["create ConfigMap ok"] == recorded.children["delete ConfigMap ok"] == 2
        assert recorded.children["create Pod ok"] == 4
        assert 2 <= recorded.failed_pods <= 4, "the first failure of each attempt, and others that were seen in time"
        assert recorded.lags
        assert all(0 <= lag < 5 for lag in recorded.lags)
        await cluster.api.delete(FRAMEWORKS, "train", NAMESPACE)
        await asyncio.sleep(5)
        assert recorded.jobs == ["created", "restarted", "failed", "deleted"]


async def test_success_is_recorded_and_refusals_are_errors() -> None:
    """A creation under a foreign object's name is counted as failed; when the name is free, the Framework succeeds."""
    cluster, recorded = metered()
    async with cluster.running():
        await cluster.api.create(CONFIG_MAPS, {"metadata": {"name": "train-attempt"}}, NAMESPACE)
        await cluster.create(framework("train", role("worker", 1)))
        await asyncio.sleep(30)
        assert recorded.children["create ConfigMap error"] >= 1
        assert recorded.children["create ConfigMap ok"] == 0
        await cluster.api.delete(CONFIG_MAPS, "train-attempt", NAMESPACE)
        await cluster.until_state("train", "Completed")
        assert recorded.jobs == ["created", "successful"]
        assert recorded.failed_pods == 0


async def test_a_new_operator_counts_nothing_again() -> None:
    """An operator that takes over does not record again what the former one recorded."""
    cluster, recorded = metered()
    async with cluster.running():
        await cluster.create(framework("train", role("worker", 2)))
        await cluster.until_state("train", "AttemptRunning")
        await cluster.kill_operator()
        cluster.metrics = recorded = RecordedMetrics()
        cluster.start_operator()
        await cluster.until_state("train", "Completed")
        assert recorded.jobs == ["successful"]
        assert recorded.children["create Pod ok"] == 0
