"""`rc` tasks with an engine and a real farm; the agents are played."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from controllers.tasks.plugins.rc import DeployPlugin
from rcfarm.operations.rc_deploy import RCDeployer
from store.kv.protocol import Store
from store.schema.keys import Keys
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.simulated_agents import running_agents
from tests.support.tasks.engines import World, engine_on, running
from tests.support.waiting import background


def entry(version: str) -> dict[str, Any]:
    launchables = {"main": {"command": ["serve", version]}}
    return {
        "id": "web",
        "replicas": 2,
        "allocation_strategy": "dynamic",
        "manifest": {"id": "web", "launchables": launchables},
    }


async def test_a_deploy_succeeds_when_its_pods_pass_and_fails_with_the_farms_reasons_when_they_do_not(
    any_store: Store, root: str
) -> None:
    """The second version is rolled out by the farm's own rules; its pods fail their check."""
    keys = Keys(root)
    deploys = DeployPlugin(any_store, keys, RCDeployer(any_store, keys))
    world, fleet = World(any_store, keys), Fleet(any_store, keys)
    async with (
        running_agents(any_store, keys, {"n1": {}, "n2": {}}) as agents,
        running_farm(any_store, keys),
        background(deploys.run()),
        running(engine_on(any_store, keys, deploys, virtual=False)),
    ):
        await world.submit("deploy-1", "rc", config={"rc": entry("1")})
        done = await asyncio.wait_for(world.until_done("deploy-1"), 30)
        assert done.phase == "PhaseSuccess"
        status = await fleet.status("web")
        assert status is not None
        assert (status.state, status.healthy, status.generation) == ("converged", 2, 1)

        agents.sick = {"n1": "critical", "n2": "critical"}
        await world.submit("deploy-2", "rc", config={"rc": entry("2"), "patience": 0.5})
        failed = await asyncio.wait_for(world.until_done("deploy-2"), 30)

        assert failed.phase == "PhasePermanentFailure"  # no retries
        assert failed.error is not None
        assert failed.error.code.endswith("RCUnhealthy")
        assert "web has had trouble for 0.5 s" in failed.error.message
        spec = await fleet.rcs.get("web")
        assert spec.generation == 2
        assert msgspec.json.decode(await fleet.rcs.manifest(spec.manifest))["launchables"]["main"]["command"][1] == "2"
