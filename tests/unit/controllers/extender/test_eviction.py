"""Evicting victims for kube-schedulers that never call `preempt`; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from controllers.extender.eviction import LAST_PAUSE, SILENCE, EvictVictims
from scheduler.hived.contract import POD_SCHEDULING_SPEC
from scheduler.hived.errors import UserError
from store.kube.api.errors import Forbidden, TooManyRequests
from store.kube.api.objects import POD_DISRUPTION_BUDGETS, PODS, Object, is_deleting, name_of, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.extender.process import NAMESPACE, Process, ScriptedAlgorithm, binds, placed, preempts, waits
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime


class Evictions:
    """Records Evictions: (version, pod, UID in its precondition), and their times. `fail`: an error for each."""

    def __init__(self, api: MemoryKube) -> None:
        self.posted: list[tuple[str, str, str]] = []
        self.times: list[float] = []
        self.fail: Exception | None = None
        api.before_call = self._hear

    def _hear(self, call: Call) -> None:
        if call.subresource == "eviction":
            uid = call.body["deleteOptions"]["preconditions"]["uid"]
            self.posted.append((call.body["apiVersion"], call.name, uid))
            self.times.append(loop_time())
            if self.fail is not None:
                raise self.fail

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.posted]


class World:
    """Pod `p` needs the place of the running pods `v0` and `v1` on node n0."""

    def __init__(self, process: Process, algorithm: ScriptedAlgorithm, pod: Object, victims: list[Object]) -> None:
        self.process, self.algorithm, self.pod, self.victims = process, algorithm, pod, victims
        self.evictions = Evictions(process.api)

    async def running(self, name: str, node: str, device: int) -> Object:
        """Return a further pod that runs on a device."""
        pod = placed(await self.process.add_pod(name), node, device)
        await self.process.bind_as(pod)
        return pod

    async def filter(self, pod: Object | None = None, *, times: int = 1) -> None:
        """Filter `p`, or another pod, and let the evictions begin."""
        for _ in range(times):
            await self.process.filter(self.pod if pod is None else pod)
        await self.process.settled()

    async def ending(self) -> list[str]:
        pods = (await self.process.api.list(PODS, NAMESPACE)).items
        return [name_of(pod) for pod in pods if is_deleting(pod)]


async def world_of(mode: EvictVictims, **how: Any) -> AsyncIterator[World]:
    algorithm = ScriptedAlgorithm()
    process = Process(algorithm, nodes=("n0",), evict_victims=mode, **how)
    async with process.running():
        await process.add_nodes("n0")
        victims = []
        for number in range(2):
            victim = placed(await process.add_pod(f"v{number}"), "n0", number)
            await process.bind_as(victim)
            status = {"status": {"phase": "Running"}}
            await process.api.patch(PODS, f"v{number}", NAMESPACE, status, subresource="status")
            victims.append(victim)
        pod = await process.add_pod("p", schedulerName="vc-a")
        algorithm.decisions["p"] = preempts("n0", *victims)
        await process.settled()
        yield World(process, algorithm, pod, victims)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async for world in world_of("auto"):
        yield world


@pytest.fixture
async def eager() -> AsyncIterator[World]:
    async for world in world_of("always"):
        yield world


class TestWhen:
    async def test_a_kube_scheduler_that_never_calls_preempt(self, world: World) -> None:
        """A second filter with a decision to preempt and no preempt in between shows it; victims are evicted
        gracefully.
        """
        await world.process.filter(world.pod)
        await asyncio.sleep(SILENCE / 2)
        assert world.evictions.posted == []
        await world.filter()
        assert world.evictions.posted == [("policy/v1", name_of(victim), uid_of(victim)) for victim in world.victims]
        assert await world.ending() == ["v0", "v1"]
        assert world.process.state(world.pod) == "Preempting"

    async def test_a_quiet_cluster(self, world: World) -> None:
        """The second filter may come minutes later there: victims are evicted once it is clear that no
        preempt follows.
        """
        await world.process.filter(world.pod)
        began = loop_time()
        await asyncio.sleep(60)
        assert world.evictions.names == ["v0", "v1"]
        assert world.evictions.times[0] - began == pytest.approx(SILENCE, abs=0.1)

    async def test_a_preempt_in_time(self, world: World) -> None:
        """Nothing is evicted after its preempt, nor if it does not call again while its victims still stop."""
        await world.process.filter(world.pod)
        await asyncio.sleep(SILENCE / 2)
        await world.process.preempt(world.pod)
        await world.process.filter(world.pod)
        await asyncio.sleep(60)
        assert world.evictions.posted == []

    async def test_pods_that_never_preempt_prove_nothing(self, world: World) -> None:
        """kube-scheduler doesn't call preempt for them, even if it does for other pods."""
        meek = await world.process.add_pod("meek", schedulerName="vc-a", preemptionPolicy="Never")
        world.algorithm.decisions["meek"] = preempts("n0", *world.victims)
        for _ in range(3):
            await world.process.filter(meek)
        await asyncio.sleep(60)
        await world.filter()
        assert world.evictions.posted == []

    async def test_a_kube_scheduler_that_calls_preempt(self, world: World) -> None:
        """Nothing is evicted, however often it calls."""
        for _ in range(5):
            await world.filter()
            await world.process.preempt(world.pod)
        await asyncio.sleep(60)
        assert world.evictions.posted == []

    async def test_a_silent_kube_scheduler_is_silent_for_all_its_pods(self, world: World) -> None:
        """The next pod of the same kube-scheduler does not wait for a second filter; a pod of another one does."""
        same = await world.process.add_pod("same", schedulerName="vc-a")
        other = await world.process.add_pod("other", schedulerName="vc-b")
        await world.filter(times=2)
        for pod, expected in ((other, 0), (same, 1)):
            world.algorithm.decisions[name_of(pod)] = preempts("n0", *world.victims)
            heard = len(world.algorithm.heard)
            await world.filter(pod)
            assert world.algorithm.heard[heard:].count(f"Preempting {name_of(pod)}") == expected
        assert world.evictions.names == ["v0", "v1"]

    async def test_a_silent_kube_scheduler_that_calls_after_all(self, world: World) -> None:
        """Its preempt takes over: our preemption ends, and two filters are needed to start it again."""
        world.evictions.fail = Forbidden("no", status=403)
        await world.filter(times=2)
        assert world.evictions.names == ["v0", "v1"]
        assert (await world.process.preempt(world.pod)).node_name_to_meta_victims
        await world.process.filter(world.pod)
        await asyncio.sleep(600)
        assert world.evictions.names == ["v0", "v1"]

    async def test_a_decision_that_comes_back(self, world: World) -> None:
        """A finished preemption starts again at the next filter that finds victims."""
        await world.filter(times=2)
        world.algorithm.decisions["p"] = waits()
        await asyncio.sleep(60)
        late = await world.running("late", "n0", 2)
        world.algorithm.decisions["p"] = preempts("n0", late)
        await world.filter()
        assert world.evictions.names == ["v0", "v1", "late"]

    async def test_always(self, eager: World) -> None:
        """The first filter is enough, and a call of preempt does not change that. Each victim gets an Event."""
        await eager.process.filter(eager.pod)
        await eager.process.preempt(eager.pod)
        await eager.process.settled()
        assert eager.evictions.names == ["v0", "v1"]
        assert ("Preempted", "v0", "Preempted by default/p") in eager.process.recorder.events

    async def test_never(self) -> None:
        """Nothing is evicted."""
        async for world in world_of("never"):
            for _ in range(5):
                await world.process.filter(world.pod)
            await asyncio.sleep(60)
            assert world.evictions.posted == []

    async def test_a_pod_that_never_preempts(self, eager: World) -> None:
        """Its preemptionPolicy Never is respected."""
        pod = await eager.process.add_pod("meek", preemptionPolicy="Never")
        eager.algorithm.decisions["meek"] = preempts("n0", *eager.victims)
        await eager.filter(pod)
        assert eager.evictions.posted == []


