"""Pods pass from one RC to another, with real farms on an embedded store, and agents that obey at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from rcfarm.operations.errors import BadInput, NoSuchRC, RCRefused
from rcfarm.operations.handovers import Handovers
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, SessionSpec
from store.schema.keys import Keys
from store.schema.records import Handover, Mutation, RCSpec, UpdatePolicy, decode, encode
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.simulated_agents import SimulatedAgents, running_agents

NODES = [f"n{number}" for number in range(1, 6)]
AT_ONCE = UpdatePolicy(min_healthy_time=0.0)


@pytest.fixture
async def agents(store: EmbeddedStore, keys: Keys) -> AsyncIterator[SimulatedAgents]:
    async with running_agents(store, keys, {node: {} for node in NODES}) as agents:
        yield agents


@pytest.fixture
def handovers(store: EmbeddedStore, keys: Keys) -> Handovers:
    return Handovers(store, keys, actor="me")


async def two(fleet: Fleet, replicas: int = 5, **fields: object) -> None:
    """Create `blue` with pods, and `green` of the same pod id without."""
    await fleet.create("blue", replicas, pod_id="web", update=AT_ONCE)
    await fleet.create("green", 0, pod_id="web", update=AT_ONCE, pod_labels={"color": "green"}, **fields)


async def handover(fleet: Fleet, rc_id: str = "green") -> Handover:
    entry = await fleet.store.get(fleet.keys.handover(rc_id))
    assert entry is not None
    return decode(Handover, entry.key, entry.value)


async def until_ended(fleet: Fleet, state: str = "done") -> None:
    async def ended() -> bool:
        return (await handover(fleet)).state == state

    await fleet.until(ended)


async def is_unlocked(fleet: Fleet, rc_id: str) -> bool:
    return await fleet.store.get(fleet.keys.mutation(rc_id)) is None


async def healthy(fleet: Fleet) -> int:
    """Return how many pods of both RCs pass on what their intents say."""
    intents, found = await fleet.intents_of("web"), 0
    for node, intent in intents.items():
        entry = await fleet.store.get(fleet.keys.health(intent.rc, node))
        found += entry is not None and b'"passing"' in entry.value and intent.manifest.encode() in entry.value
    return found


async def test_all_pods_pass_on_their_nodes(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """Each pod passes on its node, with the new manifest and labels; then the old RC is deleted. The log has it."""
    async with running_farm(store, keys):
        await two(fleet)
        await fleet.until_placed("blue", NODES)
        await handovers.begin("blue", "green", desired=5, minimum=3)
        await until_ended(fleet)
        green = await fleet.rcs.get("green")
        assert {(i.rc, i.manifest, i.labels["color"]) for i in (await fleet.intents_of("web")).values()} == {
            ("green", green.manifest, "green")
        }
        await fleet.until_placed("green", NODES)
        assert green.replicas_desired == 5

        async def is_gone() -> bool:
            return not await store.keys(keys.rc("blue"))

        await fleet.until(is_gone)
        assert (await fleet.until_state("green", "converged")).reasons == ()
        assert await is_unlocked(fleet, "green")
        for rc_id in ("blue", "green"):
            [end] = await fleet.audit(rc_id, "ROLLING_UPDATE_COMPLETION")
            assert (end.event_details["succeeded"], end.event_details["canceled"]) == (True, False)
        moves = [e.event_details for e in await fleet.audit("green") if e.event_details["added"]]
        assert sorted(node for move in moves for node in move["added"]) == NODES
        assert all(len(move["added"]) <= 2 for move in moves), "never more at once than the minimum allows"
