"""Ownership of pods: orphans that a job adopts, pods that it releases, and jobs of the same name."""

from __future__ import annotations

import asyncio

import pytest

from store.kube.api.objects import PODS, Object, controller_of, uid_of
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.train_jobs import (
    JOB,
    TRAIN_JOBS,
    Writes,
    all_created,
    children,
    condition,
    conditions,
    create,
    job_labels,
    memory_kube,
    operate,
    read,
    running,
    train_job,
    until,
)

pytestmark = pytest.mark.looptime


async def test_orphans_with_our_labels_are_adopted() -> None:
    """They belong to the job from then on: no pod is created in their place."""
    api = memory_kube()
    for index in range(2):
        body = {
            "metadata": {"name": f"old-{index}", "labels": job_labels(type="worker", index=str(index))},
            "spec": {"containers": [{"name": "main", "image": "trainer:1"}]},
        }
        await api.create(PODS, body, "default")
    async with running(operate(api)):
        job = await create(api, train_job(Worker=2))
        pods = await until(lambda: _owned(api, job, 2))
        await asyncio.sleep(60)
        assert set(pods) == set(await children(api, PODS)) == {"old-0", "old-1"}


async def _owned(api: MemoryKube, job: Object, count: int) -> dict[str, Object] | None:
    pods = await children(api, PODS)
    owned = {name: pod for name, pod in pods.items() if (controller_of(pod) or {}).get("uid") == uid_of(job)}
    return owned if len(owned) == count else None


async def test_a_pod_that_loses_our_labels_is_released_and_replaced() -> None:
    """A user takes a pod out of the job for inspection: it stays alive, and the job gets another."""
    api = memory_kube()
    async with running(operate(api)):
        await create(api, train_job(Worker=1, restart_policy="Always"))
        first = (await all_created(api, 1))["train-worker-0"]
        await api.patch(PODS, "train-worker-0", "default", {"metadata": {"labels": {JOB: "inspect"}}})
        await until(lambda: _is_orphan(api, "train-worker-0"))
        blocked = await condition(api, "Blocked")

    assert uid_of((await children(api, PODS))["train-worker-0"]) == uid_of(first)
    assert "train-worker-0" in blocked["message"]


async def _is_orphan(api: MemoryKube, name: str) -> bool:
    return controller_of((await children(api, PODS))[name]) is None


async def test_a_pod_that_leaves_the_group_is_released() -> None:
    """Without its group label the watch reports it as deleted, though it exists: its reference is removed once, then
    the cache discards it.
    """
    api = memory_kube()
    operator = operate(api)
    async with running(operator):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        labels = dict.fromkeys(job_labels(type="worker", index="0"))
        await api.patch(PODS, "train-worker-0", "default", {"metadata": {"labels": labels}})
        await until(lambda: _is_orphan(api, "train-worker-0"))
        writes = Writes(api)
        await asyncio.sleep(5)
        assert writes.of("patch", PODS) == []
        assert len(operator.jobs.pod_lister) == 0


async def test_a_recreated_job_inherits_nothing() -> None:
    """A job deleted and created again under its name gets its own pods, while those of the first are still ending."""
    api = memory_kube(gc_delay=3.0)
    operator = operate(api)
    async with running(operator):
        first = await create(api, train_job(Worker=2))
        await all_created(api, 2)
        await api.delete(TRAIN_JOBS, "train", "default")
        second = await create(api, train_job(Worker=2))
        await until(lambda: _owned(api, second, 2))
        assert uid_of(first) != uid_of(second)
        assert operator.jobs.expectations.satisfied(uid_of(first))
        assert "Blocked" not in conditions(await read(api))