class TestVictims:
    async def test_next_victims_follow_when_these_are_gone(self, eager: World) -> None:
        """The decision is repeated when a victim is gone, and evictions end when it names no victim."""
        other = await eager.running("v2", "n1", 0)
        await eager.filter()
        eager.algorithm.decisions["p"] = preempts("n1", other)
        began = loop_time()
        await eager.process.delete("v0")
        assert eager.evictions.names == ["v0", "v1", "v2"]
        assert loop_time() == began
        eager.algorithm.decisions["p"] = binds("n0")
        await eager.process.delete("v2")
        heard = len(eager.algorithm.heard)
        await asyncio.sleep(600)
        assert eager.algorithm.heard[heard:] == []
        assert (await eager.process.filter(eager.pod)).node_names == ("n0",)

    async def test_victims_on_other_nodes(self, eager: World) -> None:
        """They are evicted together with those of the first node, so that a gang waits once, not once per node."""
        other = await eager.running("v2", "n1", 0)
        eager.algorithm.decisions["p"] = preempts("n0", *eager.victims, elsewhere=(other,))
        await eager.filter()
        assert eager.evictions.names == ["v0", "v1", "v2"]

    async def test_a_victim_is_evicted_once(self, eager: World) -> None:
        """Also if it stops slowly, if several pods preempt it, and if it is being deleted anyway."""
        await eager.process.api.delete(PODS, "v1", NAMESPACE)
        gang = [await eager.process.add_pod(f"g{number}") for number in range(3)]
        for pod in gang:
            eager.algorithm.decisions[name_of(pod)] = preempts("n0", *eager.victims)
            await eager.process.filter(pod)
        await asyncio.sleep(10 * LAST_PAUSE)
        assert eager.evictions.names == ["v0"]

    @pytest.mark.parametrize("how", ["gone", "replaced"])
    async def test_a_victim_that_is_gone(self, eager: World, how: str) -> None:
        """Its name, and any pod that has that name now, is left alone."""
        await eager.process.delete("v0")
        if how == "replaced":
            await eager.process.add_pod("v0")
        await eager.filter()
        assert eager.evictions.names == ["v1"]

    async def test_a_pod_that_is_not_ours(self, eager: World) -> None:
        """Whatever a decision names, pods that do not ask for HiveD are never evicted."""
        plain = await eager.process.add_pod("plain", containers=[{"name": "c", "image": "i"}])
        eager.algorithm.decisions["p"] = preempts("n0", plain)
        await eager.process.filter(eager.pod)
        await asyncio.sleep(60)
        assert eager.evictions.posted == []

    async def test_a_preemptor_on_which_the_algorithm_fails(self, world: World) -> None:
        """P20: no pod is evicted for it, the log has the stack, and the scheduler continues."""
        await world.process.filter(world.pod)
        world.algorithm.decisions["p"] = KeyError("lost")
        with capture_logs() as logs:
            await asyncio.sleep(2 * SILENCE)
        assert ("error", True) in [(entry["log_level"], "exc_info" in entry) for entry in logs]
        assert not world.evictions.names
        assert world.process.scheduler.ready.is_set()

    async def test_a_preempt_of_an_unknown_pod(self, world: World) -> None:
        """It proves nothing about any kube-scheduler, whatever its `schedulerName`, and a pod without a spec does no
        harm.
        """
        stranger = world.pod | {"metadata": world.pod["metadata"] | {"uid": "another"}}
        for pod in (stranger, {key: value for key, value in stranger.items() if key != "spec"}):
            with pytest.raises(UserError, match="does not exist"):
                await world.process.preempt(pod)
        await world.process.filter(world.pod)
        await asyncio.sleep(2 * SILENCE)
        assert world.evictions.names == ["v0", "v1"]

    @pytest.mark.parametrize("what", ["deleted", "waits", "asks for something else"])
    async def test_a_preemptor_that_no_longer_preempts(self, eager: World, what: str) -> None:
        """Evictions for it end."""
        eager.evictions.fail = Forbidden("no", status=403)
        await eager.filter()
        if what == "deleted":
            await eager.process.delete("p")
        else:
            eager.algorithm.decisions["p"] = waits()
        if what == "asks for something else":
            change = {"metadata": {"annotations": {POD_SCHEDULING_SPEC: "virtualCluster: b"}}}
            await eager.process.api.patch(PODS, "p", NAMESPACE, change)
        await asyncio.sleep(600)
        assert eager.evictions.names == ["v0", "v1"]


