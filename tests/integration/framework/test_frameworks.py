"""Frameworks end to end: `rcfarm jobs` as a process, real API server, scheduler and garbage collector, real barriers.

One operator serves all tests; each test has nodes of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd, decode_status
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, Resource, uid_of
from tests.support import require
from tests.support.framework.cluster import framework, role, tasks_of
from tests.support.framework.real import RealFrameworks, codes_of, real_frameworks
from tests.support.kube.control_plane import ControlPlane
from tests.support.programs.daemon import running
from tests.support.waiting import until

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
FANCY = {"fancyRetryPolicy": True, "maxRetryCount": 0}
FIRST_FAILS = {"minFailedTaskCount": 1}
RUNS_ON: dict[str, str] = {}
SUCCEEDS = {"hollow/exit-code": "0", "hollow/run-seconds": "1"}
SETTINGS = {
    "jobs.lease": "off",
    "jobs.conflict_delay_min": 1,
    "jobs.conflict_delay_max": 2,
    "jobs.compress_large_status": "true",
}
ENOUGH = 4000  # tasks whose statuses etcd accepts only compressed


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    control_plane.install(crd())
    control_plane.start_scheduler()
    yield control_plane
    control_plane.scheduler.kill()


@pytest.fixture(scope="module")
def home(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The namespace of these tests, with an operator that runs its Frameworks."""
    name = f"test-{secrets.token_hex(5)}"
    plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    flags = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    directory = tmp_path_factory.mktemp("frameworks")
    with running(directory / "jobs", "jobs", "--kubeconfig", str(plane.kubeconfig), "-n", name, *flags) as operator:
        operator.until_ready()
        yield name
        assert operator.stop() == 0
        assert "Traceback" not in operator.log()
    plane.request("DELETE", f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=0")
    plane.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
async def cluster(plane: ControlPlane, home: str, tmp_path: Path) -> AsyncIterator[RealFrameworks]:
    async with real_frameworks(plane, home, tmp_path) as cluster:
        yield cluster


def with_barrier(name: str, tasks: int, *, program: str = "barrier", cpu: str = "1", **annotations: str) -> Object:
    """Return a role whose tasks run a barrier first. One failed task ends the attempt."""
    plan = {"hollow/barrier.program": program, **annotations}
    made = role(name, tasks, annotations=plan, init=["barrier"], policy=FIRST_FAILS)
    made["task"]["pod"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
    return made


def app_has_started(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any({"running", "terminated"} & (status.get("state") or {}).keys() for status in statuses)


async def test_no_container_of_a_gang_starts_before_the_gang_is_whole(cluster: RealFrameworks) -> None:
    """The barriers hold their pods until the last pod has its address; then all continue with the same addresses.
    Unknown fields of the spec stay as they were written."""
    await cluster.add_nodes(2)
    body = framework("gang", with_barrier("chief", 1, **{"hollow/start-seconds": "2"}), with_barrier("worker", 2))
    body["spec"]["taskRoles"][0]["task"]["pod"]["spec"]["ofTheFuture"] = {"gates": ["a"]}
    written = (await cluster.create(body))["spec"]
    uids: dict[str, str] = {}

    async def all_have_started() -> bool:
        pods = await cluster.pods("gang")
        uids.update({name: uid_of(pod) for name, pod in pods.items()})
        if any(map(app_has_started, pods.values())):
            status = (await cluster.get("gang"))["status"]
            roles = status["attemptStatus"]["taskRoleStatuses"]
            assert all(task["attemptStatus"]["podIP"] for each in roles for task in each["taskStatuses"])
        return len(pods) == 3 and all(map(app_has_started, pods.values()))

    await until(all_have_started, "all three started")
    await cluster.finish("gang")
    scripts = {(cluster.directory / uid / "injector.sh").read_text() for uid in uids.values()}
    (script,) = scripts
    assert "FB_CHIEF_IPS=" in script
    assert "FB_WORKER_IPS=" in script
    status = await cluster.until_completed("gang")
    assert status["attemptStatus"]["completionStatus"]["code"] == 0
    assert codes_of(status, "worker") == [0, 0]
    assert (await cluster.get("gang"))["spec"] == written


async def test_a_gang_without_room_is_retried(cluster: RealFrameworks) -> None:
    """No node has room for one task: the others' barriers give up with 201, and the whole attempt ends and frees its
    resources. It is retried after a random delay, and succeeds once there is room."""
    await cluster.add_nodes(1, capacity={"cpu": "2"})
    await cluster.create(
        framework("large", with_barrier("worker", 3, program="hasty-barrier", **SUCCEEDS), retryPolicy=FANCY)
    )
    status = await cluster.until("large", lambda status: status["attemptStatus"]["id"] >= 1, "in its next attempt")
    assert status["retryPolicyStatus"]["accountableRetriedCount"] == 0
    await cluster.until_event("large", "FrameworkRetry")
    await cluster.add_nodes(1)
    status = await cluster.until_completed("large")
    assert status["attemptStatus"]["completionStatus"]["code"] == 0


async def test_a_quota_holds_tasks_up_until_it_is_lifted(cluster: RealFrameworks) -> None:
    """The quota admits one of two pods; a condition and an Event say so. When it is lifted the second pod follows, and
    the condition is removed."""
    await cluster.add_nodes(1)
    in_use = len((await cluster.api.list(PODS, cluster.namespace)).items)
    await cluster.api.create(
        QUOTAS, {"metadata": {"name": "few"}, "spec": {"hard": {"pods": str(in_use + 1)}}}, cluster.namespace
    )

    async def is_counted() -> bool:
        quota = await cluster.api.get(QUOTAS, "few", cluster.namespace)
        return bool((quota.get("status") or {}).get("used"))

    await until(is_counted, "the quota in force")
    await cluster.create(framework("held", role("worker", 2, annotations=RUNS_ON)))
    status = await cluster.until("held", lambda status: status.get("conditions"), "held up")
    (condition,) = status["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("CreationBlocked", "True", "QuotaExceeded")
    assert sorted(task["state"] for task in tasks_of(status, "worker"))[0] == "AttemptCreationPending"
    await cluster.api.delete(QUOTAS, "few", cluster.namespace)
    status = await cluster.until(
        "held", lambda status: [task["state"] for task in tasks_of(status, "worker")] == ["AttemptRunning"] * 2, "whole"
    )
    assert not status.get("conditions")
    await cluster.until_event("held", "QuotaExceeded")
    await cluster.patch("held", {"executionType": "Stop"})
    await cluster.until_completed("held")


async def test_a_pod_that_does_not_end_is_removed_in_time(cluster: RealFrameworks) -> None:
    """With a timeout of 1 s a stuck pod is deleted by force; without one its Framework waits until it has ended."""
    await cluster.add_nodes(1)
    stuck = {"hollow/stuck": "true"}
    for name, grace in (("forced", 1), ("patient", None)):
        await cluster.create(framework(name, role("worker", 1, annotations=stuck, grace=grace)))
    for name in ("forced", "patient"):
        await cluster.until_state(name, "AttemptRunning")
        await cluster.patch(name, {"executionType": "Stop"})
    status = await cluster.until_completed("forced")
    assert codes_of(status, "worker") == [-220]
    status = await cluster.until_state("patient", "AttemptDeleting")
    assert await cluster.pods("patient") != {}
    await cluster.annotate_pods("patient", {"hollow/stuck": "false"})
    await cluster.until_completed("patient")


async def test_tasks_that_are_scaled_away_and_wanted_again(cluster: RealFrameworks) -> None:
    """Scaled from 3 tasks to 1 and back to 2 while pods still end: the second task is a new instance, the third is
    gone. A removed role drains while a new one starts at once."""
    await cluster.add_nodes(1)
    slow = {"hollow/stuck": "true"}
    worker = role("worker", 3, annotations=slow)
    await cluster.create(framework("elastic", worker, role("old", 1, annotations=slow)))
    status = await cluster.until_state("elastic", "AttemptRunning")
    status = await cluster.until("elastic", lambda status: len(tasks_of(status, "worker")) == 3, "of three workers")
    before = [task["instanceUID"] for task in tasks_of(status, "worker")]
    await cluster.patch("elastic", {"taskRoles": [worker | {"taskNumber": 1}, role("new", 1, annotations=RUNS_ON)]})
    await cluster.until(
        "elastic",
        lambda status: (
            [task["state"] for task in tasks_of(status, "worker")][1:] == ["AttemptDeleting"] * 2
            and tasks_of(status, "old")[0]["state"] == "AttemptDeleting"
            and [task["state"] for task in tasks_of(status, "new")] == ["AttemptRunning"]
        ),
        "draining",
    )
    await cluster.patch("elastic", {"taskRoles": [worker | {"taskNumber": 2}, role("new", 1, annotations=RUNS_ON)]})
    await cluster.annotate_pods("elastic", {"hollow/stuck": "false"})
    status = await cluster.until(
        "elastic",
        lambda status: (
            [task["state"] for task in tasks_of(status, "worker")] == ["AttemptRunning"] * 2
            and not tasks_of(status, "old")
        ),
        "of two workers",
    )
    after = [task["instanceUID"] for task in tasks_of(status, "worker")]
    assert after[0] == before[0]
    assert after[1] not in before
    assert set(await cluster.pods("elastic")) == {"elastic-worker-0", "elastic-worker-1", "elastic-new-0"}
    await cluster.finish("elastic")
    await cluster.until_completed("elastic")


async def test_a_status_too_large_for_etcd_is_compressed(cluster: RealFrameworks) -> None:
    """The statuses of thousands of tasks are stored compressed, and can be read again, now and after later changes."""
    await cluster.create(framework("wide", role("worker", ENOUGH), executionType="Create"))
    status = await cluster.until_state("wide", "AttemptCreationPending")
    assert status["attemptStatus"]["taskRoleStatuses"] is None
    decoded = require(decode_status(status))
    assert len(decoded.roles[0].tasks) == ENOUGH
    await cluster.patch("wide", {"executionType": "Stop"})
    ended = require(decode_status(await cluster.until_completed("wide")))
    outcomes = {task.attempt_status.completion_status for task in ended.roles[0].tasks}
    assert {outcome.code for outcome in outcomes if outcome} == {-220}


async def test_a_deleted_pod_is_replaced(cluster: RealFrameworks) -> None:
    """A task whose pod is deleted gets another one, and the Framework goes on. When its ConfigMap is deleted the
    Framework is retried, after all its pods are gone."""
    await cluster.add_nodes(1)
    retried = role("worker", 2, annotations=RUNS_ON, retry=FANCY)
    await cluster.create(framework("loss", retried, retryPolicy=FANCY))
    await cluster.until(
        "loss", lambda status: [task["state"] for task in tasks_of(status, "worker")] == ["AttemptRunning"] * 2, "whole"
    )
    await cluster.api.delete(PODS, "loss-worker-0", cluster.namespace)
    status = await cluster.until(
        "loss",
        lambda status: (
            tasks_of(status, "worker")[0]["attemptStatus"]["id"] == 1
            and tasks_of(status, "worker")[0]["state"] == "AttemptRunning"
        ),
        "with a new pod",
    )
    assert status["attemptStatus"]["id"] == 0
    await cluster.api.delete(CONFIG_MAPS, "loss-attempt", cluster.namespace, propagation="Background")
    status = await cluster.until(
        "loss", lambda status: (status["attemptStatus"]["id"], status["state"]) == (1, "AttemptRunning"), "retried"
    )
    assert status["retryPolicyStatus"]["accountableRetriedCount"] == 0
    await cluster.patch("loss", {"executionType": "Stop"})
    await cluster.until_completed("loss")


async def test_a_name_is_used_again_at_once(cluster: RealFrameworks) -> None:
    """A running Framework is deleted, and a new one takes its name while the old pods still end: it waits until their
    names are free, and adopts nothing."""
    await cluster.add_nodes(1)
    slow = {"hollow/stop-seconds": "2"}
    await cluster.create(framework("again", role("worker", 2, annotations=slow)))
    await cluster.until(
        "again",
        lambda status: [task["state"] for task in tasks_of(status, "worker")] == ["AttemptRunning"] * 2,
        "whole",
    )
    before = {uid_of(pod) for pod in (await cluster.pods("again")).values()}
    await cluster.api.delete(FRAMEWORKS, "again", cluster.namespace, propagation="Background")
    successor = await cluster.create(framework("again", role("worker", 2, annotations=SUCCEEDS)))
    status = await cluster.until_completed("again")
    assert uid_of(await cluster.get("again")) == uid_of(successor)
    assert codes_of(status, "worker") == [0, 0]
    assert not before & {task["attemptStatus"]["podUID"] for task in tasks_of(status, "worker")}
    assert {task["retryPolicyStatus"]["totalRetriedCount"] for task in tasks_of(status, "worker")} == {0}
