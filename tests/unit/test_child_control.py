"""Creating and deleting children: what is told on the job, and what is measured."""

from __future__ import annotations

import pytest

from controllers.child_control import ChildControl
from controllers.controller_interface import GroupVersionKind
from store.kube.errors import AlreadyExists, Forbidden, NotFound, ServerError
from store.kube.memory import MemoryKube
from store.kube.memory_kinds import NAMESPACES
from store.kube.objects import Object, name_of, uid_of
from store.kube.resources import PODS
from tests.support.train_jobs import TRAIN_JOBS, Tally, TellTale, Writes, memory_kube, template, train_job

POD = {"metadata": {"name": "train-worker-0"}, **template()}


class Controlled:
    """A job whose pods are controlled."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        self.api, self.job = api, job
        self.told, self.tally, self.writes = TellTale(), Tally(), Writes(api)
        kind = GroupVersionKind("example.dev", "v1", "TrainJob")
        self.pods = ChildControl(api, PODS, job_kind=kind, recorder=self.told, metrics=self.tally)

    @classmethod
    async def create(cls) -> Controlled:
        api = memory_kube()
        return cls(api, await api.create(TRAIN_JOBS, train_job(), "default"))


async def test_a_creation_is_told_and_counted() -> None:
    """On the job, with the pod's name."""
    one = await Controlled.create()

    created = await one.pods.create(one.job, POD)

    assert name_of(created) == "train-worker-0"
    event = one.told.events[0]
    assert (event.severity, event.reason, event.about) == (
        "Normal",
        "SuccessfulCreatePod",
        "example.dev/v1 TrainJob train",
    )
    assert "train-worker-0" in event.message
    assert one.tally.figures == ["create Pod ok"]


async def test_a_refused_creation_is_told_with_the_reason() -> None:
    """A quota, say: whoever describes the job sees why there is no pod."""
    one = await Controlled.create()
    one.writes.fail = lambda call: Forbidden("exceeded quota: pods=10")

    with pytest.raises(Forbidden):
        await one.pods.create(one.job, POD)

    assert one.told.reasons == ["FailedCreatePod"]
    assert "exceeded quota: pods=10" in one.told.events[0].message
    assert one.tally.figures == ["create Pod failed"]


async def test_in_a_namespace_that_ends_nothing_is_told() -> None:
    """Nobody may create Events there either, and everything is about to go."""
    one = await Controlled.create()
    await one.api.patch(TRAIN_JOBS, "train", "default", {"metadata": {"finalizers": ["example.dev/hold"]}})
    await one.api.delete(NAMESPACES, "default")

    with pytest.raises(Forbidden):
        await one.pods.create(one.job, POD)
    assert one.told.events == []


async def test_a_taken_name_is_the_callers_to_judge() -> None:
    """It may well be the job's own pod that the cache does not show yet: no Event."""
    one = await Controlled.create()
    await one.pods.create(one.job, POD)
    one.told.events.clear()

    with pytest.raises(AlreadyExists):
        await one.pods.create(one.job, POD)
    assert one.told.events == []


async def test_a_deletion_is_told_with_its_reason() -> None:
    """And it is graceful, unless it is forced."""
    one = await Controlled.create()
    pod = await one.pods.create(one.job, POD)
    await one.api.create(PODS, {"target": {"name": "n"}}, "default", name=name_of(pod), subresource="binding")

    assert await one.pods.delete(one.job, name_of(pod), uid_of(pod), why="surplus")
    assert one.told.events[-1].reason == "SuccessfulDeletePod"
    assert "surplus" in one.told.events[-1].message
    assert (await one.api.get(PODS, name_of(pod), "default"))["metadata"]["deletionTimestamp"]

    assert await one.pods.delete(one.job, name_of(pod), uid_of(pod), force=True)
    with pytest.raises(NotFound):
        await one.api.get(PODS, name_of(pod), "default")


async def test_a_successor_of_the_same_name_is_not_deleted() -> None:
    """The reference deletes by name; we name the UID. What is gone is gone, and nothing is told."""
    one = await Controlled.create()
    old = await one.pods.create(one.job, POD)
    await one.api.delete(PODS, name_of(old), "default", grace_period=0)
    assert not await one.pods.delete(one.job, name_of(old), uid_of(old))
    new = await one.pods.create(one.job, POD)
    one.told.events.clear()

    assert not await one.pods.delete(one.job, name_of(old), uid_of(old))

    assert uid_of(await one.api.get(PODS, name_of(new), "default")) == uid_of(new)
    assert one.told.events == []


async def test_a_failed_deletion_is_told_and_raised() -> None:
    """The caller decides what next; the Event says what the server said."""
    one = await Controlled.create()
    pod = await one.pods.create(one.job, POD)
    one.writes.fail = lambda call: ServerError("etcd is away")

    with pytest.raises(ServerError):
        await one.pods.delete(one.job, name_of(pod), uid_of(pod))
    assert one.told.reasons[-1] == "FailedDeletePod"
    assert one.tally.figures[-1] == "delete Pod failed"
