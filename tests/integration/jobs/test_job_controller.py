"""The job controller against a real API server and its garbage collector; the test plays the kubelet."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from controllers.jobs.api import (
    ClaimFailed,
)
from controllers.jobs.controller import ClaimManager, recheck_deletion_timestamp
from controllers.jobs.gang import DisruptionBudget
from store.kube.api.errors import Conflict, Invalid, KubeError
from store.kube.api.objects import (
    CONFIG_MAPS,
    EVENTS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Object,
    Resource,
    controller_of,
    name_of,
    uid_of,
)
from store.kube.client.client import KubeClient
from tests.support.jobs.train_jobs import (
    TRAIN_JOBS,
    TrainJobs,
    all_created,
    children,
    condition,
    conditions,
    job_labels,
    reference_to,
    running,
    set_phase,
    template,
    train_job,
    train_job_definition,
)
from tests.support.kube.control_plane import ControlPlane
from tests.support.waiting import until

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
BUDGETS = POD_DISRUPTION_BUDGETS.in_version("v1beta1")


@pytest.fixture(autouse=True)
def _definition(control_plane: ControlPlane) -> None:
    control_plane.install(train_job_definition())


class Claims:
    """A job in its own namespace, and claims of pods for it."""

    def __init__(self, kube: KubeClient, job: Object) -> None:
        self.kube, self.job = kube, job
        self.namespace = job["metadata"]["namespace"]

    @property
    def reference(self) -> Object:
        return reference_to(self.job)

    async def pod(self, name: str, labels: dict[str, str], *owners: Object) -> Object:
        metadata = {"name": name, "labels": labels, "ownerReferences": list(owners)}
        return await self.kube.create(PODS, {"metadata": metadata, **template()}, self.namespace)

    async def claim(self, *pods: Object) -> list[Object]:
        async def live() -> Object:
            return await self.kube.get(TRAIN_JOBS, name_of(self.job), self.namespace)

        return await ClaimManager(
            self.kube,
            PODS,
            self.job,
            reference=self.reference,
            selector=job_labels(),
            can_adopt=recheck_deletion_timestamp(live, uid_of(self.job)),
        ).claim(pods)

    async def controller(self, name: str) -> str:
        return str((controller_of(await self.kube.get(PODS, name, self.namespace)) or {}).get("uid", ""))


@pytest.fixture
async def claims(kube: KubeClient, namespace: str) -> Claims:
    return Claims(kube, await kube.create(TRAIN_JOBS, train_job(namespace=namespace), namespace))


async def test_adoption_and_release(claims: Claims) -> None:
    """The server accepts our strategic patches: a reference is added, or removed while others stay."""
    config = await claims.kube.create(CONFIG_MAPS, {"metadata": {"name": "other"}}, claims.namespace)
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "other", "uid": uid_of(config)}
    orphan = await claims.pod("orphan", job_labels(), other)
    drifted = await claims.pod("drifted", {"away": "yes"}, other, claims.reference)

    claimed = await claims.claim(orphan, drifted)

    assert [name_of(pod) for pod in claimed] == ["orphan"]
    references = claimed[0]["metadata"]["ownerReferences"]
    assert sorted(references, key=str) == sorted([other, claims.reference], key=str)
    released = await claims.kube.get(PODS, "drifted", claims.namespace)
    assert released["metadata"]["ownerReferences"] == [other]


async def test_a_second_controller_is_refused(claims: Claims) -> None:
    """Another controller adopted the orphan while our cache showed it free: our patch is refused because of its version
    and its references."""
    rival_job = await claims.kube.create(TRAIN_JOBS, train_job("rival", claims.namespace), claims.namespace)
    rival = {**claims.reference, "name": "rival", "uid": uid_of(rival_job)}
    orphan = await claims.pod("orphan", job_labels())
    taken = await claims.kube.patch(
        PODS, "orphan", claims.namespace, {"metadata": {"ownerReferences": [rival]}}, patch_type="strategic"
    )

    with pytest.raises(ClaimFailed) as by_version:
        await claims.claim(orphan)
    orphan["metadata"]["resourceVersion"] = taken["metadata"]["resourceVersion"]
    with pytest.raises(ClaimFailed) as by_reference:
        await claims.claim(orphan)

    assert isinstance(by_version.value.errors[0], Conflict | Invalid)
    assert isinstance(by_reference.value.errors[0], Invalid)
    assert await claims.controller("orphan") == rival["uid"]


async def test_a_successor_is_neither_adopted_nor_released_nor_deleted(claims: Claims) -> None:
    """The UIDs in patches and deletions protect a new object of the same name."""
    old_orphan = await claims.pod("orphan", job_labels())
    old_drifted = await claims.pod("drifted", {"away": "yes"}, claims.reference)
    for name in ("orphan", "drifted"):
        await claims.kube.delete(PODS, name, claims.namespace, grace_period=0)
    await claims.pod("orphan", {"away": "yes"})
    await claims.pod("drifted", job_labels(), claims.reference)

    with pytest.raises(ClaimFailed):
        await claims.claim(old_orphan)
    assert await claims.claim(old_drifted) == []
    assert await claims.controller("orphan") == ""
    assert await claims.controller("drifted") == uid_of(claims.job)

    jobs = TrainJobs(claims.kube, namespace=claims.namespace).jobs
    assert not await jobs.pod_control.delete(claims.job, "drifted", uid_of(old_drifted))
    assert await claims.controller("drifted") == uid_of(claims.job)


async def test_a_job_from_start_to_end(kube: KubeClient, namespace: str) -> None:
    """A real server accepts the pods, services and budget; the job succeeds; after its deletion nothing is left."""
    operator = TrainJobs(kube, namespace=namespace, gang=DisruptionBudget())
    async with running(operator):
        await kube.create(TRAIN_JOBS, train_job(namespace=namespace, Worker=2, PS=1), namespace)
        await all_created(kube, 3, namespace=namespace)
        service = (await children(kube, SERVICES, namespace))["train-worker-1"]
        assert service["spec"]["clusterIP"] == "None"
        assert [port["name"] for port in service["spec"]["ports"]] == ["rpc"]
        assert (await kube.get(BUDGETS, "train", namespace))["spec"]["minAvailable"] == 3

        replicas = {"spec": {"replicaSpecs": {"Worker": {"replicas": 3}}}}
        await kube.patch(TRAIN_JOBS, "train", namespace, replicas)
        await all_created(kube, 4, namespace=namespace)
        await until(lambda: _min_available(kube, namespace, 4))

        for index in range(3):
            await set_phase(kube, f"train-worker-{index}", "Succeeded", code=0, namespace=namespace)
        await condition(kube, "Succeeded", namespace=namespace)
        await kube.delete(TRAIN_JOBS, "train", namespace, propagation="Background")
        await all_created(kube, 0, namespace=namespace)

    reasons = Counter(event["reason"] for event in (await kube.list(EVENTS, namespace)).items)
    assert {"SuccessfulCreatePod", "SuccessfulCreateService", "JobCreated", "JobSucceeded"} <= reasons.keys()


async def _min_available(kube: KubeClient, namespace: str, count: int) -> bool:
    return bool((await kube.get(BUDGETS, "train", namespace))["spec"]["minAvailable"] == count)


async def test_a_name_that_is_used_again_at_once(kube: KubeClient, namespace: str) -> None:
    """The garbage collector still deletes the first job's pods: the second waits for the names, and gets its own."""
    async with running(TrainJobs(kube, namespace=namespace)):
        first = await kube.create(TRAIN_JOBS, train_job(namespace=namespace, Worker=3), namespace)
        await all_created(kube, 3, namespace=namespace)
        await kube.delete(TRAIN_JOBS, "train", namespace, propagation="Background")
        second = await kube.create(TRAIN_JOBS, train_job(namespace=namespace, Worker=3), namespace)

        async def all_of_second() -> bool:
            pods = (await children(kube, PODS, namespace)).values()
            return [(controller_of(pod) or {}).get("uid") for pod in pods] == [uid_of(second)] * 3

        await until(all_of_second)
        assert uid_of(first) != uid_of(second)
        assert "Blocked" not in conditions(await kube.get(TRAIN_JOBS, "train", namespace))


