"""Jobs that an operator can't run: each has the condition Blocked with the reason, and affects no other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from store.kube.api.errors import Invalid
from store.kube.api.objects import PODS, Object, controller_of, uid_of
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.train_jobs import (
    TRAIN_JOBS,
    TrainJobs,
    Writes,
    all_created,
    children,
    condition,
    conditions,
    create,
    memory_kube,
    operate,
    read,
    reasons,
    running,
    train_job,
    until,
)

pytestmark = pytest.mark.looptime


async def test_one_bad_job_harms_no_other() -> None:
    """An invalid job reports the reason by a condition and an Event, and waits until it is corrected."""
    api = memory_kube()
    bad = train_job("bad", Worker=1)
    bad["spec"]["replicaSpecs"]["Worker"]["replicas"] = -1
    async with running(operate(api)):
        await create(api, bad)
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        blocked = await condition(api, "Blocked", "bad")
        assert blocked["reason"] == "InvalidSpec"
        assert "spec.replicaSpecs.Worker.replicas" in blocked["message"]

        writes = Writes(api)
        await asyncio.sleep(600)
        assert writes.calls == []
        assert (await reasons(api)).count("InvalidSpec") == 1

        await api.patch(TRAIN_JOBS, "bad", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}})
        await all_created(api, 2)
        assert conditions(await read(api, "bad"))["Blocked"] == "False"


async def test_a_refused_pod_template_blocks_its_job_only() -> None:
    """The job shows the message of the API server's 422."""
    api = memory_kube()

    def admission(resource: Any, new: Object | None, old: Object | None) -> None:
        if resource == PODS and new is not None and new["spec"]["containers"][0]["image"] == "":
            raise Invalid("spec.containers[0].image: Required value", status=422)

    api.admission = admission
    bad = train_job("bad", Worker=3)
    bad["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["image"] = ""
    async with running(operate(api)):
        await create(api, bad)
        await create(api, train_job(Worker=1))
        blocked = await condition(api, "Blocked", "bad")
        assert set(await children(api, PODS)) == {"train-worker-0"}

    assert blocked["reason"] == "Rejected"
    assert "image: Required value" in blocked["message"]


class Clumsy(TrainJobs):
    """A hook with a defect that affects only some jobs."""

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        pod["spec"]["containers"][0]["env"] = job["spec"]["world"]


async def test_a_hook_that_fails_blocks_the_jobs_that_it_fails_for() -> None:
    """No expectation is registered for a failed hook; once the job is acceptable to it, the job continues."""
    api = memory_kube()
    operator = operate(api, Clumsy)
    async with running(operator):
        job = await create(api, train_job(Worker=1))
        blocked = await condition(api, "Blocked")
        assert blocked["reason"] == "HookFailed"
        assert "set_cluster_spec" in blocked["message"]
        assert operator.jobs.expectations.satisfied(uid_of(job))

        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"world": []}})
        await all_created(api, 1)


async def test_a_name_that_another_object_has_blocks_the_job() -> None:
    """A stranger's pod is never adopted or deleted; the condition names it, and is removed when the name is free."""
    api = memory_kube()
    stranger = {"metadata": {"name": "train-worker-0"}, "spec": {"containers": [{"name": "x", "image": "y"}]}}
    await api.create(PODS, stranger, "default")
    async with running(operate(api)):
        await create(api, train_job(Worker=2))
        blocked = await condition(api, "Blocked")
        assert blocked["reason"] == "NameTaken"
        assert "Pod default/train-worker-0" in blocked["message"]
        assert controller_of((await children(api, PODS))["train-worker-0"]) is None

        await api.delete(PODS, "train-worker-0", "default", grace_period=0)
        await all_created(api, 2)
        await until(lambda: _unblocked(api))


async def _unblocked(api: MemoryKube) -> bool:
    return conditions(await read(api)).get("Blocked") == "False"
