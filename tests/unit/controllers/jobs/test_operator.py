"""An operator against an in-memory API server, on virtual time; the test acts as the kubelet."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from controllers.jobs.api import (
    BadSpec,
    JobView,
    RunPolicy,
)
from controllers.jobs.operator import Resync
from store.kube.api.errors import Conflict, Invalid, ServerError, Unreachable
from store.kube.api.objects import PODS, SERVICES, Object, controller_of, labels_of, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import (
    TRAIN_JOBS,
    Tally,
    TrainJobs,
    Writes,
    all_created,
    children,
    condition,
    conditions,
    create,
    created,
    fails,
    job_labels,
    memory_kube,
    operate,
    read,
    reasons,
    running,
    set_phase,
    train_job,
)
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime


async def test_what_is_missing_is_created_and_what_is_above_is_deleted() -> None:
    """Each of 4 workers and 2 parameter servers gets a pod and a service, created once, again when it is lost. With
    fewer replicas the last ones are deleted.
    """
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

        writes.calls.clear()
        for name in ("train-worker-1", "train-ps-0"):
            await api.delete(PODS, name, "default", grace_period=0)
        await api.delete(SERVICES, "train-worker-0", "default")
        await all_created(api, 6)
        await asyncio.sleep(60)
        assert sorted(writes.of("create", PODS)) == ["train-ps-0", "train-worker-1"]
        assert writes.of("create", SERVICES) == ["train-worker-0"]

        writes.calls.clear()
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 2}}}})
        assert set(await all_created(api, 4)) == {"train-worker-0", "train-worker-1", "train-ps-0", "train-ps-1"}
        await asyncio.sleep(60)
        assert sorted(writes.of("delete", PODS)) == ["train-worker-2", "train-worker-3"]
        assert writes.of("create", PODS) == []


async def test_a_quiet_job_costs_no_request() -> None:
    """Once everything exists, there is no read or write for an hour, despite the periodic syncs."""
    api = memory_kube()
    tally = Tally()
    async with running(operate(api, metrics=tally)):
        await created(api, train_job(Worker=2), 2)
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


async def test_our_own_status_wakes_no_job() -> None:
    """The echo of a write is ignored; a change by another client is not."""
    api = memory_kube()
    operator = operate(api, StandingStill)
    operator.cached = await create(api, train_job(Worker=1))
    await operator.reconciler.sync("default/train")
    assert conditions(await read(api)) == {"Created": "True"}

    operator.reconciler.job_changed(await read(api))
    assert len(operator.jobs.work_queue) == 0
    operator.reconciler.job_changed(await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"note": "new"}}))
    assert len(operator.jobs.work_queue) == 1


async def test_the_status_is_written_before_the_pod_goes() -> None:
    """A failure is stored before its only evidence is deleted; if the write fails, the pod stays."""
    api = memory_kube()
    async with running(operate(api)):
        await created(api, train_job(Worker=1, restart_policy="OnFailure", policy={"backoffLimit": 3}), 1)
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


async def test_a_job_that_comes_early_does_not_spin() -> None:
    """An expectation that ends a rounding error after its timer causes one later sync."""
    api = memory_kube()
    Writes(api).fail = fails("create", "Pod", Unreachable("connection lost"), times=1)
    moment = 0.017347
    assert moment + 10.0 > 10.017347
    async with running(operate(api)):
        await asyncio.sleep(moment)
        await created(api, train_job(Worker=1), 1)


async def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    """Its end is stored first; five seconds later the job and the objects that it owns are gone."""
    api = memory_kube()
    tally = Tally()
    async with running(operate(api, metrics=tally)):
        await created(api, train_job(Worker=1, policy={"ttlSecondsAfterFinished": 5}), 1)
        await set_phase(api, "train-worker-0", "Succeeded", code=0)
        await condition(api, "Succeeded")
        ended = loop_time()
        await until(lambda: "TrainJob deleted" in tally.figures)
        assert 4.0 <= loop_time() - ended <= 5.1
        await all_created(api, 0)

    outcomes = [figure for figure in tally.figures if figure.startswith("TrainJob")]
    assert outcomes == ["TrainJob created", "TrainJob successful", "TrainJob deleted"]


async def test_the_periodic_sync_repairs_a_missed_event() -> None:
    """A job whose event was missed is synced again later."""
    api = memory_kube()
    operator = operate(api)
    async with running(operator):
        await created(api, train_job(Worker=1), 1)
        operator.jobs.enqueue = lambda key: None
        await api.delete(PODS, "train-worker-0", "default", grace_period=0)
        await asyncio.sleep(1)
        assert await children(api, PODS) == {}
        await all_created(api, 1)

    assert loop_time() <= 20.0


async def test_a_job_continues_while_it_cannot_be_watched() -> None:
    """The cache of jobs stands still: decisions build on our own writes."""
    api = memory_kube()
    writes = Writes(api)
    async with running(operate(api)):
        await created(api, train_job(Worker=1), 1)
        writes.fail = lambda call: Unreachable("down") if call.resource == TRAIN_JOBS and call.verb == "watch" else None
        api.break_watches()
        await asyncio.sleep(5)
        await set_phase(api, "train-worker-0", "Running")
        await condition(api, "Running")
        await set_phase(api, "train-worker-0", "Succeeded", code=0)
        await condition(api, "Succeeded")


async def test_two_operators_would_not_fight_over_a_status() -> None:
    """A status that another client changed is never overwritten; the decision is repeated from it."""
    api = memory_kube()
    async with running(operate(api)):
        await created(api, train_job(Worker=1), 1)
        await api.patch(TRAIN_JOBS, "train", "default", {"status": {"theirs": "x"}}, subresource="status")
        await set_phase(api, "train-worker-0", "Running")
        await condition(api, "Running")

    assert (await read(api))["status"]["theirs"] == "x"


async def test_conflicts_do_not_stop_a_job() -> None:
    """With a 409 on every other status write, it is written eventually, and nothing is created twice."""
    api = memory_kube()
    writes = Writes(api)
    count = 0

    def storm(call: Call) -> Exception | None:
        nonlocal count
        count += call.subresource == "status"
        return Conflict("storm", status=409) if call.subresource == "status" and count % 2 else None

    writes.fail = storm
    async with running(operate(api)):
        await created(api, train_job(Worker=3), 3)
        await condition(api, "Created")

    assert len(writes.of("create", PODS)) == 3


async def test_a_lost_watch_changes_nothing() -> None:
    """The watches break while pods are created and one is deleted: the job ends up complete, nothing is created
    twice.
    """
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


async def test_figures_of_a_failing_job() -> None:
    """The metrics count creations, failures and the job's states, and time the reaction to an event."""
    api, tally = memory_kube(), Tally()
    async with running(operate(api, metrics=tally)):
        await created(api, train_job(Worker=1), 1)
        await set_phase(api, "train-worker-0", "Failed", code=1)
        await condition(api, "Failed")

    for figure in ("create Pod ok", "create Service ok", "pod failed", "TrainJob failed", "reconciled ok"):
        assert figure in tally.figures, figure
    assert 0.0 <= max(tally.lags) < 0.1


