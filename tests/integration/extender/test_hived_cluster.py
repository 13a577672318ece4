"""`rcfarm extender` in use: called by a real kube-scheduler, about pods of a real API server, on hollow nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from controllers.framework.api.types import FRAMEWORK_NAME, FRAMEWORKS
from controllers.framework.api.wire import crd
from scheduler.hived.contract import POD_LEAF_CELL_ISOLATION
from store.kube.api.objects import NODES, PODS, Object, annotations_of, name_of, uid_of
from tests.support.extender.manifests import COMPLETE, EXAMPLES
from tests.support.extender.real_cluster import PRIORITY_CLASSES, HivedCluster, hived_cluster, hosts, node_of
from tests.support.extender.replica import ExtenderProcess
from tests.support.extender.witness import Witness, read
from tests.support.jobs.replicas import Replica, until
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.behaviour import environment
from tests.support.kube.hollow.kubelet import CAPACITY
from tests.support.kube.hollow.scheduler import node_body
from tests.support.kube.shipped_manifests import documents

NO_TAINTS = {"spec": {"taints": None}}


async def test_a_gang_is_placed_as_a_whole_or_not_at_all(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Six pods on four free GPUs: none of them runs, and each gets the reason. A gang of four that comes later runs.
    When it has gone and there are eight GPUs, the six run; pods of one gang carry the same placements."""
    witness = Witness(control_plane, namespace)
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=1) as cluster:
        half = await cluster.submit(cluster.job("half", "a", 0, (1, 4)))
        await cluster.until_bound(half)
        large = await cluster.submit(cluster.job("large", "a", 0, (6, 1)))
        for name in large:
            await cluster.until_reported(name, "the quota of a has no room for pods of 6x1 leaf cells")
        small = await cluster.submit(cluster.job("small", "a", 0, (4, 1)))
        pods = await cluster.until_bound(small)
        assert len({read(pod).places for pod in pods.values()}) == 1
        found = await cluster.pods()
        assert not any(node_of(found[name]) for name in large)
        assert set(await cluster.groups()) == {"half", "small"}
        await cluster.delete([*small, *half])
        pods = await cluster.until_bound(large)
        assert len({read(pod).places for pod in pods.values()}) == 1
    seen = await asyncio.to_thread(witness.check)
    assert seen.groups == {f"{namespace}/{name}": pods for name, pods in (("half", 1), ("small", 4), ("large", 6))}


async def test_a_guaranteed_gang_gets_its_quota_back_by_evictions(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Opportunistic pods have all GPUs. This kube-scheduler never calls `preempt` (see `real_cluster`), so the extender
    evicts just the pods on the devices that it needs, and binds when they are gone."""
    witness = Witness(control_plane, namespace)
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=3, quotas={"a": 2}) as cluster:
        small = await fill(cluster)
        gang = await cluster.submit(cluster.job("gang", "a", 5, (2, 8)))
        pods = await cluster.until_bound(gang)
        left = [name for name, pod in (await cluster.pods()).items() if name in small]
        assert len(left) == 4
        assert not {node_of(pod) for pod in pods.values()} & {
            node_of(pod) for name, pod in (await cluster.pods()).items() if name in left
        }
    seen = await asyncio.to_thread(witness.check)
    assert len(seen.ended) == 8


async def test_a_second_extender_is_noticed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """Started by mistake beside the extender that kube-scheduler calls, it sees pods bound that it had recorded as
    waiting, and reports it; the other extender does not."""
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=1) as cluster:
        config = hosts(cluster.nodes, {"a": 1})
        with ExtenderProcess(tmp_path / "second", control_plane.kubeconfig, config, {}) as second:
            await second.until_ready()
            await cluster.until_bound(await cluster.submit(cluster.job("gang", "a", 0, (2, 4))))

            async def has_noticed() -> bool:
                return (await asyncio.to_thread(second.metrics))["rcfarm_hived_foreign_bindings_total"] == 2

            await until(has_noticed, "both pods noticed")
            assert "bound by another extender" in second.log()
        assert (await asyncio.to_thread(cluster.extender.metrics))["rcfarm_hived_foreign_bindings_total"] == 0


async def fill(cluster: HivedCluster) -> list[str]:
    """Give opportunistic pods all devices of three nodes, two pods on each."""
    jobs = [cluster.job(f"small-{number}", "a", -1, (1, 2)) for number in range(12)]
    names = [name for job in jobs for name in await cluster.submit(job, stop_seconds="0.2")]
    await cluster.until_bound(names)
    return names


async def test_a_guaranteed_gang_preempts_through_kube_scheduler(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Kube-schedulers that do call `preempt` delete the victims that the extender names, one node after the other; our
    own evictions are off. The test plays this part, and the real kube-scheduler the rest."""
    witness = Witness(control_plane, namespace)
    never = {"extender.evict_victims": "never"}
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=3, quotas={"a": 2}, settings=never) as cluster:
        small = await fill(cluster)
        gang = await cluster.submit(cluster.job("gang", "a", 5, (2, 8)))
        for name in gang:
            await cluster.until_reported(name, "preempt")
        assert set(small) <= set(await cluster.pods())
        victims: set[str] = set()

        async def is_bound() -> bool:
            pods = await cluster.pods()
            waiting = [pods[name] for name in gang if not node_of(pods[name])]
            for pod in waiting:
                victims.update(await preempt(cluster, pods, pod))
            return not waiting

        await until(is_bound, "the gang bound")
        assert len(victims) == 8
        assert victims <= set(small)
    seen = await asyncio.to_thread(witness.check)
    assert len(seen.ended) == 8


