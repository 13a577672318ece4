"""The operator of training jobs dies at every call of a life, and another takes over: the same outcomes, and never two
pods for one replica.

The API server prunes the status as the original's definitions do. What users and nodes do follows the jobs' state, so a
life without a death and one with it see the same events.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import pytest

from controllers.jobs.gang import SCHEDULER_PLUGINS_POD_GROUPS, SchedulerPluginsPodGroup
from controllers.jobs.status import decode_status
from controllers.training import PyTorchJobs, TFJobs
from controllers.training.pytorch import AUTOSCALERS
from store.kube.api.objects import EVENTS, PODS, SERVICES, Object, Resource, labels_of, name_of, phase_of, uid_of
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.train_jobs import loop_clock, memory_kube, operate
from tests.support.kube.faults.network import Moment, MortalKube
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.training.cluster import Cluster
from tests.support.training.manifests import pytorch_job, tf_job
from tests.support.waiting import until as awaited

pytestmark = pytest.mark.looptime

until = partial(awaited, within=600, every=0.5)  # each look costs as much as what it looks at
STATUS = {"conditions", "replicaStatuses", "startTime", "completionTime", "lastReconcileTime"}
OF_A_TYPE = {"active", "succeeded", "failed", "selector", "labelSelector"}


class Witness:
    """Prunes each status as the original's definition does, and checks every write. `last`: the last status stored.

    `created`: how often each pod was created. `breaches`: of guarantees.
    """

    def __init__(self, jobs: Resource, api: MemoryKube) -> None:
        self.breaches: list[str] = []
        self.created: Counter[str] = Counter()
        self.last: Object = {}
        self._jobs, self._api = jobs, api

    def __call__(self, resource: Resource, new: Object, old: Object | None) -> None:
        if resource == PODS and old is None:
            self.created[name_of(new)] += 1
            index = labels_of(new)["training.kubeflow.org/replica-index"]
            if not name_of(new).endswith(index):
                self.breaches.append(f"{name_of(new)} has the index {index}")
            if any(each["type"] in ("Succeeded", "Failed") for each in self.last.get("conditions", ())):
                self.breaches.append(f"{name_of(new)} is created for a finished job")
        elif resource == self._jobs and "status" in new:
            status = new["status"]
            for field in status.keys() - STATUS:
                del status[field]
            for counts in status.get("replicaStatuses", {}).values():
                for field in counts.keys() - OF_A_TYPE:
                    del counts[field]
            ends = [each["type"] for each in self.last.get("conditions", ()) if each["type"] in ("Succeeded", "Failed")]
            if ends and self.last != status:
                self.breaches.append(f"a finished job changed: {ends}")
            self.last = dict(status)


Story = Callable[[Cluster], Awaitable[None]]


class Scene(NamedTuple):
    """A kind of job, what happens to a job of it, and parameters of its operator."""

    kind: Any
    story: Story
    parameters: Any


async def phases(found: Cluster) -> dict[str, str]:
    return {name: phase_of(pod) for name, pod in (await found.pods()).items()}


async def status(found: Cluster, name: str) -> Any:
    return decode_status((await found.job(name)).get("status"))


async def restarts_success_and_suspension(found: Cluster) -> None:
    """A worker fails and runs again; another succeeds and loses its pod; a suspension; success."""
    await found.create(pytorch_job(Master=1, Worker={"replicas": 2, "restartPolicy": "ExitCode"}, spec=LIMITS))
    first = await found.all_running(3)
    await found.plan("m-worker-1", exit_code="137", run_seconds="0")

    async def again() -> bool:
        pods = await found.pods()
        second = pods.get("m-worker-1")
        return second is not None and uid_of(second) != uid_of(first["m-worker-1"]) and phase_of(second) == "Running"

    await until(again, "the worker runs again")
    await found.plan("m-worker-0", exit_code="0", run_seconds="0")

    async def recorded() -> bool:
        return bool((await status(found, "m")).replica_statuses["Worker"].completed == [0])

    await until(recorded, "its success is recorded")
    await found.api.delete(PODS, "m-worker-0", "default", grace_period=0)
    await asyncio.sleep(5)
    assert "m-worker-0" not in await found.pods()
    await found.patch("m", {"runPolicy": {"suspend": True}})

    async def idle() -> bool:
        counts = (await status(found, "m")).replica_statuses.values()
        return not await found.pods() and not await found.services() and not any(each.active for each in counts)

    await until(idle, "the suspended job is idle")
    await found.patch("m", {"runPolicy": {"suspend": False}})
    await found.all_running(3)
    await found.plan("m-master-0", exit_code="0", run_seconds="0")


LIMITS = {"runPolicy": {"cleanPodPolicy": "All", "backoffLimit": 3, "ttlSecondsAfterFinished": 5}}
ELASTIC = {"minReplicas": 1, "maxReplicas": 3, "metrics": [{"type": "Resource", "resource": {"name": "cpu"}}]}


async def elastic_to_its_deadline(found: Cluster) -> None:
    """A gang with an autoscaler is scaled up and down, and exceeds its deadline: its pods stop under None, too."""
    policy = {"activeDeadlineSeconds": 30, "ttlSecondsAfterFinished": 20}
    await found.create(pytorch_job(Worker=2, spec={"elasticPolicy": ELASTIC, "runPolicy": policy}))
    await found.all_running(2)
    await until(lambda: found.named(AUTOSCALERS), "the autoscaler")
    await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 3}}})
    await found.all_running(3)
    await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 2}}})
    await found.all_running(2)
    await found.condition("m", "Failed")
    await asyncio.sleep(10)
    assert "Running" not in (await phases(found)).values()


async def restarts_of_the_whole_job(found: Cluster) -> None:
    """A server is evicted and a worker dies, each restarting all; then the chief succeeds."""
    job = tf_job(Chief=1, Worker={"replicas": 1, "restartPolicy": "ExitCode"}, PS=1, spec=LIMITS)
    job["metadata"]["annotations"] = {"rcfarm.dev/restart": "job"}
    await found.create(job)
    pods = await found.all_running(3)
    found.kubelet.fail(pods["tf-ps-0"])
    known = {uid_of(pod) for pod in pods.values()}
    pods = await _replaced(found, known)
    await found.plan("tf-worker-0", exit_code="143", run_seconds="0")
    await _replaced(found, known | {uid_of(pod) for pod in pods.values()})
    await found.plan("tf-chief-0", exit_code="0", run_seconds="0")


async def _replaced(found: Cluster, known: set[str]) -> dict[str, Object]:
    async def complete() -> dict[str, Object] | None:
        pods = await found.pods()
        fresh = [pod for pod in pods.values() if uid_of(pod) not in known and phase_of(pod) == "Running"]
        return pods if len(fresh) == 3 else None

    return dict(await until(complete, "all pods are new"))


SCENES = {
    "restarts, success, suspension": Scene(PyTorchJobs, restarts_success_and_suspension, {}),
    "elastic to its deadline": Scene(PyTorchJobs, elastic_to_its_deadline, {"gang": SchedulerPluginsPodGroup()}),
    "restarts of the whole job": Scene(TFJobs, restarts_of_the_whole_job, {}),
}


class Life(NamedTuple):
    """The result of a life. `calls`: the number of its first operator's calls."""

    outcome: tuple[object, ...]
    breaches: list[str]
    calls: int


