"""Gangs: the object that holds a job's pods together, what it says, and what pods carry for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from controllers.controller_interface import GroupVersionKind
from controllers.gang import PRIORITY_CLASSES, GangControl, discover_resource, served_resource
from controllers.gang_kinds import (
    VOLCANO_POD_GROUPS,
    DisruptionBudget,
    GangKind,
    GangSize,
    SchedulerPluginsPodGroup,
    VolcanoPodGroup,
)
from controllers.gang_resources import min_resources
from controllers.job_errors import Leftover, NameTaken, NotServed
from controllers.job_objects import Identity
from controllers.job_types import BadSpec, Gang, JobView, ReplicaSpec, RunPolicy, SchedulingPolicy
from store.kube.errors import KubeError, NotFound, Unreachable
from store.kube.informer import Informer
from store.kube.memory import Call, MemoryKube
from store.kube.objects import Object, controller_of, owner_reference
from store.kube.resources import POD_DISRUPTION_BUDGETS, Resource
from tests.support.train_jobs import (
    INDEX,
    TRAIN_JOBS,
    TYPE,
    Tally,
    TellTale,
    Writes,
    job_labels,
    loop_time,
    memory_kube,
    running_informer,
    train_job,
)

pytestmark = pytest.mark.looptime

BUDGET = DisruptionBudget()
BUDGETS = POD_DISRUPTION_BUDGETS.in_version("v1beta1")


def spec(replicas: int, *, priority: str = "", **resources: Any) -> ReplicaSpec:
    containers = [{"name": "main", "resources": resources}]
    return ReplicaSpec(template={"spec": {"containers": containers, "priorityClassName": priority}}, replicas=replicas)


def view(policy: SchedulingPolicy | None = None, **replicas: ReplicaSpec) -> JobView:
    run_policy = RunPolicy(scheduling_policy=policy or SchedulingPolicy())
    return JobView("train", "TrainJob", replicas or {"Worker": spec(4)}, TYPE, INDEX, run_policy=run_policy)


class Controlled:
    """A job and the control of its gang's object."""

    def __init__(self, api: MemoryKube, job: Object, kind: GangKind, resource: Resource) -> None:
        self.api, self.job, self.resource = api, job, resource
        self.told, self.tally, self.writes = TellTale(), Tally(), Writes(api)
        job_kind = GroupVersionKind("example.dev", "v1", "TrainJob")
        self.cache = Informer(api, resource, clock=loop_time)
        self.gang = GangControl(api, kind, resource, job_kind, self.told, self.tally, cache=self.cache)

    @classmethod
    async def create(cls, kind: GangKind = BUDGET, resource: Resource = BUDGETS) -> Controlled:
        api = memory_kube(gc_delay=None)
        job = train_job()
        job["metadata"]["annotations"] = {"team": "a", "kubectl.kubernetes.io/last-applied-configuration": "{...}"}
        return cls(api, await api.create(TRAIN_JOBS, job, "default"), kind, resource)

    @property
    def identity(self) -> Identity:
        reference = owner_reference(self.job, api_version="example.dev/v1", kind="TrainJob")
        return Identity(self.job, reference, job_labels(), TYPE, INDEX)

    async def stored(self) -> Object:
        return await self.api.get(self.resource, "train", "default")


async def test_a_budget_is_created_for_the_whole_gang() -> None:
    """Named as the job, owned by it, over exactly its pods; unless the policy says less, all of them."""
    one = await Controlled.create()

    await one.gang.sync(one.identity, view(), 4)

    stored = await one.stored()
    assert stored["spec"] == {"minAvailable": 4, "selector": {"matchLabels": job_labels()}}
    assert stored["metadata"]["labels"] == job_labels()
    assert stored["metadata"]["annotations"] == {"team": "a"}
    assert controller_of(stored) == one.identity.owner_reference
    assert one.told.reasons == ["SuccessfulCreatePdb"]
    assert one.tally.figures == ["create PodDisruptionBudget ok"]


