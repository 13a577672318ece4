"""Frameworks from creation to their end, on a cluster in memory and in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from controllers.framework.api.types import FRAMEWORKS
from store.kube.api.objects import Object
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, now, role

pytestmark = pytest.mark.looptime


async def test_a_framework_runs_to_its_end() -> None:
    """Both roles run, the attempt succeeds, its pods and its ConfigMap are gone, and the status shows it."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("ps", 1), role("worker", 3)))
        status = await cluster.until_state("job", "AttemptRunning")
        assert set(await cluster.pods("job")) == {"job-ps-0", "job-worker-0", "job-worker-1", "job-worker-2"}
        status = await cluster.until_state("job", "Completed")
        assert status["attemptStatus"]["completionStatus"]["code"] == 0
        assert await cluster.pods("job") == {}
        assert await cluster.config_map("job") is None
        assert "FrameworkCompleted" in await cluster.events("job")


async def test_what_is_deleted_is_in_the_log_once() -> None:
    """A user deletes a running Framework: its last state and that of each pod are logged as frameworkcontroller does,
    that of its ConfigMap is not."""
    with capture_logs() as logs:
        async with Cluster().running() as cluster:
            await cluster.create(framework("job", role("worker", 2, annotations={})))
            await cluster.until_state("job", "AttemptRunning")
            await cluster.api.delete(FRAMEWORKS, "job", NAMESPACE, propagation="Foreground")
            await asyncio.sleep(100)
    lines = [str(log["event"]) for log in logs]
    snapshots = [line.partition(": ObjectSnapshot: ")[0] for line in lines if ": ObjectSnapshot: " in line]
    assert sorted(snapshots) == [
        "[default/job-worker-0]: OnPodDeletion",
        "[default/job-worker-1]: OnPodDeletion",
        "[default/job]: OnFrameworkDeletion",
    ]


async def test_create_waits_for_start() -> None:
    """With executionType Create nothing is created; Start creates the ConfigMap and the pods."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("worker", 2), executionType="Create"))
        await cluster.until_state("job", "AttemptCreationPending")
        await asyncio.sleep(600)
        assert (await cluster.status("job"))["state"] == "AttemptCreationPending"
        assert await cluster.config_map("job") is None
        await cluster.patch("job", {"executionType": "Start"})
        await cluster.until_state("job", "Completed")


async def test_stop_completes_a_running_framework() -> None:
    """The pods go, the Framework completes with -210 and its tasks with -220."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("worker", 2, annotations={})))
        await cluster.until_state("job", "AttemptRunning")
        await cluster.patch("job", {"executionType": "Stop"})
        status = await cluster.until_state("job", "Completed")
        assert status["attemptStatus"]["completionStatus"]["code"] == -210
        codes = [task["attemptStatus"]["completionStatus"]["code"] for task in await cluster.tasks("job", "worker")]
        assert codes == [-220, -220]
        assert await cluster.pods("job") == {}


async def test_a_conflict_is_tried_again_after_a_random_delay() -> None:
    """An init container exits with 201: the attempt ends, and the next one begins 60 to 900 s later."""
    plan = {"hollow/barrier.exit-code": "201", "hollow/exit-code": "0"}
    worker = role("worker", 2, annotations=plan, init=["barrier"], policy={"minFailedTaskCount": 1})
    async with Cluster().running() as cluster:
        retry = {"fancyRetryPolicy": True, "maxRetryCount": 0}
        await cluster.create(framework("job", worker, retryPolicy=retry))
        status = await cluster.until(
            "job", lambda status: status["retryPolicyStatus"]["retryDelaySec"] is not None, "waiting for its retry"
        )
        ended, delay = now(), status["retryPolicyStatus"]["retryDelaySec"]
        assert 60 <= delay <= 900
        assert status["state"] == "AttemptCompleted"
        assert await cluster.pods("job") == {}
        status = await cluster.until("job", lambda status: status["attemptStatus"]["id"] == 1, "in its next attempt")
        assert delay - 2 <= now() - ended <= delay + 2
        assert status["retryPolicyStatus"]["accountableRetriedCount"] == 0


async def test_a_user_who_overwrites_the_status_is_overruled() -> None:
    """A user's changes of the status are ignored and replaced; the user's change of the spec stays."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("worker", 1, annotations={})))
        await cluster.until_state("job", "AttemptRunning")
        await cluster.api.patch(
            FRAMEWORKS, "job", NAMESPACE, {"status": {"state": "Completed"}, "spec": {"description": "mine"}}
        )
        await cluster.until_state("job", "AttemptRunning")
        assert (await cluster.get("job"))["spec"]["description"] == "mine"
        assert set(await cluster.pods("job")) == {"job-worker-0"}


@pytest.mark.parametrize(
    "task",
    [None, {}, {"pod": None}, {"pod": {}}, {"pod": {"spec": {}}}, {"pod": {"spec": {"containers": []}}}],
    ids=["no task", "empty task", "no pod", "empty pod", "empty spec", "no containers"],
)
async def test_a_task_without_containers_completes(task: Object | None) -> None:
    """The API server refuses its pod, so the Framework ends with -200, as with frameworkcontroller, and is not retried;
    a caller that waits for Completed does not wait for ever."""
    bare = role("worker", 2, policy={"minFailedTaskCount": 1}) | {"task": task}
    if task is None:
        del bare["task"]
    async with Cluster().running() as cluster:
        await cluster.create(framework("bare", bare, retryPolicy={"fancyRetryPolicy": True, "maxRetryCount": 0}))
        status = await cluster.until_state("bare", "Completed")
    assert status["attemptStatus"]["completionStatus"]["code"] == -200
    assert status["attemptStatus"]["id"] == 0
