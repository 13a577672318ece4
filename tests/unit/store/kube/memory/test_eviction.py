"""Evictions in `MemoryKube` beyond what the conformance suite asks: what budgets cover, and what they have left."""

from __future__ import annotations

from typing import Any

import pytest

from store.kube.api.errors import ServerError, TooManyRequests
from store.kube.api.objects import POD_DISRUPTION_BUDGETS, PODS, Object, name_of
from store.kube.memory.kube import MemoryKube

pytestmark = pytest.mark.looptime


async def run_pod(kube: MemoryKube, name: str) -> None:
    body = {
        "metadata": {"name": name, "labels": {"app": "x"}},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]},
    }
    await kube.create(PODS, body, "default")
    await kube.patch(PODS, name, "default", {"status": {"phase": "Running"}}, subresource="status")


async def add_budget(kube: MemoryKube, name: str, selector: dict[str, Any], allowed: int) -> None:
    await kube.create(POD_DISRUPTION_BUDGETS, {"metadata": {"name": name}, "spec": {"selector": selector}}, "default")
    status = {"status": {"disruptionsAllowed": allowed, "observedGeneration": 1}}
    await kube.patch(POD_DISRUPTION_BUDGETS, name, "default", status, subresource="status")


async def evict(kube: MemoryKube, name: str) -> None:
    body: Object = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    await kube.create(PODS, body, "default", name=name, subresource="eviction")


async def ending(kube: MemoryKube) -> list[str]:
    pods = (await kube.list(PODS, "default")).items
    return [name_of(pod) for pod in pods if "deletionTimestamp" in pod["metadata"]]


async def test_each_eviction_takes_one() -> None:
    """When a budget allows one disruption, the second pod has to wait until it allows another."""
    kube = MemoryKube()
    await add_budget(kube, "b", {"matchLabels": {"app": "x"}}, allowed=1)
    for name in ("p", "q"):
        await run_pod(kube, name)
    await evict(kube, "p")
    with pytest.raises(TooManyRequests):
        await evict(kube, "q")
    assert await ending(kube) == ["p"]


@pytest.mark.parametrize(
    ("selector", "covers"),
    [
        ({"matchLabels": {"app": "y"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["x", "y"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({}, False),
    ],
)
async def test_what_a_budget_covers(selector: dict[str, Any], covers: bool) -> None:
    """The pods that its selector matches; an empty one matches none."""
    kube = MemoryKube()
    await add_budget(kube, "b", selector, allowed=0)
    await run_pod(kube, "p")
    if covers:
        with pytest.raises(TooManyRequests):
            await evict(kube, "p")
    else:
        await evict(kube, "p")
    assert await ending(kube) == ([] if covers else ["p"])


async def test_a_pod_in_two_budgets() -> None:
    """The server does not know which one to take from."""
    kube = MemoryKube()
    for name in ("a", "b"):
        await add_budget(kube, name, {"matchLabels": {"app": "x"}}, allowed=1)
    await run_pod(kube, "p")
    with pytest.raises(ServerError, match="more than one"):
        await evict(kube, "p")
