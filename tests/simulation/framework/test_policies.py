"""The ends of attempts and their consequences: retries, completion policies, retention, on a cluster in virtual
time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import msgspec
import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.config.config import FrameworkConfig, shipped_config
from store.kube.api.errors import Forbidden
from store.kube.api.objects import PODS, Object, Resource, uid_of
from store.kube.api.protocol import KubeApi, Page, WatchEvent
from store.kube.memory.kube import Call
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, now, role
from tests.support.kube.faults.network import Network

pytestmark = pytest.mark.looptime

RUNS_ON: dict[str, str] = {}
FANCY = {"fancyRetryPolicy": True, "maxRetryCount": 0}
FIRST_FAILS = {"minFailedTaskCount": 1}


def config(**settings: Any) -> FrameworkConfig:
    return msgspec.structs.replace(shipped_config(), **settings)


def ends(code: int, after: float = 2) -> dict[str, str]:
    """Return the annotations of pods that end with this code."""
    return {"hollow/exit-code": str(code), "hollow/run-seconds": str(after)}


def outcome(status: Object) -> int:
    return int(status["attemptStatus"]["completionStatus"]["code"])


def task_states(status: Object) -> list[str]:
    roles = status["attemptStatus"]["taskRoleStatuses"]
    return [task["state"] for each in roles for task in each["taskStatuses"]]


async def test_a_stop_does_not_wait_for_a_retry() -> None:
    """Stopped while its retry is delayed, a Framework completes at once with -210, in one more
    attempt."""
    barrier = {"hollow/barrier.exit-code": "201"}
    async with Cluster().running() as cluster:
        waits = role("worker", 1, annotations=barrier, init=["barrier"], policy=FIRST_FAILS)
        await cluster.create(framework("job", waits, retryPolicy=FANCY))
        await cluster.until("job", lambda status: status["retryPolicyStatus"]["retryDelaySec"], "waiting")
        asked = now()
        await cluster.patch("job", {"executionType": "Stop"})
        status = await cluster.until_state("job", "Completed")
        assert now() - asked < 2
        assert (outcome(status), status["attemptStatus"]["id"]) == (-210, 1)


@pytest.mark.parametrize(
    ("policy", "code", "retries"),
    [
        ({"fancyRetryPolicy": True, "maxRetryCount": 5}, 210, 0),
        ({"fancyRetryPolicy": True, "maxRetryCount": 1}, 7, 1),
        ({"fancyRetryPolicy": False, "maxRetryCount": 2}, 210, 2),
        ({"fancyRetryPolicy": False, "maxRetryCount": -1}, 0, 0),
    ],
)
async def test_how_often_a_framework_is_retried(policy: Object, code: int, retries: int) -> None:
    """A fancy policy does not retry permanent failures, and retries unknown ones as often as configured; success ends
    the Framework."""
    async with Cluster().running() as cluster:
        fails = role("worker", 1, annotations=ends(code), policy=FIRST_FAILS)
        await cluster.create(framework("job", fails, retryPolicy=policy))
        status = await cluster.until_state("job", "Completed")
        assert outcome(status) == code
        assert status["retryPolicyStatus"]["totalRetriedCount"] == retries
        assert status["retryPolicyStatus"]["accountableRetriedCount"] == retries


async def test_success_can_be_repeated_for_ever() -> None:
    """With maxRetryCount -2 a Framework that succeeds starts again."""
    async with Cluster().running() as cluster:
        body = framework("job", role("worker", 1, annotations=ends(0)), retryPolicy={"maxRetryCount": -2})
        await cluster.create(body)
        status = await cluster.until("job", lambda status: status["attemptStatus"]["id"] == 3, "in its fourth attempt")
        assert status["retryPolicyStatus"]["accountableRetriedCount"] == 3


async def test_the_failure_that_crosses_the_limit_ends_the_attempt() -> None:
    """With a limit of two failures of a role, the second gives the outcome, and ends the tasks still running. A role
    without a policy does not count."""
    async with Cluster().running() as cluster:
        policy = {"minFailedTaskCount": 2}
        early, late = (role(name, 1, annotations=ends(7, after)) for name, after in (("early", 2), ("late", 60)))
        worker = role("worker", 2, annotations=ends(8, 30), policy=policy)
        await cluster.create(framework("job", early, worker, late))
        status = await cluster.until_state("job", "Completed")
        assert outcome(status) == 8
        assert status["attemptStatus"]["completionStatus"]["trigger"]["taskRoleName"] == "worker"
        assert [task["attemptStatus"]["completionStatus"]["code"] for task in await cluster.tasks("job", "late")] == [
            -220
        ]


async def test_enough_successes_end_the_attempt() -> None:
    """The chief's success is the Framework's; its servers, which never end, are stopped."""
    async with Cluster().running() as cluster:
        chief = role("chief", 2, annotations=ends(0, 30), policy={"minSucceededTaskCount": 2})
        await cluster.create(framework("job", chief, role("ps", 2, annotations=RUNS_ON)))
        status = await cluster.until_state("job", "Completed")
        assert outcome(status) == 0
        codes = [task["attemptStatus"]["completionStatus"]["code"] for task in await cluster.tasks("job", "ps")]
        assert codes == [-220, -220]


async def test_failures_that_no_policy_counts() -> None:
    """Without a policy a Framework whose tasks all failed has succeeded; an Event warns."""
    async with Cluster().running() as cluster:
        await cluster.create(framework("job", role("worker", 2, annotations=ends(7))))
        status = await cluster.until_state("job", "Completed")
        assert outcome(status) == 0
        assert "CompletionPolicyOmitted" in await cluster.events("job")


class Blind:
    """A `KubeApi` whose lists and watches never show a pod."""

    def __init__(self, inner: KubeApi) -> None:
        self._inner = inner

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    async def list(self, resource: Resource, *arguments: Any, **options: Any) -> Page:
        page = await self._inner.list(resource, *arguments, **options)
        return dataclasses.replace(page, items=[]) if resource == PODS else page

    @asynccontextmanager
    async def watch(
        self, resource: Resource, *arguments: Any, **options: Any
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async with self._inner.watch(resource, *arguments, **options) as events:
            yield (event async for event in events if resource != PODS or event.type == "BOOKMARK")


async def test_a_pod_that_no_cache_shows() -> None:
    """A pod that never appears in the cache is deleted after the cache timeout, and its task fails with -111."""
    async with Cluster(nodes=1).running(operator=False) as cluster:
        cluster.start_operator(Blind(cluster.api))
        await cluster.create(framework("job", role("worker", 1, annotations=RUNS_ON, policy=FIRST_FAILS)))
        began = now()
        status = await cluster.until_state("job", "Completed")
        assert outcome(status) == -111
        assert now() - began >= 300
        assert await cluster.pods("job") == {}


async def test_a_failed_task_is_scaled_away_with_its_limit() -> None:
    """One edit removes the failed task and lowers the limit to one: the removed task does not count."""
    async with Cluster().running() as cluster:
        policy = {"minFailedTaskCount": 2}
        keep = role("keep", 1, annotations=RUNS_ON, policy=FIRST_FAILS)
        await cluster.create(framework("job", keep, role("worker", 2, annotations=RUNS_ON, policy=policy)))
        await cluster.until("job", lambda status: task_states(status) == ["AttemptRunning"] * 3, "whole")
        await cluster.api.patch(PODS, "job-worker-1", NAMESPACE, {"metadata": {"annotations": ends(7, 0)}})
        await cluster.until("job", lambda status: "Completed" in task_states(status), "short of a task")
        smaller = role("worker", 1, annotations=RUNS_ON, policy=FIRST_FAILS)
        await cluster.patch("job", {"taskRoles": [keep, smaller]})
        await cluster.until("job", lambda status: task_states(status) == ["AttemptRunning"] * 2, "of two tasks")
        await asyncio.sleep(60)
        assert (await cluster.status("job"))["state"] == "AttemptRunning"


async def test_a_completed_framework_is_kept_and_then_deleted() -> None:
    """The Framework is deleted in the foreground when the retention ends, no sooner."""
    asked: list[Object] = []

    class Deletions(Network):
        async def delete(self, resource: Resource, *arguments: Any, **options: Any) -> None:
            if resource == FRAMEWORKS:
                asked.append({"at": now(), **options})
            await self.inner.delete(resource, *arguments, **options)

    async with Cluster(config(framework_completed_retain_sec=3600)).running(operator=False) as cluster:
        cluster.start_operator(Deletions(cluster.api))
        made = await cluster.create(framework("job", role("worker", 1)))
        status = await cluster.until_state("job", "Completed")
        completed = datetime.fromisoformat(status["completionTime"]).timestamp()
        async with asyncio.timeout(4000):
            while (await cluster.api.list(FRAMEWORKS, NAMESPACE)).items:
                await asyncio.sleep(1)
        (deletion,) = asked
        assert 3600 <= deletion["at"] - completed < 3602
        assert (deletion["uid"], deletion["propagation"]) == (uid_of(made), "Foreground")


async def test_a_stranger_keeps_its_name() -> None:
    """A foreign pod with a task's name stays as it is, and the task waits; it gets its own pod within half a minute
    after the foreign one is gone."""
    stranger = {"metadata": {"name": "job-worker-0"}, "spec": {"containers": [{"name": "main", "image": "other"}]}}
    async with Cluster().running() as cluster:
        made = await cluster.api.create(PODS, stranger, NAMESPACE)
        await cluster.create(framework("job", role("worker", 2, annotations=RUNS_ON)))
        status = await cluster.until("job", lambda status: bool(status.get("conditions")), "held up")
        assert status["conditions"][0]["reason"] == "NameTaken"
        await asyncio.sleep(3600)
        left = await cluster.api.get(PODS, "job-worker-0", NAMESPACE)
        assert (uid_of(left), left["metadata"].get("deletionTimestamp")) == (uid_of(made), None)
        assert sorted(task_states(await cluster.status("job"))) == ["AttemptCreationPending", "AttemptRunning"]
        await cluster.api.delete(PODS, "job-worker-0", NAMESPACE, uid=uid_of(made), grace_period=0)
        gone = now()
        status = await cluster.until("job", lambda status: task_states(status) == ["AttemptRunning"] * 2, "whole")
        assert now() - gone <= 31
        assert not status.get("conditions")


async def test_one_framework_that_makes_no_sense() -> None:
    """An invalid Framework gets a condition that names the field, and others run; once corrected, it runs too."""
    async with Cluster().running() as cluster:
        bad = framework("bad", role("worker", 1))
        bad["spec"]["taskRoles"][0]["task"]["pod"] = "a text"
        await cluster.create(bad)
        await cluster.create(framework("good", role("worker", 1)))
        await cluster.until_state("good", "Completed")
        (condition,) = (await cluster.status("bad"))["conditions"]
        assert (condition["type"], condition["status"]) == ("Valid", "False")
        assert "spec.taskRoles[0].task.pod" in condition["message"]
        await cluster.patch("bad", {"taskRoles": [role("worker", 1)]})
        await cluster.until_state("bad", "Completed")


async def test_a_quota_that_is_lifted_after_hours() -> None:
    """However long the quota refused a pod, its removal is noticed within half a minute."""

    def refuse(call: Call) -> None:
        if call.verb == "create" and call.resource == PODS and now() < lifted:
            raise Forbidden("pods is forbidden: exceeded quota: few, requested: pods=1", status=403)

    async with Cluster().running() as cluster:
        lifted = now() + 7200
        cluster.api.before_call = refuse
        await cluster.create(framework("job", role("worker", 2, annotations=RUNS_ON)))
        await asyncio.sleep(7200)
        assert (await cluster.status("job"))["conditions"][0]["reason"] == "QuotaExceeded"
        status = await cluster.until("job", lambda status: task_states(status) == ["AttemptRunning"] * 2, "whole")
        assert now() - lifted <= 31
        assert not status.get("conditions")
