"""Creations and deletions by an operator that fail or get no answer, and the state kept for deleted jobs."""

from __future__ import annotations

import asyncio

import pytest

from controllers.jobs import executor
from store.kube.api.errors import Forbidden, KubeError, NotFound, ServerError, ServerTimeout, Unreachable
from store.kube.api.objects import PODS, Object, uid_of
from store.kube.memory.kube import Call
from tests.support.jobs.train_jobs import (
    TRAIN_JOBS,
    TrainJobs,
    Writes,
    all_created,
    create,
    created,
    fails,
    memory_kube,
    operate,
    reasons,
    running,
    set_phase,
    train_job,
)
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime


async def test_a_failed_creation_is_tried_again() -> None:
    """After a 500 the expectation is removed at once, and the retry follows the failure."""
    api = memory_kube()
    writes = Writes(api)
    writes.fail = fails("create", "Pod", ServerError("broken", status=500), times=2)
    async with running(operate(api)):
        await created(api, train_job(Worker=1), 1)

    assert writes.of("create", PODS) == ["train-worker-0"] * 3
    assert loop_time() < 1.0


@pytest.mark.parametrize("error", [ServerTimeout("timeout", status=504), Unreachable("connection lost")])
async def test_a_creation_without_an_answer_is_expected_for_a_while(error: KubeError) -> None:
    """The job waits for the pod; if it does not appear, the creation is repeated."""
    api = memory_kube()
    writes = Writes(api)
    writes.fail = fails("create", "Pod", error, times=1)
    operator = operate(api)
    async with running(operator):
        job = await create(api, train_job(Worker=1))
        await until(lambda: writes.of("create", PODS))
        await asyncio.sleep(5)
        assert len(writes.of("create", PODS)) == 1
        assert [entry.what for entry in operator.jobs.expectations.outstanding(uid_of(job))] == ["train-worker-0"]
        await all_created(api, 1)

    assert 10.0 <= loop_time() <= 10.5


async def test_a_creation_whose_answer_was_lost_is_not_repeated() -> None:
    """It was carried out: its event comes, and the job continues at once."""
    api = memory_kube()
    lost = fails("create", "Pod", Unreachable("answer lost"), times=1)

    def after(call: Call) -> None:
        if error := lost(call):
            raise error

    writes = Writes(api)
    api.after_call = after
    async with running(operate(api)):
        await created(api, train_job(Worker=3), 3)
        await asyncio.sleep(60)

    assert sorted(writes.of("create", PODS)) == [f"train-worker-{index}" for index in range(3)]


async def test_a_quota_costs_few_requests() -> None:
    """Slow start: of 100 pods one is tried; the retries back off, and an Event names the reason."""
    api = memory_kube()
    writes = Writes(api)
    writes.fail = fails("create", "Pod", Forbidden("exceeded quota", status=403))
    operator = operate(api)
    async with running(operator):
        job = await create(api, train_job(Worker=100))
        await asyncio.sleep(60)
        assert len(writes.of("create", PODS)) <= 20
        assert not operator.jobs.expectations.outstanding(uid_of(job))

        writes.fail = lambda call: None
        await all_created(api, 100)
    assert "FailedCreatePod" in await reasons(api)


async def test_a_deletion_is_requested_once() -> None:
    """While the cache still shows the pod, other events of the job do not repeat the deletion."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await created(api, train_job(Worker=2), 2)
        writes.fail = lambda call: Unreachable("down") if call.resource == PODS and call.verb == "watch" else None
        api.break_watches()
        await asyncio.sleep(5)
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}})
        for number in range(20):
            await asyncio.sleep(1)
            await api.patch(TRAIN_JOBS, "train", "default", {"metadata": {"labels": {"n": str(number)}}})

    assert writes.of("delete", PODS) == ["train-worker-1"]


async def seconds_to_scale_down(error: KubeError, *, applied: bool) -> float:
    """Return how long two workers take to become one, when the first deletion of a pod meets the error."""
    api = memory_kube()
    fate = fails("delete", "Pod", error, times=1)

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
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}})
        await all_created(api, 1)
        return loop_time() - began


@pytest.mark.parametrize(
    ("error", "applied", "least", "most"),
    [
        pytest.param(ServerError("broken", status=500), False, 0.0, 1.0, id="refused: tried again at once"),
        pytest.param(NotFound("gone", status=404), False, 0.0, 20.0, id="gone: no event will come, a later sync does"),
        pytest.param(ServerTimeout("timeout", status=504), False, 10.0, 10.5, id="no answer: repeated after a while"),
        pytest.param(Unreachable("connection lost"), False, 10.0, 10.5, id="no connection: repeated after a while"),
        pytest.param(Unreachable("answer lost"), True, 0.0, 1.0, id="answer lost: its event ends the wait"),
    ],
)
async def test_a_deletion_that_meets_an_error(error: KubeError, applied: bool, least: float, most: float) -> None:
    """Its expectation is removed where it was certainly not carried out, and else waits for the event for a while."""
    assert least <= await seconds_to_scale_down(error, applied=applied) <= most


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
        await until(lambda: operator.jobs.expectations._deadlines)
        await api.delete(TRAIN_JOBS, "train", "default")
        async with asyncio.timeout(1):
            await until(lambda: not operator.jobs.expectations._deadlines)


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

    remembered = operator.reconciler._statuses._written, operator.reconciler._resync._delays
    assert remembered == ({}, {})


class Counting(TrainJobs):
    """Counts the pods that it was asked to prepare."""

    prepared = 0

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        self.prepared += 1


async def test_a_large_job_is_created_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more pods than the bound are prepared before they are created, and each is created once."""
    monkeypatch.setattr(executor, "MAX_CREATIONS", 5)
    api = memory_kube()
    writes = Writes(api)
    operator = operate(api, Counting)
    ahead: list[int] = []
    writes.fail = lambda call: ahead.append(operator.prepared - len(writes.of("create", PODS)))
    async with running(operator):
        await created(api, train_job(Worker=12, PS=7), 19)
    assert len(writes.of("create", PODS)) == len(set(writes.of("create", PODS))) == operator.prepared == 19
    assert 0 < max(ahead) <= 5
    assert loop_time() < 1.0
