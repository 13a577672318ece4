"""Consul that is unavailable, restarted, emptied or refusing, under farms and agents with real pods."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rcfarm.operations.restore import deleted_rcs
from store.schema.manifest import digest
from tests.support.agent.agents import alive, started_under
from tests.support.consul.server import ConsulServer, StartConsul
from tests.support.programs.installation import Daemon, Installation, installation
from tests.support.programs.server_process import REPOSITORY

NODES = ["node-1", "node-2"]
SOON = ("--wait-healthy", "1")
FAST: dict[str, Any] = {"claim_grace": 3, "handover_interval": 0.02}
CONNECTIONS = 64  # that a process may open, per the documentation


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """An installation on a Consul in memory, with nothing started yet."""
    async with installation(consul_server, tmp_path / "site") as site:
        yield site


def start(site: Installation) -> list[Daemon]:
    """Start a farm and two agents."""
    return [site.farm("farm-a", **FAST), *(site.agent(node) for node in NODES)]


async def pids_of(site: Installation, rc_id: str, count: int) -> dict[str, int]:
    """Wait until the RC has this number of running, passing pods. Return the process of each by node."""

    async def running() -> dict[str, int] | None:
        status = await site.fleet.status(rc_id)
        realities = {node: await site.fleet.reality(node, rc_id) for node in NODES}
        found = {
            node: process.pid
            for node, reality in realities.items()
            if reality and (process := reality.launchables.get("main")) and process.state == "running" and process.pid
        }
        return found if status and status.healthy == status.desired == len(found) == count else None

    return await site.until(running, f"{count} pods of {rc_id} run and pass")


async def test_consul_is_down_at_the_start(site: Installation, consul_server: ConsulServer) -> None:
    """Farm, agent and command report the address and the error; the daemons continue as soon as Consul is up."""
    consul_server.stop()
    farm, *agents = start(site)
    for daemon in (farm, *agents):
        event = await site.until_logged(daemon, "The store does not answer; waiting for it")
        assert event["error"].startswith(f"Consul at {consul_server.address} is unavailable: ")
        assert "Connection refused" in event["error"] or "Connect call failed" in event["error"]
    ran = await site.cli("rc", "list")
    assert ran.code == 1
    assert ran.err.startswith(f"error: Consul at {consul_server.address} is unavailable: ")
    assert len(ran.err.splitlines()) == 1
    assert all(daemon.is_running for daemon in (farm, *agents))
    await asyncio.to_thread(consul_server.start)
    await site.fleet.create("web", 2)
    await pids_of(site, "web", 2)


async def test_consul_restarts_with_its_data(start_consul: StartConsul, tmp_path: Path) -> None:
    """Pods keep running under their agents' care while Consul is down; then farms and agents continue with the same
    pods, and none was removed or placed again."""
    server = start_consul(durable=True)
    async with installation(server, tmp_path / "site") as site:
        farm, *_ = start(site)
        await site.fleet.create("web", 2)
        before = await pids_of(site, "web", 2)
        placed = await site.fleet.audit("web")
        server.kill()
        await site.until_logged(farm, "Session lost; releasing all RCs")
        os.kill(before["node-1"], signal.SIGKILL)
        away = await site.until(lambda: process_on(site, "node-1", other_than=before), "it is started again")
        assert alive(before["node-2"])
        await asyncio.to_thread(server.start)
        expected = {"node-1": away, "node-2": before["node-2"]}
        await site.until(lambda: are_shown(site, "web", expected), "the agents report what runs")
        assert await site.fleet.audit("web") == placed
        await site.fleet.rcs.set_replicas("web", 1)
        left = await pids_of(
            site, "web", 1
        )  # on node-2, if the farm has not heard yet that node-1's new process passes
        assert left.items() < expected.items()


async def are_shown(site: Installation, rc_id: str, pids: dict[str, int]) -> bool:
    return await pids_of(site, rc_id, len(pids)) == pids


def process_on(site: Installation, node: str, *, other_than: Mapping[str, int] = {}) -> int | None:
    """Return the process that runs on the node, as the system reports it."""
    pids = [pid for pid in started_under(site.state_dir(node)) if pid not in other_than.values()]
    return pids[0] if pids else None


async def test_consul_loses_its_data(site: Installation, consul_server: ConsulServer) -> None:
    """An emptied tree stops nothing: pods keep running, also after their agent was restarted, and their agents report
    why. Applied again, the RC has the same processes."""
    _, *agents = start(site)
    await site.fleet.create("web", 2)
    before = await pids_of(site, "web", 2)
    await asyncio.to_thread(consul_server.restart)
    await site.until(lambda: are_kept(site), "the agents keep the pods and say why")
    agents[0].stop()
    agents[0].start()
    agents[1].kill()
    agents[1].start()
    await site.until(lambda: are_kept(site), "the next agents keep them, too")
    assert {node: process_on(site, node) for node in NODES} == before
    await site.until_live("farm-a")
    ran = await site.cli("doctor")
    assert "the brake is on, nothing is removed: all 1 RCs are gone from the store" in ran.out
    assert "web on node-1 runs without an intent: its intent vanished together with the node's record" in ran.out
    assert (await site.cli("brake", "release", "--yes")).code == 0
    await site.fleet.create("web", 2)
    assert await pids_of(site, "web", 2) == before
    await site.fleet.rcs.set_replicas("web", 1)
    await site.until(lambda: process_on(site, "node-2") is None, "what is not desired stops again")


async def are_kept(site: Installation) -> bool:
    """Return whether every agent is registered and reports a pod that it keeps."""
    for node in NODES:
        alive_key = await site.store.get(site.keys.node_alive(node))
        reality = await site.fleet.reality(node, "web")
        if alive_key is None or alive_key.session is None or reality is None:
            return False
        if "the store was emptied or replaced" not in reality.reason:
            return False
    return True


def policies() -> dict[str, str]:
    """Return the ACL policies that the documentation gives, by name."""
    text = (REPOSITORY / "docs" / "pages" / "operating.md").read_text()
    blocks = re.findall(r"```hcl\n# policy: (\w+)\n(.*?)```", text, re.DOTALL)
    return dict(blocks)


async def test_the_documented_policies_are_enough(start_consul: StartConsul, tmp_path: Path) -> None:
    """With ACLs on, each kind of program works with just the policy that the documentation gives it. One agent has the
    policy of its node, the other the policy for all nodes."""
    server = start_consul(acl=True)
    token = {name: server.create_token(rules) for name, rules in policies().items()}
    agents_token = {"node-1": token["agent"], "node-2": token["agents"]}
    async with installation(server, tmp_path / "site") as site:
        farm = site.farm("farm-a", token=token["farm"], manifest_gc_interval=0.5, **FAST)
        await site.until_live("farm-a")  # the farm writes `meta`, which agents may not
        agents = [site.agent(node, token=agents_token[node]) for node in NODES]

        async def operator(*arguments: str) -> str:
            ran = await site.cli(*arguments, token=token["operator"])
            assert ran.code == 0, ran.err
            return ran.out

        await site.until_registered(*NODES)
        manifest = tmp_path / "web.yaml"
        manifest.write_text(SERVICE)
        await operator("rc", "create", "-m", str(manifest), "--id", "web", "--replicas", "2", *SOON)
        await site.until(lambda: len(server.request("GET", "/v1/health/service/web?passing")) == 2, "pods are found")
        await operator("node", "label", "node-2", "pool=other")
        assert "2 of 2 placed" in await operator("rc", "scale", "web", "2", *SOON)
        await operator("rc", "delete", "web", "--yes")
        unused = b'{"id":"unused","launchables":{"main":{"command":["true"]}}}'
        await site.store.put(site.keys.manifest(digest(unused)), unused)
        (deleted,) = (await deleted_rcs(site.store, site.keys)).records
        kept = [site.keys.manifest(deleted.manifest)]

        async def collected() -> bool:
            return await site.store.keys(site.keys.manifests) == kept

        await site.until(collected, "the manifest of no RC is collected, and that of the deleted one is not")
        assert "error" not in await operator("doctor")
        for daemon in (farm, *agents):
            assert [event for event in daemon.events() if "denied" in str(event.get("error"))] == []


SERVICE = """
id: web
launchables:
  main:
    command: [python3, -m, http.server, "${RCFARM_PORT_HTTP}", --bind, "${RCFARM_ADDRESS}"]
