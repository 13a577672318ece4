"""The pods of one RC pass to another on a real Consul: farms that are killed, agents with real processes, commands."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.support.consul.server import ConsulServer
from tests.support.programs.cli import Ran
from tests.support.programs.installation import Installation, installation

NODES = [f"node-{number}" for number in range(1, 5)]


async def apply(site: Installation, rc_id: str, replicas: int) -> Ran:
    launchable = {"command": ["sleep", "1000"], "env": {"VERSION": rc_id}, "stop_timeout": 1}
    manifest = {"id": "web", "launchables": {"main": launchable}}
    path = site.directory / f"{rc_id}.json"
    fields = {"replicas": replicas, "update": {"min_healthy_time": 0.5}, "manifest": manifest}
    path.write_text(json.dumps({"id": rc_id, **fields}))
    return await site.cli("rc", "apply", "-f", str(path), "--yes", "--wait-healthy", "0.2")


async def passing(site: Installation) -> int:
    """Return how many pods the agents report as passing, of either RC."""
    entries = (await site.store.list(site.keys.healths, consistent=True)).entries
    return sum(entry.session is not None and b'"passing"' in entry.value for entry in entries)


async def test_farms_are_killed_in_the_middle(consul_server: ConsulServer, tmp_path: Path) -> None:
    """The farm that carries the hand-over on dies by SIGKILL, twice; the next one goes on. Each pod is replaced once,
    three of four pass all the time, and then the old RC is gone."""
    async with installation(consul_server, tmp_path / "site") as site:
        farms = [site.farm(name, claim_grace=3, handover_interval=0.02) for name in ("farm-a", "farm-b")]
        await site.start_agents(*NODES)
        assert (await apply(site, "blue", 4)).code == 0
        assert (await apply(site, "green", 0)).code == 0
        refused = await site.cli("rollout", "between", "blue", "green", "--desired", "4", "--minimum", "4")
        assert (refused.code, "lower --minimum, or raise --desired" in refused.err) == (1, True)
        rolling = asyncio.create_task(
            site.cli("rollout", "between", "blue", "green", "--desired", "4", "--minimum", "3", "--timeout", "60")
        )
        least = 4
        for count in (1, 3):

            async def has_come_so_far(count: int = count) -> bool:
                nonlocal least
                least = min(least, await passing(site))
                return len(await site.store.keys(site.keys.rc("green") + "pods/")) >= count

            await site.until(has_come_so_far, f"{count} pods have passed")
            status = await site.cli("rollout", "status", "green")
            assert "hand-over from rc blue to rc green (desired 4, minimum 3): running" in status.out
            owner = (await site.cli("rc", "owner", "green", "-o", "json")).json["farm"]
            [farm] = [daemon for daemon in farms if daemon.name == owner]
            farm.kill()
            farm.start()
        ended = await rolling
        assert ended.code == 0, ended.out
        assert least >= 3

        async def blue_is_gone() -> bool:
            return not await site.store.keys(site.keys.rc("blue"))

        await site.until(blue_is_gone, "the old RC is gone")
        starts = [len(daemon.events("Process started")) for daemon in site.daemons if daemon.name in NODES]
        assert starts == [2, 2, 2, 2]
        events = (await site.cli("rc", "history", "green", "-o", "json")).json
        assert "ROLLING_UPDATE_COMPLETION" in {event["event_type"] for event in events}