class Mortal(MortalKube):
    """Dies at calls that matter: Events are sent beside the job, and lists are read at the start."""

    async def before(self, call: Any) -> None:
        if call.resource == EVENTS.plural or call.verb in ("list", "served"):
            self.calls.pop()
            return await self._live()
        return await super().before(call)

    async def after(self, call: Any) -> None:
        if call.resource == EVENTS.plural or call.verb in ("list", "served"):
            return await self._live()
        return await super().after(call)


async def life(scene: Scene, dies_at: float, moment: Moment) -> Life:
    """Run a job until it is gone, with the death of its operator at one call."""
    api = memory_kube()
    api.register(scene.kind.resource, has_status=True)
    api.admission = witness = Witness(scene.kind.resource, api)
    kubelet = HollowKubelet(api, clock=lambda: loop_clock().timestamp(), schedules=True)
    await kubelet.add_nodes(1)
    mortal = Mortal(api, dies_at, moment)
    first = operate(mortal, scene.kind, **scene.parameters)
    async with asyncio.TaskGroup() as group:
        playing = group.create_task(kubelet.run())
        operating = group.create_task(first.run())
        telling = asyncio.ensure_future(scene.story(Cluster(api, first, kubelet)))
        ended = group.create_task(_gone(api, scene.kind.resource, telling))
        died = asyncio.create_task(mortal.died.wait())
        await asyncio.wait([ended, died], return_when=asyncio.FIRST_COMPLETED)
        if mortal.died.is_set():
            operating.cancel()
            operating = group.create_task(operate(api, scene.kind, **scene.parameters).run())
        died.cancel()
        await ended
        left = [*(await api.list(PODS)).items, *(await api.list(SERVICES)).items]
        left += [*(await api.list(AUTOSCALERS)).items, *(await api.list(SCHEDULER_PLUGINS_POD_GROUPS)).items]
        operating.cancel()
        playing.cancel()
    assert left == []
    return Life(_outcome(witness), witness.breaches, len(mortal.calls))


async def _gone(api: MemoryKube, resource: Resource, telling: asyncio.Future[None]) -> None:
    """Wait until the story has ended, and the job has been deleted after its time to live, with all its objects."""
    await telling

    async def gone() -> bool:
        return not (await api.list(resource)).items and not (await api.list(PODS)).items

    await until(gone, "the job and its objects are gone")
    await asyncio.sleep(1)


def _outcome(witness: Witness) -> tuple[object, ...]:
    final = decode_status(witness.last)
    counted = {
        f"{kind} {index}": (retry.failures, retry.disruptions)
        for kind, each in final.replica_statuses.items()
        for index, retry in each.retries.items()
    }
    conditions = [(each.type, each.status, each.reason) for each in final.conditions]
    return conditions, counted, dict(witness.created)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("moment", get_args(Moment))
async def test_given_a_death_before_or_after_any_call_then_the_outcome_is_the_same(
    scene: Scene, moment: Moment
) -> None:
    """The same conditions in the same order, the same counts, and each pod created as often as without a death.

    After a call the server is in the state in which the next one finds it, so every third of these moments will do.
    """
    undisturbed = await life(scene, math.inf, moment)
    assert undisturbed.breaches == []
    assert undisturbed.calls > 15
    for number in range(0, undisturbed.calls, 1 if moment == "before" else 3):
        disturbed = await life(scene, number, moment)
        assert disturbed.breaches == [], f"{moment} call {number}"
        assert disturbed.outcome == undisturbed.outcome, f"{moment} call {number}"
