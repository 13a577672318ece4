"""What an operator makes for a gang: a disruption budget, or a PodGroup of Volcano's."""

from __future__ import annotations

import asyncio

import pytest

from controllers.gang_kinds import DisruptionBudget, VolcanoPodGroup
from controllers.job_errors import NotServed
from store.kube.memory import MemoryKube
from store.kube.resources import POD_DISRUPTION_BUDGETS, PODS
from tests.support.train_jobs import (
    TRAIN_JOBS,
    Writes,
    all_created,
    children,
    condition,
    create,
    memory_kube,
    operate,
    running,
    set_phase,
    train_job,
    until,
)

pytestmark = pytest.mark.looptime


async def test_gangs_get_their_budget_and_lose_it_with_the_end() -> None:
    """Scenario 56: created for all replicas, patched when they change, deleted when the job has finished, once."""
    api = memory_kube()
    async with running(operate(api, gang=DisruptionBudget())):
        await create(api, train_job(Worker=2))
        await all_created(api, 2)
        writes = Writes(api)
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 3}}}})
        await all_created(api, 3)
        budget = await api.get(POD_DISRUPTION_BUDGETS, "train", "default")
        assert budget["spec"]["minAvailable"] == 3
        assert writes.of("create", POD_DISRUPTION_BUDGETS) == []

        for index in range(3):
            await set_phase(api, f"train-worker-{index}", "Succeeded", code=0)
        await condition(api, "Succeeded")
        await until(lambda: writes.of("delete", POD_DISRUPTION_BUDGETS))
        await asyncio.sleep(1)
        writes.calls.clear()
        await asyncio.sleep(3600)
        assert writes.calls == []


async def test_a_lost_budget_comes_back_at_once() -> None:
    """The objects are watched: nobody has to wait for a resync."""
    api = memory_kube()
    async with running(operate(api, gang=DisruptionBudget())):
        await create(api, train_job(Worker=1))
        await all_created(api, 1)
        await api.delete(POD_DISRUPTION_BUDGETS, "train", "default")
        await asyncio.sleep(0.5)
        await api.get(POD_DISRUPTION_BUDGETS, "train", "default")


async def test_a_gang_that_the_server_cannot_have_ends_the_operator() -> None:
    """No job could run as it was asked for: it is said at once what is missing, and what to do."""
    kind = VolcanoPodGroup()
    operator = operate(memory_kube(unserved=kind.resources), gang=kind)
    with pytest.raises(NotServed, match=r"podgroups in scheduling\.volcano\.sh/v1beta1: install it, or switch gang"):
        await operator.run()


async def test_volcano_decides_when_pods_are_created() -> None:
    """The group first; pods when the scheduler lets it in, without polling, and marked as its members."""
    kind = VolcanoPodGroup()
    api = memory_kube()
    async with running(operate(api, gang=kind)):
        await create(api, train_job(Worker=2))
        await until(lambda: _exists(api, kind))
        await asyncio.sleep(30)
        assert await children(api, PODS) == {}

        await api.patch(kind.resources[0], "train", "default", {"status": {"phase": "Inqueue"}})
        pods = await all_created(api, 2)

    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"volcano"}
    assert pods["train-worker-0"]["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "train"


async def _exists(api: MemoryKube, kind: VolcanoPodGroup) -> bool:
    return bool((await api.list(kind.resources[0], "default")).items)


async def test_the_seeds_functions_for_budgets() -> None:
    """sync_pdb and delete_pdb, for operators with a sync of their own, need no informer."""
    api = memory_kube(unserved=[POD_DISRUPTION_BUDGETS])
    job = await create(api, train_job(Worker=2))
    jobs = operate(api).jobs
    beta = POD_DISRUPTION_BUDGETS.in_version("v1beta1")

    await jobs.sync_pdb(job, 2)
    assert (await jobs.sync_pdb(job, 5))["spec"]["minAvailable"] == 5
    assert (await api.get(beta, "train", "default"))["spec"]["minAvailable"] == 5
    await jobs.delete_pdb(job)
    await jobs.delete_pdb(job)
    assert (await api.list(beta, "default")).items == []
