"""Claiming: which objects belong to a job by owner and labels, and the requests that this takes."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.jobs.api.errors import AdoptionRefused, ClaimFailed
from controllers.jobs.children.adoption import Claim, ClaimManager, classify, recheck_deletion_timestamp
from store.kube.api.errors import Forbidden, NotFound, ServerError
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, controller_of, name_of, owner_reference, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import TRAIN_JOBS, Writes, job_labels, memory_kube, template, train_job

LABELS = job_labels()


def reference_to(job: Object) -> Object:
    return owner_reference(job, api_version=TRAIN_JOBS.api_version, kind=TRAIN_JOBS.kind)


def candidate(
    *, owner: Object | None = None, labels: dict[str, str] | None = None, deleting: bool = False, name: str = "p"
) -> Object:
    metadata: Object = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels or LABELS}
    if owner is not None:
        metadata["ownerReferences"] = [reference_to(owner)]
    if deleting:
        metadata["deletionTimestamp"] = "2024-05-01T12:00:00Z"
    return {"metadata": metadata, **template()}


def job(uid: str = "uid-job", *, deleting: bool = False) -> Object:
    obj = train_job()
    obj["metadata"] |= {"uid": uid} | ({"deletionTimestamp": "2024-05-01T12:00:00Z"} if deleting else {})
    return obj


OTHER = {"unrelated": "yes"}
OURS, FOREIGN = job(), job("uid-other")


@pytest.mark.parametrize(
    ("pod", "owner", "claim"),
    [
        pytest.param(candidate(owner=OURS), OURS, Claim.KEEP, id="ours"),
        pytest.param(candidate(owner=OURS, deleting=True), OURS, Claim.KEEP, id="ours, terminating"),
        pytest.param(candidate(owner=OURS), job(deleting=True), Claim.KEEP, id="39: job deleting, owned kept"),
        pytest.param(candidate(owner=OURS, labels=OTHER), OURS, Claim.RELEASE, id="41: owned, mismatch"),
        pytest.param(candidate(owner=OURS, labels=OTHER), job(deleting=True), Claim.SKIP, id="mismatch, job deleting"),
        pytest.param(candidate(owner=FOREIGN), OURS, Claim.SKIP, id="40: owned by another"),
        pytest.param(candidate(), OURS, Claim.ADOPT, id="orphan"),
        pytest.param(candidate(labels=OTHER), OURS, Claim.SKIP, id="38: orphan, mismatch"),
        pytest.param(candidate(deleting=True), OURS, Claim.SKIP, id="42: orphan terminating"),
        pytest.param(candidate(), job(deleting=True), Claim.SKIP, id="39: job deleting, orphan"),
    ],
)
def test_classification(pod: Object, owner: Object, claim: Claim) -> None:
    """The owner comes first, then the labels; an orphan is only adopted when neither it nor the job is being
    deleted.
    """
    assert classify(pod, owner, LABELS) is claim


class Cluster:
    """A job in an API server, and claims for it."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        self.api, self.job = api, job
        self.writes = Writes(api)
        self.reads = 0
        self.released: list[str] = []

    @classmethod
    async def create(cls) -> Cluster:
        api = memory_kube()
        return cls(api, await api.create(TRAIN_JOBS, train_job(), "default"))

    async def pod(self, name: str, *, labels: dict[str, str] | None = None, owner: Object | None = None) -> Object:
        body = candidate(name=name, labels=labels, owner=owner)
        del body["metadata"]["uid"]
        return await self.api.create(PODS, body, "default")

    async def read_job(self) -> Object:
        self.reads += 1
        return await self.api.get(TRAIN_JOBS, "train", "default")

    async def claim(self, *pods: Object) -> list[Object]:
        manager = ClaimManager(
            self.api,
            PODS,
            self.job,
            reference=reference_to(self.job),
            selector=LABELS,
            can_adopt=recheck_deletion_timestamp(self.read_job, uid_of(self.job)),
            released=lambda obj: self.released.append(name_of(obj)),
        )
        return await manager.claim(pods)

    async def controller(self, name: str) -> Any:
        return (controller_of(await self.api.get(PODS, name, "default")) or {}).get("uid")


async def test_matching_pods_are_claimed_without_a_request() -> None:
    """Of two owned pods, the one with our labels is claimed without a read or a write."""
    cluster = await Cluster.create()
    ours = await cluster.pod("ours", owner=cluster.job)
    alien = await cluster.pod("alien", labels=OTHER)
    cluster.writes.calls.clear()

    assert [name_of(pod) for pod in await cluster.claim(ours, alien)] == ["ours"]
    assert cluster.writes.calls == []
    assert cluster.reads == 0


async def test_orphans_are_adopted_after_one_live_read() -> None:
    """The job is read once, however many orphans there are; each gets our reference as its controller."""
    cluster = await Cluster.create()
    orphans = [await cluster.pod(name) for name in ("a", "b", "c")]

    claimed = await cluster.claim(*orphans)

    assert {name_of(pod) for pod in claimed} == {"a", "b", "c"}
    assert all(controller_of(pod) == reference_to(cluster.job) for pod in claimed)
    assert [await cluster.controller(name) for name in "abc"] == [uid_of(cluster.job)] * 3
    assert cluster.reads == 1


