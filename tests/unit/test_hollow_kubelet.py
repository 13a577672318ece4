"""Hollow kubelets play pods as their annotations say; on MemoryKube, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from store.kube import errors
from store.kube.memory import Call, MemoryKube
from store.kube.objects import Object
from store.kube.resources import PODS
from tests.support.hollow_behaviour import Ended
from tests.support.hollow_env import environment, expand
from tests.support.hollow_kubelet import HollowKubelet
from tests.support.hollow_pod import ContainerRun
from tests.support.hollow_programs import process

pytestmark = pytest.mark.looptime

EPOCH = 1_700_000_000.0


def clock() -> float:
    return EPOCH + asyncio.get_running_loop().time()


@pytest.fixture
async def kube() -> MemoryKube:
    return MemoryKube(clock=clock, rng=random.Random(1))


@asynccontextmanager
async def kubelet(kube: MemoryKube, nodes: int = 1, **options: Any) -> AsyncIterator[HollowKubelet]:
    """A kubelet with nodes `n-0` and so on that runs meanwhile."""
    hollow = HollowKubelet(kube, clock=clock, **options)
    await hollow.add_nodes(nodes, prefix="n", capacity={"pods": "3", "cpu": "2"})
    running = asyncio.create_task(hollow.run())
    try:
        yield hollow
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()


def pod(name: str = "p", /, node: str = "n-0", *, inits: tuple[str, ...] = (), **annotations: str) -> Object:
    """Annotations are written with `_` for `-` and `__` for `.`, without the prefix."""
    spec: Object = {
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "scratch"}],
        "initContainers": [{"name": each, "image": "scratch"} for each in inits],
    }
    if node:
        spec["nodeName"] = node
    hollow = {"hollow/" + key.replace("__", ".").replace("_", "-"): value for key, value in annotations.items()}
    return {"metadata": {"name": name, "annotations": hollow}, "spec": spec}


async def seen(kube: MemoryKube, after: float, name: str = "p") -> Object:
    """The pod, some seconds later."""
    await asyncio.sleep(after)
    return await kube.get(PODS, name, "default")


async def exists(kube: MemoryKube, name: str = "p") -> bool:
    try:
        await kube.get(PODS, name, "default")
    except errors.NotFound:
        return False
    return True


def state_of(obj: Object, at: int = 0, field: str = "containerStatuses") -> Object:
    state: Object = obj["status"][field][at]["state"]
    return state


async def test_a_pod_runs_and_ends(kube: MemoryKube) -> None:
    """It is Pending until it starts, then has an address and is ready; at its end it has succeeded."""
    async with kubelet(kube):
        await kube.create(PODS, pod(start_seconds="5", run_seconds="10", exit_code="0"), "default")
        assert (await seen(kube, 4))["status"]["phase"] == "Pending"
        running = await seen(kube, 2)
        assert running["status"]["phase"] == "Running"
        assert running["status"]["podIP"].startswith("10.")
        assert {"type": "Ready", "status": "True"} in running["status"]["conditions"]
        ended = await seen(kube, 10)
        assert ended["status"]["phase"] == "Succeeded"
        terminated = state_of(ended)["terminated"]
        assert (terminated["exitCode"], terminated["reason"]) == (0, "Completed")
        assert terminated["startedAt"] < terminated["finishedAt"]


async def test_a_failure(kube: MemoryKube) -> None:
    """Exit code, reason, message and signal are reported as asked for."""
    async with kubelet(kube):
        body = pod(exit_code="137", main__reason="OOMKilled", message="too much", signal="9")
        await kube.create(PODS, body, "default")
        ended = await seen(kube, 1)
    assert ended["status"]["phase"] == "Failed"
    terminated = state_of(ended)["terminated"]
    assert [terminated[name] for name in ("exitCode", "reason", "message", "signal")] == [
        137,
        "OOMKilled",
        "too much",
        9,
    ]


async def test_init_containers_come_first(kube: MemoryKube) -> None:
    """One after the other, with the address already known; a failure of one fails the pod."""
    async with kubelet(kube):
        await kube.create(PODS, pod(inits=("one", "two"), one__run_seconds="5"), "default")
        await kube.create(PODS, pod("q", inits=("one", "two"), one__exit_code="201"), "default")
        waiting = await seen(kube, 1)
        assert (waiting["status"]["phase"], bool(waiting["status"]["podIP"])) == ("Pending", True)
        assert "running" in state_of(waiting, 0, "initContainerStatuses")
        assert "waiting" in state_of(waiting, 1, "initContainerStatuses")
        assert (await seen(kube, 5))["status"]["phase"] == "Running"
        failed = await seen(kube, 0, "q")
    assert failed["status"]["phase"] == "Failed"
    assert state_of(failed, 0, "initContainerStatuses")["terminated"]["exitCode"] == 201
    assert "waiting" in state_of(failed)


@pytest.mark.parametrize(
    ("policy", "codes", "phase", "restarts"),
    [("OnFailure", "1,1,0", "Succeeded", 2), ("Always", "0", "Running", 5), ("Never", "1", "Failed", 0)],
)
async def test_restarts(kube: MemoryKube, policy: str, codes: str, phase: str, restarts: int) -> None:
    """As the pod's policy says; each start has its own exit code, and the last end is kept."""
    async with kubelet(kube, restart_delay=1.0):
        body = pod(run_seconds="1", exit_code=codes)
        body["spec"]["restartPolicy"] = policy
        await kube.create(PODS, body, "default")
        await asyncio.sleep(10.5)
        obj = await seen(kube, 0)
    assert obj["status"]["phase"] == phase
    status = obj["status"]["containerStatuses"][0]
    assert status["restartCount"] == restarts
    assert ("lastState" in status) is (restarts > 0)


