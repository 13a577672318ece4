"""What users and other controllers see of training jobs: objects, conditions and Events, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.jobs.gang import (
    SCHEDULER_PLUGINS_POD_GROUPS,
    VOLCANO_POD_GROUPS,
    SchedulerPluginsPodGroup,
    VolcanoPodGroup,
)
from controllers.training.options import TrainingOptions
from controllers.training.pytorch import AUTOSCALERS, PYTORCH_JOBS, PyTorchJobs
from controllers.training.tensorflow import TFJobs
from store.kube.api.objects import EVENTS, Resource, annotations_of, labels_of
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import operate, running
from tests.support.training.cluster import Cluster, cluster
from tests.support.training.manifests import environment, pytorch_job, tf_job
from tests.support.waiting import until

pytestmark = pytest.mark.looptime

METRICS = [
    {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}
]
ELASTIC = {"minReplicas": 1, "maxReplicas": 4}


def requests(api: MemoryKube) -> list[Call]:
    """Return the list to which all later calls are appended, apart from watches and the kubelet's."""
    calls: list[Call] = []
    api.before_call = lambda call: calls.append(call) if call.verb != "watch" else None
    return calls


async def test_a_job_of_another_controller_causes_no_request() -> None:
    """Kueue's MultiKueue runs it in another cluster."""
    async with cluster(PyTorchJobs) as found:
        await asyncio.sleep(5)
        calls = requests(found.api)
        job = pytorch_job(Master=1, spec={"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}})
        await found.create(job)
        await asyncio.sleep(600)
        assert [(call.verb, call.resource.kind) for call in calls] == [("create", "PyTorchJob")]
        assert "status" not in await found.job("m")


async def test_no_workers_are_no_pods_and_no_services() -> None:
    """Zero replicas mean that there is no such type; the original creates and deletes one for ever."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Master=1, Worker=0))
        await found.all_running(1)
        await asyncio.sleep(60)
        assert set(await found.pods()) == set(await found.services()) == {"m-master-0"}
        assert await found.variable("m-master-0", "WORLD_SIZE") == "1"


async def test_a_scale_to_none_and_back_deletes_and_creates() -> None:
    """The job waits without workers, and goes on with them."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=2, spec={"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2}}))
        await found.all_running(2)
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 0}}})
        await until(found.is_empty, "no pods")
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 1}}})
        await found.all_running(1)


async def test_defaults_are_never_written_back() -> None:
    """A type in another case is treated as the known one; the stored spec stays as its author wrote it."""
    async with cluster(TFJobs) as found:
        job = tf_job(worker=None, ps=1)
        written = (await found.create(job))["spec"]
        await found.all_running(2)
        assert set(await found.pods()) == {"tf-worker-0", "tf-ps-0"}
        await found.condition("tf", "Running")
        assert (await found.job("tf"))["spec"] == written


async def test_metrics_make_an_autoscaler_which_goes_with_the_end() -> None:
    """It has exactly our fields, is owned by the job, follows the spec, and is deleted when the job has finished."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=2, spec={"elasticPolicy": {**ELASTIC, "metrics": METRICS}}))
        await found.all_running(2)
        (autoscaler,) = (await found.named(AUTOSCALERS)).values()
        assert autoscaler["spec"] == {
            "scaleTargetRef": {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "m"},
            "minReplicas": 1,
            "maxReplicas": 4,
            "metrics": METRICS,
        }
        (owner,) = autoscaler["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("PyTorchJob", "m", True)

        await found.patch("m", {"elasticPolicy": {"maxReplicas": 3}})
        await until(lambda: limits(found, 3), "follows the spec")
        await found.plan("m-worker-0", exit_code="0", run_seconds="0")
        await found.condition("m", "Succeeded")
        await until(lambda: absent(found, AUTOSCALERS), "deleted")


async def limits(found: Cluster, largest: int) -> bool:
    return [each["spec"]["maxReplicas"] for each in (await found.named(AUTOSCALERS)).values()] == [largest]


async def absent(found: Cluster, resource: Resource) -> bool:
    return not await found.named(resource)


async def test_an_autoscaler_goes_when_its_metrics_go_or_the_job_is_suspended() -> None:
    """The original leaves it behind in the first case."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=1, spec={"elasticPolicy": {**ELASTIC, "metrics": METRICS}}))
        await until(lambda: found.named(AUTOSCALERS), "created")
        await found.patch("m", {"elasticPolicy": {"metrics": None}})
        await until(lambda: absent(found, AUTOSCALERS), "deleted")
        await found.patch("m", {"elasticPolicy": {"metrics": METRICS}})
        await until(lambda: found.named(AUTOSCALERS), "created again")
        await found.patch("m", {"runPolicy": {"suspend": True}})
        await until(lambda: absent(found, AUTOSCALERS), "deleted with the pods")