async def test_a_storm_of_conflicts(kube: KubeClient, namespace: str) -> None:
    """A user annotates the job without a pause: its status is stored all the same, and no pod is created twice."""

    async def annotate() -> None:
        number = 0
        while True:
            number += 1
            with suppress(KubeError):
                await kube.patch(TRAIN_JOBS, "train", namespace, {"metadata": {"annotations": {"n": str(number)}}})

    job = train_job(namespace=namespace, Worker=4)
    job["spec"]["successPolicy"] = "AllWorkers"
    async with running(TrainJobs(kube, namespace=namespace)), asyncio.TaskGroup() as group:
        await kube.create(TRAIN_JOBS, job, namespace)
        storm = group.create_task(annotate())
        pods = await all_created(kube, 4, namespace=namespace)
        for name in pods:
            await set_phase(kube, name, "Running", namespace=namespace)
        await condition(kube, "Running", namespace=namespace)
        for name in pods:
            await set_phase(kube, name, "Succeeded", code=0, namespace=namespace)
        await condition(kube, "Succeeded", namespace=namespace)
        storm.cancel()
        assert {uid_of(pod) for pod in (await children(kube, PODS, namespace)).values()} == {
            uid_of(pod) for pod in pods.values()
        }


async def test_a_quota_is_met_slowly_and_left_when_it_allows(kube: KubeClient, namespace: str) -> None:
    """Three of ten pods fit: the job reports why by an Event, does not hammer, and completes when there is room."""
    quota = {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "3"}}}
    await kube.create(QUOTAS, quota, namespace)
    await until(lambda: _quota_counts(kube, namespace))
    async with running(TrainJobs(kube, namespace=namespace)):
        await kube.create(TRAIN_JOBS, train_job(namespace=namespace, Worker=10), namespace)
        await all_created(kube, 3, 10, namespace=namespace)
        await until(lambda: _event(kube, namespace, "FailedCreatePod", "exceeded quota"))

        await kube.patch(QUOTAS, "pods", namespace, {"spec": {"hard": {"pods": "20"}}})
        await all_created(kube, 10, namespace=namespace)