async def test_a_running_pod_is_told_to_end(kube: MemoryKube) -> None:
    """Annotations count when they change: a pod that would run for ever ends."""
    async with kubelet(kube):
        await kube.create(PODS, pod(), "default")
        assert (await seen(kube, 1000))["status"]["phase"] == "Running"
        await kube.patch(PODS, "p", "default", {"metadata": {"annotations": {"hollow/exit-code": "3"}}})
        assert state_of(await seen(kube, 0.1))["terminated"]["exitCode"] == 3


async def test_deletion(kube: MemoryKube) -> None:
    """A pod stops in its own time, at most in its grace period, which may be shortened; a stuck one never."""
    async with kubelet(kube, nodes=2):
        await kube.create(PODS, pod("quick"), "default")
        await kube.create(PODS, pod("slow", stop_seconds="10"), "default")
        await kube.create(PODS, pod("deaf", stop_seconds="inf"), "default")
        await kube.create(PODS, pod("stuck", "n-1", stuck="true"), "default")
        await asyncio.sleep(1)
        for name in ("quick", "slow", "deaf", "stuck"):
            await kube.delete(PODS, name, "default")
        left = {}
        for after in (1, 8, 2, 18, 2, 1000):
            await asyncio.sleep(after)
            left[after] = [item["metadata"]["name"] for item in (await kube.list(PODS)).items]
        assert left == {
            1: ["deaf", "slow", "stuck"],
            8: ["deaf", "slow", "stuck"],
            2: ["stuck"],
            18: ["deaf", "stuck"],
            1000: ["stuck"],
        }


async def test_the_grace_period_is_shortened(kube: MemoryKube) -> None:
    """The second, shorter deletion counts; the end is reported when a code was asked for."""
    async with kubelet(kube):
        await kube.create(PODS, pod(stop_seconds="inf", stop_code="143"), "default")
        await asyncio.sleep(1)
        await kube.delete(PODS, "p", "default")
        await asyncio.sleep(1)
        await kube.delete(PODS, "p", "default", grace_period=3)
        version = str(kube.version)
        assert await exists(kube)
        await asyncio.sleep(3)
        assert not await exists(kube)
        async with kube.watch(PODS, resource_version=version, timeout=1) as events:
            first = await anext(events)
    assert state_of(first.object)["terminated"]["exitCode"] == 143


@pytest.mark.parametrize("how", ["annotation", "call"])
async def test_eviction(kube: MemoryKube, how: str) -> None:
    """The pod fails with the reason of the node, and its containers are killed."""
    async with kubelet(kube) as hollow:
        annotations: dict[str, Any] = (
            {"evict_seconds": "5", "evict_reason": "Preempting"} if how == "annotation" else {}
        )
        obj = await kube.create(PODS, pod(**annotations), "default")
        await asyncio.sleep(4)
        if how == "call":
            hollow.fail(obj, "Preempting")
        evicted = await seen(kube, 2)
        assert (evicted["status"]["phase"], evicted["status"]["reason"]) == ("Failed", "Preempting")
        assert state_of(evicted)["terminated"]["exitCode"] == 137
        await kube.delete(PODS, "p", "default")
        assert not await exists(kube)