async def test_a_budget_that_exists_is_patched() -> None:
    """Scenario 56: replicas change: patched, no error; what others added to it stays."""
    one = await Controlled.create()
    await one.gang.sync(one.identity, view(), 4)
    await one.api.patch(BUDGETS, "train", "default", {"spec": {"theirs": 1}, "metadata": {"labels": {"x": "y"}}})

    await one.gang.sync(one.identity, view(), 6)

    stored = await one.stored()
    assert stored["spec"] == {"minAvailable": 6, "selector": {"matchLabels": job_labels()}, "theirs": 1}
    assert stored["metadata"]["labels"]["x"] == "y"
    assert one.writes.calls[-1].body["spec"] == {"minAvailable": 6}


async def test_a_successor_of_the_budget_is_not_patched() -> None:
    """What took its name a moment ago belongs to somebody else, and stays as it is."""
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


async def test_a_budget_that_is_right_is_left_alone() -> None:
    """No write that changes nothing."""
    one = await Controlled.create()
    await one.gang.sync(one.identity, view(), 4)
    one.writes.calls.clear()

    async with running_informer(one.cache):
        await one.gang.sync(one.identity, view(), 4)
    assert one.writes.calls == []


async def test_what_a_decision_is_told() -> None:
    """Whether the object exists, and says what it should."""
    one = await Controlled.create()
    async with running_informer(one.cache) as settle:
        assert await one.gang.observe(one.identity, view()) == Gang(exists=False, current=False)
        await one.gang.sync(one.identity, view(), 4)
        await settle()
        assert await one.gang.observe(one.identity, view()) == Gang(exists=True, current=True)
        assert await one.gang.observe(one.identity, view(Worker=spec(5))) == Gang(exists=True, current=False)


@pytest.mark.parametrize(
    ("owner", "error"),
    [
        pytest.param({"kind": "TrainJob", "name": "train", "uid": "former"}, Leftover, id="of a former job"),
        pytest.param({"kind": "TrainJob", "name": "other", "uid": "other"}, NameTaken, id="of another job"),
        pytest.param(None, NameTaken, id="of nobody"),
    ],
)
async def test_a_strangers_budget_is_left_alone(owner: Object | None, error: type[Exception]) -> None:
    """It is neither patched nor deleted, and does not pass for ours."""
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
    """One that is there goes, with an Event; one that is not is no error."""
    one = await Controlled.create()
    await one.gang.delete(one.job)
    assert one.told.events == []

    await one.gang.sync(one.identity, view(), 4)
    await one.gang.delete(one.job)

    with pytest.raises(NotFound):
        await one.stored()
    assert one.told.reasons == ["SuccessfulCreatePdb", "SuccessfulDeletePdb"]


async def test_a_volcano_group_says_what_the_gang_needs() -> None:
    """Members, resources, queue and priority; what the policy takes back vanishes from the group."""
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
    assert (await one.stored())["spec"] == {"minMember": 4, "minResources": {"cpu": "7"}}


@pytest.mark.parametrize(("phase", "holds"), [(None, True), ("", True), ("Pending", True), ("Inqueue", False)])
async def test_volcano_holds_pods_back_until_the_group_is_in(phase: str | None, holds: bool) -> None:
    """A missing group holds them, too; the group is watched, nobody polls it."""
    one = await Controlled.create(VolcanoPodGroup(), VOLCANO_POD_GROUPS)
    async with running_informer(one.cache) as settle:
        assert (await one.gang.observe(one.identity, view())).holds_creation
        await one.gang.sync(one.identity, view(), 4)
        if phase is not None:
            await one.api.patch(VOLCANO_POD_GROUPS, "train", "default", {"status": {"phase": phase}})
        await settle()
        assert (await one.gang.observe(one.identity, view())).holds_creation is holds


