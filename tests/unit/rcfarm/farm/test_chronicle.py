"""What farms record of nodes, farms and ownership: few events, written by one farm."""

from __future__ import annotations

import asyncio
from typing import Any

from store.schema import audit
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.stage import KEYS, owned
from tests.support.waiting import until

OURS = ("RCS_", "FARM_JOINED", "FARMS_", "NODES_")  # what the types of our events begin with


async def recorded(fleet: Fleet) -> list[tuple[str, str, dict[str, Any]]]:
    found = await audit.events(fleet.store, fleet.keys)
    return [(each.event_type, each.actor, each.event_details) for each in found if each.event_type.startswith(OURS)]


async def test_many_claims_are_one_event(store: ScriptedStore, fleet: Fleet) -> None:
    """It counts the RCs, and is the only one of its farm."""
    for number in range(30):
        await fleet.create(f"rc-{number:02}", 0)
    async with running_farm(store, KEYS) as farm:
        await until(lambda: len(owned(farm)) == 30)
        await fleet.until(lambda: _has(fleet, "RCS_CLAIMED"))
    claims = [details for kind, _, details in await recorded(fleet) if kind == "RCS_CLAIMED"]
    assert [each["count"] for each in claims] == [30]
    assert len(claims[0]["rcs"]) == 30


async def test_one_farm_records_what_all_of_them_see(store: ScriptedStore, fleet: Fleet) -> None:
    """Dead, lost and returned agents, and farms that leave, are in the log once each, though two farms see them."""
    nodes = ["node-1", "node-2", "node-3"]
    await fleet.add_nodes(nodes)
    other = ScriptedStore(store.inner)
    async with running_farm(store, KEYS, "farm-a", node_lost_after=0.1) as one:
        async with running_farm(other, KEYS, "farm-b", node_lost_after=0.1) as two:
            await until(lambda: one.membership.live() == two.membership.live() == {"farm-a", "farm-b"})
            await asyncio.gather(*map(fleet.kill_node, nodes))
            await fleet.until(lambda: _has(fleet, "NODES_LOST"))
            await fleet.add_nodes(["node-2"])
            await fleet.until(lambda: _has(fleet, "NODES_BACK"))
        await fleet.until(lambda: _has(fleet, "FARMS_LEFT"))
    found = await recorded(fleet)
    seen = {kind: details for kind, _, details in found if kind.startswith("NODES_")}
    assert [kind for kind, _, _ in found].count("NODES_DEAD") == 1
    assert seen["NODES_DEAD"] == seen["NODES_LOST"] == {"nodes": nodes, "count": 3}
    assert seen["NODES_BACK"] == {"nodes": ["node-2"], "count": 1}
    assert ("FARMS_LEFT", "farm-a", {"farms": ["farm-b"], "count": 1}) in found


async def _has(fleet: Fleet, kind: str) -> bool:
    return any(each == kind for each, _, _ in await recorded(fleet))
