"""Performing the actions of steps, on an API server in memory: what is asked of it, and what is told of its answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from controllers.framework.actions import (
    Confirm,
    Create,
    Created,
    CreateFailed,
    Delete,
    DeleteAccepted,
    DeleteFramework,
    Failed,
    Gone,
    NameTaken,
    Outcome,
    Present,
    Step,
)
from controllers.framework.config import FrameworkConfig
from controllers.framework.constants import FRAMEWORKS, State
from controllers.framework.execution import perform
from controllers.framework.step import step
from controllers.framework.types import Framework, TaskId
from controllers.framework.wire import decode_framework
from store.kube.errors import Forbidden, NotFound, Unreachable
from store.kube.memory import Call, MemoryKube
from store.kube.objects import Object, is_deleting, uid_of
from store.kube.resources import CONFIG_MAPS, PODS, Resource
from tests.support.framework_world import manifest, role
from tests.support.frameworks import NAMESPACE, now

pytestmark = pytest.mark.looptime

FIRST, SECOND = TaskId("worker", 0), TaskId("worker", 1)


class Bench:
    """A Framework `job` of two workers, stepped and performed by hand."""

    def __init__(self, api: MemoryKube, stored: Object) -> None:
        self.api = api
        self.framework: Framework = decode_framework(stored)

    @classmethod
    async def create(cls) -> Bench:
        api = MemoryKube(clock=now, rng=random.Random(1), gc_delay=1.0)
        api.register(FRAMEWORKS, has_status=False)
        body = manifest(role("worker", 2))
        return cls(api, await api.create(FRAMEWORKS, {**body, "metadata": {"name": "job"}}, NAMESPACE))

    def step(self, outcomes: Sequence[Outcome] = ()) -> Step:
        at = datetime.fromtimestamp(now(), UTC)
        config, rng = FrameworkConfig(), random.Random(2)
        asked = step(self.framework, None, {}, now=at, rng=rng, config=config, outcomes=outcomes)
        self.framework = replace(self.framework, status=asked.status)
        return asked

    async def perform(self, *actions: Create | Delete | Confirm | DeleteFramework) -> list[Outcome]:
        return await perform(self.api, self.framework, actions)

    async def begin(self) -> tuple[str, str, str]:
        """The UIDs of the attempt's ConfigMap and of its pods."""
        (config_map,) = await self.perform(*self.step().actions)
        assert isinstance(config_map, Created)
        self.step([config_map])
        first, second = await self.perform(Create(FIRST), Create(SECOND))
        assert isinstance(first, Created)
        assert isinstance(second, Created)
        return config_map.uid, first.uid, second.uid

    async def read(self, resource: Resource, name: str) -> Object:
        return await self.api.get(resource, name, NAMESPACE)

    async def bind(self, name: str) -> None:
        """Give the pod a node: from now on its deletion waits for a kubelet."""
        target = {"target": {"kind": "Node", "name": "node-1"}}
        await self.api.create(PODS, target, NAMESPACE, name=name, subresource="binding")

    async def is_there(self, resource: Resource, name: str) -> bool:
        try:
            return not is_deleting(await self.read(resource, name))
        except NotFound:
            return False


async def test_what_is_created_is_told_with_its_uid() -> None:
    """The ConfigMap belongs to the Framework, the pods to the ConfigMap, each by the UID that it has."""
    bench = await Bench.create()
    config_map, first, second = await bench.begin()

    stored = await bench.read(CONFIG_MAPS, "job-attempt")
    assert (uid_of(stored), stored["metadata"]["ownerReferences"][0]["uid"]) == (config_map, bench.framework.uid)
    for name, uid in (("job-worker-0", first), ("job-worker-1", second)):
        pod = await bench.read(PODS, name)
        assert (uid_of(pod), pod["metadata"]["ownerReferences"][0]["uid"]) == (uid, config_map)


async def test_a_name_that_is_taken_is_told_with_its_holder() -> None:
    """Whether that is an orphan of ours or a stranger, the next step decides."""
    bench = await Bench.create()
    _, first, _ = await bench.begin()

    (outcome,) = await bench.perform(Create(FIRST))
    assert isinstance(outcome, NameTaken)
    assert outcome.holder is not None
    assert uid_of(outcome.holder) == first


async def test_one_refusal_disturbs_no_other_creation() -> None:
    """Each action has its own outcome, in their order; a refusal keeps its status and words."""
    bench = await Bench.create()
    (config_map,) = await bench.perform(*bench.step().actions)
    bench.step([config_map])

    def refuse_first(call: Call) -> None:
        if (call.verb, call.name) == ("create", "job-worker-0"):
            raise Forbidden("exceeded quota: pods", status=403)

    bench.api.before_call = refuse_first
    refused, created = await bench.perform(Create(FIRST), Create(SECOND))
    assert refused == CreateFailed(FIRST, 403, "exceeded quota: pods")
    assert isinstance(created, Created)


@pytest.mark.parametrize("grace", [None, 0])
async def test_a_successor_is_not_deleted(grace: int | None) -> None:
    """A deletion is of one UID: who has the name since then stays, also when force is used."""
    bench = await Bench.create()
    await bench.begin()

    assert await bench.perform(Delete(FIRST, "job-worker-0", "former", grace)) == [Gone("former")]
    assert await bench.perform(Delete(None, "job-attempt", "former")) == [Gone("former")]
    assert await bench.is_there(PODS, "job-worker-0")
    assert await bench.is_there(CONFIG_MAPS, "job-attempt")


