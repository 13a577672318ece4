"""The verbs on nodes, pods and farms, and the timeline, on a real Consul with real agents."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.schema.records import FarmMember, Intent, NodeSpec, encode
from tests.support.agent.agents import alive, started_under
from tests.support.consul.server import ConsulServer
from tests.support.programs.cli import Ran, run
from tests.support.programs.installation import Installation, installation

NODES = ["node-1", "node-2", "node-3"]
SLEEPS = "while true; do sleep 1000 & wait; done"


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """A farm and three agents, with a service on two of them."""
    async with installation(consul_server, tmp_path / "site") as site:
        site.farm("farm-a", node_lost_after=10.5, handover_interval=0.02)
        await site.start_agents(*NODES)
        manifest = {"id": "web", "launchables": {"main": {"command": ["sh", "-c", SLEEPS], "stop_timeout": 1}}}
        fields = {"replicas": 2, "allocation_strategy": "dynamic", "update": {"min_healthy_time": 1}}
        path = site.directory / "web.json"
        path.write_text(json.dumps({"id": "web", **fields, "manifest": manifest}))
        assert (await site.cli("rc", "apply", "-f", str(path), "--yes", "--wait-healthy", "0")).code == 0
        yield site


async def quick(site: Installation, line: str) -> Ran:
    """Run a command within this process, which is quicker than in one of its own."""
    env = {"RCFARM_STORE": site.url, "RCFARM_STORE_ROOT": site.root, "CONSUL_HTTP_TOKEN": site.token}
    return await asyncio.to_thread(run, *shlex.split(line), env=env)


async def contents(site: Installation) -> dict[str, bytes]:
    """Return what operators and farms have written, without what agents and owners report."""
    moving = tuple(f"{site.keys.root}/{part}" for part in ("history", "audit/", "rcs/", "reality/", "health/"))
    entries = (await site.store.list(f"{site.keys.root}/", consistent=True)).entries
    kept = {entry.key: entry.value for entry in entries if not entry.key.startswith(moving)}
    return kept | {entry.key: entry.value for entry in entries if entry.key.endswith("/spec")}


REFUSED = {
    "node drain": "name the nodes, or give `-l SELECTOR`",
    "node drain node-1 -l a=b": "name the nodes, or give `-l SELECTOR`",
    "node drain node-1 ghost": "there is no node ghost; `rcfarm node list`",
    "node drain -l rack=r9": "-l rack=r9: no node has such labels",
    "node drain -l 'rack in'": "rack in",
    "node drain node-1 --wait --timeout soon": "'soon' is not a valid float range",
    "node undrain ghost": "there is no node ghost",
    "node remove ghost --yes": "there is no node ghost",
    "node remove node-1 --yes": "its agent lives; move its pods away with `rcfarm node drain node-1 --wait`",
    "node remove node-9 --yes": "1 pod is placed there: web (rc old)",
    "node remove node-9 --release-pods": "not confirmed",
    "farm forget ghost": "there is no farm ghost",
    "farm forget farm-a": "farm farm-a is live; stop it first",
    "pod list --node ghost": "there is no node ghost",
    "pod list --rc ghost": "no rc ghost",
    "pod list -l '='": "'='",
    "pod stop web": "'web' is no pod; write NODE/POD",
    "pod stop node-3/web": "there is no pod node-3/web",
    "pod stop node-9/web": "the agent of node-9 does not answer",
    "pod stop ../web": "there is no pod ../web",
    "pod where 2147483646": "no process 2147483646 on this machine",
    "pod where self": "'self' is not a whole number",
    "pod where ghost 1": "there is no node ghost",
    "pod where node-1 1": "process 1 is none of a pod on node-1",
    "pod where 1": "process 1 is none of a pod",
    "brake engage": "Missing option '--reason'",
    "brake engage --reason ' '": "--reason: write why",
    "events --since lately": "--since 'lately': write an RFC 3339 time",
}


async def test_what_is_refused_changes_nothing(site: Installation) -> None:
    """One clear error on standard error, exit code 1, and the store as it was."""
    await site.store.put(site.keys.node_spec("node-9"), encode(NodeSpec(name="node-9", schedulable=False)))
    orphan = Intent(manifest="f" * 64, rc="old", shard="00")
    await site.store.put(site.keys.intent("node-9", "web"), encode(orphan))
    before = await contents(site)
    for line, message in REFUSED.items():
        ran = await quick(site, line)
        of_usage = "Usage: " in ran.err  # the program itself, other than its function, ends with 1 then, too
        assert (ran.code, message in ran.err) == (2 if of_usage else 1, True), f"{line}: {ran}"
        assert ran.err.count("error: ") + ran.err.count("Error: ") == 1, ran.err
        assert "Traceback" not in ran.err
    assert await contents(site) == before

    away = await asyncio.to_thread(run, "node", "drain", "node-1", "--store", "consul://127.0.0.1:1")
    assert (away.code, "127.0.0.1:1" in away.err) == (1, True)
    if site.token:
        return
    assert (await quick(site, "node drain node-1 --token-file /nonexistent")).code == 1


async def test_an_operators_day(site: Installation) -> None:
    """A pod is stopped once, a process is found, a node is drained while a rollout goes on, a machine dies and is
    forgotten; the timeline has all of it, and a follower learned of it as it happened."""
    following = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rcfarm", "events", "-f", "-o", "json"),
        env=site.environ() | {"RCFARM_STORE": site.url, "RCFARM_STORE_ROOT": site.root},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await _stopped_once(site)
        await _drained(site)
        await _forgotten(site)
        seen = await _seen(following, "NODE_REMOVED")
    finally:
        following.kill()
        await following.wait()
    types = [event["type"] for event in seen]
    order = ["POD_STOPPED", "POD_EXITED", "NODE_CORDONED", "NODE_TRANSFER_COMPLETION", "NODES_LOST"]
    positions = [types.index(each) for each in order]
    assert positions == sorted(positions), types
    read = (await quick(site, "events --since 1h -o json")).json
    assert {"RCS_CLAIMED", "FARM_JOINED", "NODES_DEAD", "NODE_REMOVED"} <= {event["type"] for event in read}
    about = (await quick(site, "events --since 1h --node node-1 -o json")).json
    assert all("node-1" in json.dumps(event) for event in about)
    assert (await quick(site, "events --since 1h --rc web")).out.count("processes stopped once") == 1


async def _stopped_once(site: Installation) -> None:
    (before,) = (await quick(site, "pod list --node node-1 -o json")).json
    assert (before["rc"], before["state"], before["labels"]["pod_id"]) == ("web", "running", "web")
    stopped = await site.cli("pod", "stop", "node-1/web")
    assert (stopped.code, "was stopped and runs again" in stopped.out) == (0, True), stopped
    (after,) = (await quick(site, "pod list --node node-1 -o json")).json
    pid = after["launchables"]["main"]["pid"]
    assert pid != before["launchables"]["main"]["pid"]
    assert not alive(before["launchables"]["main"]["pid"])

    child = next(each for each in started_under(site.state_dir("node-1")) if each != pid)
    for line in (f"pod where {pid}", f"pod where {child}", f"pod where node-1 {pid}"):
        found = await quick(site, line)
        assert (found.code, "pod node-1/web, rc web" in found.out) == (0, True), (line, found)


async def _drained(site: Installation) -> None:
    """During a rollout: no pod too few, and at the end nothing is left."""
    fewest = 2

    async def watch() -> None:
        nonlocal fewest
        while True:
            snap = await site.fleet.rcs.snapshot("web")
            fewest = min(fewest, snap.healthy + snap.healthy_outdated)
            await asyncio.sleep(0.05)

    await site.fleet.rcs.restart("web")
    watching = asyncio.create_task(watch())
    drained = await site.cli("node", "drain", "node-1", "--wait", "--timeout", "60")
    watching.cancel()
    assert (drained.code, drained.out.splitlines()[-1]) == (0, "node node-1 is empty"), drained
    assert fewest >= 1
    assert started_under(site.state_dir("node-1")) == []
    assert (await quick(site, "node drain -l '!pool' -o json")).json["nodes"][0]["evict"] is True
    stuck = await site.cli("node", "drain", "node-2", "node-3", "--wait", "--timeout", "30")
    assert (stuck.code, "can't move" in stuck.out) == (2, True), stuck
    back = await quick(site, "node undrain node-1 node-2 node-3")
    assert back.out == "".join(f"node {node} takes pods again\n" for node in NODES)


async def _forgotten(site: Installation) -> None:
    """A machine dies; its record goes with what was placed there."""
    daemon = next(each for each in site.daemons if each.name == "node-3")
    os.kill(daemon.pid, signal.SIGKILL)

    async def is_dead() -> bool:
        entry = await site.store.get(site.keys.node_alive("node-3"))
        return entry is not None and entry.session is None

    await site.until(is_dead, "node-3 is dead")
    await site.until(lambda: _was_lost(site), "node-3 is lost")
    removed = await quick(site, "node remove node-3 --release-pods --yes")
    assert (removed.code, "node node-3 is forgotten" in removed.out) == (0, True), removed
    assert await site.store.keys(site.keys.node("node-3")) == []
    assert await site.store.keys(site.keys.node_intents("node-3")) == []
    member = encode(FarmMember(farm="gone"))
    await site.store.put(site.keys.farm("gone"), member)
    assert (await quick(site, "farm forget gone")).out == "farm gone is forgotten\n"
    assert await site.store.get(site.keys.farm("gone")) is None


async def _was_lost(site: Installation) -> bool:
    return "NODES_LOST" in (await quick(site, "events -o json")).out


async def _seen(following: asyncio.subprocess.Process, last: str) -> list[dict[str, str]]:
    """Return the events that a follower printed, up to the last one."""
    assert following.stdout is not None
    found: list[dict[str, str]] = []
    async with asyncio.timeout(20):
        while not found or found[-1]["type"] != last:
            found.append(json.loads(await following.stdout.readline()))
    return found
