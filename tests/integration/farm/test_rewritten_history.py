"""The store's history is rewritten under a running fleet: farms and agents notice, and repair the records.

On real Consul, with one server and with three: a deletion of a parent, a restored snapshot, or an older data directory
wakes no blocking query. See `store.schema.history`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from rcfarm.farm.farm import Farm
from store.consul.store import ConsulSettings, ConsulStore
from store.schema.keys import Keys
from tests.support.agent.agents import AgentHarness, harness
from tests.support.consul.server import ConsulCluster, ConsulServer, StartConsul
from tests.support.farm.fleet import Fleet, manifest, running_farm

KEYS = Keys()
NODES = ("node-1", "node-2")
NOTICED = 5.0  # seconds within which a rewritten history is noticed
CONVERGED = 60.0  # seconds within which the fleet is as the new history wants it
SLACK = 15.0  # further seconds for a busy machine; a blocking query that misses the news takes minutes

StartCluster = Callable[[int], ConsulCluster]


class Site:
    """A farm and agents in this process, on their own Consul, and what a user would ask of them."""

    def __init__(self, server: ConsulServer, store: ConsulStore, farm: Farm, agents: dict[str, AgentHarness]) -> None:
        self.server, self.store, self.farm, self.agents = server, store, farm, agents
        self.fleet = Fleet(store, KEYS)

    async def until(self, condition: Callable[[], Awaitable[object]], what: str, within: float) -> float:
        """Wait for a condition. Return the seconds that it took."""
        began = time.monotonic()
        while not await condition():
            assert time.monotonic() - began < within, f"not within {within:g} s: {what}"
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def has_lived(self, rc_id: str = "web") -> None:
        """Create an RC, scale it down and up again, so that there are tombstones, and wait until all is healthy."""
        await self.fleet.create(rc_id, 2)
        await self.until(lambda: self.is_healthy(rc_id, NODES), f"{rc_id} healthy", CONVERGED)
        await self.fleet.rcs.set_replicas(rc_id, 1)
        await self.until(lambda: self.is_healthy(rc_id, NODES[:1]), f"{rc_id} on one node", CONVERGED)
        await self.fleet.rcs.set_replicas(rc_id, 2)
        await self.until(lambda: self.is_healthy(rc_id, NODES), f"{rc_id} healthy", CONVERGED)

    async def is_healthy(self, rc_id: str, nodes: tuple[str, ...]) -> bool:
        """Return whether the RC runs, passing, on just these nodes, and its status says so."""
        for node, agent in self.agents.items():
            if (node in nodes) != (rc_id in self.pids(node)):
                return False
            health = await agent.health(rc_id)
            if (node in nodes) != (health is not None and health.status == "passing"):
                return False
            reality = await agent.reality(rc_id)
            main = reality.launchables.get("main") if reality else None
            if node in nodes and (main is None or main.pid != self.pids(node).get(rc_id)):
                return False
        status = await self.fleet.status(rc_id)
        return status is not None and (status.state, status.healthy) == ("converged", len(nodes))

    def pids(self, node: str) -> dict[str, int]:
        """Return the processes that run on the node, by pod id, as the node's agent has them."""
        agent = self.agents[node].agent
        found = {}
        for pod_id, worker in agent.workers.items() if agent else ():
            pod = worker.pod
            process = pod.processes().get("main") if pod else None
            if process and process.pid:
                found[pod_id] = process.pid
        return found

    def delete_tree(self, prefix: str) -> None:
        """Run `consul kv delete -recurse`."""
        self.server.request("DELETE", f"/v1/kv/{prefix}?recurse")

    def snapshot(self) -> bytes:
        """Run `consul snapshot save`."""
        with urllib.request.urlopen(f"http://{self.server.address}/v1/snapshot", timeout=10) as answer:
            return bytes(answer.read())

    def restore(self, snapshot: bytes) -> None:
        """Run `consul snapshot restore`."""
        self.server.request("PUT", "/v1/snapshot", snapshot)


