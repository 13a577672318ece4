"""The agent on a real Consul: pods with ports are services that other programs can find."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from store.consul.store import ConsulSettings, ConsulStore
from store.kv.protocol import Unavailable
from store.schema.keys import Keys
from tests.support import require
from tests.support.agent.agents import AgentHarness, harness, manifest
from tests.support.consul.server import ConsulServer, StartConsul

SERVER: dict[str, Any] = {
    "command": ["python3", "-u", "-m", "http.server", "${RCFARM_PORT_HTTP}", "--bind", "${RCFARM_ADDRESS}"],
    "ports": {"http": 0},
    "health": {"http": {}, "interval": 0.2, "timeout": 1},
}


@pytest.fixture
async def node(consul: ConsulServer, root: str, tmp_path: Path) -> AsyncIterator[AgentHarness]:
    store = ConsulStore(ConsulSettings.from_env(consul.url))
    name = f"node-{root.replace('/', '-').replace('_', '-').lower()}"
    async with harness(store, tmp_path / "node", node=name, keys=Keys(root), discovery_interval=0.5) as node:
        yield node
    await store.close()


async def test_a_pod_with_ports_is_found_while_it_is_healthy(node: AgentHarness, consul: ConsulServer) -> None:
    """A passing pod is a passing service with its address, port and labels; the service fails and goes with the pod."""
    node.start()
    await node.intend(manifest(**SERVER), labels={"tier": "front"})
    await node.until_health("passing")
    reality = require(await node.reality())
    found = await services(node, consul, lambda it: len(it) == 1 and status(it) == "passing")
    service = found[0]["Service"]
    assert (service["Address"], service["Port"]) == ("127.0.0.1", reality.ports["http"])
    assert service["Tags"] == ["tier=front"]
    assert service["Meta"] == {"rc": "rc-1", "port-http": str(reality.ports["http"])}
    pid = require(reality.launchables["main"].pid)
    os.kill(pid, signal.SIGSTOP)
    await services(node, consul, lambda it: status(it) == "critical")
    os.kill(pid, signal.SIGCONT)
    await services(node, consul, lambda it: status(it) == "passing")
    await node.unintend()
    await node.until_gone()
    await services(node, consul, lambda it: it == [])


async def test_services_follow_the_pods_of_the_next_agent(node: AgentHarness, consul: ConsulServer) -> None:
    """A service that Consul lost is registered again; one whose pod ended while no agent was running is removed."""
    node.start()
    await node.intend(manifest(**SERVER))
    await services(node, consul, lambda it: status(it) == "passing")
    consul.request("PUT", f"/v1/agent/service/deregister/rcfarm:{node.node}:web")
    await services(node, consul, lambda it: it == [])
    await services(node, consul, lambda it: status(it) == "passing")
    await node.stop()
    await node.unintend()
    node.start()
    await node.until_gone()
    await services(node, consul, lambda it: it == [])


async def test_other_services_are_left_alone(node: AgentHarness, consul: ConsulServer) -> None:
    """Services that the agent did not register are never touched, also those of a node whose name starts with ours."""
    other = f"rcfarm:{node.node}-2:web"
    consul.request("PUT", "/v1/agent/service/register", {"ID": other, "Name": "other"})
    node.start()
    await node.intend(manifest(**SERVER))
    await services(node, consul, lambda it: status(it) == "passing")
    await node.unintend()
    await node.until_gone()
    await services(node, consul, lambda it: it == [])
    assert other in consul.request("GET", "/v1/agent/services")
    consul.request("PUT", f"/v1/agent/service/deregister/{other}")


async def services(
    node: AgentHarness, consul: ConsulServer, condition: Callable[[list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Wait until the catalog shows the services of the pod `web` on the node with these values. Return them."""

    def found() -> list[dict[str, Any]]:
        entries = consul.request("GET", "/v1/health/service/web")
        return [entry for entry in entries if entry["Service"]["ID"] == f"rcfarm:{node.node}:web"]

    def look() -> tuple[list[dict[str, Any]]] | None:
        entries = found()
        return (entries,) if condition(entries) else None

    (entries,) = await node.eventually(look, lambda: f"Consul shows {found()}")
    return list(entries)


def status(found: list[dict[str, Any]]) -> str:
    """Return the status of the pod's own check."""
    checks = [check["Status"] for entry in found for check in entry["Checks"] if check["ServiceID"]]
    return checks[0] if checks else ""


async def test_discovery_that_is_not_permitted_hinders_nothing(start_consul: StartConsul, tmp_path: Path) -> None:
    """Without permission for services a pod runs and is healthy; only discovery waits."""
    server = start_consul(acl=True)
    rules = (
        'key_prefix "" { policy = "write" } session_prefix "" { policy = "write" } node_prefix "" { policy = "read" }'
    )
    token = server.create_token(rules)
    store = ConsulStore(ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": token}))
    async with harness(store, tmp_path / "node", discovery_interval=0.5) as node:
        node.start()
        await node.intend(manifest(**SERVER))
        await node.until_health("passing")
        assert await services(node, server, lambda it: it == []) == []
        await node.unintend()
        await node.until_gone()
    await store.close()


async def test_consul_may_come_late_and_go_away(start_consul: StartConsul, tmp_path: Path) -> None:
    """An agent waits for a Consul that is down at its start; pods go on while Consul is away, and are reported again
    afterwards."""
    server = start_consul(durable=True)
    store = ConsulStore(ConsulSettings.from_env(server.url))
    async with harness(store, tmp_path / "node") as node:
        sha256 = await node.put_manifest(manifest())
        server.stop()
        agent = node.start()
        await node.eventually(lambda: agent.problem and agent.keeper.last_error, lambda: agent.problem)
        server.start()

        async def intended() -> bool:
            try:
                await node.intend_digest("web", sha256)
            except Unavailable:
                return False
            return True

        await node.eventually(intended, lambda: "Consul does not answer")
        process = await node.until_running()
        await node.until_health("passing")
        server.stop()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await node.eventually(lambda: node.processes() not in ([], [process.pid]), lambda: "no process")
        server.start()
        await node.until(lambda it: it.launchables["main"].restarts == 1)
        await node.until_health("passing")
    await store.close()