async def test_priorities_decide_whose_requests_count() -> None:
    """The gang starts with its most important pods; a priority class is read once, and an unknown one counts as 0."""
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


PODS_OF_KINDS: list[tuple[GangKind, Object]] = [
    (DisruptionBudget(), {"metadata": {}, "spec": {}}),
    (DisruptionBudget("kube-batch"), {"metadata": {}, "spec": {"schedulerName": "kube-batch"}}),
    (
        VolcanoPodGroup(),
        {
            "metadata": {
                "annotations": {"scheduling.k8s.io/group-name": "train", "volcano.sh/task-spec": "worker"},
            },
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


@pytest.mark.parametrize(("kind", "expected"), PODS_OF_KINDS)
def test_pods_are_made_members(kind: GangKind, expected: Object) -> None:
    """Each scheduler's own marks, and its name where the template leaves it open."""
    pod: Object = {"metadata": {}, "spec": {}}

    assert kind.decorate(pod, "train", "Worker") is None
    assert pod == expected


@pytest.mark.parametrize("kind", [VolcanoPodGroup(), SchedulerPluginsPodGroup(), DisruptionBudget("kube-batch")])
def test_another_scheduler_is_respected_with_a_warning(kind: GangKind) -> None:
    """It may know gangs, too; if it does not, the Event says what is wrong."""
    pod: Object = {"metadata": {}, "spec": {"schedulerName": "mine"}}

    warning = kind.decorate(pod, "train", "Worker")

    assert pod["spec"]["schedulerName"] == "mine"
    assert warning is not None
    assert (warning.type, warning.reason) == ("Warning", "SettedPodTemplateSchedulerName")


def test_scheduler_plugins_group_has_a_timeout() -> None:
    """And no queue or priority, which it does not know."""
    kind = SchedulerPluginsPodGroup()
    policy = SchedulingPolicy(schedule_timeout_seconds=60, queue="ignored")
    size = kind.spec(policy, GangSize(3), job_labels())

    assert size == {"minMember": 3, "minResources": None, "scheduleTimeoutSeconds": 60}
    assert not kind.holds_creation(None)


def test_limits_stand_in_for_requests() -> None:
    """Per resource, as the API server defaults it; nothing at all is nothing."""
    total = min_resources(
        {"a": spec(2, requests={"cpu": "1"}, limits={"cpu": "4", "gpu": "1"}), "b": spec(3)}, 10, lambda name: 0
    )
    assert total == {"cpu": "2", "gpu": "2"}


def test_an_unreadable_quantity_is_a_bad_spec() -> None:
    """Named with its type, so that it can be mended."""
    with pytest.raises(BadSpec, match=r"Worker: template.*'lots'"):
        min_resources({"Worker": spec(1, requests={"cpu": "lots"})}, 1, lambda name: 0)


async def test_the_best_served_version_is_taken() -> None:
    """policy/v1 where there is one, else v1beta1; else it is said what is missing."""
    kind = DisruptionBudget()
    assert await served_resource(memory_kube(), kind.resources) == POD_DISRUPTION_BUDGETS
    assert await served_resource(memory_kube(unserved=[POD_DISRUPTION_BUDGETS]), kind.resources) == BUDGETS
    with pytest.raises(NotServed, match=r"poddisruptionbudgets in policy/v1 or .* in policy/v1beta1.*install it"):
        await served_resource(memory_kube(unserved=[POD_DISRUPTION_BUDGETS, BUDGETS]), kind.resources)


async def test_discovery_waits_for_the_api_server() -> None:
    """A controller that starts before the API server finds out when it is there."""
    api = memory_kube()
    answers: Iterator[Exception | None] = iter([Unreachable("refused"), Unreachable("refused"), None])
    Writes(api).fail = lambda call: next(answers)

    assert await discover_resource(api, DisruptionBudget().resources, retry_period=2.0) == POD_DISRUPTION_BUDGETS
    assert loop_time() == pytest.approx(4.0)
