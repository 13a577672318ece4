"""The decision log on a real Consul: from an event of the audit log to the decision behind it, and to its replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.consul.server import ConsulServer
from tests.support.programs.cli import Ran
from tests.support.programs.installation import Installation, installation

FAST: dict[str, Any] = {"claim_grace": 3, "handover_interval": 0.02}
NODES = ["node-1", "node-2", "node-3"]


async def apply(site: Installation, version: str) -> None:
    launchable = {"command": ["sleep", "1000"], "env": {"VERSION": version}, "stop_timeout": 1}
    document = {
        "id": "web",
        "replicas": 3,
        "update": {"min_healthy_time": 0.5},
        "manifest": {"id": "web", "launchables": {"main": launchable}},
    }
    path = site.directory / "web.json"
    path.write_text(json.dumps(document))
    ran = await site.cli("rc", "apply", "-f", str(path), "--yes", "--wait-healthy", "0.2")
    assert ran.code == 0, ran.out + ran.err


async def test_from_an_event_to_its_replay(consul_server: ConsulServer, tmp_path: Path) -> None:
    """Each event of a farm's change names its decision, which is replayed to the same bytes: with the transaction that
    wrote it, without the store, and after the farm was killed; also that of the deletion."""
    log = tmp_path / "decisions"
    async with installation(consul_server, tmp_path / "site") as site:
        farm = site.farm("farm-a", **FAST, decision_log=log)
        await site.start_agents(*NODES)
        await apply(site, "1")
        await apply(site, "2")

        async def ids() -> list[str]:
            events = (await site.cli("rc", "history", "web", "--all", "-o", "json")).json
            ours = [each["event_details"] for each in events if each["actor"] == "farm-a"]
            assert all("decision" in details for details in ours)
            return [details["decision"] for details in ours]

        async def replay(*arguments: str) -> Ran:
            return await site.cli("replay", *arguments, "--log", str(log), "-o", "json", url="consul://127.0.0.1:1")

        async def is_logged(decision: str) -> bool:
            return (await replay(decision)).code != 1

        rolled_out = await ids()
        assert len(rolled_out) >= 4
        assert rolled_out[-1] in (await site.cli("rc", "history", "web")).out
        await site.until(lambda: is_logged(rolled_out[-1]), "the last decision is in the file")
        farm.kill()
        for decision in rolled_out:
            ran = await replay(decision)
            assert (ran.code, ran.json["identical"]) == (0, True), ran.err
            assert ran.json["decision"]["transaction"] > 0
        shown = await site.cli("replay", rolled_out[-1], "--log", str(log))
        assert shown.code == 0
        assert "\nidentical: " in shown.out

        farm.start()
        assert (await site.cli("rc", "delete", "web", "--yes")).code == 0
        deleted = (await ids())[-1]
        assert farm.stop() == 0, "the rest is written at the end"
        assert (await replay(deleted)).json["identical"]
        listed = (await replay("--rc", "web")).json
        assert {*rolled_out, deleted} <= {each["id"] for each in listed}
        summary = await replay("--all")
        assert (summary.code, summary.json["identical"]) == (0, summary.json["decisions"]), summary.out


async def test_a_farm_works_without_its_log(consul_server: ConsulServer, tmp_path: Path) -> None:
    """A folder that can't be written costs one line; the RCs are as they should be."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    async with installation(consul_server, tmp_path / "site") as site:
        farm = site.farm("farm-a", **FAST, decision_log=blocked / "log")
        await site.start_agents(*NODES)
        await apply(site, "1")
        await site.until_logged(farm, "Decisions can't be logged")
        await apply(site, "2")
        assert len(farm.events("Decisions can't be logged")) == 1