@asynccontextmanager
async def site(server: ConsulServer, directory: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        stores = [ConsulStore(ConsulSettings.from_env(server.url)) for _ in range(2 + len(NODES))]
        for store in stores:
            stack.push_async_callback(store.close)
        agents = {}
        for node, store in zip(NODES, stores[2:], strict=True):
            agents[node] = await stack.enter_async_context(harness(store, directory / node, node=node))
            agents[node].start()
        farm = await stack.enter_async_context(running_farm(stores[1], KEYS))
        yield Site(server, stores[0], farm, agents)


@pytest.fixture(params=[1, 3])
async def lived(
    request: pytest.FixtureRequest, start_consul: StartConsul, start_cluster: StartCluster, tmp_path: Path
) -> AsyncIterator[Site]:
    """A fleet with some history, on one Consul server, and on a follower of three."""
    if request.param == 1:
        server = start_consul(durable=True)
    else:
        cluster = start_cluster(request.param)
        server = next(each for each in cluster.servers if each is not cluster.leader)
    async with site(server, tmp_path / "nodes") as lived:
        await lived.has_lived()
        yield lived


async def test_the_brake_engages_when_the_tree_is_deleted_with_its_parent(lived: Site) -> None:
    """`consul kv delete -recurse rcfarm/rcs/` engages the brake within seconds; nothing is stopped, and the agents
    write their health again. Applying an RC of the same manifest adopts its running pods unchanged, also while the
    brake is engaged."""
    before = {node: lived.pids(node) for node in NODES}
    lived.delete_tree(KEYS.rcs)
    await lived.until(lambda: lived.store.get(KEYS.brake), "the brake is on", NOTICED + SLACK)

    async def reasserted() -> bool:
        return all([await agent.health("web") for agent in lived.agents.values()])

    await lived.until(reasserted, "health is written again", NOTICED + SLACK)
    assert {node: lived.pids(node) for node in NODES} == before
    await lived.fleet.rcs.create(manifest("web"), rc_id="web", replicas=2)
    await lived.until(lambda: lived.is_healthy("web", NODES), "the pods are the RC's again", CONVERGED)
    assert {node: lived.pids(node) for node in NODES} == before
    events = await lived.fleet.audit("web")
    assert not any(event.event_details["removed"] for event in events[-1:])


async def test_the_fleet_survives_the_deletion_of_the_root(lived: Site) -> None:
    """`consul kv delete -recurse rcfarm/`: farms and agents register again within seconds, the brake engages, and
    nothing is stopped; RCs that are applied again adopt the processes."""
    before = {node: lived.pids(node) for node in NODES}
    lived.delete_tree(KEYS.root + "/")

    async def registered() -> bool:
        alive = [await lived.store.get(KEYS.node_alive(node)) for node in NODES]
        return all(
            entry is not None and entry.session for entry in [*alive, await lived.store.get(KEYS.farm("farm-a"))]
        )

    await lived.until(registered, "farm and agents are registered again", NOTICED + SLACK)
    await lived.until(lambda: lived.store.get(KEYS.brake), "the brake is on", NOTICED + SLACK)
    await lived.fleet.rcs.create(manifest("web"), rc_id="web", replicas=2)
    await lived.until(lambda: lived.is_healthy("web", NODES), "the pods are the RC's again", CONVERGED)
    assert {node: lived.pids(node) for node in NODES} == before


async def test_a_restored_snapshot_is_noticed_in_a_quiet_fleet(lived: Site) -> None:
    """Changes after the snapshot are undone: a pod added since is stopped, a pod removed since is started, and reality
    and health show the present, not the snapshot's state."""
    snapshot = lived.snapshot()
    await lived.fleet.create("later", 1)
    await lived.until(lambda: lived.is_healthy("later", NODES[:1]), "later runs", CONVERGED)
    await lived.fleet.rcs.set_replicas("web", 1)
    await lived.until(lambda: lived.is_healthy("web", NODES[:1]), "web on one node", CONVERGED)
    os.kill(lived.pids("node-1")["web"], 9)

    async def restarted() -> bool:
        reality = await lived.agents["node-1"].reality("web")
        return reality is not None and reality.launchables["main"].restarts == 1

    await lived.until(restarted, "the process is started again", CONVERGED)
    await lived.until(lambda: lived.is_healthy("web", NODES[:1]), "web on one node", CONVERGED)
    pid = lived.pids("node-1")["web"]
    lived.restore(snapshot)
    await lived.until(lambda: lived.is_healthy("web", NODES), "web is as it was", CONVERGED)

    async def gone() -> bool:
        return all("later" not in lived.pids(node) for node in NODES)

    await lived.until(gone, "the pod that the snapshot does not know is stopped", CONVERGED)
    assert lived.pids("node-1")["web"] == pid


async def test_an_older_data_directory_is_noticed(start_consul: StartConsul, tmp_path: Path) -> None:
    """A server that comes back with older data reuses indexes; the fleet follows its present content."""
    server = start_consul(durable=True)
    async with site(server, tmp_path / "nodes") as lived:
        await lived.has_lived()
        server.stop()
        shutil.copytree(server.directory / "data", tmp_path / "older")
        server.start()
        await lived.until(lambda: lived.is_healthy("web", NODES), "web healthy", CONVERGED)
        await lived.fleet.rcs.set_replicas("web", 1)  # of two pods, one that is not passing is removed first

        async def on_one_node() -> bool:
            return any([await lived.is_healthy("web", (node,)) for node in NODES])

        await lived.until(on_one_node, "web on one node", CONVERGED)
        server.kill()
        shutil.rmtree(server.directory / "data")
        shutil.copytree(tmp_path / "older", server.directory / "data")
        server.start()
        await lived.until(lambda: lived.is_healthy("web", NODES), "web on both nodes again", CONVERGED)


async def test_records_of_an_agent_that_are_lost_are_written_again(lived: Site) -> None:
    """Reality and health that an operator deletes, or replaces by older ones, are correct again within seconds."""
    reality = KEYS.reality("node-1", "web")
    old = await lived.store.get(reality)
    assert old is not None
    await lived.store.delete(reality)
    await lived.store.delete(KEYS.health("web", "node-2"))
    await lived.store.put(KEYS.reality("node-2", "web"), old.value)
    await lived.until(lambda: lived.is_healthy("web", NODES), "all records are right", NOTICED + SLACK)