async def _quota_counts(kube: KubeClient, namespace: str) -> bool:
    return "used" in (await kube.get(QUOTAS, "pods", namespace)).get("status", {})


async def _event(kube: KubeClient, namespace: str, reason: str, text: str) -> bool:
    events = (await kube.list(EVENTS, namespace)).items
    return any(event["reason"] == reason and text in event["message"] for event in events)


async def test_a_refused_template_blocks_its_job_only(kube: KubeClient, namespace: str) -> None:
    """The API server's validation message appears in the condition, and other jobs are not affected."""
    bad = train_job("bad", namespace, Worker=2)
    bad["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "Not A Name"
    async with running(TrainJobs(kube, namespace=namespace)):
        await kube.create(TRAIN_JOBS, bad, namespace)
        await kube.create(TRAIN_JOBS, train_job(namespace=namespace, Worker=1), namespace)

        blocked = await condition(kube, "Blocked", "bad", namespace=namespace)
        assert "spec.containers[0].name" in blocked["message"]
        await until(lambda: _created(kube, namespace, "train-worker-0"))


async def _created(kube: KubeClient, namespace: str, pod: str) -> bool:
    return pod in await children(kube, PODS, namespace)


async def test_a_restart_of_the_api_server_in_the_middle(own_control_plane: ControlPlane) -> None:
    """Creations without an answer, watches that break: in the end every pod exists once, and none was replaced."""
    plane = own_control_plane
    plane.install(train_job_definition())
    async with await KubeClient.connect(str(plane.kubeconfig)) as kube, running(TrainJobs(kube)):
        await kube.create(TRAIN_JOBS, train_job(Worker=60), "default")
        before = await until(lambda: children(kube, PODS))
        assert len(before) < 60
        await asyncio.to_thread(plane.restart_apiserver)
        pods = await until(lambda: _many(kube, 60), within=90)
        assert {uid_of(pod) for pod in before.values()} <= {uid_of(pod) for pod in pods.values()}
        assert sorted(pods) == sorted(f"train-worker-{index}" for index in range(60))


async def _many(kube: KubeClient, count: int) -> dict[str, Object] | None:
    with suppress(KubeError):
        pods = await children(kube, PODS)
        return pods if len(pods) == count else None
    return None
