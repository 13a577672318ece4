"""Users' mistakes are reported as a clear error on their pod, or skipped and logged; other pods are not affected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import yaml

from scheduler.hived.contract import POD_BIND_INFO, POD_LEAF_CELL_ISOLATION, POD_SCHEDULING_SPEC
from store.kube.api.objects import PODS, Object, uid_of
from tests.support.extender.real_cluster import HivedCluster, enabled_pod, hived_cluster, message_of, node_of, pod_of
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane

ALONE = {"virtualCluster": "a", "leafCellNumber": 1}
REFUSED = {  # by pod: its annotation, and the texts reported to its owner
    "no-annotation": (None, ["pod-scheduling-spec"]),
    "no-yaml": ("{virtualCluster: [", ["pod-scheduling-spec"]),
    "unknown-cluster": (yaml.safe_dump({**ALONE, "virtualCluster": "nobody"}), ["nobody"]),
    "stranger": (
        yaml.safe_dump({**ALONE, "affinityGroup": {"name": "g", "members": [{"podNumber": 1, "leafCellNumber": 2}]}}),
        ["affinityGroup"],
    ),
}


async def test_each_mistake_reaches_its_owner(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """Malformed annotations and invalid requests: the pod's condition and an Event name the pod and the field. Pods
    that contradict their gang get an error; the gang runs. Other pods are placed as usual."""
    async with undisturbed(control_plane, namespace, tmp_path) as cluster:
        for name, (annotation, _) in REFUSED.items():
            annotations = {} if annotation is None else {POD_SCHEDULING_SPEC: annotation}
            await cluster.create(enabled_pod(name, annotations))
        for name, (_, texts) in REFUSED.items():
            for text in texts:
                await cluster.until_reported(name, text)
            assert f"{namespace}/{name}" in message_of((await cluster.pods())[name])
        gang = cluster.job("gang", "a", 0, (2, 1))
        (first, second) = await cluster.submit(gang)
        await cluster.until_bound([first, second])
        for name, job in {
            "other-cluster": cluster.job("gang", "b", 0, (2, 1)),
            "other-priority": cluster.job("gang", "a", 7, (2, 1)),
            "other-members": cluster.job("gang", "a", 0, (3, 1)),
            "one-too-many": gang,
        }.items():
            await cluster.create(pod_of(job, name, 1))
            await cluster.until_reported(name, f"{namespace}/gang")


@asynccontextmanager
async def undisturbed(plane: ControlPlane, namespace: str, directory: Path) -> AsyncIterator[HivedCluster]:
    """Yield a cluster whose extender must still run at the end, without any internal error, place a pod, and stop
    cleanly on SIGTERM."""
    async with hived_cluster(plane, namespace, directory, quotas={"a": 1, "b": 1}) as cluster:
        yield cluster
        (last,) = await cluster.submit(cluster.job("last", "b", 0, (1, 8)))
        await cluster.until_bound([last])
        assert cluster.extender.is_running
        assert await asyncio.to_thread(cluster.extender.readiness)
        assert await asyncio.to_thread(cluster.extender.process.stop) == 0
        assert "Traceback" not in cluster.extender.log()


async def test_pods_that_others_bind_are_skipped(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """Enabled pods that another scheduler bound: without bind info, with unreadable bind info, with one for an unknown
    node. Each is logged with its name. An extender that finds them at its start runs, too."""
    async with undisturbed(control_plane, namespace, tmp_path) as cluster:
        node = cluster.nodes[0]
        spec = {POD_SCHEDULING_SPEC: yaml.safe_dump(ALONE)}
        forged = {POD_BIND_INFO: bind_info("nowhere"), POD_LEAF_CELL_ISOLATION: "0"}
        strangers = {
            "by-its-owner": spec,
            "not-even-asked": {},
            "unreadable": {**spec, POD_BIND_INFO: "{node: ["},
            "elsewhere": {**spec, **forged},
        }
        for name, annotations in strangers.items():
            await cluster.create(enabled_pod(name, annotations, nodeName=node))
        full = await cluster.submit(cluster.job("full", "a", 0, (1, 8)))
        await cluster.until_bound(full)
        (waiting,) = await cluster.submit(cluster.job("waiting", "a", 0, (1, 8)))
        await cluster.until_reported(waiting, "the quota of a has no room")
        await bind_by_hand(cluster, waiting, node)
        named = {*strangers, waiting} - {"elsewhere"}
        await until(lambda: warned_of(cluster, named), "each of them in the log")
        before = cluster.extender.log()
        cluster.extender.kill()
        cluster.extender.start()
        await cluster.extender.until_ready()
        assert await cluster.groups() != {}
        assert {"full"} <= set(await cluster.groups())
        assert len(cluster.extender.log()) > len(before)
        await cluster.delete([*strangers, waiting])


def bind_info(node: str) -> str:
    place = {"physicalNode": node, "physicalLeafCellIndices": [0], "preassignedCellTypes": ["V100-HOST"]}
    group = [{"podPlacements": [place]}]
    return json.dumps(
        {"node": node, "leafCellIsolation": [0], "cellChain": "V100-HOST", "affinityGroupBindInfo": group}
    )


async def bind_by_hand(cluster: HivedCluster, name: str, node: str) -> None:
    pod: Object = (await cluster.pods())[name]
    body = {"metadata": {"name": name, "uid": uid_of(pod)}, "target": {"kind": "Node", "name": node}}
    await cluster.api.create(PODS, body, cluster.namespace, name=name, subresource="binding")
    assert node_of((await cluster.pods())[name]) == node


def warned_of(cluster: HivedCluster, names: set[str]) -> bool:
    """Return whether the log warns of each of the pods."""
    lines = (json.loads(line) for line in cluster.extender.log().splitlines())
    return {f"{cluster.namespace}/{name}" for name in names} <= {
        line.get("pod") for line in lines if line["level"] == "warning"
    }
