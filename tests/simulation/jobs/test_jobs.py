"""Jobs from start to end in virtual time: operator, API server in memory, hollow kubelet; and under faults."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controllers.jobs.operator import OVERDUE
from store.kube.api.objects import PODS, SERVICES, Object, Resource, is_deleting, labels_of, name_of, uid_of
from store.kube.api.protocol import WatchEvent
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.train_jobs import (
    INDEX,
    TRAIN_JOBS,
    TYPE,
    Writes,
    children,
    condition,
    conditions,
    loop_clock,
    memory_kube,
    operate,
    read,
    running,
    train_job,
)
from tests.support.kube.faults.network import FlakyKube
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime


@asynccontextmanager
async def hollow(api: MemoryKube) -> AsyncIterator[HollowKubelet]:
    """Yield four nodes whose kubelet and scheduler are hollow."""
    kubelet = HollowKubelet(api, clock=lambda: loop_clock().timestamp(), schedules=True)
    await kubelet.add_nodes(4)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kubelet.run())
        try:
            yield kubelet
        finally:
            task.cancel()


async def test_a_job_of_four_workers_and_two_servers_succeeds() -> None:
    """Created, running, succeeded after its workers' half minute; the servers, which never end, are cleaned up."""
    api = memory_kube()
    writes = Writes(api)
    job = train_job(Worker=4, PS=2)
    workers = job["spec"]["replicaSpecs"]["Worker"]["template"]["metadata"]["annotations"]
    workers |= {"hollow/exit-code": "0", "hollow/run-seconds": "30"}
    async with hollow(api), running(operate(api)):
        await api.create(TRAIN_JOBS, job, "default")
        await condition(api, "Running")
        assert loop_time() < 2.0
        await condition(api, "Succeeded")
        assert 30.0 <= loop_time() < 32.0
        await until(lambda: _left(api, 4))
        await asyncio.sleep(3600)

        done = await read(api)
        assert conditions(done) == {"Created": "True", "Running": "False", "Succeeded": "True"}
        assert done["status"]["replicaStatuses"]["Worker"]["succeeded"] == 4
        assert sorted(await children(api, PODS)) == [f"train-worker-{index}" for index in range(4)]

    assert Counter(writes.of("create", PODS)).most_common(1)[0][1] == 1
    assert len(writes.of("patch", TRAIN_JOBS, "status")) <= 12


class ForgetfulKube(MemoryKube):
    """An API server that forgets the first watch of services: it stays open, and brings nothing."""

    watched = 0

    @asynccontextmanager
    async def watch(self, resource: Resource, namespace: str = "", **options: Any) -> AsyncIterator[Any]:
        self.watched += resource == SERVICES
        async with super().watch(resource, namespace, **options) as events:
            yield silence() if resource == SERVICES and self.watched == 1 else events


async def silence() -> AsyncIterator[WatchEvent]:
    """Yield nothing, for ever."""
    await asyncio.Event().wait()
    yield WatchEvent("BOOKMARK", {})


async def test_a_watch_that_the_api_server_has_forgotten_is_begun_again() -> None:
    """The services of a job were created and are not seen: after ten seconds the operator watches again from where it
    stood, without a list, sees them, and the job goes on. Nothing is created twice."""
    api = ForgetfulKube(clock=lambda: loop_clock().timestamp(), rng=random.Random(7))
    api.register(TRAIN_JOBS, has_status=True)
    writes = Writes(api)
    async with hollow(api), running(operate(api)):
        await api.create(TRAIN_JOBS, train_job(Worker=2), "default")
        await condition(api, "Running")
        assert OVERDUE <= loop_time() < 2 * OVERDUE
        await asyncio.sleep(60)
    assert api.watched == 2
    assert Counter(writes.of("create", SERVICES)).most_common(1)[0][1] == 1


async def _left(api: MemoryKube, count: int) -> bool:
    return len(await children(api, PODS)) == count


async def test_a_worker_that_is_evicted_runs_again() -> None:
    """An eviction is not the job's fault: another pod runs under the same name and service, and the job succeeds."""
    api = memory_kube()
    plan = {"hollow/exit-code": "0", "hollow/run-seconds": "60"}
    job = train_job(Worker=2, restart_policy="ExitCode", annotations=plan)
    job["spec"]["successPolicy"] = "AllWorkers"
    async with hollow(api) as kubelet, running(operate(api)):
        await api.create(TRAIN_JOBS, job, "default")
        await condition(api, "Running")
        services = await children(api, SERVICES)
        first = (await children(api, PODS))["train-worker-1"]
        await asyncio.sleep(5)
        kubelet.fail(first)
        await condition(api, "Succeeded", within=600)

        second = (await children(api, PODS))["train-worker-1"]
        assert uid_of(second) != uid_of(first)
        assert uid_of((await children(api, SERVICES))["train-worker-1"]) == uid_of(services["train-worker-1"])
        retry = (await read(api))["status"]["replicaStatuses"]["Worker"]["retries"]["1"]
        assert retry.get("disruptions") == 1
        assert retry.get("failures", 0) == 0


