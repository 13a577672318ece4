"""Expectations: a controller waits for the effects of its calls, but not forever. Claims: which objects belong to a job
by owner and labels, and the requests that this takes. Stories of pods that a job adopts and releases.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.jobs.api import (
    AdoptionRefused,
    ClaimFailed,
)
from controllers.jobs.controller import (
    Claim,
    ClaimManager,
    Expectations,
    Expected,
    classify,
    recheck_deletion_timestamp,
)
from store.kube.api.errors import Forbidden, NotFound, ServerError
from store.kube.api.objects import CONFIG_MAPS, PODS, Object, controller_of, name_of, uid_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import (
    JOB,
    TRAIN_JOBS,
    Stored,
    Writes,
    all_created,
    children,
    condition,
    conditions,
    create,
    created,
    job_labels,
    memory_kube,
    operate,
    read,
    reference_to,
    running,
    template,
    train_job,
)
from tests.support.waiting import until

pytestmark = pytest.mark.looptime

POD_KEY = "uid-1/worker/pods"


def test_an_expectation_expires() -> None:
    """A lost event holds the job back for the time to live and no longer."""
    now = 0.0
    expectations = Expectations(ttl=300.0, clock=lambda: now)
    expectations.expect([Expected(POD_KEY, "create", "a")])
    now = 100.0
    expectations.expect([Expected(POD_KEY, "create", "b")])

    assert expectations.expires_in("uid-1") == 300.0
    now = 300.0
    assert expectations.outstanding("uid-1") == [Expected(POD_KEY, "create", "b")]
    now = 400.0
    assert not expectations.outstanding("uid-1")
    assert expectations.expires_in("uid-1") is None


def test_an_event_counts_for_its_own_effect_only() -> None:
    """The second event of one UID does not count as another pod's deletion; a text is a name or a UID."""
    expectations = Expectations(clock=lambda: 0.0)
    expectations.expect([Expected(POD_KEY, "create", "uid-a")])
    expectations.expect(Expected(POD_KEY, "delete", uid) for uid in ("uid-a", "uid-b"))

    expectations.cross_off(Expected(POD_KEY, "delete", "uid-a"))
    expectations.cross_off(Expected(POD_KEY, "delete", "uid-a"))

    left = [Expected(POD_KEY, "create", "uid-a"), Expected(POD_KEY, "delete", "uid-b")]
    assert expectations.outstanding("uid-1") == left


def test_an_uncertain_call_holds_the_job_back_briefly() -> None:
    """After a timeout the creation stays expected, but not for as long as after an answer. If its event came before the
    timeout, no entry is left.
    """
    now = 0.0
    expectations = Expectations(ttl=300.0, uncertain_ttl=10.0, clock=lambda: now)
    expectations.expect(Expected(POD_KEY, "create", name) for name in ("a", "b"))
    expectations.cross_off(Expected(POD_KEY, "create", "b"))
    now = 1.0

    for name in ("a", "b"):
        expectations.uncertain(Expected(POD_KEY, "create", name))
    expectations.uncertain(Expected("uid-9/worker/pods", "create", "a"))
    assert expectations.outstanding("uid-1") == [Expected(POD_KEY, "create", "a")]
    assert expectations.expires_in("uid-1") == 10.0
    assert not expectations.outstanding("uid-9")
    now = 11.0
    assert not expectations.outstanding("uid-1")
    assert expectations._deadlines == {}


LABELS = job_labels()


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


