"""An operator at work, against an API server in memory and on virtual time; the test plays the kubelet."""

from __future__ import annotations

import asyncio

import pytest

from controllers.job_types import BadSpec, JobView
from store.kube.errors import Conflict, Forbidden, KubeError, ServerError, ServerTimeout, Unreachable
from store.kube.memory import Call
from store.kube.objects import Object, labels_of, name_of, uid_of
from store.kube.resources import PODS, SERVICES
from tests.support.train_jobs import (
    INDEX,
    TRAIN_JOBS,
    TYPE,
    Tally,
    TrainJobs,
    Writes,
    all_created,
    children,
    condition,
    conditions,
    create,
    fails,
    job_labels,
    loop_time,
    memory_kube,
    operate,
    read,
    reasons,
    running,
    set_phase,
    train_job,
    until,
)

pytestmark = pytest.mark.looptime


async def test_everything_is_created() -> None:
    """Scenario 44: 4 workers and 2 parameter servers, nothing there: 6 pods and 6 services, each once."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await create(api, train_job(Worker=4, PS=2))
        pods = await all_created(api, 6)
        await asyncio.sleep(60)

    names = [f"train-worker-{index}" for index in range(4)] + ["train-ps-0", "train-ps-1"]
    assert sorted(pods) == sorted(names)
    assert sorted(writes.of("create", PODS)) == sorted(writes.of("create", SERVICES)) == sorted(names)
    assert labels_of(pods["train-ps-1"]) == job_labels(type="ps", index="1")
    assert pods["train-worker-3"]["spec"]["containers"][0]["env"][0]["value"].count("train-worker") == 4


async def test_only_what_is_missing_is_created() -> None:
    """Scenario 45: of 2 workers and a parameter server one pod and no service is there: the rest is created."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await create(api, train_job(Worker=2, PS=1))
        await all_created(api, 3)
        writes.calls.clear()
        for name in ("train-worker-1", "train-ps-0"):
            await api.delete(PODS, name, "default", grace_period=0)
        await api.delete(SERVICES, "train-worker-0", "default")
        await all_created(api, 3)
        await asyncio.sleep(60)

    assert sorted(writes.of("create", PODS)) == ["train-ps-0", "train-worker-1"]
    assert writes.of("create", SERVICES) == ["train-worker-0"]


async def test_scaling_down_deletes_what_is_above() -> None:
    """Scenario 46: indexes 0, 1 and 2, replicas 1: 1 and 2 go, and no hole below them is filled."""
    api = memory_kube()
    async with running(operate(api)):
        await create(api, train_job(Worker=3))
        await all_created(api, 3)
        writes = Writes(api)
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}})
        assert list(await all_created(api, 1)) == ["train-worker-0"]
        await asyncio.sleep(60)

    assert sorted(writes.of("delete", PODS)) == ["train-worker-1", "train-worker-2"]
    assert writes.of("create", PODS) == []


async def test_a_quiet_job_costs_no_request() -> None:
    """Once everything is there, nothing is written or read for an hour, though the audit looks."""
    api = memory_kube()
    tally = Tally()
    async with running(operate(api, metrics=tally)):
        await create(api, train_job(Worker=2))
        await all_created(api, 2)
        await asyncio.sleep(60)
        calls: list[Call] = []
        api.before_call = lambda call: calls.append(call) if call.verb != "watch" else None
        tally.figures.clear()
        await asyncio.sleep(3600)

    assert calls == []
    assert 10 <= tally.figures.count("reconciled ok") <= 20


class StandingStill(TrainJobs):
    """Its cache of jobs shows one state."""

    cached: Object | None = None

    def get_job_from_informer_cache(self, namespace: str, name: str) -> Object | None:
        return self.cached