class Chaos:
    """All faults around a job, at random: operators that crash and are replaced, a bad network, watches that break
    together with the history that they need, pods that are evicted or deleted.

    `violations`: broken guarantees, as the API server saw them.
    """

    def __init__(self, api: MemoryKube, kubelet: HollowKubelet, rng: random.Random) -> None:
        self.api, self.kubelet, self.rng = api, kubelet, rng
        self.violations: list[str] = []
        self.finished = False
        self.evictions = self.crashes = 0
        self._network = FlakyKube(api, rng, refused=0.1, lost=0.05)
        self._operator: asyncio.Task[None] | None = None
        api.admission = self._check

    def _check(self, resource: Resource, new: Object, old: Object | None) -> None:
        """Check every write before it is stored."""
        if resource == TRAIN_JOBS and old is not None:
            self._check_status(conditions(old), conditions(new))
        elif resource == PODS and old is None:
            labels = labels_of(new)
            if int(labels[INDEX]) >= {"worker": 4, "ps": 2}[labels[TYPE]]:
                self.violations.append(f"{name_of(new)} is not in the spec")
            if self.finished:
                self.violations.append(f"{name_of(new)} is created for a finished job")

    def _check_status(self, old: dict[str, str], new: dict[str, str]) -> None:
        self.finished = self.finished or new.get("Succeeded") == "True"
        if old.get("Succeeded") == "True" and new != old:
            self.violations.append(f"a finished job changed: {old} to {new}")
        if new.get("Failed") == "True" or new.get("Blocked") == "True":
            self.violations.append(f"nothing that happened is the job's fault: {new}")

    async def rage(self, group: asyncio.TaskGroup, seconds: float) -> None:
        """Cause a fault about every second; then a good network and an operator that stays."""
        self._start(group)
        while loop_time() < seconds:
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            strike = self.rng.choice([self._crash, self._break, self._forget, self._evict, self._delete])
            await strike(group)
        self._network.refused = self._network.lost = 0.0

    def _start(self, group: asyncio.TaskGroup) -> None:
        operator = operate(self._network)
        self._operator = group.create_task(operator.run())

    def stop(self) -> None:
        """End the last operator."""
        assert self._operator is not None
        self._operator.cancel()

    async def _crash(self, group: asyncio.TaskGroup) -> None:
        """Crash the operator: nothing of the old process reaches the server any more; the new one remembers nothing."""
        assert self._operator is not None
        self._network.dead = True
        self._operator.cancel()
        self._network = FlakyKube(self.api, self.rng, refused=0.1, lost=0.05)
        self._start(group)
        self.crashes += 1

    async def _break(self, group: asyncio.TaskGroup) -> None:
        self.api.break_watches()

    async def _forget(self, group: asyncio.TaskGroup) -> None:
        self.api.compact()
        self.api.break_watches()

    async def _evict(self, group: asyncio.TaskGroup) -> None:
        if pods := await self._running():
            self.kubelet.fail(self.rng.choice(pods))
            self.evictions += 1

    async def _delete(self, group: asyncio.TaskGroup) -> None:
        if pods := await self._running():
            await self.api.delete(PODS, name_of(self.rng.choice(pods)), "default", grace_period=0)

    async def _running(self) -> list[Object]:
        pods = await children(self.api, PODS)
        return [pod for pod in pods.values() if pod["status"]["phase"] == "Running" and not is_deleting(pod)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_job_survives_a_bad_minute(seed: int) -> None:
    """Whatever faults occur for a minute: the job succeeds, each eviction counts at most once, no pod is created
    unnecessarily, and no back-off remains."""
    api = memory_kube()
    job = train_job(Worker=4, PS=2, restart_policy="ExitCode")
    job["spec"]["successPolicy"] = "AllWorkers"
    workers = job["spec"]["replicaSpecs"]["Worker"]["template"]["metadata"]["annotations"]
    workers |= {"hollow/exit-code": "0", "hollow/run-seconds": "40"}
    async with hollow(api) as kubelet, asyncio.TaskGroup() as group:
        chaos = Chaos(api, kubelet, random.Random(seed))
        await api.create(TRAIN_JOBS, job, "default")
        await chaos.rage(group, 60.0)
        await condition(api, "Succeeded", within=3000)
        await until(lambda: _left(api, 4), within=600)
        status = (await read(api))["status"]
        chaos.stop()

    assert chaos.violations == []
    assert chaos.crashes > 0
    retries = [retry for kind in status["replicaStatuses"].values() for retry in kind.get("retries", {}).values()]
    assert sum(retry.get("disruptions", 0) for retry in retries) <= chaos.evictions
    assert sum(retry.get("failures", 0) for retry in retries) == 0