async def test_a_lost_node(kube: MemoryKube) -> None:
    """Nothing is heard of it, and it hears nothing; when it is back, all is made up for."""
    async with kubelet(kube) as hollow:
        await kube.create(PODS, pod("p", exit_code="0", run_seconds="10"), "default")
        await kube.create(PODS, pod("q"), "default")
        await asyncio.sleep(1)
        hollow.lose("n-0")
        await kube.delete(PODS, "q", "default")
        assert (await seen(kube, 1000))["status"]["phase"] == "Running"
        assert await exists(kube, "q")
        hollow.recover("n-0")
        assert (await seen(kube, 1))["status"]["phase"] == "Succeeded"
        assert not await exists(kube, "q")


async def test_a_successor_is_another_pod(kube: MemoryKube) -> None:
    """A pod of the same name starts anew, with another address."""
    async with kubelet(kube) as hollow:
        await kube.create(PODS, pod(), "default")
        first = await seen(kube, 1)
        await kube.delete(PODS, "p", "default", grace_period=0)
        await kube.create(PODS, pod(), "default")
        second = await seen(kube, 1)
        assert second["status"]["phase"] == "Running"
        assert second["status"]["podIP"] != first["status"]["podIP"]
        assert hollow.playing == 1


async def test_a_program_decides(kube: MemoryKube) -> None:
    """A registered program gets the container's environment and says how the container ends."""
    runs: list[ContainerRun] = []

    async def program(run: ContainerRun) -> Ended:
        runs.append(run)
        await asyncio.sleep(7)
        return Ended(42)

    async with kubelet(kube, programs={"barrier": program}, ipv6=True):
        body = pod(inits=("wait",), wait__program="barrier")
        body["spec"]["initContainers"][0]["env"] = [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        ]
        await kube.create(PODS, body, "default")
        assert (await seen(kube, 6))["status"]["phase"] == "Pending"
        assert state_of(await seen(kube, 2), 0, "initContainerStatuses")["terminated"]["exitCode"] == 42
    assert runs[0].env["IP"].startswith("fd00::")


async def test_a_program_is_stopped_with_its_pod(kube: MemoryKube) -> None:
    """Deleting the pod cancels it."""
    ended = asyncio.Event()

    async def program(run: ContainerRun) -> Ended:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.set()
        return Ended(0)

    async with kubelet(kube, programs={"wait": program}):
        await kube.create(PODS, pod(program="wait"), "default")
        await asyncio.sleep(1)
        await kube.delete(PODS, "p", "default")
        await asyncio.sleep(1)
        assert ended.is_set()
        assert not await exists(kube)


async def test_a_broken_program_fails_the_test(kube: MemoryKube) -> None:
    """An unknown program is an error of the test, not a hanging pod."""
    hollow = HollowKubelet(kube, clock=clock)
    await hollow.add_nodes(1, prefix="n")
    await kube.create(PODS, pod(program="missing"), "default")
    with pytest.raises(BaseExceptionGroup) as raised:
        await hollow.run()
    assert raised.value.subgroup(KeyError)


async def test_it_schedules(kube: MemoryKube) -> None:
    """Pods are bound to nodes that have room and the labels; the others wait until there is room."""
    async with kubelet(kube, nodes=2, schedules=True) as hollow:
        await hollow.add_nodes(1, prefix="gpu", labels={"kind": "gpu"}, capacity={"pods": "1"})
        for number in range(8):
            await kube.create(PODS, pod(f"p{number}", ""), "default")
        wants_label = pod("g", "")
        wants_label["spec"]["nodeSelector"] = {"kind": "gpu"}
        hungry = pod("h", "")
        hungry["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2.5"}}
        for body in (wants_label, hungry):
            await kube.create(PODS, body, "default")
        await asyncio.sleep(1)
        bound = await _nodes(kube)
        assert sorted(bound.values()) == ["", "", "", "gpu-0", "n-0", "n-0", "n-0", "n-1", "n-1", "n-1"]
        assert bound["h"] == ""
        await kube.delete(PODS, "p0", "default")
        await asyncio.sleep(1)
        assert sorted((await _nodes(kube)).values()).count("n-0") == 3


