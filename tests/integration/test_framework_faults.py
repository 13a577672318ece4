"""The Framework operator under faults: killed, stopped, cut off, lied to, on a control plane that is killed as well.

Operators are processes, `rcfarm jobs` as people run it. What happened is read from etcd afterwards, where nothing is
missing, and held to the promises by `tests.support.framework_witness`.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

from controllers.framework.crd import crd
from store.kube.client import KubeClient
from tests.support.control_plane import ControlPlane, servers_directory
from tests.support.etcd_history import FLAGS
from tests.support.framework_load import Load, create, outcome, planned, until_completed
from tests.support.framework_witness import Seen, Witness
from tests.support.hollow_kubelet import HollowKubelet
from tests.support.jobs_replica import Replica, until

LEASE, RENEW, RETRY = 2.0, 1.6, 0.3  # seconds
SHORT = {"jobs__lease_duration": LEASE, "jobs__renew_deadline": RENEW, "jobs__retry_period": RETRY}
SLACK, STALL = 1.0, 10.0  # seconds for a busy machine: usually, and at worst
PAIRS, KILLS = 5, 6


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that tests of this module may kill, and that forgets nothing."""
    servers_directory()
    directory = tmp_path_factory.mktemp("framework-faults")
    (directory / "audit.yaml").write_text(_AUDIT)
    audit = [f"--audit-policy-file={directory / 'audit.yaml'}", f"--audit-log-path={directory / 'audit.log'}"]
    plane = ControlPlane(directory, apiserver_flags=[*FLAGS, *audit])
    try:
        plane.start()
        plane.install(crd())
        yield plane
    finally:
        plane.close()


_AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, verbs: [create, update, patch, delete]}
- level: None
"""


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    return new_namespace(plane)


def new_namespace(plane: ControlPlane) -> str:
    name = f"t{secrets.token_hex(4)}"
    plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def api(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """An administrator's client, while nodes run pods."""
    async with await KubeClient.connect(str(plane.kubeconfig)) as api, asyncio.TaskGroup() as group:
        kubelet = HollowKubelet(api, schedules=True)
        playing = group.create_task(kubelet.run())
        await kubelet.add_nodes(8)
        yield api
        await kubelet.remove_nodes()
        playing.cancel()


class Pair:
    """Two replicas of one namespace. Whoever ends by itself is started again, as the cluster would do."""

    def __init__(self, stack: ExitStack, plane: ControlPlane, directory: Path, namespace: str) -> None:
        self.killed: list[float] = []  # Unix seconds
        made = (
            Replica(directory / namespace / name, plane.kubeconfig, namespace, lease=f"{namespace}/jobs", **SHORT)
            for name in "ab"
        )
        self.replicas: Sequence[Replica] = [stack.enter_context(replica) for replica in made]

    async def leader(self) -> Replica | None:
        """Who leads now."""
        found = None
        for replica in self.replicas:
            replica.start()
            if await replica.leads():
                found = replica
        return found

    async def until_led(self) -> tuple[Replica, Replica]:
        """Wait for a leader; it and the other."""
        await until(self.leader, "a leader")
        leader = await self.leader() or self.replicas[0]
        return leader, next(each for each in self.replicas if each is not leader)

    async def kill_leaders(self, kills: int, rng: random.Random) -> None:
        """Kill so many leaders, each some moments after it began to lead, and while a standby waits."""
        while len(self.killed) < kills:
            leader, standby = await self.until_led()
            await asyncio.gather(until(standby.is_ready, "a standby"), asyncio.sleep(rng.uniform(0.0, 2.0)))
            if await leader.leads():
                leader.kill()
                self.killed.append(time.time())
                await until(self.leader, "another leader")


@pytest.mark.timeout(400)
async def test_leaders_are_killed_at_random_moments(plane: ControlPlane, api: KubeClient, tmp_path: Path) -> None:
    """Scenarios 41 and 42 (framework): thirty leaders die under load. Never two pods of a task, no pod's end is lost,
    all Frameworks end as expected, and each time the other replica leads when the lease has run out."""
    namespaces = [await asyncio.to_thread(new_namespace, plane) for _ in range(PAIRS)]
    witnesses = [Witness(plane, namespace) for namespace in namespaces]
    loads = [Load(api, namespace, random.Random(namespace), slots=3) for namespace in namespaces]
    with ExitStack() as stack:
        pairs = [Pair(stack, plane, tmp_path, namespace) for namespace in namespaces]
        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(load.run())
            async with asyncio.TaskGroup() as killing:
                for number, pair in enumerate(pairs):
                    killing.create_task(pair.kill_leaders(KILLS, random.Random(number)))
            for load in loads:
                load.finish()
            for pair in pairs:
                await pair.until_led()
    for witness, pair, load in zip(witnesses, pairs, loads, strict=True):
        seen = await asyncio.to_thread(witness.check)
        assert load.ended == len(seen.completed) > KILLS
        assert len(seen.ended) > KILLS
        hold_to_takeovers(seen, pair.killed)


def hold_to_takeovers(seen: Seen, killed: Sequence[float]) -> None:
    """After each kill the next leader came within lease and retry, give or take a machine that stalls."""
    waited = [min(taken.at for taken in seen.takeovers if taken.at > moment) - moment for moment in killed]
    assert median(waited) < LEASE + 2.2 * RETRY + SLACK, waited
    assert max(waited) < LEASE + 2.2 * RETRY + STALL, waited


async def test_parts_of_the_control_plane_are_killed(
    plane: ControlPlane, api: KubeClient, namespace: str, tmp_path: Path
) -> None:
    """The API server and then etcd die in the middle of two dozen Frameworks: all of them end as expected."""
    rng = random.Random(1)
    witness = Witness(plane, namespace)
    plans = [planned(f"f{number}", rng) for number in range(24)]
    with Replica(tmp_path / "a", plane.kubeconfig, namespace):
        for plan in plans:
            await create(api, plan.body, namespace)
        await asyncio.to_thread(plane.restart_apiserver)
        await asyncio.to_thread(plane.etcd.kill)
        await asyncio.to_thread(plane.etcd.start)
        for plan in plans:
            obj = await until_completed(api, plan.body["metadata"]["name"], namespace)
            assert outcome(obj) == plan.expected
    seen = await asyncio.to_thread(witness.check)
    assert len(seen.completed) == len(plans)