async def test_our_own_status_wakes_nobody() -> None:
    """The echo of a write is not looked at; what somebody else changed is."""
    api = memory_kube()
    operator = operate(api, StandingStill)
    operator.cached = await create(api, train_job(Worker=1))
    await operator.reconciler.sync("default/train")
    assert conditions(await read(api)) == {"Created": "True"}

    operator.reconciler.job_changed(await read(api))
    assert len(operator.jobs.work_queue) == 0
    operator.reconciler.job_changed(await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"note": "new"}}))
    assert len(operator.jobs.work_queue) == 1


async def test_a_failed_creation_is_tried_again() -> None:
    """Scenario 30: the server answers 500: the expectation is taken back at once, and the retry follows the failure."""
    api = memory_kube()
    writes = Writes(api)
    writes.fail = fails("create", "Pod", ServerError("broken", status=500), times=2)
    async with running(operate(api)):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)

    assert writes.of("create", PODS) == ["train-worker-0"] * 3
    assert loop_time() < 1.0


@pytest.mark.parametrize("error", [ServerTimeout("timeout", status=504), Unreachable("connection lost")])
async def test_a_creation_without_an_answer_is_expected_for_a_while(error: KubeError) -> None:
    """Scenario 31: it may come yet, so nothing is done about the job; when it does not, it is asked for again."""
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
    """It was carried out: its event comes, and the job goes on at once."""
    api = memory_kube()
    lost = fails("create", "Pod", Unreachable("answer lost"), times=1)

    def after(call: Call) -> None:
        if error := lost(call):
            raise error

    writes = Writes(api)
    api.after_call = after
    async with running(operate(api)):
        await create(api, train_job(Worker=3))
        await all_created(api, 3)
        await asyncio.sleep(60)

    assert sorted(writes.of("create", PODS)) == [f"train-worker-{index}" for index in range(3)]


async def test_a_quota_costs_few_requests() -> None:
    """Slow start: of 100 pods one is tried; the job waits its growing turn, and says why by an Event."""
    api = memory_kube()
    writes = Writes(api)
    writes.fail = fails("create", "Pod", Forbidden("exceeded quota", status=403))
    operator = operate(api)
    async with running(operator):
        job = await create(api, train_job(Worker=100))
        await asyncio.sleep(60)
        assert len(writes.of("create", PODS)) <= 20
        assert operator.jobs.expectations.satisfied(uid_of(job))

        writes.fail = lambda call: None
        await all_created(api, 100)
    assert "FailedCreatePod" in await reasons(api)


async def test_the_status_is_written_before_the_pod_goes() -> None:
    """A failure is on record before its only witness is deleted; should the record fail, the pod stays."""
    api = memory_kube()
    async with running(operate(api)):
        await create(api, train_job(Worker=1, restart_policy="OnFailure", policy={"backoffLimit": 3}))
        await all_created(api, 1)
        writes = Writes(api)
        writes.fail = fails("patch", "TrainJob", ServerError("broken", status=500))
        await set_phase(api, "train-worker-0", "Failed", code=1)
        await asyncio.sleep(30)
        assert writes.of("delete", PODS) == []

        writes.fail = lambda call: None
        writes.calls.clear()
        await until(lambda: writes.of("delete", PODS))

    kinds = [(call.verb, call.resource.kind) for call in writes.calls]
    assert kinds.index(("patch", "TrainJob")) < kinds.index(("delete", "Pod"))


async def test_a_deadline_comes_without_an_event() -> None:
    """Scenario 52: two seconds after its start the job fails, though nothing happened to wake it."""
    api = memory_kube()
    async with running(operate(api)):
        await create(api, train_job(Worker=1, policy={"activeDeadlineSeconds": 2}))
        await condition(api, "Failed")

    assert 2.0 <= loop_time() <= 2.1


async def test_a_job_that_comes_early_does_not_spin() -> None:
    """At this moment an expectation ends a rounding error after its timer: the job looks again a little later."""
    api = memory_kube()
    Writes(api).fail = fails("create", "Pod", Unreachable("connection lost"), times=1)
    moment = 0.017347
    assert moment + 10.0 > 10.017347
    async with running(operate(api)):
        await asyncio.sleep(moment)
        await create(api, train_job(Worker=1))
        await all_created(api, 1)


