"""`rcfarm hived explain | simulate | snapshot` beside a running extender: their output is true, or comes true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from store.kube.api.objects import PODS
from tests.support.extender.real_cluster import HivedCluster, hived_cluster, node_of, pod_of
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.programs import cli
from tests.support.programs.cli import Ran


async def test_what_is_explained_is_what_happens(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    """A gang that lacks a pod holds the whole quota: explain reports this to a pod that waits for it, and that the pod
    could run elsewhere; it does. For a stronger pod explain names the pods that it waits for while they end, also from
    a saved snapshot; then it runs."""
    async with hived_cluster(control_plane, namespace, tmp_path, nodes=2, quotas={"a": 1}) as cluster:
        gang = cluster.job("gang", "a", 5, (2, 4), lazy=False)
        await cluster.create(pod_of(gang, "gang-0", 4, stop_seconds="inf"))
        first = node_of((await cluster.until_bound(["gang-0"]))["gang-0"])
        (late,) = await cluster.submit(cluster.job("late", "a", 5, (1, 8)))
        await cluster.until_reported(late, "the quota of a has no room")
        (other,) = set(cluster.nodes) - {first}
        answer = await run(cluster, "explain", f"{namespace}/{late}")
        assert f"used by {namespace}/gang [1 of 2 pods missing])" in answer.out
        for name in (late, f"gpu/{namespace}/{late}"):
            url = cluster.extender.url
            found = (await asyncio.to_thread(cli.run, "explain", name, "--extender", url, "-o", "json")).json
            assert (found["kind"], found["name"], found["state"]) == ("gpu", f"{namespace}/{late}", "waiting")
            assert [each["code"] for each in found["reasons"]] == ["gpu_waiting"]
        assert f"Hint: as an opportunistic pod (priority -1) it would run now, on {other}\n" in answer.out
        assert "The last answer to kube-scheduler (Waiting): chain V100-HOST: the quota of a has no room" in answer.out

        idle = cluster.job("idle", "a", -1, (1, 8))
        file = tmp_path / "idle.yaml"
        body = pod_of(idle, "idle-0", 8)
        file.write_text(
            yaml.safe_dump({"kind": "Pod", **body, "metadata": {**body["metadata"], "namespace": namespace}})
        )
        answer = await run(cluster, "simulate", "--lose", first, "--pod", str(file), "--pod", f"{namespace}/{late}")
        assert answer.code == 2
        assert f"  {namespace}/gang of a, priority 5: {namespace}/gang-0 on {first}\n" in answer.out
        assert f"\n{namespace}/idle-0: bind: it fits" in answer.out
        assert f"\n  place {other}: 0,1,2,3,4,5,6,7\n" in answer.out
        assert f"\n{namespace}/{late}: wait: " in answer.out
        assert (await cluster.submit(idle)) == ["idle-0"]
        assert node_of((await cluster.until_bound(["idle-0"]))["idle-0"]) == other
        answer = await run(cluster, "explain", f"{namespace}/idle-0")
        assert (answer.code, f"has its place: it is on {other}: 0,1,2,3,4,5,6,7, in" in answer.err) == (1, True)

        (boss,) = await cluster.submit(cluster.job("boss", "a", 9, (1, 8)))
        await until(lambda: claims(cluster, boss), f"{boss} waiting for its victims")
        saved = tmp_path / "state.json"
        saved.write_text((await run(cluster, "snapshot")).out)
        answer = await run_on(saved, boss, namespace)
        assert f"  waits for group {namespace}/gang of a, priority 5: {namespace}/gang-0 on {first}\n" in answer.out
        assert f"(Preempting): waits for pods to leave {first}: {namespace}/gang-0\n" in answer.out
        answer = await run_on(saved, late, namespace)
        assert f"used by {namespace}/boss [waits for its victims])" in answer.out
        await cluster.api.delete(PODS, "gang-0", namespace, grace_period=0)
        await cluster.until_bound([boss])


async def claims(cluster: HivedCluster, pod: str) -> bool:
    """Return whether a pod's group has claimed its place."""
    answer = await run(cluster, "explain", f"{cluster.namespace}/{pod}")
    return "preempt: its group has claimed its places and waits until their users are deleted" in answer.out


async def run(cluster: HivedCluster, *arguments: str) -> Ran:
    """Run `rcfarm hived …` on the cluster's extender."""
    return await asyncio.to_thread(cli.run, "hived", *arguments, "--extender", cluster.extender.url)


async def run_on(snapshot: Path, pod: str, namespace: str) -> Ran:
    """Run `rcfarm hived explain` on a saved snapshot."""
    return await asyncio.to_thread(cli.run, "hived", "explain", f"{namespace}/{pod}", "--snapshot", str(snapshot))
