"""Frameworks from creation to their end, on a cluster in memory and in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from controllers.framework.api.types import FRAMEWORKS
from store.kube.api.objects import Object
from tests.support.framework.cluster import EPOCH, NAMESPACE, Cluster, framework, now, role

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


async def test_a_clock_that_is_set_back_delays_no_status() -> None:
    """A status that is stored with the next change waits for a second or two, not until the clock has caught up."""
    never = {"hollow/start-seconds": "inf"}
    cluster = Cluster()
    cluster.clock = lambda: 2 * EPOCH - now()  # it runs backwards
    async with cluster.running():
        await cluster.create(framework("job", role("worker", 1, annotations={}), role("late", 1, annotations=never)))
        async with asyncio.timeout(10):
            await cluster.until_state("job", "AttemptRunning")
        (worker,) = await cluster.tasks("job", "worker")
        assert worker["attemptStatus"]["podIP"]
