"""Gangs of training jobs by HiveD: the real kube-scheduler, `rcfarm extender` and `rcfarm jobs`."""

from __future__ import annotations

from pathlib import Path

import yaml

from scheduler.hived.contract import POD_SCHEDULING_ENABLE, POD_SCHEDULING_SPEC
from store.kube.api.objects import Object, annotations_of
from tests.support.extender.real_cluster import SCHEDULER, HivedCluster, hived_cluster, node_of, priority_class
from tests.support.kube.control_plane import ControlPlane
from tests.support.programs.daemon import DaemonLives
from tests.support.training.real import TrainingCluster, example, played_as


def gang(cluster: HivedCluster, name: str, workers: int, leaves: int, **plan: object) -> Object:
    """Return a PyTorchJob whose master and workers get cells of virtual cluster `a` together, or none of them."""
    job = example("pytorch")
    job["metadata"]["name"] = name
    specs = job["spec"]["pytorchReplicaSpecs"]
    specs["Worker"]["replicas"] = workers
    group = cluster.job(name, "a", 0, (1 + workers, leaves))
    for spec in specs.values():
        template = spec["template"]
        template["metadata"] = {"annotations": {POD_SCHEDULING_SPEC: yaml.safe_dump(group.spec(leaves))}}
        template["spec"] |= {"schedulerName": SCHEDULER, "priorityClassName": priority_class(0)}
        template["spec"]["containers"][0]["resources"] = {"limits": {POD_SCHEDULING_ENABLE: 1}}
    return played_as(job, Master=plan, Worker=plan)


async def test_a_job_gets_its_cells_as_a_whole_or_waits(
    plane: ControlPlane, namespace: str, operator: DaemonLives, tmp_path: Path
) -> None:
    """Three pods have six of eight GPUs; a job of four pods with two GPUs each waits, and none of its pods runs before
    the first job has succeeded and its pods have left their cells."""
    assert operator.is_running
    async with hived_cluster(plane, namespace, tmp_path, nodes=1) as hived:
        await hived.ensure_priority(priority_class(0))
        cluster = TrainingCluster(hived.api, namespace, hived.kubelet)
        first = await cluster.create(gang(hived, "first", 2, 2, run_seconds="inf"))
        names = ["first-master-0", "first-worker-0", "first-worker-1"]
        pods = await hived.until_bound(names)
        assert len({annotations_of(pod)[POD_SCHEDULING_SPEC] for pod in pods.values()}) == 1
        second = await cluster.create(gang(hived, "second", 3, 2, exit_code=0, run_seconds=0.5))
        await hived.until_reported("second-master-0", "no room for pods of 4x2 leaf cells")
        assert not any(node_of(pod) for name, pod in (await cluster.pods()).items() if name.startswith("second"))
        for name in names:
            await cluster.end(name, 0)
        await cluster.until(first, "Succeeded")
        await cluster.until(second, "Succeeded")