class TestRefusals:
    async def test_a_disruption_budget(self, eager: World) -> None:
        """The victim stays, the preemptor gets an Event, and eviction is repeated with growing pauses."""
        eager.algorithm.decisions["p"] = preempts("n0", eager.victims[0])
        body = {
            "metadata": {"name": "b"},
            "spec": {"selector": {"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}},
        }
        await eager.process.api.create(POD_DISRUPTION_BUDGETS, body, NAMESPACE)
        began = loop_time()
        await eager.process.filter(eager.pod)
        await asyncio.sleep(300)
        assert await eager.ending() == []
        reason, name, message = eager.process.recorder.events[0]
        assert (reason, name) == ("PreemptionBlocked", "p")
        assert "default/v0" in message
        pauses = [
            after - before for before, after in zip(eager.evictions.times, eager.evictions.times[1:], strict=False)
        ]
        assert eager.evictions.times[0] == began
        assert 1 <= pauses[0] <= 2
        assert all(LAST_PAUSE <= pause <= 2 * LAST_PAUSE for pause in pauses[5:])
        await eager.process.api.delete(POD_DISRUPTION_BUDGETS, "b", NAMESPACE)
        await asyncio.sleep(2 * LAST_PAUSE)
        assert await eager.ending() == ["v0"]

    async def test_a_retry_after_is_respected(self, eager: World) -> None:
        """Eviction pauses for as long as the server asks."""
        eager.evictions.fail = TooManyRequests("later", status=429, retry_after=100.0)
        await eager.process.filter(eager.pod)
        await asyncio.sleep(99)
        assert eager.evictions.names == ["v0", "v1"]
        await asyncio.sleep(2)
        assert eager.evictions.names == ["v0", "v1"] * 2

    async def test_an_older_server(self) -> None:
        """Before 1.22 there is only policy/v1beta1; it is tried after policy/v1 is refused."""
        async for world in world_of("always", api=MemoryKube(unserved=[POD_DISRUPTION_BUDGETS])):
            await world.filter()
            assert [(version, name) for version, name, _ in world.evictions.posted] == [
                ("policy/v1", "v0"),
                ("policy/v1beta1", "v0"),
                ("policy/v1beta1", "v1"),
            ]
            assert await world.ending() == ["v0", "v1"]

    async def test_an_older_server_and_two_preemptors(self) -> None:
        """Both learn it at the same time; neither counts it as a failure."""
        async for world in world_of("always", api=MemoryKube(unserved=[POD_DISRUPTION_BUDGETS])):
            other = await world.process.add_pod("q", schedulerName="vc-a")
            for name, victim in zip("pq", world.victims, strict=True):
                world.algorithm.decisions[name] = preempts("n0", victim)
            world.process.api.before_call = lambda call: asyncio.sleep(0.1) if call.subresource == "eviction" else None
            with capture_logs() as logs:
                await asyncio.gather(*map(world.process.filter, (world.pod, other)))
                await asyncio.sleep(0.5)
            assert await world.ending() == ["v0", "v1"]
            assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == []
