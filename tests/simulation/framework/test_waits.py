"""What only time ends: retention, a taken name, a quota; on a cluster in virtual time."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec
import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.config import FrameworkConfig, shipped_config
from store.kube.api.errors import Forbidden
from store.kube.api.objects import PODS, Object, Resource, uid_of
from store.kube.memory.kube import Call
from tests.support.framework.cluster import NAMESPACE, Cluster, framework, now, role
from tests.support.kube.faults.network import Network

pytestmark = pytest.mark.looptime

RUNS_ON: dict[str, str] = {}


def config(**settings: Any) -> FrameworkConfig:
    return msgspec.structs.replace(shipped_config(), **settings)


def task_states(status: Object) -> list[str]:
    roles = status["attemptStatus"]["taskRoleStatuses"]
    return [task["state"] for each in roles for task in each["taskStatuses"]]


async def test_a_completed_framework_is_kept_and_then_deleted() -> None:
    """The Framework is deleted in the foreground when the retention ends, no sooner."""
    asked: list[Object] = []

    class Deletions(Network):
        async def delete(self, resource: Resource, *arguments: Any, **options: Any) -> None:
            if resource == FRAMEWORKS:
                asked.append({"at": now(), **options})
            await self.inner.delete(resource, *arguments, **options)

    async with Cluster(config(retain_completed=3600)).running(operator=False) as cluster:
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
