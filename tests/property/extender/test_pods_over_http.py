"""P20 of HiveD over HTTP: pods with any annotations are answered, and stop nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import patch

import aiohttp
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.extender import scheduler as scheduler_module
from controllers.extender.scheduler import HivedScheduler
from controllers.extender.server import extender_app
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.contract import POD_BIND_INFO, POD_SCHEDULING_SPEC
from scheduler.hived.inspection.inspection import Inspected, Inspection
from store.kube.api.objects import NODES, PODS, Object
from store.kube.memory.kube import MemoryKube
from store.kube.memory.rules import NAMESPACES
from tests.property.hived.world.any_json import ANY
from tests.support.extender.web import served
from tests.support.hived.cluster import Job, node_object, pod_object, topology_of

CONFIG: Object = {
    "physicalCluster": {
        "cellTypes": {"HOST": {"childCellType": "GPU", "childCellNumber": 4, "isNodeLevel": True}},
        "physicalCells": [{"cellType": "HOST", "cellAddress": "a0"}, {"cellType": "HOST", "cellAddress": "a1"}],
    },
    "virtualClusters": {"vision": {"virtualCells": [{"cellType": "HOST", "cellNumber": 2}]}},
}
NUMBERS = st.integers(-2, 5) | st.sampled_from([2**31, 2**70, 1.5, "1", None])
SPEC_FIELDS = {
    "virtualCluster": st.just("vision") | ANY,
    "priority": NUMBERS | ANY,
    "pinnedCellId": st.just("") | ANY,
    "leafCellType": st.sampled_from(["GPU", ""]) | ANY,
    "leafCellNumber": NUMBERS | ANY,
    "lazyPreemptionEnable": st.booleans() | ANY,
    "ignoreK8sSuggestedNodes": st.booleans() | ANY,
    "affinityGroup": ANY
    | st.fixed_dictionaries(
        {"name": st.sampled_from(["g", "h"]) | ANY},
        optional={
            "members": ANY
            | st.lists(
                st.fixed_dictionaries({"podNumber": NUMBERS, "leafCellNumber": NUMBERS}) | ANY, min_size=1, max_size=3
            )
        },
    ),
}
SPECS_AS_TEXT = st.one_of(
    st.text(),
    st.fixed_dictionaries({}, optional=SPEC_FIELDS).map(json.dumps),
    st.fixed_dictionaries({}, optional=SPEC_FIELDS).map(lambda spec: yaml.safe_dump(spec, allow_unicode=True)),
    st.fixed_dictionaries({"virtualCluster": st.just("vision"), "leafCellNumber": NUMBERS}).map(json.dumps),
)
ANNOTATIONS = st.fixed_dictionaries(
    {}, optional={POD_SCHEDULING_SPEC: SPECS_AS_TEXT, POD_BIND_INFO: st.text() | ANY.map(json.dumps)}
)


@given(st.lists(st.tuples(ANNOTATIONS, st.sampled_from(["", "", "", "a0", "elsewhere"])), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_pods_with_any_annotations_are_answered(pods: list[tuple[dict[str, str], str]]) -> None:
    """P20: malformed, contradictory, bound by hand: each pod gets a well-formed answer, none is a platform error, and a
    valid pod is served afterwards.
    """
    with patch.object(scheduler_module, "PATIENCE", 0.01):  # the wait of a call for a pod that is left out
        asyncio.run(_serve_pods(pods))


async def _serve_pods(pods: list[tuple[dict[str, str], str]]) -> None:
    server = MemoryKube()
    await server.create(NAMESPACES, {"metadata": {"name": "test"}})
    for node in ("a0", "a1"):
        await server.create(NODES, node_object(node))
    algorithm = HivedAlgorithm(topology_of(CONFIG))
    scheduler = HivedScheduler(server, algorithm)
    app = extender_app(scheduler, Inspection(Inspected(algorithm)))
    running = asyncio.create_task(scheduler.run())
    async with served(app) as url, aiohttp.ClientSession() as session:
        await scheduler.ready.wait()
        for number, (annotations, node) in enumerate(pods):
            pod = await server.create(PODS, pod_object(f"p{number}", annotations, node=node), "test")
            for call in ("filter", "preempt"):
                await _check_call(session, f"{url}/v1/extender/{call}", pod)
        for number in range(len(pods)):
            await server.delete(PODS, f"p{number}", "test")
        good = await server.create(PODS, Job("good", "vision", 1).pod("good", 1), "test")
        answer = await _check_call(session, f"{url}/v1/extender/filter", good)
        assert answer["NodeNames"] in (["a0"], ["a1"])
        assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def _check_call(session: aiohttp.ClientSession, url: str, pod: Object) -> Any:
    body = {"Pod": pod, "NodeNames": ["a0", "a1"], "NodeNameToMetaVictims": {"a0": None, "a1": None}}
    async with session.post(url, json=body) as response:
        answer = await response.json()
    assert response.status in (200, 400), answer
    if response.status == 200 and "Error" in answer:
        assert not answer["Error"] or answer["Error"].startswith("Code: 400, "), answer
        assert [bool(answer[field]) for field in ("NodeNames", "FailedNodes", "Error")].count(True) == 1
    return answer
