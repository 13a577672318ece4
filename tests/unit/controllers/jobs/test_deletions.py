"""Deletions by an operator that fail or get no answer, and the state kept for deleted jobs."""

from __future__ import annotations

import asyncio

import pytest

from store.kube.api.errors import KubeError, NotFound, ServerError, ServerTimeout, Unreachable
from store.kube.api.objects import PODS, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import (
    TRAIN_JOBS,
    Writes,
    all_created,
    loop_time,
    memory_kube,
    operate,
    running,
    set_phase,
    train_job,
    until,
)

pytestmark = pytest.mark.looptime


async def scale_to(api: MemoryKube, workers: int) -> None:
    await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}}})


async def seconds_to_scale_down(error: KubeError, *, applied: bool = False) -> float:
    """Return how long two workers take to become one, when the first deletion of a pod meets the error."""
    api = memory_kube()
    left = [error]

    def fate(call: Call) -> Exception | None:
        return left.pop() if left and (call.verb, call.resource) == ("delete", PODS) else None

    def lose_answer(call: Call) -> None:
        if lost := fate(call):
            raise lost

    async with running(operate(api)):
        await api.create(TRAIN_JOBS, train_job(Worker=2), "default")
        await all_created(api, 2)
        await asyncio.sleep(1)
        if applied:
            api.after_call = lose_answer
        else:
            Writes(api).fail = fate
        began = loop_time()
        await scale_to(api, 1)
        await all_created(api, 1)
        return loop_time() - began


async def test_a_deletion_that_is_refused_is_tried_again() -> None:
    """Its expectation is removed, so the retry follows the failure."""
    assert await seconds_to_scale_down(ServerError("broken", status=500)) < 1.0


async def test_a_deletion_of_what_is_gone_holds_nothing_up() -> None:
    """No event will come; the job is synced again at its next time, not five minutes later."""
    assert await seconds_to_scale_down(NotFound("gone", status=404)) < 20.0


@pytest.mark.parametrize("error", [ServerTimeout("timeout", status=504), Unreachable("connection lost")])
async def test_a_deletion_without_an_answer_is_expected_for_a_while(error: KubeError) -> None:
    """It may still be carried out; if it is not, it is repeated."""
    assert 10.0 <= await seconds_to_scale_down(error) <= 10.5


async def test_a_deletion_whose_answer_was_lost_is_seen() -> None:
    """It was carried out: its event ends the wait."""
    assert await seconds_to_scale_down(Unreachable("answer lost"), applied=True) < 1.0


async def test_the_time_to_live_of_a_job_is_not_its_successors() -> None:
    """A job created under the name of one whose time to live has just ended stays."""
    api = memory_kube()
    successors: list[str] = []

    async def replace_it(call: Call) -> None:
        if (call.verb, call.resource) == ("delete", TRAIN_JOBS) and not successors:
            api.before_call = None
            await api.delete(TRAIN_JOBS, "train", "default")
            successors.append(uid_of(await api.create(TRAIN_JOBS, train_job(Worker=1), "default")))

    async with running(operate(api)):
        await api.create(TRAIN_JOBS, train_job(Worker=1, policy={"ttlSecondsAfterFinished": 5}), "default")
        await all_created(api, 1)
        api.before_call = replace_it
        await set_phase(api, "train-worker-0", "Succeeded", code=0)
        await until(lambda: successors)
        await asyncio.sleep(60)
        assert [uid_of(await api.get(TRAIN_JOBS, "train", "default"))] == successors


async def test_what_was_expected_of_a_job_goes_with_it() -> None:
    """An unanswered creation whose event never comes is forgotten with its job."""
    api = memory_kube()
    writes = Writes(api)
    writes.fail = lambda call: (
        Unreachable("connection lost") if (call.verb, call.resource) == ("create", PODS) else None
    )
    operator = operate(api)
    async with running(operator):
        await api.create(TRAIN_JOBS, train_job(Worker=1), "default")
        await until(lambda: len(operator.jobs.expectations))
        await api.delete(TRAIN_JOBS, "train", "default")
        async with asyncio.timeout(1):
            await until(lambda: not len(operator.jobs.expectations))


async def test_a_job_that_goes_while_it_is_worked_on_leaves_nothing_behind() -> None:
    """Its deletion is seen before the answer to a status write: the answer is not kept."""
    api = memory_kube(gc_delay=None)
    operator = operate(api)

    async def delete_it(call: Call) -> None:
        if (call.verb, call.resource, call.subresource) == ("patch", TRAIN_JOBS, "status"):
            await api.delete(TRAIN_JOBS, "train", "default")
            await asyncio.sleep(1)

    async with running(operator):
        await api.create(TRAIN_JOBS, train_job(Worker=1), "default")
        await all_created(api, 1)
        await asyncio.sleep(1)
        api.after_call = delete_it
        await set_phase(api, "train-worker-0", "Running")
        await asyncio.sleep(600)

    remembered = operator.reconciler._statuses._written, operator.reconciler._audit._delays
    assert remembered == ({}, {})
