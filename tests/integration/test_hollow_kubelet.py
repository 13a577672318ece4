"""Hollow kubelets on a real API server: what they report is taken, and real schedulers and processes work with them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from store.kube.client import KubeClient
from store.kube.objects import Object, name_of
from store.kube.resources import PODS
from tests.support.control_plane import ControlPlane
from tests.support.hollow_kubelet import HollowKubelet
from tests.support.hollow_programs import process


@asynccontextmanager
async def kubelet(kube: KubeClient, namespace: str, **options: Any) -> AsyncIterator[HollowKubelet]:
    hollow = HollowKubelet(kube, namespace=namespace, **options)
    running = asyncio.create_task(hollow.run())
    try:
        yield hollow
    finally:
        running.cancel()
        await asyncio.wait([running])
        await hollow.remove_nodes()
        if not running.cancelled():
            running.result()


async def pods_when(
    kube: KubeClient, namespace: str, condition: Callable[[Sequence[Object]], bool]
) -> Sequence[Object]:
    """The pods of the namespace, once they are as wanted."""
    async with asyncio.timeout(60):
        while True:
            found = (await kube.list(PODS, namespace)).items
            if condition(found):
                return found
            await asyncio.sleep(0.05)


def phases(pods: Iterable[Object]) -> Counter[str]:
    """How many pods are in each phase."""
    return Counter(pod["status"]["phase"] for pod in pods)


def pod(name: str, **annotations: str) -> Object:
    hollow = {"hollow/" + key.replace("_", "-"): value for key, value in annotations.items()}
    spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "scratch"}]}
    return {"metadata": {"name": name, "annotations": hollow}, "spec": spec}


async def test_many_pods_run_to_their_end(kube: KubeClient, namespace: str) -> None:
    """Bound by the kubelet itself, each with an address of its own; deleted ones go when they stopped."""
    async with kubelet(kube, namespace, schedules=True) as hollow:
        await hollow.add_nodes(4)
        bodies = [pod(f"p{n}", **({"exit_code": "0"} if n < 100 else {"stop_code": "143"})) for n in range(120)]
        await asyncio.gather(*(kube.create(PODS, body, namespace) for body in bodies))
        pods = await pods_when(kube, namespace, lambda pods: phases(pods) == {"Succeeded": 100, "Running": 20})
        assert len({each["status"]["podIP"] for each in pods}) == 120
        await asyncio.gather(*(kube.delete(PODS, name_of(each), namespace) for each in pods))
        await pods_when(kube, namespace, lambda pods: not pods)


async def test_containers_that_run_in_earnest(kube: KubeClient, namespace: str, tmp_path: Path) -> None:
    """An init container is a real process with the environment that the API server stored; its end decides."""
    programs = {"shell": process(directory=tmp_path)}
    async with kubelet(kube, namespace, programs=programs, schedules=True) as hollow:
        await hollow.add_nodes(1)
        for name, code in (("good", 0), ("bad", 7)):
            body = pod(name, exit_code="0")
            body["metadata"]["annotations"]["hollow/init.program"] = "shell"
            body["spec"]["initContainers"] = [
                {
                    "name": "init",
                    "image": "scratch",
                    "command": ["sh", "-c", f"echo uid is $WHO; exit {code}"],
                    "env": [
                        {"name": "UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                        {"name": "WHO", "value": "1_$(UID)"},
                    ],
                }
            ]
            await kube.create(PODS, body, namespace)
        pods = await pods_when(kube, namespace, lambda pods: phases(pods) == {"Failed": 1, "Succeeded": 1})
    bad = next(each for each in pods if name_of(each) == "bad")
    state = bad["status"]["initContainerStatuses"][0]["state"]["terminated"]
    assert state["exitCode"] == 7
    assert state["message"] == f"uid is 1_{bad['metadata']['uid']}\n"


async def test_the_real_scheduler_binds(control_plane: ControlPlane, kube: KubeClient, namespace: str) -> None:
    """kube-scheduler takes hollow nodes for real ones, with their labels and their room."""
    control_plane.start_scheduler()
    try:
        async with kubelet(kube, namespace) as hollow:
            names = await hollow.add_nodes(2, labels={"in": namespace}, capacity={"pods": "1"})
            for number in range(3):
                body = pod(f"p{number}", exit_code="0", run_seconds="inf")
                body["spec"]["nodeSelector"] = {"in": namespace}
                await kube.create(PODS, body, namespace)
            pods = await pods_when(kube, namespace, lambda pods: phases(pods) == {"Running": 2, "Pending": 1})
            bound = [each["spec"]["nodeName"] for each in pods if each["status"]["phase"] == "Running"]
            assert sorted(bound) == sorted(names)
    finally:
        control_plane.scheduler.kill()
