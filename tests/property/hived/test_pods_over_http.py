"""P20 of HiveD over HTTP: whatever users write on their pods is answered, and stops nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import patch

import aiohttp
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.hived import scheduler as scheduler_module
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.constants import POD_BIND_INFO, POD_SCHEDULING_SPEC
from scheduler.hived.inspection import Inspected, Inspection
from scheduler.hived.scheduler import HivedScheduler
from scheduler.hived.web_server import extender_app
from store.kube.memory import MemoryKube
from store.kube.memory_kinds import NAMESPACES
from store.kube.objects import Object
from store.kube.resources import NODES, PODS
from tests.property.hived.any_json import ANY
from tests.support.hived import Job, node_object, pod_object, topology_of
from tests.support.hived_web import served

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
def test_p20_whatever_is_written_on_pods_is_answered(pods: list[tuple[dict[str, str], str]]) -> None:
    """Malformed, contradicting, bound by hand: each pod gets a well-formed answer, none is a platform error, and a pod
    in order is served afterwards.
    """
    with patch.object(scheduler_module, "PATIENCE", 0.01):  # that a call about a pod that is left out waits
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