async def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    """Scenario 53: its end is on record first; five seconds later the job, and what it owns, is gone."""
    api = memory_kube()
    tally = Tally()
    async with running(operate(api, metrics=tally)):
        await create(api, train_job(Worker=1, policy={"ttlSecondsAfterFinished": 5}))
        await all_created(api, 1)
        await set_phase(api, "train-worker-0", "Succeeded", code=0)
        await condition(api, "Succeeded")
        ended = loop_time()
        await until(lambda: "TrainJob deleted" in tally.figures)
        assert 4.0 <= loop_time() - ended <= 5.1
        await all_created(api, 0)

    outcomes = [figure for figure in tally.figures if figure.startswith("TrainJob")]
    assert outcomes == ["TrainJob created", "TrainJob successful", "TrainJob deleted"]


async def test_the_audit_mends_what_no_event_told() -> None:
    """A handler that missed an event is no disaster: the job is looked at again."""
    api = memory_kube()
    operator = operate(api)
    async with running(operator):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        operator.jobs.enqueue = lambda key: None
        await api.delete(PODS, "train-worker-0", "default", grace_period=0)
        await asyncio.sleep(1)
        assert await children(api, PODS) == {}
        await all_created(api, 1)

    assert loop_time() <= 20.0


async def test_a_job_that_is_deleted_is_forgotten() -> None:
    """With everything that was remembered of it; its pods are the garbage collector's."""
    api = memory_kube()
    operator = operate(api)
    async with running(operator):
        await create(api, train_job(Worker=2))
        await all_created(api, 2)
        await api.delete(TRAIN_JOBS, "train", "default")
        await all_created(api, 0)
        await asyncio.sleep(1)

    assert len(operator.jobs.expectations) == 0
    assert operator.jobs.work_queue.num_requeues("default/train") == 0


async def test_a_job_goes_on_while_it_cannot_be_watched() -> None:
    """The cache of jobs stands still: what was written of a job is known all the same, and built upon."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        writes.fail = lambda call: Unreachable("down") if call.resource == TRAIN_JOBS and call.verb == "watch" else None
        api.break_watches()
        await asyncio.sleep(5)
        await set_phase(api, "train-worker-0", "Running")
        await condition(api, "Running")
        await set_phase(api, "train-worker-0", "Succeeded", code=0)
        await condition(api, "Succeeded")


async def test_a_deletion_is_asked_for_once() -> None:
    """While the cache still shows the pod, and the job is awakened by other things, nobody deletes it again."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await create(api, train_job(Worker=2))
        await all_created(api, 2)
        writes.fail = lambda call: Unreachable("down") if call.resource == PODS and call.verb == "watch" else None
        api.break_watches()
        await asyncio.sleep(5)
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 1}}}})
        for number in range(20):
            await asyncio.sleep(1)
            await api.patch(TRAIN_JOBS, "train", "default", {"metadata": {"labels": {"n": str(number)}}})

    assert writes.of("delete", PODS) == ["train-worker-1"]


async def test_two_operators_would_not_fight_over_a_status() -> None:
    """A status that somebody else changed is never overwritten; the decision is made again from it."""
    api = memory_kube()
    async with running(operate(api)):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        await api.patch(TRAIN_JOBS, "train", "default", {"status": {"theirs": "x"}}, subresource="status")
        await set_phase(api, "train-worker-0", "Running")
        await condition(api, "Running")

    assert (await read(api))["status"]["theirs"] == "x"