async def test_nothing_is_adopted_for_a_job_that_is_going() -> None:
    """If the cached job is alive but the real one is being deleted, every adoption is refused, after one read."""
    cluster = await Cluster.create()
    orphans = [await cluster.pod(name) for name in ("a", "b")]
    await cluster.api.patch(TRAIN_JOBS, "train", "default", {"metadata": {"finalizers": ["example.dev/hold"]}})
    await cluster.api.delete(TRAIN_JOBS, "train", "default")

    with pytest.raises(ClaimFailed) as failure:
        await cluster.claim(*orphans)

    assert [type(error) for error in failure.value.errors] == [AdoptionRefused, AdoptionRefused]
    assert cluster.reads == 1
    assert await cluster.controller("a") is None


async def test_nothing_is_adopted_for_a_job_that_was_replaced() -> None:
    """Another job with another UID has the name now; the orphans are not ours."""
    cluster = await Cluster.create()
    orphan = await cluster.pod("a")
    await cluster.api.delete(TRAIN_JOBS, "train", "default")
    await cluster.api.create(TRAIN_JOBS, train_job(), "default")

    with pytest.raises(ClaimFailed, match="deleted and created again"):
        await cluster.claim(orphan)


async def test_a_failed_read_is_the_answer_for_the_whole_sync() -> None:
    """The read is not repeated for the next orphan; the next sync reads again."""
    reads = 0

    async def read() -> Object:
        nonlocal reads
        reads += 1
        raise NotFound("gone")

    can_adopt = recheck_deletion_timestamp(read, "uid")
    for _ in range(2):
        with pytest.raises(NotFound):
            await can_adopt()
    assert reads == 1


async def test_a_pod_without_our_labels_is_released() -> None:
    """Our reference is removed, others stay, and the cache is notified to discard the pod."""
    cluster = await Cluster.create()
    pod = await cluster.pod("drifted", labels=OTHER, owner=cluster.job)
    co_owner = await cluster.api.create(CONFIG_MAPS, {"metadata": {"name": "c"}}, "default")
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": uid_of(co_owner)}
    references = [*pod["metadata"]["ownerReferences"], other]
    pod = await cluster.api.patch(PODS, "drifted", "default", {"metadata": {"ownerReferences": references}})

    assert await cluster.claim(pod) == []

    stored = await cluster.api.get(PODS, "drifted", "default")
    assert stored["metadata"]["ownerReferences"] == [other]
    assert cluster.released == ["drifted"]
    assert cluster.writes.calls[-1].body["metadata"]["uid"] == uid_of(pod)


async def test_a_release_never_touches_a_successor() -> None:
    """The pod was deleted and created again under its name: there is nothing to release."""
    cluster = await Cluster.create()
    old = await cluster.pod("p", labels=OTHER, owner=cluster.job)
    await cluster.api.delete(PODS, "p", "default", grace_period=0)
    await cluster.pod("p", owner=cluster.job)

    assert await cluster.claim(old) == []
    assert await cluster.controller("p") == uid_of(cluster.job)
    assert cluster.released == ["p"]


async def test_an_adoption_from_an_old_state_is_refused() -> None:
    """Another client has changed the orphan, perhaps its labels: the server refuses, and the job is retried."""
    cluster = await Cluster.create()
    orphan = await cluster.pod("p")
    await cluster.api.patch(PODS, "p", "default", {"metadata": {"labels": {TRAIN_JOBS.plural: "x"}}})

    with pytest.raises(ClaimFailed):
        await cluster.claim(orphan)
    assert await cluster.controller("p") is None


async def test_what_is_gone_is_no_error() -> None:
    """An orphan and a drifted pod that no longer exist are not claimed."""
    cluster = await Cluster.create()
    gone = [await cluster.pod("a"), await cluster.pod("b", labels=OTHER, owner=cluster.job)]
    for name in "ab":
        await cluster.api.delete(PODS, name, "default", grace_period=0)

    assert await cluster.claim(*gone) == []


async def test_one_failure_disturbs_no_other() -> None:
    """Errors are collected: the exception holds the claimed objects and names the failures."""
    cluster = await Cluster.create()
    pods = [await cluster.pod("ours", owner=cluster.job), await cluster.pod("a"), await cluster.pod("b")]
    drifted = await cluster.pod("c", labels=OTHER, owner=cluster.job)

    def fail(call: Call) -> Exception | None:
        return {"a": Forbidden("a is forbidden"), "c": ServerError("c broke")}.get(call.name)

    cluster.writes.fail = fail
    with pytest.raises(ClaimFailed, match=r"2 of its pods.*a is forbidden; c broke") as failure:
        await cluster.claim(*pods, drifted)

    assert sorted(name_of(pod) for pod in failure.value.claimed) == ["b", "ours"]