async def test_the_scale_subresource_finds_the_workers() -> None:
    """A scaled job has its third worker; the status has the count and the selector that the scale reads."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=2, spec={"elasticPolicy": ELASTIC}))
        await found.all_running(2)
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 3}}})
        assert "m-worker-2" in await found.all_running(3)
        await until(lambda: counted(found, 3), "three are active")
        selector = (await found.job("m"))["status"]["replicaStatuses"]["Worker"]["selector"]
        assert selector == (
            "training.kubeflow.org/job-name=m,training.kubeflow.org/operator-name=pytorchjob-controller,"
            "training.kubeflow.org/replica-type=worker"
        )


async def counted(found: Cluster, active: int) -> bool:
    return bool((await found.job("m"))["status"]["replicaStatuses"]["Worker"].get("active") == active)


async def phase(found: Cluster, value: str) -> None:
    """Write the status of the job's group, as Volcano does."""
    await found.api.patch(VOLCANO_POD_GROUPS, "m", "default", {"status": {"phase": value}}, subresource="status")


async def test_volcano_admits_the_group_before_any_pod_exists() -> None:
    """Pending: no pods, and no write for ten minutes. Admitted: all pods, with both annotations."""
    async with cluster(PyTorchJobs, VOLCANO_POD_GROUPS, gang=VolcanoPodGroup()) as found:
        await found.create(pytorch_job(Master=1, Worker=2))
        await until(lambda: found.named(VOLCANO_POD_GROUPS), "a group")
        await phase(found, "Pending")
        await asyncio.sleep(5)
        calls = requests(found.api)
        await asyncio.sleep(600)
        assert calls == []
        (group,) = (await found.named(VOLCANO_POD_GROUPS)).values()
        assert (group["spec"]["minMember"], group["spec"]["queue"]) == (3, "default")
        await phase(found, "Inqueue")
        worker = await until(lambda: found.pod("m-worker-1"))
        marks = {"scheduling.k8s.io/group-name": "m", "volcano.sh/task-spec": "worker"}
        assert marks.items() <= annotations_of(worker).items()
        assert worker["spec"]["schedulerName"] == "volcano"


async def test_a_queue_set_by_hand_is_kept() -> None:
    """A job without a queue gets the default one once; later changes of the group are its author's."""
    async with cluster(PyTorchJobs, VOLCANO_POD_GROUPS, gang=VolcanoPodGroup()) as found:
        await found.create(pytorch_job(Worker=1))
        await until(lambda: found.named(VOLCANO_POD_GROUPS), "a group")
        await found.api.patch(VOLCANO_POD_GROUPS, "m", "default", {"spec": {"queue": "vision"}})
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 2}}})
        await asyncio.sleep(60)
        (group,) = (await found.named(VOLCANO_POD_GROUPS)).values()
        assert (group["spec"]["minMember"], group["spec"]["queue"]) == (2, "vision")


async def test_another_gang_scheduler_gets_its_group_and_its_name() -> None:
    """The group of scheduler-plugins with the policy's parameters; pods are labelled and do not wait."""
    gang = SchedulerPluginsPodGroup(scheduler="my-sched")
    policy = {"schedulingPolicy": {"minAvailable": 2, "scheduleTimeoutSeconds": 30, "minResources": {"cpu": "3"}}}
    async with cluster(PyTorchJobs, SCHEDULER_PLUGINS_POD_GROUPS, gang=gang) as found:
        await found.create(pytorch_job(Worker=3, spec={"runPolicy": policy}))
        worker = await until(lambda: found.pod("m-worker-2"))
        assert worker["spec"]["schedulerName"] == "my-sched"
        assert labels_of(worker)["scheduling.x-k8s.io/pod-group"] == "m"
        (group,) = (await found.named(SCHEDULER_PLUGINS_POD_GROUPS)).values()
        assert group["spec"] == {"minMember": 2, "minResources": {"cpu": "3"}, "scheduleTimeoutSeconds": 30}


async def blocked(found: Cluster, name: str) -> str:
    """Wait until the job is blocked. Return the message."""
    return str((await found.condition(name, "Blocked"))["message"])


async def test_one_invalid_job_blocks_itself_alone_and_recovers() -> None:
    """An elastic job without workers crashed the original for all. The Event names the field, once."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job("a", Master=1, spec={"elasticPolicy": ELASTIC}))
        await found.create(pytorch_job("b", Master=1))
        await found.condition("b", "Running")
        assert (
            await blocked(found, "a")
            == "spec.elasticPolicy: only workers are elastic; add spec.pytorchReplicaSpecs.Worker"
        )
        await asyncio.sleep(600)
        events = [
            (kind, message) for kind, reason, message in await found.events() if reason == "PyTorchJobFailedValidation"
        ]
        assert len(events) == 1
        assert events[0][0] == "Warning"
        assert "spec.elasticPolicy" in events[0][1]

        await found.patch("a", {"elasticPolicy": None})
        await found.condition("a", "Running")
        conditions = (await found.job("a"))["status"]["conditions"]
        assert not any(each["type"] == "Blocked" and each["status"] == "True" for each in conditions)
        assert conditions[-1]["type"] == "Running"


async def test_a_second_mistake_is_reported_after_the_first() -> None:
    """Each change of the spec is judged as it is then."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Master=2))
        assert "one master" in await blocked(found, "m")
        await found.patch(
            "m", {"pytorchReplicaSpecs": {"Master": {"replicas": 1}}, "nprocPerNode": "1", "elasticPolicy": {}}
        )
        await asyncio.sleep(5)
        assert "elastic" in await blocked(found, "m")