async def test_what_a_status_names_is_not_deleted_unless_it_belongs_to_the_framework() -> None:
    """Who may edit a Framework may write any name and UID into its status: that gives no right over other objects."""
    bench = await Bench.create()
    config_map, first, _ = await bench.begin()
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "victim"}}
    victim = uid_of(await bench.api.create(CONFIG_MAPS, body, NAMESPACE))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": config_map, "controller": True}
    container = {"name": "main", "image": "example.org/task:1"}
    pod = {"metadata": {"name": "other", "ownerReferences": [reference]}, "spec": {"containers": [container]}}
    stranger = uid_of(await bench.api.create(PODS, {"apiVersion": "v1", "kind": "Pod"} | pod, NAMESPACE))

    assert await bench.perform(Delete(None, "victim", victim, confirm=True, check=True)) == [Gone(victim)]
    assert await bench.perform(Delete(FIRST, "other", stranger, 0, check=True)) == [Gone(stranger)]
    assert await bench.is_there(CONFIG_MAPS, "victim")
    assert await bench.is_there(PODS, "other")

    assert await bench.perform(Delete(FIRST, "job-worker-0", first, 0, True, check=True)) == [Gone(first)]
    deleted = await bench.perform(Delete(None, "job-attempt", config_map, check=True))
    assert deleted == [DeleteAccepted(config_map)]
    assert not await bench.is_there(CONFIG_MAPS, "job-attempt")


async def test_a_forged_status_is_checked_before_anything_is_deleted() -> None:
    """What no cache shows, and what does not say itself that it is ours, is read before it is deleted."""
    bench = await Bench.create()
    await bench.begin()
    status = bench.framework.status
    assert status is not None
    forged = msgspec.structs.replace(status.attempt_status, config_map_name="victim", config_map_uid="victims-uid")
    status = msgspec.structs.replace(status, attempt_status=forged, state=State.DELETION_PENDING)
    bench.framework = replace(bench.framework, status=status)
    deletions = [action for action in bench.step().actions if isinstance(action, Delete)]
    assert [(action.name, action.check) for action in deletions] == [("victim", True)]


async def test_a_deletion_gives_a_pod_its_time_and_force_does_not() -> None:
    """Scenario 44 (framework): accepted, and there until its kubelet is done; with grace 0 it is gone at once."""
    bench = await Bench.create()
    _, first, _ = await bench.begin()
    await bench.bind("job-worker-0")

    assert await bench.perform(Delete(FIRST, "job-worker-0", first)) == [DeleteAccepted(first)]
    assert await bench.perform(Delete(FIRST, "job-worker-0", first, confirm=True)) == [DeleteAccepted(first)]
    assert is_deleting(await bench.read(PODS, "job-worker-0"))
    assert await bench.perform(Delete(FIRST, "job-worker-0", first, 0, confirm=True)) == [Gone(first)]


async def test_an_attempts_config_map_goes_after_its_pods() -> None:
    """G2: while a pod of the attempt lives, its ConfigMap is there, so nobody takes the attempt for over."""
    bench = await Bench.create()
    config_map, _, second = await bench.begin()
    await bench.bind("job-worker-1")

    assert await bench.perform(Delete(None, "job-attempt", config_map)) == [DeleteAccepted(config_map)]
    await asyncio.sleep(60)
    assert is_deleting(await bench.read(PODS, "job-worker-1"))
    assert is_deleting(await bench.read(CONFIG_MAPS, "job-attempt"))
    await bench.perform(Delete(SECOND, "job-worker-1", second, 0))
    await asyncio.sleep(60)
    assert await bench.perform(Confirm(None, "job-attempt", config_map)) == [Gone(config_map)]


async def test_a_completed_framework_goes_after_all_that_it_has() -> None:
    """Scenario 48 (framework): in the foreground, and only the one whose time is over."""
    bench = await Bench.create()
    await bench.begin()
    await bench.bind("job-worker-0")

    assert await bench.perform(DeleteFramework("former")) == [Gone("former")]
    assert await bench.is_there(FRAMEWORKS, "job")
    uid = bench.framework.uid
    assert await bench.perform(DeleteFramework(uid)) == [DeleteAccepted(uid)]
    await asyncio.sleep(60)
    assert is_deleting(await bench.read(FRAMEWORKS, "job")), "its pod lives"


async def test_a_look_with_quorum() -> None:
    """Present with its state, gone when the name is another's, and neither when nobody answers."""
    bench = await Bench.create()
    _, first, _ = await bench.begin()

    (present,) = await bench.perform(Confirm(FIRST, "job-worker-0", first))
    assert isinstance(present, Present)
    assert uid_of(present.found) == first
    assert await bench.perform(Confirm(FIRST, "job-worker-0", "former")) == [Gone("former")]

    def hang_up(call: Call) -> None:
        raise Unreachable("connection refused")

    bench.api.before_call = hang_up
    failed = [Failed(first, "connection refused")]
    assert await bench.perform(Confirm(FIRST, "job-worker-0", first)) == failed
    assert await bench.perform(Delete(FIRST, "job-worker-0", first)) == failed
    assert await bench.perform(DeleteFramework(first)) == failed
