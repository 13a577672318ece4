"""`rcfarm hived explain | simulate | snapshot` beside an extender at work: what they tell is so, or happens then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from tests.support import cli
from tests.support.cli import Ran
from tests.support.control_plane import ControlPlane
from tests.support.hived_cluster import HivedCluster, hived_cluster, node_of, pod_of
from tests.support.jobs_replica import until


async def test_what_is_told_is_what_happens(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """A gang of which a pod is missing holds the whole quota: a pod that waits for it is told so, and that it could run
    elsewhere; it does. A stronger one is told whom it waits for while they end, also from a saved snapshot; then it
    runs."""
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=2, quotas={"a": 1}) as cluster:
        gang = cluster.job("gang", "a", 5, (2, 4), lazy=False)
        await cluster.create(pod_of(gang, "gang-0", 4, stop_seconds="2"))
        first = node_of((await cluster.until_bound(["gang-0"]))["gang-0"])
        (late,) = await cluster.submit(cluster.job("late", "a", 5, (1, 8)))
        await cluster.until_told(late, "the quota of a has no room")
        (other,) = set(cluster.nodes) - {first}
        told = await run(cluster, "explain", f"{namespace}/{late}")
        assert f"used by {namespace}/gang [1 of 2 pods missing])" in told.out
        assert f"Hint: as an opportunistic pod (priority -1) it would run now, on {other}\n" in told.out
        assert "The last answer to kube-scheduler (Waiting): chain V100-HOST: the quota of a has no room" in told.out

        idle = cluster.job("idle", "a", -1, (1, 8))
        file = tmp_path / "idle.yaml"
        body = pod_of(idle, "idle-0", 8)
        file.write_text(
            yaml.safe_dump({"kind": "Pod", **body, "metadata": {**body["metadata"], "namespace": namespace}})
        )
        told = await run(cluster, "simulate", "--lose", first, "--pod", str(file), "--pod", f"{namespace}/{late}")
        assert told.code == 2
        assert f"  {namespace}/gang of a, priority 5: {namespace}/gang-0 on {first}\n" in told.out
        assert f"\n{namespace}/idle-0: bind: it fits" in told.out
        assert f"\n  place {other}: 0,1,2,3,4,5,6,7\n" in told.out
        assert f"\n{namespace}/{late}: wait: " in told.out
        assert (await cluster.submit(idle)) == ["idle-0"]
        assert node_of((await cluster.until_bound(["idle-0"]))["idle-0"]) == other
        told = await run(cluster, "explain", f"{namespace}/idle-0")
        assert (told.code, f"has its place: it is on {other}: 0,1,2,3,4,5,6,7, in" in told.err) == (1, True)

        (boss,) = await cluster.submit(cluster.job("boss", "a", 9, (1, 8)))
        await until(lambda: claims(cluster, boss), f"{boss} waiting for its victims")
        saved = tmp_path / "state.json"
        saved.write_text((await run(cluster, "snapshot")).out)
        told = await run_on(saved, boss, namespace)
        assert f"  waits for group {namespace}/gang of a, priority 5: {namespace}/gang-0 on {first}\n" in told.out
        assert f"(Preempting): waits for pods to leave {first}: {namespace}/gang-0\n" in told.out
        told = await run_on(saved, late, namespace)
        assert f"used by {namespace}/boss [waits for its victims])" in told.out
        await cluster.until_bound([boss])


async def claims(cluster: HivedCluster, pod: str) -> bool:
    """Whether a pod's group has claimed its place."""
    told = await run(cluster, "explain", f"{cluster.namespace}/{pod}")
    return "preempt: its group has claimed its places, and waits until their users are gone" in told.out


async def run(cluster: HivedCluster, *arguments: str) -> Ran:
    """`rcfarm hived …` on the cluster's extender."""
    return await asyncio.to_thread(cli.run, "hived", *arguments, "--extender", cluster.extender.url)


async def run_on(snapshot: Path, pod: str, namespace: str) -> Ran:
    """`rcfarm hived explain` on a saved snapshot."""
    return await asyncio.to_thread(cli.run, "hived", "explain", f"{namespace}/{pod}", "--snapshot", str(snapshot))
