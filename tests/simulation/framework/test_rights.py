"""The shipped rights of the Framework operator are exactly those that it uses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.config import shipped_config
from controllers.framework.operator import STATUS_SUBRESOURCE, FrameworkOperator
from store.kube.api.errors import Conflict
from store.kube.api.objects import CONFIG_MAPS, PODS, SERVICES
from store.kube.events import EventRecorder
from store.kube.leaderelection.election import Election, FencedApi
from store.kube.memory.kube import Call, MemoryKube
from tests.support.framework.cluster import NAMESPACE, framework, now, role
from tests.support.kube.faults.network import ScriptedKube
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.shipped_manifests import Variant, manifest, rights

pytestmark = pytest.mark.looptime

VERBS = {"replace": "update"}  # as the API's authorizers call it
FINALIZERS = {("", "configmaps/finalizers", "update"), (FRAMEWORKS.group, "frameworks/finalizers", "update")}


@pytest.mark.parametrize("variant", get_args(Variant))
async def test_each_right_has_its_use_and_each_use_its_right(variant: Variant) -> None:
    """A life with every kind of event: taken names, conflicts, a rescale, retries, a lost object, the end of the
    retention. The calls made are exactly those that the rules of the variant allow.

    The rights on finalizers are not used by calls: an admission plugin asks for them.
    """
    server = MemoryKube(clock=now, rng=random.Random(1), unserved=[STATUS_SUBRESOURCE] * (variant == "compatible"))
    server.register(FRAMEWORKS, has_status=variant == "native")
    api = ScriptedKube(server)
    async with asyncio.TaskGroup() as group:
        kubelet = HollowKubelet(server, clock=now, schedules=True)
        others = [group.create_task(kubelet.run()), group.create_task(_operate(api, variant))]
        await kubelet.add_nodes(2)
        await _live(server)
        for task in others:
            task.cancel()
    used = {(call.group, call.resource, VERBS.get(call.verb, call.verb)) for call in api.calls if call.verb != "served"}
    granted = rights(manifest(variant, "ClusterRole"), manifest(variant, "Role"))
    assert granted >= FINALIZERS
    assert used == granted - FINALIZERS


async def _operate(api: ScriptedKube, variant: Variant) -> None:
    """Run the operator as `rcfarm jobs` does."""
    is_native = variant == "native"
    config = msgspec.structs.replace(
        shipped_config(),
        native_mode=is_native,
        headless_services=is_native,
        disruption_budgets=is_native,
        retain_completed=600,
    )
    recorder = EventRecorder(api, "rcfarm-jobs", clock=now)
    election = Election(api, NAMESPACE, "rcfarm-jobs", "a", clock=asyncio.get_running_loop().time)
    operator = FrameworkOperator(FencedApi(api, election), config, recorder, clock=now, rng=random.Random(3))
    async with asyncio.TaskGroup() as group:
        group.create_task(recorder.run())
        group.create_task(election.run(operator.run))


async def _live(server: MemoryKube) -> None:
    """Live the life of one Framework. Foreign objects take its names first, and a status write conflicts."""
    stranger = {"spec": {"containers": [{"name": "main", "image": "example.org/other:1"}]}}
    taken = ((CONFIG_MAPS, "train-attempt"), (PODS, "train-worker-0"), (SERVICES, "train-worker"))
    for resource, name in taken:
        await server.create(resource, stranger | {"metadata": {"name": name}}, NAMESPACE)
    server.before_call = _refuse_one_status()
    body = framework("train", role("worker", 2, annotations={"hollow/run-seconds": "300", "hollow/exit-code": "0"}))
    await server.create(FRAMEWORKS, body, NAMESPACE)
    await asyncio.sleep(60)
    await server.delete(CONFIG_MAPS, "train-attempt", NAMESPACE)
    await asyncio.sleep(60)
    await server.delete(PODS, "train-worker-0", NAMESPACE, grace_period=0)
    await asyncio.sleep(60)
    for number in (3, 1):
        body["spec"]["taskRoles"][0]["taskNumber"] = number
        await server.patch(FRAMEWORKS, "train", NAMESPACE, {"spec": body["spec"]})
        await asyncio.sleep(60)
    async with asyncio.timeout(3600):
        while (await server.list(FRAMEWORKS, NAMESPACE)).items:
            await asyncio.sleep(10)


def _refuse_one_status() -> Callable[[Call], None]:
    waiting = [Conflict("the object has been modified", status=409)]

    def before(call: Call) -> None:
        if (call.verb, call.resource) == ("patch", FRAMEWORKS) and "spec" not in call.body and waiting:
            raise waiting.pop()

    return before