async def test_a_spec_that_becomes_invalid_leaves_the_pods_alone() -> None:
    """The job goes on when it is corrected; nothing was restarted."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Master=1, Worker=1))
        pods = await found.all_running(2)
        await found.patch("m", {"runPolicy": {"cleanPodPolicy": "Foo"}})
        assert "spec.runPolicy.cleanPodPolicy" in await blocked(found, "m")
        await asyncio.sleep(600)
        await found.patch("m", {"runPolicy": {"cleanPodPolicy": "All"}})
        await asyncio.sleep(60)
        assert {pod["metadata"]["uid"] for pod in (await found.pods()).values()} == {
            pod["metadata"]["uid"] for pod in pods.values()
        }


async def test_a_job_without_replica_types_is_blocked() -> None:
    """The original ignores it silently."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job())
        assert "spec.pytorchReplicaSpecs: expected an object with at least one replica type" in await blocked(
            found, "m"
        )
        assert "PyTorchJobFailedValidation" in [reason for _, reason, _ in await found.events()]


async def test_labels_of_the_job_change_nothing_and_templates_only_later_pods() -> None:
    """An edited template is used for the pods that are created after it."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=2, spec={"elasticPolicy": ELASTIC}))
        await found.all_running(2)
        await found.condition("m", "Running")
        await asyncio.sleep(5)
        calls = requests(found.api)
        metadata = {"metadata": {"labels": {"team": "vision"}, "annotations": {"note": "x"}}}
        await found.api.patch(PYTORCH_JOBS, "m", "default", metadata)
        await asyncio.sleep(60)
        assert [(call.verb, call.resource.kind) for call in calls] == [("patch", "PyTorchJob")]

        template = pytorch_job(Worker=1)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        template["spec"]["containers"][0]["env"] = [{"name": "VERSION", "value": "2"}]
        await found.patch("m", {"pytorchReplicaSpecs": {"Worker": {"replicas": 3, "template": template}}})
        pods = await found.all_running(3)
        assert [dict(environment(pods[f"m-worker-{index}"])).get("VERSION") for index in range(3)] == [None, None, "2"]


async def warnings(found: Cluster) -> list[str]:
    return [message for _, reason, message in await found.events() if reason == "PyTorchJobSpecWarning"]


async def test_warnings_of_a_spec_are_events_once_per_change() -> None:
    """A misplaced field is reported when the job is new, another warning when its spec has changed."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=1, spec={"cleanPodPolicy": "All"}))
        await found.condition("m", "Running")
        await asyncio.sleep(600)
        misplaced = "spec.cleanPodPolicy has no effect: move it to spec.runPolicy.cleanPodPolicy"
        assert await warnings(found) == [misplaced]
        await found.patch("m", {"cleanPodPolicy": None, "backoffLimit": 3})
        await asyncio.sleep(600)
        assert len(await warnings(found)) == 2


async def test_warnings_are_not_repeated_by_the_next_operator() -> None:
    """It takes the job over without an Event, as a job that ran under the original."""
    async with cluster(PyTorchJobs) as found:
        await found.create(pytorch_job(Worker=1, spec={"cleanPodPolicy": "All"}))
        await found.condition("m", "Running")
        await asyncio.sleep(60)
        for event in await found.named(EVENTS):
            await found.api.delete(EVENTS, event, "default")
        async with running(operate(found.api, PyTorchJobs)):
            await asyncio.sleep(600)
        assert await warnings(found) == []


async def test_without_init_containers_workers_come_after_their_master() -> None:
    """They are created once the master's pod has an address."""
    async with cluster(PyTorchJobs, options=TrainingOptions(init_containers=None)) as found:
        master: Any = pytorch_job(Master=1)["spec"]["pytorchReplicaSpecs"]["Master"]
        master["template"]["metadata"] = {"annotations": {"hollow/start-seconds": "30"}}
        await found.create(pytorch_job(Master=master, Worker=1))
        await asyncio.sleep(20)
        assert set(await found.pods()) == {"m-master-0"}
        assert set(await found.services()) == {"m-master-0", "m-worker-0"}
        pods = await found.all_running(2)
        assert "initContainers" not in pods["m-worker-0"]["spec"]
