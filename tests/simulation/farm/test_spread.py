"""Where a farm places pods: spread over nodes by their number of pods, and over the values of a label."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.farm.fleet import Fleet, running_farm

NODES = [f"n{number:02}" for number in range(10)]


async def loads(fleet: Fleet, keys: Keys) -> Counter[str]:
    return Counter(keys.parse_pod(key).node for key in await fleet.store.keys(keys.intents))


async def test_many_rcs_are_spread_evenly(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """Also those that are placed at the same time: a pod that is being written counts."""
    await fleet.add_nodes(NODES)
    for number in range(40):
        await fleet.create(f"rc-{number:02}", 2)
    async with running_farm(store, keys):
        await fleet.until(lambda: _total(fleet, keys, 80))
        found = await loads(fleet, keys)
        assert set(found.values()) == {8}, found
        await fleet.add_nodes(["n10"])
        await fleet.create("late", 1)
        await fleet.until_placed("late", ["n10"])


async def test_an_rc_is_spread_over_racks_before_nodes(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """As many pods per rack as can be, however many nodes each rack has, and however loaded they are."""
    for number, node in enumerate(NODES):
        await fleet.add_nodes([node], {"rack": "big" if number < 8 else f"small-{number}"})
    for number in range(6):
        await fleet.create(f"other-{number}", 1, node_selector="rack in (small-8,small-9)")
    async with running_farm(store, keys):
        await fleet.until(lambda: _total(fleet, keys, 6))
        await fleet.create("web", 0)
        await fleet.rcs.update("web", lambda spec: replace(spec, spread="rack", replicas_desired=3))
        await fleet.until_placed("web", ["n00", "n08", "n09"])
        await fleet.rcs.set_replicas("web", 5)
        await fleet.until_placed("web", ["n00", "n01", "n02", "n08", "n09"])


async def _total(fleet: Fleet, keys: Keys, pods: int) -> bool:
    return (await loads(fleet, keys)).total() == pods
