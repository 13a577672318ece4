"""Daemon sets on a real Consul: a pod on each node that matches, through joins, drains, dead agents and relabelling."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent.agents import started_under
from tests.support.consul.server import ConsulServer
from tests.support.programs.cli import Ran
from tests.support.programs.installation import Installation, installation

NODES = [f"node-{number:02}" for number in range(1, 11)]
FAST: dict[str, Any] = {"claim_grace": 3, "handover_interval": 0.02, "node_lost_after": 11}


@pytest.fixture
async def site(consul_server: ConsulServer, tmp_path: Path) -> AsyncIterator[Installation]:
    """A farm and ten agents."""
    async with installation(consul_server, tmp_path / "site") as site:
        site.farm("farm-a", **FAST)
        await site.start_agents(*NODES)
        yield site


async def apply(site: Installation, version: str, *command: str, **fields: Any) -> Ran:
    launchable = {"command": list(command) or ["sleep", "1000"], "env": {"VERSION": version}, "stop_timeout": 1}
    document = {
        "id": "shipper",
        "replicas": "all",
        "update": {"min_healthy_time": 0.2, "max_unavailable": "50%"},
        "manifest": {"id": "shipper", "launchables": {"main": launchable}},
    }
    path = site.directory / "shipper.json"
    path.write_text(json.dumps(document | fields))
    return await site.cli("rc", "apply", "-f", str(path), "--yes", "--wait-healthy", "0.1")


def running(site: Installation) -> dict[str, tuple[int, str]]:
    """Return the process and the version that each node runs."""
    found = {}
    for node in [path.name for path in (site.directory / "nodes").iterdir()]:
        for pid in started_under(site.state_dir(node)):
            with suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found[node] = pid, next(each[8:] for each in environ if each.startswith("VERSION="))
    return found


async def until_runs(site: Installation, version: str, *nodes: str) -> None:
    def reached() -> bool:
        found = running(site)
        return all(node in found and found[node][1] == version for node in nodes)

    await site.until(reached, f"version {version} runs on {', '.join(nodes)}")


async def placed(site: Installation) -> set[str]:
    found = await site.store.list(site.keys.rc("shipper") + "pods/")
    return {entry.key.rpartition("/")[2] for entry in found.entries}


async def until_placed(site: Installation, *nodes: str) -> None:
    async def reached() -> bool:
        return await placed(site) == set(nodes)

    await site.until(reached, f"its pods are on {', '.join(nodes)}")


async def test_over_ten_agents_of_which_one_is_dead(site: Installation) -> None:
    """It reaches every node that lives; a rollout goes past a dead one, which is named, and which has the right version
    when it returns. A node that joins gets the same one at once."""
    assert (await apply(site, "1")).code == 0
    await until_runs(site, "1", *NODES)
    assert "replicas desired all" in (await site.cli("rc", "history", "shipper")).out
    dead = next(daemon for daemon in site.daemons if daemon.name == "node-03")
    dead.kill()

    async def is_known() -> bool:
        entry = await site.store.get(site.keys.node_alive("node-03"), consistent=True)
        return entry is None or entry.session is None

    await site.until(is_known, "the node is known to be dead")
    applied = await apply(site, "2")
    assert applied.code == 0, applied
    await until_runs(site, "2", *(node for node in NODES if node != "node-03"))
    explained = await site.cli("rc", "explain", "shipper")
    assert "1 of 10 pods is on a node whose agent does not answer: node-03" in explained.out
    assert (await site.cli("ds", "list")).out.splitlines()[1].split()[1] == "converged"
    dead.start()
    await until_runs(site, "2", "node-03")
    site.agent("node-11")
    await until_placed(site, *NODES, "node-11")


async def test_a_bad_version_is_taken_back_after_its_canary(site: Installation) -> None:
    assert (await apply(site, "1")).code == 0
    await until_runs(site, "1", *NODES)
    before = running(site)
    failed = await apply(site, "2", "sh", "-c", "exit 3")
    assert failed.code == 2
    assert "exited with code 3" in failed.out
    await until_runs(site, "1", *NODES)
    after = running(site)
    assert len([node for node in NODES if before[node] != after[node]]) == 1, (before, after)


async def test_drained_nodes_lose_it_and_cordoned_ones_keep_it(site: Installation) -> None:
    """Unless it tolerates the drain, as log shippers do."""
    assert (await apply(site, "1")).code == 0
    assert (await site.cli("node", "cordon", "node-01")).code == 0
    assert (await site.cli("node", "cordon", "node-02", "--evict")).code == 0
    await until_placed(site, *(node for node in NODES if node != "node-02"))
    assert (await apply(site, "1", tolerate_drain=True)).code == 0
    assert (await site.cli("node", "cordon", "node-04", "--evict")).code == 0
    assert (await site.cli("node", "uncordon", "node-02")).code == 0
    await until_placed(site, *NODES)


async def test_without_its_labels_it_loses_nothing_before_an_operator_confirms(site: Installation) -> None:
    """All labels vanish: nothing is removed, and the reason says how to go on. One node alone is left after a while."""
    for node in NODES:
        assert (await site.cli("node", "label", node, "pool=web")).code == 0
    assert (await apply(site, "1", node_selector="pool=web")).code == 0
    await until_placed(site, *NODES)
    assert (await site.cli("node", "label", "node-10", "pool-")).out == "node node-10 has no labels\n"

    async def left() -> bool:
        return "node-10 does not match any more; it loses its pod" in (await site.cli("ds", "status", "shipper")).out

    await site.until(left, "the status says what happens to it")
    await until_placed(site, *NODES[:-1])
    for node in NODES[:-1]:
        assert (await site.cli("node", "label", node, "pool-")).code == 0

    async def held() -> bool:
        return "confirm with `rcfarm ds shrink shipper`" in (await site.cli("rc", "status", "shipper")).out

    await site.until(held, "it is held")
    assert await placed(site) == set(NODES[:-1])
    refused = await site.cli("ds", "shrink", "shipper")
    assert (refused.code, await placed(site)) == (1, set(NODES[:-1])), "without a terminal it asks for --yes"
    assert (await site.cli("ds", "shrink", "shipper", "--yes")).code == 0
    await until_placed(site)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicas": "some"}, 'replicas: expected a whole number or `all`, got "some"'),
    ({"replicas": 1000000}, "replicas: 1000000 is more than 999999; use `all`"),
    ({"update": {"max_surge": 1}}, "update.max_surge: 1, but with `replicas: all` no node is left for it"),
    ({"allocation_strategy": "dynamic"}, "allocation_strategy: dynamic, but `replicas: all` moves no pod"),
    ({"replicas": 2, "tolerate_drain": True}, "tolerate_drain: only `replicas: all` has it"),
    ({"update": {"wave_by": "a b"}}, "update.wave_by: label key 'a b'"),
    ({"update": {"canary_selector": "a in (b"}}, "update.canary_selector: selector 'a in (b'"),
    ({"update": {"canary_selector": "a=b", "canary": 0}}, "but update.canary is 0, so that there is no canary"),
]


async def test_what_it_can_not_have_is_refused(consul_server: ConsulServer, tmp_path: Path) -> None:
    async with installation(consul_server, tmp_path / "site") as site:
        for fields, problem in REFUSED:
            refused = await apply(site, "1", **fields)
            assert (refused.code, problem in refused.err) == (1, True), refused
        assert (await site.cli("rc", "get", "shipper")).code == 1