async def test_an_operator_that_is_stopped_stops_everything() -> None:
    """No task and no watch of it is left."""
    api = memory_kube()
    before = len(asyncio.all_tasks())
    async with running(operate(api)):
        await created(api, train_job(Worker=1), 1)
    await asyncio.sleep(0)

    assert len(asyncio.all_tasks()) == before
    assert api.watch_count == 0


async def test_a_status_that_cannot_be_read_is_not_written() -> None:
    """Another client broke it: an Event reports it, and no action is taken until it is corrected."""
    api = memory_kube()
    async with running(operate(api)):
        job = train_job(Worker=1)
        job["status"] = {"conditions": "none"}
        await create(api, job)
        await api.patch(TRAIN_JOBS, "train", "default", {"status": {"conditions": "none"}}, subresource="status")
        await asyncio.sleep(5)
        assert "InvalidStatus" in await reasons(api)


async def test_the_view_refuses_an_unknown_success_policy() -> None:
    """The error names the field and the valid values."""
    job = train_job(Worker=1)
    job["spec"]["successPolicy"] = "Some"
    with pytest.raises(BadSpec, match=r"spec\.successPolicy: 'Some' is not one of AllWorkers"):
        operate(memory_kube()).view(job)


async def test_the_default_view() -> None:
    """It reads kubeflow's form, with the class's settings."""
    operator, job = operate(memory_kube()), train_job(Worker=2, policy={"backoffLimit": 3})
    view: JobView = operator.view(job)
    job["spec"]["runPolicy"] = None

    assert operator.view(job).run_policy == RunPolicy()
    assert (view.name, view.kind, view.min_available, view.run_policy.backoff_limit) == ("train", "TrainJob", 2, 3)


async def test_one_bad_job_harms_no_other() -> None:
    """An invalid job reports the reason by a condition and an Event, and waits until it is corrected."""
    api = memory_kube()
    bad = train_job("bad", Worker=1)
    bad["spec"]["replicaSpecs"]["Worker"]["replicas"] = -1
    async with running(operate(api)):
        await create(api, bad)
        await created(api, train_job(Worker=1), 1)
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
        assert not operator.jobs.expectations.outstanding(uid_of(job))

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
        (pod,) = (await children(api, PODS)).values()  # and no other is created: they might meet the same
        assert controller_of(pod) is None

        await api.delete(PODS, "train-worker-0", "default", grace_period=0)
        await all_created(api, 2)
        await until(lambda: _unblocked(api))


async def _unblocked(api: MemoryKube) -> bool:
    return conditions(await read(api)).get("Blocked") == "False"


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("period", "waits"), [(15.0, [15.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0]), (3600.0, [3600.0, 3600.0])]
)
def test_an_idle_job_is_synced_less_and_less_often(period: float, waits: list[float]) -> None:
    """The delay doubles up to five minutes; a longer period is kept. A change resets it. Other jobs are unaffected, and
    a deleted job leaves no state.
    """
    resync = Resync(period, NoJitter())
    assert [resync.after("x", idle=True) for _ in waits] == waits

    assert resync.after("y", idle=True) == period
    assert resync.after("x", idle=False) == period
    assert resync.after("x", idle=True) == waits[1]
    resync.forget("x")
    assert resync.after("x", idle=True) == period


def test_periodic_syncs_are_spread() -> None:
    """Delays are stretched by up to a fifth, so that jobs created together do not stay in step."""
    resync = Resync(10.0, random.Random(1))
    waits = [resync.after(str(number), idle=True) for number in range(100)]

    assert all(10.0 <= wait <= 12.0 for wait in waits)
    assert len(set(waits)) == 100
