"""Gangs: the object that declares a job's pods a gang, its contents, and the pods' metadata for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from controllers.jobs.api import (
    BadSpec,
    Gang,
    JobView,
    Leftover,
    NameTaken,
    NotServed,
    ReplicaSpec,
    RunPolicy,
    SchedulingPolicy,
)
from controllers.jobs.control import ChildControl, Identity
from controllers.jobs.gang import (
    PRIORITY_CLASSES,
    VOLCANO_POD_GROUPS,
    DisruptionBudget,
    GangControl,
    GangKind,
    GangSize,
    SchedulerPluginsPodGroup,
    VolcanoPodGroup,
    discover_resource,
    min_resources,
    served_resource,
)
from store.kube.api.errors import KubeError, NotFound, Unreachable
from store.kube.api.objects import POD_DISRUPTION_BUDGETS, PODS, Object, Resource, controller_of
from store.kube.informer.informer import Informer
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import (
    INDEX,
    KIND,
    TRAIN_JOBS,
    TYPE,
    Stored,
    Writes,
    all_created,
    children,
    condition,
    create,
    job_labels,
    memory_kube,
    operate,
    reference_to,
    running,
    running_informer,
    set_phase,
    train_job,
)
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime

BUDGET = DisruptionBudget()
BUDGETS = POD_DISRUPTION_BUDGETS.in_version("v1beta1")

PODS_OF_KINDS: list[tuple[GangKind, Object]] = [
    (DisruptionBudget(), {"metadata": {}, "spec": {}}),
    (DisruptionBudget("kube-batch"), {"metadata": {}, "spec": {"schedulerName": "kube-batch"}}),
    (
        VolcanoPodGroup(),
        {
            "metadata": {"annotations": {"scheduling.k8s.io/group-name": "train", "volcano.sh/task-spec": "worker"}},
            "spec": {"schedulerName": "volcano"},
        },
    ),
    (
        SchedulerPluginsPodGroup(),
        {
            "metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "train"}},
            "spec": {"schedulerName": "scheduler-plugins-scheduler"},
        },
    ),
]


async def test_gangs_get_their_budget_and_lose_it_with_the_end() -> None:
    """It is created for all replicas, patched when they change, and deleted once when the job has finished. The objects
    are watched, so a lost one comes back at once, without waiting for a resync.
    """
    api = memory_kube()
    async with running(operate(api, gang=DisruptionBudget())):
        await create(api, train_job(Worker=2))
        await all_created(api, 2)
        writes = Writes(api)
        await api.patch(TRAIN_JOBS, "train", "default", {"spec": {"replicaSpecs": {"Worker": {"replicas": 3}}}})
        await all_created(api, 3)
        budget = await api.get(POD_DISRUPTION_BUDGETS, "train", "default")
        assert budget["spec"]["minAvailable"] == 3
        assert writes.of("create", POD_DISRUPTION_BUDGETS) == []
        await api.delete(POD_DISRUPTION_BUDGETS, "train", "default")
        writes.calls.clear()
        await asyncio.sleep(0.5)
        assert writes.of("create", POD_DISRUPTION_BUDGETS) == ["train"]

        for index in range(3):
            await set_phase(api, f"train-worker-{index}", "Succeeded", code=0)
        await condition(api, "Succeeded")
        await until(lambda: writes.of("delete", POD_DISRUPTION_BUDGETS))
        await asyncio.sleep(1)
        writes.calls.clear()
        await asyncio.sleep(3600)
        assert writes.calls == []


async def test_a_gang_that_the_server_cannot_have_ends_the_operator() -> None:
    """No job could run as requested: the error names at once what is missing, and what to do."""
    kind = VolcanoPodGroup()
    operator = operate(memory_kube(unserved=kind.resources), gang=kind)
    with pytest.raises(NotServed, match=r"podgroups in scheduling\.volcano\.sh/v1beta1: install it, or disable"):
        await operator.run()


async def test_volcano_decides_when_pods_are_created() -> None:
    """The group comes first; pods follow when the scheduler admits it, without polling, with its annotations."""
    kind = VolcanoPodGroup()
    api = memory_kube()
    async with running(operate(api, gang=kind)):
        await create(api, train_job(Worker=2))
        await until(lambda: _exists(api, kind))
        await asyncio.sleep(30)
        assert await children(api, PODS) == {}

        await api.patch(kind.resources[0], "train", "default", {"status": {"phase": "Inqueue"}})
        pods = await all_created(api, 2)

    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"volcano"}
    assert pods["train-worker-0"]["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "train"


async def _exists(api: MemoryKube, kind: VolcanoPodGroup) -> bool:
    return bool((await api.list(kind.resources[0], "default")).items)


async def test_kubeflows_functions_for_budgets() -> None:
    """sync_pdb and delete_pdb, for operators with a sync of their own, need no informer."""
    api = memory_kube(unserved=[POD_DISRUPTION_BUDGETS])
    job = await create(api, train_job(Worker=2))
    jobs = operate(api).jobs
    beta = POD_DISRUPTION_BUDGETS.in_version("v1beta1")

    await jobs.sync_pdb(job, 2)
    assert (await jobs.sync_pdb(job, 5))["spec"]["minAvailable"] == 5
    assert (await api.get(beta, "train", "default"))["spec"]["minAvailable"] == 5
    await jobs.delete_pdb(job)
    await jobs.delete_pdb(job)
    assert (await api.list(beta, "default")).items == []


def spec(replicas: int, *, priority: str = "", **resources: Any) -> ReplicaSpec:
    containers = [{"name": "main", "resources": resources}]
    return ReplicaSpec(template={"spec": {"containers": containers, "priorityClassName": priority}}, replicas=replicas)


def view(policy: SchedulingPolicy | None = None, **replicas: ReplicaSpec) -> JobView:
    run_policy = RunPolicy(scheduling_policy=policy or SchedulingPolicy())
    return JobView("train", "TrainJob", replicas or {"Worker": spec(4)}, TYPE, INDEX, run_policy=run_policy)


class Controlled(Stored):
    """A job and the control of its gang's object."""

    def __init__(self, api: MemoryKube, job: Object, kind: GangKind = BUDGET, resource: Resource = BUDGETS) -> None:
        super().__init__(api, job)
        self.resource, self.cache = resource, Informer(api, resource, clock=loop_time)
        self.gang = GangControl(ChildControl(api, resource, KIND, self.recorder, self.tally), kind, cache=self.cache)

    @classmethod
    async def create(cls, *of_what: Any) -> Controlled:
        job = train_job()
        job["metadata"]["annotations"] = {"team": "a", "kubectl.kubernetes.io/last-applied-configuration": "{...}"}
        api = memory_kube(gc_delay=None)
        return cls(api, await create(api, job), *of_what)

    @property
    def identity(self) -> Identity:
        return Identity(self.job, reference_to(self.job), job_labels(), TYPE, INDEX)

    async def stored(self) -> Object:
        return await self.api.get(self.resource, "train", "default")


async def test_a_budget_is_created_for_the_whole_gang() -> None:
    """It has the job's name, is owned by it, selects exactly its pods, and requires all of them by default."""
    one = await Controlled.create()

    await one.gang.sync(one.identity, view(), 4)

    stored = await one.stored()
    assert stored["spec"] == {"minAvailable": 4, "selector": {"matchLabels": job_labels()}}
    assert stored["metadata"]["annotations"] == {"team": "a"}
    assert controller_of(stored) == one.identity.owner_reference
    assert one.recorder.reasons == ["SuccessfulCreatePdb"]
    assert one.tally.figures == ["create PodDisruptionBudget ok"]


async def test_a_budget_that_exists_is_patched() -> None:
    """A change of replicas is patched without an error; fields and labels of other clients stay."""
    one = await Controlled.create()
    await one.gang.sync(one.identity, view(), 4)
    theirs = {"spec": {"theirs": 1}, "metadata": {"labels": {"x": "y"}}}
    await one.api.patch(BUDGETS, "train", "default", theirs)

    await one.gang.sync(one.identity, view(), 6)

    stored = await one.stored()
    assert stored["spec"] == {"minAvailable": 6, "selector": {"matchLabels": job_labels()}, "theirs": 1}
    assert stored["metadata"]["labels"] == {"x": "y"}
    assert one.writes.calls[-1].body["spec"] == {"minAvailable": 6}


async def test_a_successor_of_the_budget_is_not_patched() -> None:
    """An object of another owner that has just taken the name stays as it is."""
    one = await Controlled.create()
    await one.gang.sync(one.identity, view(), 4)
    theirs = {"metadata": {"name": "train"}, "spec": {"minAvailable": 1}}

    async def replace_it(call: Call) -> None:
        if call.verb == "patch":
            one.api.before_call = None
            await one.api.delete(BUDGETS, "train", "default")
            await one.api.create(BUDGETS, theirs, "default")

    one.api.before_call = replace_it
    with pytest.raises(KubeError):
        await one.gang.sync(one.identity, view(), 6)

    assert (await one.stored())["spec"] == theirs["spec"]


async def test_the_gangs_state_for_a_decision() -> None:
    """The state says whether the object exists, and is as desired; then there is no write."""
    one = await Controlled.create()
    async with running_informer(one.cache) as settle:
        assert await one.gang.observe(one.identity, view()) == Gang(exists=False, current=False)
        await one.gang.sync(one.identity, view(), 4)
        await settle()
        one.writes.calls.clear()
        await one.gang.sync(one.identity, view(), 4)
        assert one.writes.calls == []
        assert await one.gang.observe(one.identity, view()) == Gang(exists=True, current=True)
        assert await one.gang.observe(one.identity, view(Worker=spec(5))) == Gang(exists=True, current=False)


@pytest.mark.parametrize(
    ("owner", "error"),
    [
        pytest.param({"kind": "TrainJob", "name": "train", "uid": "former"}, Leftover, id="of a former job"),
        pytest.param({"kind": "TrainJob", "name": "other", "uid": "other"}, NameTaken, id="of another job"),
        pytest.param(None, NameTaken, id="without a controller"),
    ],
)
async def test_a_strangers_budget_is_left_alone(owner: Object | None, error: type[Exception]) -> None:
    """It is neither patched nor deleted, and does not count as ours."""
    one = await Controlled.create()
    references = [{"apiVersion": "example.dev/v1", "controller": True, **owner}] if owner else []
    await one.api.create(BUDGETS, {"metadata": {"name": "train", "ownerReferences": references}}, "default")
    one.writes.calls.clear()

    with pytest.raises(error, match="PodDisruptionBudget default/train"):
        await one.gang.sync(one.identity, view(), 4)
    await one.gang.delete(one.job)

    assert [call.verb for call in one.writes.calls] == ["create"]
    assert not (await one.gang.observe(one.identity, view())).exists


async def test_deleting_needs_no_budget() -> None:
    """An existing one is deleted, with an Event; a missing one is no error."""
    one = await Controlled.create()
    await one.gang.delete(one.job)
    assert one.recorder.events == []

    await one.gang.sync(one.identity, view(), 4)
    await one.gang.delete(one.job)

    with pytest.raises(NotFound):
        await one.stored()
    assert one.recorder.reasons == ["SuccessfulCreatePdb", "SuccessfulDeletePdb"]


async def test_a_volcano_group_says_what_the_gang_needs() -> None:
    """It holds members, resources, queue and priority; a field removed from the policy is removed from the group, but
    the queue stays."""
    one = await Controlled.create(VolcanoPodGroup(), VOLCANO_POD_GROUPS)
    policy = SchedulingPolicy(queue="research", priority_class="high", min_available=2)
    workers = spec(4, requests={"cpu": "500m", "memory": "1Gi"})

    await one.gang.sync(one.identity, view(policy, Worker=workers), 2)
    assert (await one.stored())["spec"] == {
        "minMember": 2,
        "minResources": {"cpu": "1", "memory": "2147483648"},
        "queue": "research",
        "priorityClassName": "high",
    }

    await one.gang.sync(one.identity, view(SchedulingPolicy(min_resources={"cpu": "7"})), 4)
    assert (await one.stored())["spec"] == {"minMember": 4, "minResources": {"cpu": "7"}, "queue": "research"}


@pytest.mark.parametrize(("phase", "holds"), [(None, True), ("", True), ("Pending", True), ("Inqueue", False)])
async def test_volcano_holds_pods_back_until_the_group_is_in(phase: str | None, holds: bool) -> None:
    """A missing group delays pods, too; the group is watched, not polled."""
    one = await Controlled.create(VolcanoPodGroup(), VOLCANO_POD_GROUPS)
    async with running_informer(one.cache) as settle:
        assert (await one.gang.observe(one.identity, view())).holds_creation
        await one.gang.sync(one.identity, view(), 4)
        if phase is not None:
            await one.api.patch(VOLCANO_POD_GROUPS, "train", "default", {"status": {"phase": phase}})
        await settle()
        assert (await one.gang.observe(one.identity, view())).holds_creation is holds


async def test_priorities_decide_whose_requests_count() -> None:
    """Pods of the highest priority count first; a priority class is read once, and an unknown one counts as 0."""
    one = await Controlled.create(VolcanoPodGroup(), VOLCANO_POD_GROUPS)
    await one.api.create(PRIORITY_CLASSES, {"metadata": {"name": "high"}, "value": 100})
    job = view(
        Worker=spec(4, priority="unknown", requests={"cpu": "1"}), Chief=spec(1, priority="high", requests={"cpu": "8"})
    )

    reads: list[str] = []
    one.api.before_call = lambda call: reads.append(call.name) if call.resource == PRIORITY_CLASSES else None

    for _ in range(2):
        await one.gang.sync(one.identity, job, 2)

    assert (await one.stored())["spec"]["minResources"] == {"cpu": "9"}
    assert reads.count("high") == 1


@pytest.mark.parametrize(("kind", "expected"), PODS_OF_KINDS)
def test_pods_are_made_members(kind: GangKind, expected: Object) -> None:
    """Each scheduler's own labels or annotations are set, and its name where the template leaves it open."""
    pod: Object = {"metadata": {}, "spec": {}}

    assert kind.decorate(pod, "train", "Worker") is None
    assert pod == expected


@pytest.mark.parametrize("kind", [VolcanoPodGroup(), SchedulerPluginsPodGroup(), DisruptionBudget("kube-batch")])
def test_another_scheduler_is_respected_with_a_warning(kind: GangKind) -> None:
    """It may know gangs, too; if it does not, the Event names the cause."""
    pod: Object = {"metadata": {}, "spec": {"schedulerName": "mine"}}

    warning = kind.decorate(pod, "train", "Worker")

    assert pod["spec"]["schedulerName"] == "mine"
    assert warning is not None
    assert (warning.type, warning.reason) == ("Warning", "SetPodTemplateSchedulerName")


def test_scheduler_plugins_group_has_a_timeout() -> None:
    """It has no queue or priority, which that scheduler does not know."""
    kind = SchedulerPluginsPodGroup()
    policy = SchedulingPolicy(schedule_timeout_seconds=60, queue="ignored")
    size = kind.spec(policy, GangSize(3), job_labels())

    assert size == {"minMember": 3, "minResources": None, "scheduleTimeoutSeconds": 60}
    assert not kind.holds_creation(None)


def test_limits_stand_in_for_requests() -> None:
    """They do so per resource, as the API server defaults it; without both there is no entry. An unreadable quantity is
    an error that names the type, the container and the resource.
    """
    specs = {"a": spec(2, requests={"cpu": "1"}, limits={"cpu": "4", "gpu": "1"}), "b": spec(3)}
    assert min_resources(specs, 10, lambda name: 0) == {"cpu": "2", "gpu": "2"}
    with pytest.raises(BadSpec, match=r"^Worker.template.spec.containers\[0\].resources: cpu: 'lots'"):
        min_resources({"Worker": spec(1, requests={"cpu": "lots"})}, 1, lambda name: 0)


async def test_the_best_served_version_is_taken() -> None:
    """The version is policy/v1 if served, else v1beta1; else the error names what is missing."""
    kind = DisruptionBudget()
    assert await served_resource(memory_kube(), kind.resources) == POD_DISRUPTION_BUDGETS
    assert await served_resource(memory_kube(unserved=[POD_DISRUPTION_BUDGETS]), kind.resources) == BUDGETS
    with pytest.raises(NotServed, match=r"poddisruptionbudgets in policy/v1 or .* in policy/v1beta1.*install it"):
        await served_resource(memory_kube(unserved=[POD_DISRUPTION_BUDGETS, BUDGETS]), kind.resources)


async def test_discovery_waits_for_the_api_server() -> None:
    """A controller that starts before the API server keeps trying."""
    api = memory_kube()
    answers: Iterator[Exception | None] = iter([Unreachable("refused"), Unreachable("refused"), None])
    Writes(api).fail = lambda call: next(answers)

    assert await discover_resource(api, DisruptionBudget().resources, retry_period=2.0) == POD_DISRUPTION_BUDGETS
    assert loop_time() == pytest.approx(4.0)