async def test_conflicts_do_not_stop_a_job() -> None:
    """409 on every other status write: it is written in the end, and nothing is created twice."""
    api = memory_kube()
    writes = Writes(api)
    count = 0

    def storm(call: Call) -> Exception | None:
        nonlocal count
        count += call.subresource == "status"
        return Conflict("storm", status=409) if call.subresource == "status" and count % 2 else None

    writes.fail = storm
    async with running(operate(api)):
        await create(api, train_job(Worker=3))
        await all_created(api, 3)
        await condition(api, "Created")

    assert len(writes.of("create", PODS)) == 3


async def test_a_lost_watch_changes_nothing() -> None:
    """The watches break while pods are created and one is deleted: the job ends up whole, nothing twice."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await create(api, train_job(Worker=8))
        await until(lambda: len(writes.of("create", PODS)) >= 3)
        api.break_watches()
        await all_created(api, 8)
        api.compact()
        api.break_watches()
        await api.delete(PODS, "train-worker-3", "default", grace_period=0)
        await until(lambda: writes.of("create", PODS).count("train-worker-3") == 2)
        await asyncio.sleep(60)

    assert len(writes.of("create", PODS)) == 9


async def test_the_seeds_functions_for_slices() -> None:
    """Filter by type, slice by index."""
    jobs = operate(memory_kube()).jobs
    pods = [
        {"metadata": {"name": f"{kind}-{index}", "labels": {TYPE: kind, INDEX: index}}}
        for kind, index in (("worker", "0"), ("worker", "1"), ("ps", "0"), ("worker", "x"))
    ]

    workers = jobs.filter_pods_for_replica_type(pods, "Worker")
    sliced = jobs.get_pod_slices(workers, 3)

    assert {index: [name_of(pod) for pod in found] for index, found in sliced.items()} == {
        0: ["worker-0"],
        1: ["worker-1"],
        2: [],
    }
    assert jobs.filter_services_for_replica_type(pods, "PS") == [pods[2]]
    assert len(jobs.get_service_slices(workers, 0)) == 2


async def test_figures_of_a_failing_job() -> None:
    """What was created, what failed, what became of the job; and how soon an event led to a request."""
    api, tally = memory_kube(), Tally()
    async with running(operate(api, metrics=tally)):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        await set_phase(api, "train-worker-0", "Failed", code=1)
        await condition(api, "Failed")

    for figure in ("create Pod ok", "create Service ok", "pod failed", "TrainJob failed", "reconciled ok"):
        assert figure in tally.figures, figure
    assert 0.0 <= max(tally.lags) < 0.1


async def test_an_operator_that_is_stopped_stops_everything() -> None:
    """No task of it is left, and no watch."""
    api = memory_kube()
    before = len(asyncio.all_tasks())
    async with running(operate(api)):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
    await asyncio.sleep(0)

    assert len(asyncio.all_tasks()) == before
    assert api.watch_count == 0


async def test_a_status_that_cannot_be_read_is_not_written() -> None:
    """Somebody broke it: an Event says so, and nothing is done on such grounds until it is mended."""
    api = memory_kube()
    async with running(operate(api)):
        job = train_job(Worker=1)
        job["status"] = {"conditions": "none"}
        await create(api, job)
        await api.patch(TRAIN_JOBS, "train", "default", {"status": {"conditions": "none"}}, subresource="status")
        await asyncio.sleep(5)
        assert "InvalidStatus" in await reasons(api)


async def test_the_view_refuses_an_unknown_success_policy() -> None:
    """With the field and what there is to choose from."""
    job = train_job(Worker=1)
    job["spec"]["successPolicy"] = "Some"
    with pytest.raises(BadSpec, match=r"spec\.successPolicy: 'Some' is not one of AllWorkers"):
        operate(memory_kube()).view(job)


async def test_the_default_view() -> None:
    """kubeflow's form, with the class's settings."""
    job = train_job(Worker=2, policy={"backoffLimit": 3})
    view: JobView = operate(memory_kube()).view(job)

    assert (view.name, view.kind, view.total_replicas, view.run_policy.backoff_limit) == ("train", "TrainJob", 2, 3)
