"""Switching to another configuration in process, while pods run and calls continue; in virtual time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from controllers.extender.pod_states import PodState
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.errors import UserError
from store.kube.api.objects import NODES, Object, name_of, uid_of
from tests.support.extender.process import Process, ScriptedAlgorithm, binds, placed, preempts
from tests.support.hived.cluster import Job, ownership, topology_of
from tests.support.hived.design_cluster import quota, regular

pytestmark = pytest.mark.looptime


@pytest.fixture
def old() -> ScriptedAlgorithm:
    return ScriptedAlgorithm()


@pytest.fixture
async def process(old: ScriptedAlgorithm) -> AsyncIterator[Process]:
    one = Process(old, nodes=("n0",))
    async with one.running():
        await one.add_nodes("n0", "n1")
        yield one


class Slow:
    """Builds an algorithm in the calling thread, when the test allows it."""

    def __init__(self) -> None:
        self.algorithm = ScriptedAlgorithm()
        self._began, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> ScriptedAlgorithm:
        self._began.set()
        assert self._may_end.wait(timeout=30)
        return self.algorithm

    async def began(self) -> None:
        await asyncio.to_thread(self._began.wait, 30)

    def end(self) -> None:
        self._may_end.set()


async def test_the_new_algorithm_gets_everything(process: Process, old: ScriptedAlgorithm) -> None:
    """Nodes, then allocated pods from the oldest on, bound or binding, then waiting pods."""
    for name, node in (("b", "n1"), ("a", "n0")):
        await process.bind_as(placed(await process.add_pod(name), node))
        await asyncio.sleep(1)
    waiting, binding = await process.add_pod("w"), await process.add_pod("binding")
    old.decisions["binding"] = binds("n0", 1)
    await process.filter(binding)
    new = ScriptedAlgorithm()
    report = await process.scheduler.replace(lambda: new)
    places = ["place b on n1", "place a on n0", "place binding on n0"]
    assert new.heard == ["add node n0", "add node n1", *places, "add w"]
    assert report.recovered == ("default/b", "default/a", "default/binding")
    assert (report.failed, report.downgraded) == ({}, ())
    assert process.scheduler.algorithm is new
    assert (await process.filter(waiting)).failed_nodes
    await process.bind(binding, "n0")
    await process.settled()
    assert process.state(binding) is PodState.BOUND
    assert new.heard[-1] == "Filtering w"


async def test_the_oldest_first(process: Process) -> None:
    """In whatever order they were seen: where there is no room for all, the oldest stay."""
    for name in ("b", "c", "a"):
        await process.bind_as(placed(await process.add_pod(name), "n0"))
        await asyncio.sleep(1)
    async with Process(ScriptedAlgorithm(), api=process.api).running() as successor:
        report = await successor.scheduler.replace(ScriptedAlgorithm)
    assert report.recovered == ("default/b", "default/c", "default/a")


async def test_changes_during_the_build(process: Process, old: ScriptedAlgorithm) -> None:
    """Calls are answered by the present algorithm, and the new one gets all changes in order when it takes over."""
    going, staying = await process.add_pod("going"), await process.add_pod("staying")
    old.decisions |= {"going": binds("n0", 0), "staying": binds("n0", 1), "late": binds("n0", 2)}
    await process.filter(going)
    build = Slow()
    async with asyncio.TaskGroup() as group:
        replacing = group.create_task(process.scheduler.replace(build))
        await build.began()
        await process.filter(staying)
        await process.delete("going")
        await process.filter(await process.add_pod("late"))
        await process.delete("late")
        await process.api.patch(NODES, "n1", "", {"spec": {"unschedulable": True}})
        await process.add_pod("new")
        await process.settled()
        build.end()
        await replacing
    assert build.algorithm.heard == [
        "add node n0",
        "add node n1",
        "place going on n0",
        "place staying on n0",
        "release going",
        "place late on n0",
        "release late",
        "add node n1",
        "add new",
    ]
    await process.delete("staying")
    assert build.algorithm.heard[-1] == "release staying"
    assert old.heard[-1] == "add new"


async def test_a_pod_that_preempts(process: Process, old: ScriptedAlgorithm) -> None:
    """Claims are not carried over: the pod waits, and is scheduled again."""
    pod = await process.add_pod("p")
    old.decisions["p"] = preempts("n0", placed(await process.add_pod("v"), "n0"))
    await process.preempt(pod)
    await process.scheduler.replace(ScriptedAlgorithm)
    assert process.state(pod) is PodState.WAITING


async def test_a_build_that_fails(process: Process, old: ScriptedAlgorithm) -> None:
    """Nothing has changed, and the next attempt may succeed."""

    def fail() -> ScriptedAlgorithm:
        raise UserError("no such chain")

    with pytest.raises(UserError, match="no such chain"):
        await process.scheduler.replace(fail)
    assert process.scheduler.algorithm is old
    await process.add_pod("p")
    new = ScriptedAlgorithm()
    await process.scheduler.replace(lambda: new)
    assert new.heard == ["add node n0", "add node n1", "add p"]


async def test_a_pod_that_can_not_be_placed(process: Process, old: ScriptedAlgorithm) -> None:
    """It is reported and keeps running; everything else is carried over."""
    for name in ("bad", "good"):
        await process.bind_as(placed(await process.add_pod(name), "n0"))

    class Picky(ScriptedAlgorithm):
        def restore(self, pod: dict[str, object]) -> None:
            if name_of(pod) == "bad":
                raise UserError("no place")
            super().restore(pod)

    new = Picky()
    report = await process.scheduler.replace(lambda: new)
    assert (report.recovered, dict(report.failed)) == (("default/good",), {"default/bad": "no place"})
    assert process.scheduler.algorithm is new
    assert (await process.read("bad"))["spec"]["nodeName"] == "n0"


async def test_two_at_once(process: Process) -> None:
    """They run one after the other; the later one stays."""
    first, second = ScriptedAlgorithm(), ScriptedAlgorithm()
    await asyncio.gather(process.scheduler.replace(lambda: first), process.scheduler.replace(lambda: second))
    assert process.scheduler.algorithm is second


def config(prod: int) -> Object:
    """Return three nodes of four devices, `prod` of them prod's."""
    return regular("GPU 4 BOX*", ["n0", "n1", "n2"], prod=quota(("BOX", prod)))


async def test_quota_that_is_gone() -> None:
    """With the real algorithm: groups that lost quota keep running and are named; others are not named."""
    one = Process(HivedAlgorithm(topology_of(config(2))), nodes=("n0", "n1", "n2"))
    async with one.running():
        await one.add_nodes("n0", "n1", "n2")
        for name in ("a", "b"):
            job = Job(name, "prod", 0, ((1, 4),), ignore=True)
            pod = await one.add_pod(name, job.pod(name, 4)["metadata"]["annotations"].popitem()[1])
            assert await one.attempt(pod)
        before = ownership(one.scheduler.algorithm)
        report = await one.scheduler.replace(lambda: HivedAlgorithm(topology_of(config(1))))
        assert report.recovered == ("default/a", "default/b")
        assert len(report.downgraded) == 1
        assert (await one.scheduler.replace(lambda: HivedAlgorithm(topology_of(config(1))))).downgraded == ()
        await one.scheduler.replace(lambda: HivedAlgorithm(topology_of(config(2))))
        assert ownership(one.scheduler.algorithm) == before
        assert len(one.scheduler.view.statuses) == 2
        assert {uid_of(await one.read(name)) for name in ("a", "b")} == set(one.scheduler.view.statuses)
