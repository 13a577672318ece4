"""Node transfers on a real Consul, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.agent.agents import started_under
from tests.support.consul.server import ConsulServer
from tests.support.programs.installation import Installation, installation

NODES = ["node-1", "node-2", "node-3"]


def running(site: Installation) -> list[str]:
    return [node for node in NODES if started_under(site.state_dir(node))]


async def test_a_drained_node_is_left_when_another_one_has_taken_over(
    consul_server: ConsulServer, tmp_path: Path
) -> None:
    """The pod's processes run on, over the farm's death, until another one has passed for long enough; the log of the
    RC has both steps."""
    async with installation(consul_server, tmp_path / "site") as site:
        farm = site.farm("farm-a", claim_grace=3, handover_interval=0.02)
        await site.start_agents(*NODES)
        manifest = {"id": "web", "launchables": {"main": {"command": ["sleep", "1000"], "stop_timeout": 1}}}
        fields = {"replicas": 2, "allocation_strategy": "dynamic", "update": {"min_healthy_time": 2}}
        path = site.directory / "web.json"
        path.write_text(json.dumps({"id": "web", **fields, "manifest": manifest}))
        assert (await site.cli("rc", "apply", "-f", str(path), "--yes", "--wait-healthy", "0.2")).code == 0
        assert running(site) == ["node-1", "node-2"]
        assert (await site.cli("node", "cordon", "node-1", "--evict")).code == 0

        async def all_run() -> bool:
            return running(site) == NODES

        await site.until(all_run, "the new pod runs beside the former one")
        assert "a pod moves from node-1 to node-3" in (await site.cli("rc", "status", "web")).out
        farm.kill()
        farm.start()

        async def has_moved() -> bool:
            return running(site) == ["node-2", "node-3"]

        await site.until(has_moved, "the former pod is gone")
        events = (await site.cli("rc", "history", "web", "-o", "json")).json
        steps = [each for each in events if each["event_type"].startswith("NODE_TRANSFER_")]
        assert [each["event_type"].rpartition("_")[2] for each in steps] == ["START", "COMPLETION"]
        assert len({each["event_details"]["id"] for each in steps}) == 1
