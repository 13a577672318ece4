"""The whole of rcfarm as users run it: farms, agents and commands as processes, a real service on the nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from store.open import read_endpoint, store_token
from store.schema.keys import health_group, shard_of
from store.schema.manifest import digest
from store.schema.records import Health, Process, decode
from tests.support.agent.agents import alive, started_under
from tests.support.consul.server import ConsulServer, consul_binary
from tests.support.programs.installation import Installation, installation

NODES = ["node-1", "node-2", "node-3"]
SERVE = """
echo "$RCFARM_POD_ID on $RCFARM_NODE" > index.html
exec python3 -m http.server $RCFARM_PORT_HTTP --bind $RCFARM_ADDRESS
"""
MANIFEST = {
    "id": "hello",
    "launchables": {"web": {"command": ["sh", "-c", SERVE], "stop_timeout": 5}},
    "ports": {"http": 0},
    "health": {"http": {}, "interval": 0.3, "timeout": 3},
}
HELLO = json.dumps(MANIFEST, sort_keys=True, separators=(",", ":"))  # as `rc apply` stores it


@pytest.fixture
async def fleet(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """Two farms and three agents on a real Consul."""
    async with installation(consul_server, tmp_path / "site") as site:
        for farm in ("farm-a", "farm-b"):
            site.farm(farm, manifest_gc_interval=1, handover_interval=0.01)
        for node in NODES:
            site.agent(node)
        await site.until_live("farm-a", "farm-b")
        yield site


async def test_the_life_of_a_service_on_consul(fleet: Installation, consul_server: ConsulServer) -> None:
    """Created, scaled, crashed, adopted and deleted, on a real Consul with redundant farms; nothing is left."""
    await created(fleet)
    assert_layout(fleet, members=["farm-a", "farm-b"])
    await until_services(fleet, "passing", 3)
    assert len(consul_server.request("GET", "/v1/health/service/hello?passing")) == 3
    await scaled(fleet)
    await survives_its_processes_and_agents(fleet)
    await deleted(fleet)
    assert consul_server.request("GET", "/v1/health/service/hello") == []


async def test_the_life_of_a_service_on_an_embedded_store(tmp_path: Path) -> None:
    """The same, with agents and commands that reach an embedded farm's store through its Consul API, and find it again
    at the same address after the farm was killed."""
    directory = tmp_path / "store"
    directory.mkdir()
    async with installation("consul://127.0.0.1:1", tmp_path / "farm") as alone:
        farm = alone.daemon("farm-a", "farm", "--name", "farm-a", "--set=farm.manifest_gc_interval=1",
                            url=f"embedded:{directory}")  # fmt: skip
        endpoint = await alone.until(lambda: read_endpoint(directory), "the farm serves its store")
        assert endpoint.pid == farm.pid
        async with installation(endpoint.url, tmp_path / "site", token=store_token(directory)) as site:
            for node in NODES:
                site.agent(node)
            await created(site)
            assert_layout(site, members=["farm-a"])
            await until_services(site, "passing", 3)
            await scaled(site)
            await survives_its_processes_and_agents(site)
            farm.kill()
            farm.start()
            await site.until_registered(*NODES)
            await deleted(site)
            assert farm.stop() == 0
        assert read_endpoint(directory) is None


async def created(site: Installation) -> None:
    """`rc create` places three replicas and follows them until they pass; each answers at its reported address."""
    await site.until(lambda: nodes_are_live(site), "all nodes are live")
    manifest = site.directory / "hello.json"
    manifest.write_text(HELLO)
    ran = await site.cli("rc", "create", "-m", str(manifest), "--id", "hello", "--replicas", "3")
    assert (ran.code, ran.out) == (0, "rc hello created: 3 of 3 placed, 3 healthy\n"), ran.err
    for pod in await pods(site):
        with urllib.request.urlopen(f"http://{pod['address']}:{pod['ports']['http']}/", timeout=10) as answer:
            assert answer.read().decode() == f"hello on {pod['node']}\n"


async def nodes_are_live(site: Installation) -> bool:
    ran = await site.cli("node", "list", "--output", "json")
    return ran.code == 0 and [node["name"] for node in ran.json if node["live"]] == NODES


async def pods(site: Installation, rc: str = "hello") -> list[dict[str, Any]]:
    """Return the pods as `rc status` shows them."""
    ran = await site.cli("rc", "status", rc, "--output", "json")
    assert ran.code == 0, ran.err
    return ran.json["pods"]  # type: ignore[no-any-return]


def assert_layout(site: Installation, members: list[str]) -> None:
    """Assert that Consul's own program shows the documented keys, apart from the audit log."""
    address = site.url.removeprefix("consul://")
    shown = subprocess.run(
        [str(consul_binary()), "kv", "get", f"-http-addr={address}", "-recurse", f"{site.root}/"],
        env=site.environ(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    values = dict(line.split(":", 1) for line in shown.splitlines())
    audit = [key for key in values if key.startswith("rcfarm/audit/")]
    assert audit
    for key in audit:
        assert re.fullmatch(r"rcfarm/audit/\d{4}-\d\d-\d\d/[0-9A-HJKMNP-TV-Z]{26}", key), key
    rc = f"rcfarm/rcs/{shard_of('hello')}/hello"
    sha256 = digest(HELLO.encode())
    expected = {
        "rcfarm/meta",
        "rcfarm/history",
        f"rcfarm/manifests/{sha256}",
        f"{rc}/spec",
        f"{rc}/owner",
        f"{rc}/status",
    }
    expected |= {f"rcfarm/farms/{farm}" for farm in members}
    for node in NODES:
        expected |= {
            f"rcfarm/nodes/{node}/spec",
            f"rcfarm/nodes/{node}/alive",
            f"{rc}/pods/{node}",
            f"rcfarm/health/{health_group(shard_of('hello'))}/{node}/hello",
        }
        expected |= {f"rcfarm/intent/{node}/hello", f"rcfarm/reality/{node}/hello"}
    assert values.keys() - set(audit) == expected
    assert values[f"rcfarm/manifests/{sha256}"] == HELLO
    assert json.loads(values["rcfarm/meta"]) == {"schema": 2, "shards": 32}
    spec = json.loads(values[f"{rc}/spec"])
    assert spec.pop("revised_by")
    assert spec.pop("revised_at")
    assert spec == {
        "id": "hello", "manifest": sha256, "replicas_desired": 3, "node_selector": "", "pod_labels": {},
        "rc_labels": {"pod_id": "hello"}, "disabled": False, "allocation_strategy": "static", "max_unavailable": 1,
        "deleting": False, "generation": 1, "update": None, "revision": 1, "tolerate_drain": False, "spread": "",
    }  # fmt: skip
    assert json.loads(values[f"{rc}/owner"]).keys() == {"farm", "since"}
    intent = json.loads(values["rcfarm/intent/node-1/hello"])
    assert intent.pop("token") >= 1
    assert intent == {
        "manifest": sha256, "rc": "hello", "shard": shard_of("hello"),
        "labels": {"pod_id": "hello", "replication_controller_id": "hello"},
    }  # fmt: skip


async def until_services(site: Installation, status: str, count: int) -> None:
    """Wait until the Consul agent (or the embedded farm's API) has this number of pods, all of that status."""

    def look() -> bool:
        found = checks(site)
        return len(found) == count and set(found.values()) <= {status}

    await site.until(look, f"{count} services are registered as {status}")


def checks(site: Installation) -> dict[str, str]:
    """Return the status, by check id, of the services that agents registered for their pods."""
    address = site.url.removeprefix("consul://")
    asked = urllib.request.Request(f"http://{address}/v1/agent/checks", headers={"X-Consul-Token": site.token})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        found = json.load(answer)
    return {name: check["Status"] for name, check in found.items() if name.startswith("rcfarm:")}


async def scaled(site: Installation) -> None:
    """Scale down, and up again by a file: surplus pods stop, desired pods run, and the commands end after that."""
    ran = await site.cli("rc", "scale", "hello", "1", "--wait-healthy", "1")
    assert (ran.code, ran.out) == (0, "rc hello scaled: 1 of 1 placed, 1 healthy\n"), ran.err
    [kept] = await pods(site)
    assert kept["node"] == "node-1"
    await site.until(lambda: not any(started_under(site.state_dir(node)) for node in NODES[1:]), "the others stop")
    document = yaml.safe_dump({"replicas": 3, "manifest": MANIFEST})
    ran = await site.cli("rc", "apply", "-f", "-", "--yes", "--wait-healthy", "1", stdin=document)
    assert (ran.code, ran.out) == (0, "rc hello changed: 3 of 3 placed, 3 healthy\n"), ran.err
    assert "+replicas: 3" in ran.err
    assert "manifest" not in ran.err


async def survives_its_processes_and_agents(site: Installation) -> None:
    """A killed process is restarted; a killed agent's processes go on, and the next agent has the same ones."""
    before = await site.until(lambda: process_on(site, "node-2"), "node-2 runs the pod")
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)

    async def restarted() -> Process | None:
        process = await process_on(site, "node-2")
        return process if process and process.pid != before.pid and process.restarts else None

    after = await site.until(restarted, "the killed process is started again")
    await site.until(lambda: is_passing(site, "node-2"), "the pod on node-2 passes again")

    agent = next(daemon for daemon in site.daemons if daemon.name == "node-2")
    agent.kill()
    assert alive(after.pid)
    await site.until(lambda: is_dead(site, "node-2"), "the killed agent's lease ends")
    assert alive(after.pid)
    agent.start()
    await site.until(lambda: is_passing(site, "node-2"), "the next agent reports the pod's health")
    assert await process_on(site, "node-2") == after
    assert alive(after.pid)


async def process_on(site: Installation, node: str) -> Process | None:
    """Return the pod's running process, as its agent reports it."""
    reality = await site.fleet.reality(node, "hello")
    process = reality.launchables.get("web") if reality else None
    return process if process and process.state == "running" else None


async def is_passing(site: Installation, node: str) -> bool:
    entry = await site.store.get(site.keys.health("hello", node))
    return (
        entry is not None and entry.session is not None and decode(Health, entry.key, entry.value).status == "passing"
    )


async def is_dead(site: Installation, node: str) -> bool:
    entry = await site.store.get(site.keys.node_alive(node))
    return entry is not None and entry.session is None


async def deleted(site: Installation) -> None:
    """`rc delete` ends when no process is left; no key of the RC remains but what it is restored from."""
    ran = await site.cli("rc", "delete", "hello", "--yes")
    assert ran.code == 0, ran.err
    assert ran.out.startswith("rc hello deleted: ")  # "no process is left", where there are control groups
    assert "`rcfarm rc restore hello` brings it back" in ran.out
    assert started_under(site.directory) == []

    async def nothing_left() -> bool:
        left = await site.store.keys(f"{site.root}/", consistent=True)
        kept = {site.keys.deleted_rc("hello"), site.keys.manifest(digest(HELLO.encode()))}
        return {key for key in left if "hello" in key or digest(HELLO.encode()) in key} == kept

    await site.until(nothing_left, "no key of the RC is left")
    await until_services(site, "passing", 0)
    ran = await site.cli("rc", "history", "hello", "--output", "json")
    assert ran.json[-1]["event_type"] == "REPLICATION_CONTROLLER_DELETED"