ports:
  http: 0
health:
  http: {}
  interval: 0.3
"""


async def test_a_token_without_rights(start_consul: StartConsul, tmp_path: Path) -> None:
    """Every program names the permission it lacks, the key, and where its token came from, but never the token; it
    continues as soon as the permission is granted."""
    server = start_consul(acl=True)
    token = server.create_token('key_prefix "other/" { policy = "read" }')
    async with installation(server, tmp_path / "site", token=token) as site:
        farm, *agents = start(site)
        for daemon in (farm, *agents):
            event = await site.until_logged(daemon, "The store denies access; waiting for it")
            assert "Permission denied" in event["error"]
            assert "needs key:read on rcfarm/meta" in event["error"]
            assert "the token from CONSUL_HTTP_TOKEN" in event["error"]
        for command in (["rc", "list"], ["status"], ["doctor"]):
            ran = await site.cli(*command)
            assert ran.code == 1
            assert "needs key:read on rcfarm/meta" in ran.err + ran.out
            assert token not in ran.err + ran.out
        assert token not in site.logs()


async def test_each_missing_permission_is_named(start_consul: StartConsul, tmp_path: Path) -> None:
    """A farm that may not create sessions, or not write, reports it and names the permission it needs."""
    server = start_consul(acl=True)
    reader = server.create_token('key_prefix "rcfarm/" { policy = "read" } key "rcfarm/meta" { policy = "write" }')
    holder = server.create_token('key_prefix "rcfarm/" { policy = "read" } session_prefix "" { policy = "write" }')
    async with installation(server, tmp_path / "site") as site:
        without_session = site.farm("farm-a", token=reader)
        event = await site.until_logged(without_session, "Could not create a session")
        assert "needs session:write" in event["error"]
        without_keys = site.farm("farm-b", token=holder)
        event = await site.until_logged(without_keys, "Farm could not join; retrying")
        assert "needs key:write on rcfarm/farms/farm-b" in event["reason"]
        note = await site.until_logged(without_keys, "The session's lease is longer than requested")
        assert "service:write" in note["reason"]
        without_node = site.agent("node-1", token=holder)
        event = await site.until_logged(without_node, "The node could not be registered")
        assert "needs key:write on rcfarm/nodes/node-1/" in event["reason"]
        ran = await site.cli("rc", "scale", "web", "1", token=holder)
        assert "there is no rc web" in ran.err
        await site.fleet.create("web", 1)
        ran = await site.cli("rc", "scale", "web", "2", token=holder)
        assert (ran.code, "needs key:write on rcfarm/rcs/" in ran.err) == (1, True)


async def test_a_farm_stays_within_its_connections(start_consul: StartConsul, tmp_path: Path) -> None:
    """Under load a farm stays within its share of the connections that Consul allows a client."""
    server = start_consul(max_connections=200)
    async with installation(server, tmp_path / "site") as site:
        await site.fleet.add_nodes([f"node-{number}" for number in range(8)])
        farm = site.farm("farm-a", **FAST)
        rc_ids = [f"rc-{number}" for number in range(150)]
        most = 0

        async def placed() -> bool:
            nonlocal most
            most = max(most, connections(farm, server))
            return len(await site.store.keys(site.keys.intents)) == 8 * len(rc_ids)

        creating = asyncio.gather(*(site.fleet.create(rc_id, 8) for rc_id in rc_ids))
        await site.until(placed, "all RCs are placed")
        await creating
        assert 32 < most <= CONNECTIONS
        assert farm.events("can't be") == []


def connections(daemon: Daemon, server: ConsulServer) -> int:
    """Return how many connections the daemon has to Consul."""
    found = psutil.Process(daemon.pid).net_connections(kind="tcp")
    return sum(bool(each.raddr) and each.raddr.port == server.ports["http"] for each in found)