class Cluster(Stored):
    """A job in an API server, and claims for it."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        super().__init__(api, job)
        self.reads = 0
        self.released: list[str] = []

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
    """An owned pod with our labels is claimed without a read or a write, and so is none."""
    cluster = await Cluster.create()
    ours, alien = await cluster.pod("ours", owner=cluster.job), await cluster.pod("alien", labels=OTHER)
    cluster.writes.calls.clear()

    assert await cluster.claim(ours, alien) == [ours]
    assert (cluster.writes.calls, cluster.reads) == ([], 0)


async def test_orphans_are_adopted_after_one_live_read() -> None:
    """The job is read once, however many orphans there are; each gets our reference as its controller."""
    cluster = await Cluster.create()
    orphans = [await cluster.pod(name) for name in ("a", "b", "c")]

    claimed = await cluster.claim(*orphans)

    assert {name_of(pod) for pod in claimed} == {"a", "b", "c"}
    assert all(controller_of(pod) == reference_to(cluster.job) for pod in claimed)
    assert [await cluster.controller(name) for name in "abc"] == [uid_of(cluster.job)] * 3
    assert cluster.reads == 1


@pytest.mark.parametrize("successor", [False, True])
async def test_nothing_is_adopted_for_a_job_that_is_gone(successor: bool) -> None:
    """If the cached job is alive but the real one is being deleted, or is another one of its name, every adoption is
    refused, after one read.
    """
    cluster = await Cluster.create()
    orphans = [await cluster.pod(name) for name in ("a", "b")]
    if not successor:
        await cluster.api.patch(TRAIN_JOBS, "train", "default", {"metadata": {"finalizers": ["example.dev/hold"]}})
    await cluster.api.delete(TRAIN_JOBS, "train", "default")
    if successor:
        await cluster.api.create(TRAIN_JOBS, train_job(), "default")

    reason = "deleted and created again: its UID is" if successor else "default/train: being deleted since 20"
    with pytest.raises(ClaimFailed, match=reason) as failure:
        await cluster.claim(*orphans)

    assert [type(error) for error in failure.value.errors] == [AdoptionRefused, AdoptionRefused]
    assert cluster.reads == 1
    assert await cluster.controller("a") is None


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


async def test_orphans_with_our_labels_are_adopted() -> None:
    """They belong to the job from then on: no pod is created in their place."""
    api = memory_kube()
    for index in range(2):
        body = {
            "metadata": {"name": f"old-{index}", "labels": job_labels(type="worker", index=str(index))},
            "spec": {"containers": [{"name": "main", "image": "trainer:1"}]},
        }
        await api.create(PODS, body, "default")
    async with running(operate(api)):
        job = await create(api, train_job(Worker=2))
        pods = await until(lambda: _owned(api, job, 2))
        await asyncio.sleep(60)
        assert set(pods) == set(await children(api, PODS)) == {"old-0", "old-1"}


async def _owned(api: MemoryKube, job: Object, count: int) -> dict[str, Object] | None:
    pods = await children(api, PODS)
    owned = {name: pod for name, pod in pods.items() if (controller_of(pod) or {}).get("uid") == uid_of(job)}
    return owned if len(owned) == count else None


async def test_a_pod_that_loses_our_labels_is_released_and_replaced() -> None:
    """A user takes a pod out of the job for inspection: it stays alive, and the job gets another."""
    api = memory_kube()
    async with running(operate(api)):
        await create(api, train_job(Worker=1, restart_policy="Always"))
        first = (await all_created(api, 1))["train-worker-0"]
        await api.patch(PODS, "train-worker-0", "default", {"metadata": {"labels": {JOB: "inspect"}}})
        await until(lambda: _is_orphan(api, "train-worker-0"))
        blocked = await condition(api, "Blocked")

    assert uid_of((await children(api, PODS))["train-worker-0"]) == uid_of(first)
    assert "train-worker-0" in blocked["message"]


async def _is_orphan(api: MemoryKube, name: str) -> bool:
    return controller_of((await children(api, PODS))[name]) is None


async def test_a_pod_that_leaves_the_group_is_released() -> None:
    """Without its group label the watch reports it as deleted, though it exists: its reference is removed once, then
    the cache discards it.
    """
    api = memory_kube()
    operator = operate(api)
    async with running(operator):
        await created(api, train_job(Worker=1), 1)
        labels = dict.fromkeys(job_labels(type="worker", index="0"))
        await api.patch(PODS, "train-worker-0", "default", {"metadata": {"labels": labels}})
        await until(lambda: _is_orphan(api, "train-worker-0"))
        writes = Writes(api)
        await asyncio.sleep(5)
        assert writes.of("patch", PODS) == []
        assert len(operator.jobs.pod_lister) == 0


async def test_a_recreated_job_inherits_nothing() -> None:
    """A job deleted and created again under its name gets its own pods, while those of the first are still ending."""
    api = memory_kube(gc_delay=3.0)
    operator = operate(api)
    async with running(operator):
        first = await create(api, train_job(Worker=2))
        await all_created(api, 2)
        await api.delete(TRAIN_JOBS, "train", "default")
        second = await create(api, train_job(Worker=2))
        await until(lambda: _owned(api, second, 2))
        assert uid_of(first) != uid_of(second)
        assert not operator.jobs.expectations.outstanding(uid_of(first))
        assert "Blocked" not in conditions(await read(api))
