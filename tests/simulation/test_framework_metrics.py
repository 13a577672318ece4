"""What the operator of Frameworks tells its metrics, over whole lives in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from controllers.framework.constants import FRAMEWORKS
from controllers.framework.operator import FrameworkOperator
from controllers.job_metrics import ChildVerb, JobOutcome, ReconcileResult
from store.kube.api import KubeApi
from store.kube.events import EventRecorder
from store.kube.resources import CONFIG_MAPS
from tests.support.frameworks import NAMESPACE, Cluster, framework, now, role

pytestmark = pytest.mark.looptime

FAILS_ONCE = {"hollow/exit-code": "7", "hollow/run-seconds": "5"}


class Told:
    """Metrics that remember what they were told."""

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


class MeteredCluster(Cluster):
    """A cluster whose operator tells `told`."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()

    def start_operator(self, api: KubeApi | None = None) -> None:
        assert self._group is not None
        seen = api or self.api
        recorder = EventRecorder(seen, "rcfarm", clock=now, rng=random.Random(2))
        self.operator = FrameworkOperator(
            seen, self.config, recorder, metrics=self.told, clock=now, rng=random.Random(3)
        )
        self._running = [self._group.create_task(self.operator.run()), self._group.create_task(recorder.run())]


async def test_a_life_is_counted_once() -> None:
    """Created, retried once, successful or failed, deleted; each pod and ConfigMap by what became of it."""
    async with MeteredCluster().running() as cluster:
        assert isinstance(cluster, MeteredCluster)
        retry = {"retryPolicy": {"fancyRetryPolicy": False, "maxRetryCount": 1}}
        policy = {"minFailedTaskCount": 1, "minSucceededTaskCount": -1}
        await cluster.create(framework("train", role("worker", 2, annotations=FAILS_ONCE, policy=policy), **retry))
        await cluster.until_state("train", "Completed")
        told = cluster.told
        assert told.jobs == ["created", "restarted", "failed"]
        assert told.children["create ConfigMap ok"] == told.children["delete ConfigMap ok"] == 2
        assert told.children["create Pod ok"] == 4
        assert 2 <= told.failed_pods <= 4, "the first failure of each attempt, and others that were seen in time"
        assert told.lags
        assert all(0 <= lag < 5 for lag in told.lags)
        await cluster.api.delete(FRAMEWORKS, "train", NAMESPACE)
        await asyncio.sleep(5)
        assert told.jobs == ["created", "restarted", "failed", "deleted"]


async def test_success_is_told_and_refusals_are_errors() -> None:
    """A name that a stranger has is a creation that failed; when it is free, the Framework goes on to its success."""
    async with MeteredCluster().running() as cluster:
        assert isinstance(cluster, MeteredCluster)
        await cluster.api.create(CONFIG_MAPS, {"metadata": {"name": "train-attempt"}}, NAMESPACE)
        await cluster.create(framework("train", role("worker", 1)))
        await asyncio.sleep(30)
        told = cluster.told
        assert told.children["create ConfigMap error"] >= 1
        assert told.children["create ConfigMap ok"] == 0
        await cluster.api.delete(CONFIG_MAPS, "train-attempt", NAMESPACE)
        await cluster.until_state("train", "Completed")
        assert told.jobs == ["created", "successful"]
        assert told.failed_pods == 0


async def test_a_new_operator_counts_nothing_again() -> None:
    """What an earlier operator told of is not told again by one that takes over."""
    async with MeteredCluster().running() as cluster:
        assert isinstance(cluster, MeteredCluster)
        await cluster.create(framework("train", role("worker", 2)))
        await cluster.until_state("train", "AttemptRunning")
        await cluster.kill_operator()
        cluster.told = Told()
        cluster.start_operator()
        await cluster.until_state("train", "Completed")
        assert cluster.told.jobs == ["successful"]
        assert cluster.told.children["create Pod ok"] == 0