async def _nodes(kube: MemoryKube) -> dict[str, str]:
    return {item["metadata"]["name"]: item["spec"].get("nodeName", "") for item in (await kube.list(PODS)).items}


async def test_it_gets_through_a_bad_network(kube: MemoryKube) -> None:
    """Calls that fail are made again, so pods end as they should."""
    rng = random.Random(7)

    def fail(call: Call) -> None:
        if call.verb in ("patch", "list", "watch", "delete") and rng.random() < 0.5:
            raise errors.ServerError("no", status=500)

    async with kubelet(kube):
        kube.before_call = fail
        await kube.create(PODS, pod(exit_code="0", run_seconds="3"), "default")
        await asyncio.sleep(300)
        kube.before_call = None
        assert (await seen(kube, 0))["status"]["phase"] == "Succeeded"


async def test_a_gang_is_quick(kube: MemoryKube) -> None:
    """A thousand pods run to their end with three calls for each."""
    calls = 0

    def count(call: Call) -> None:
        nonlocal calls
        calls += 1

    async with kubelet(kube):
        await asyncio.gather(*(kube.create(PODS, pod(f"p{n}", exit_code="0"), "default") for n in range(1000)))
        kube.before_call = count
        await asyncio.sleep(5)
        phases = {item["status"]["phase"] for item in (await kube.list(PODS)).items}
    assert phases == {"Succeeded"}
    assert calls <= 2100


def test_environments() -> None:
    """Values may refer to earlier ones and to fields of the pod; `$$` and unknown names stay text."""
    obj = {"metadata": {"uid": "u", "labels": {"a/b": "x"}}, "status": {"podIP": None}}
    env = [
        {"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "INSTANCE", "value": "3_$(UID)"},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "LATER", "value": "$(LAST) $$(UID)"},
        {"name": "LAST", "value": "z"},
    ]
    assert environment(obj, {"env": env}) == {
        "UID": "u",
        "INSTANCE": "3_u",
        "LABEL": "x",
        "IP": "",
        "LATER": "$(LAST) $(UID)",
        "LAST": "z",
    }
    assert expand("$(A)$(A)", {"A": "1"}) == "11"
    with pytest.raises(NotImplementedError, match="secretKeyRef"):
        environment(obj, {"env": [{"name": "S", "valueFrom": {"secretKeyRef": {}}}]})


@pytest.mark.looptime(False)
async def test_processes(tmp_path: Path) -> None:
    """A real process gets the environment, works where its pod's containers share files, and is stopped with it."""
    obj = {"metadata": {"uid": "u1"}}

    def shell(script: str) -> ContainerRun:
        return ContainerRun(obj, {"command": ["sh", "-c"], "args": [script]}, {"WHO": "me"}, 0)

    program = process(directory=tmp_path, environ={"EXTRA": "1"})
    assert await program(shell('echo "$WHO$EXTRA" > file')) == Ended(0)
    assert (tmp_path / "u1" / "file").read_text() == "me1\n"
    assert await program(shell("cat file; exit 3")) == Ended(3, message="me1\n")
    assert (await program(shell("kill -9 $$"))).code == 137
    running = asyncio.create_task(program(shell("echo started > up; exec sleep 600")))
    while not (tmp_path / "u1" / "up").exists():
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running], timeout=10)
    assert running.cancelled()


async def test_a_binding_that_fails_is_tried_again(kube: MemoryKube) -> None:
    """An API server in trouble answers a binding with a conflict, and the look at the pod with nothing."""
    troubles: list[Exception] = [errors.Conflict("try again", status=409), errors.Unreachable("connection refused")]

    def refuse(call: Call) -> None:
        if troubles and call.resource == PODS and (call.subresource == "binding" or call.verb == "get"):
            raise troubles.pop(0)

    async with kubelet(kube, schedules=True):
        kube.before_call = refuse
        await kube.create(PODS, pod("p", "", exit_code="0"), "default")
        async with asyncio.timeout(10):
            while (await kube.list(PODS, "default")).items[0]["spec"].get("nodeName") is None:
                await asyncio.sleep(0.05)
    assert troubles == []