async def preempt(cluster: HivedCluster, pods: dict[str, Object], pod: Object) -> set[str]:
    """Do what kube-scheduler (from 1.20.10 on) does when it has no place for a pod. Return the names of the deleted
    pods."""
    named = (await cluster.ask_whom_to_preempt(pod)).values()
    by_uid = {uid_of(each): name for name, each in pods.items()}
    victims = {by_uid[each["UID"]] for victims in named for each in victims["Pods"] if each["UID"] in by_uid}
    await cluster.delete(victims)
    return victims


async def test_nodes_that_go_bad_get_nothing_and_heal(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Not ready, cordoned, deleted: each time a pod that fits only this node waits with a reason that names the node;
    when the node heals the pod runs there. Pods already running on a bad node stay."""
    witness = Witness(control_plane, namespace)
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=2) as cluster:
        (first,) = await cluster.submit(cluster.job("first", "a", 0, (1, 8)))
        stays = node_of((await cluster.until_bound([first]))[first])
        (other,) = set(cluster.nodes) - {stays}
        await cluster.set_ready(stays, False)
        for name, spoil, heal in (
            ("unready", cluster.set_ready(other, False), cluster.set_ready(other, True)),
            ("cordoned", cluster.set_cordoned(other, True), cluster.set_cordoned(other, False)),
            ("deleted", cluster.api.delete(NODES, other), create_node(cluster, other)),
        ):
            await spoil
            await until(lambda: is_bad(cluster, other), f"{other} bad")
            (pod,) = await cluster.submit(cluster.job(name, "a", 0, (1, 8)))
            await cluster.until_reported(pod, other)
            await heal
            assert node_of((await cluster.until_bound([pod]))[pod]) == other
            await cluster.delete([pod])
            await cluster.until_gone([pod])
        assert await is_bad(cluster, stays)
        assert set(await cluster.pods()) == {first}
    await asyncio.to_thread(witness.check)


async def create_node(cluster: HivedCluster, node: str) -> None:
    await cluster.api.create(NODES, node_body(node, CAPACITY, {}))
    await cluster.api.patch(NODES, node, "", NO_TAINTS)


async def is_bad(cluster: HivedCluster, node: str) -> bool:
    """Return whether inspection shows a node as bad."""
    cells = await cluster.inspect("clusterstatus/physicalcluster")
    return any(cell["cellAddress"].endswith(node) and cell["cellHealthiness"] == "Bad" for cell in cells)


async def test_a_changed_file_is_taken_over_while_it_runs(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """The file is replaced while a gang waits for a node that it does not name: the same process soon knows the node,
    and the gang runs. A half-written file changes nothing, and is reported. With a smaller quota running pods go on,
    but can be preempted."""
    witness = Witness(control_plane, namespace)
    nodes = [f"{namespace}-{number}" for number in range(3)]
    small, whole = hosts(nodes[:2], {"a": 2}), hosts(nodes, {"a": 3})
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=3, config=small) as cluster:
        process = cluster.extender.process
        gang = await cluster.submit(cluster.job("gang", "a", 0, (3, 8), lazy=False))
        await cluster.until_reported(gang[0], "the quota of a has no room")
        cluster.extender.write(whole)
        await cluster.until_bound(gang)
        text = cluster.extender.file.read_text()
        cluster.extender.file.write_text(text[: text.index("virtualClusters:")])
        problem = "the earlier one is in use, the file is not: virtualClusters: is missing"
        await until(lambda: problem in cluster.extender.readiness(), "reporting the broken file", within=20)
        assert set(await cluster.groups()) == {"gang"}
        cluster.extender.write(hosts(nodes, {"a": 1, "b": 2}))
        await until(lambda: is_downgraded(cluster, "gang"), "downgraded")
        (late,) = await cluster.submit(cluster.job("late", "b", 0, (1, 8)))
        await cluster.until_bound([late])
        assert process.is_running
    seen = await asyncio.to_thread(witness.check)
    assert seen.groups == {f"{namespace}/gang": 3, f"{namespace}/late": 1}


async def is_downgraded(cluster: HivedCluster, group: str) -> bool:
    status = (await cluster.groups()).get(group)
    return bool(status and status.get("lazyPreemptionStatus"))


async def test_frameworks_are_gangs_of_both_kinds(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """The example: `rcfarm jobs` passes the annotations of the templates on and fills in the gang's name, the extender
    places all four pods or none, each container gets its own devices, and the Framework completes."""
    await asyncio.to_thread(control_plane.install, crd())
    config = yaml.safe_load((EXAMPLES / "hived.yaml").read_text())
    witness = Witness(control_plane, namespace)
    async with hived_cluster(
        control_plane, namespace, tmp_path, nodes=1, config=config, schedulers=["hived-prod"]
    ) as cluster:
        for prefix in ("a100", "t4"):
            await cluster.kubelet.add_nodes(5, prefix=prefix)
        for each in documents(COMPLETE / "priority-classes.yaml"):
            await cluster.api.create(PRIORITY_CLASSES, each)
        with Replica(tmp_path / "jobs", control_plane.kubeconfig, namespace):
            (body,) = documents(EXAMPLES / "framework.yaml")
            await cluster.api.create(FRAMEWORKS, body, namespace)
            names = ["bert-chief-0", *(f"bert-worker-{number}" for number in range(3))]
            pods = await cluster.until_bound(names)
            held = {name: read(pod) for name, pod in pods.items()}
            assert {holding.group for holding in held.values()} == {f"{namespace}/bert"}
            assert len({holding.places for holding in held.values()}) == 1
            for pod in pods.values():
                devices = environment(pod, pod["spec"]["containers"][0])["NVIDIA_VISIBLE_DEVICES"]
                assert devices == annotations_of(pod)[POD_LEAF_CELL_ISOLATION]
            await finish(cluster, names)
            await until(lambda: is_completed(cluster, "bert"), "completed")
            await until(lambda: no_groups(cluster), "its devices free")
        for each in documents(COMPLETE / "priority-classes.yaml"):
            await cluster.api.delete(PRIORITY_CLASSES, name_of(each))
    seen = await asyncio.to_thread(witness.check)
    assert len(seen.bound) == 4


async def finish(cluster: HivedCluster, names: Sequence[str]) -> None:
    """Make pods succeed."""
    ended: Any = {"metadata": {"annotations": {"hollow/exit-code": "0", "hollow/run-seconds": "0"}}}
    for name in names:
        await cluster.api.patch(PODS, name, cluster.namespace, ended)


async def is_completed(cluster: HivedCluster, framework: str) -> bool:
    found = await cluster.api.get(FRAMEWORKS, framework, cluster.namespace)
    if found["status"]["state"] != "Completed":
        return False
    assert found["status"]["attemptStatus"]["completionStatus"]["code"] == 0
    assert found["status"]["attemptStatus"]["id"] == 0
    return not (await cluster.api.list(PODS, cluster.namespace, label_selector=f"{FRAMEWORK_NAME}={framework}")).items


async def no_groups(cluster: HivedCluster) -> bool:
    return not await cluster.groups()
