"""Real farms that schedule by reserved capacity, over the embedded store."""

from __future__ import annotations

from functools import partial

import pytest

from scheduler.pool.scheduler import PoolScheduler
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.records import Capacity, NodeSpec, encode
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.pool import manifest, overcommitted, reserved

NODE = Capacity(cpu=1000)


@pytest.fixture
async def fleet(store: EmbeddedStore, keys: Keys) -> Fleet:
    """Three nodes of the pool, with one core each."""
    fleet = Fleet(store, keys)
    await fleet.add_nodes(["n1", "n2", "n3"])
    for name in ("n1", "n2", "n3"):
        await _set_node(store, keys, name, "web")
    return fleet


async def _set_node(store: EmbeddedStore, keys: Keys, name: str, pool: str) -> None:
    await store.put(keys.node_spec(name), encode(NodeSpec(name=name, labels={"pool": pool}, capacity=NODE)))


async def _create(fleet: Fleet, rc_id: str, replicas: int, cpu: int, **fields: str) -> None:
    raw = encode(manifest(rc_id, cpu=cpu))
    await fleet.rcs.create(raw, rc_id=rc_id, replicas=replicas, node_selector="pool=web", **fields)  # type: ignore[arg-type]


async def test_farms_share_a_pool_and_never_overcommit_it(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """Two farms place what fits; the RC that comes too late reports the lacking resource, and gets what another RC
    frees."""
    await _create(fleet, "big", 3, 600)
    async with (
        running_farm(store, keys, "farm-a", make_scheduler=partial(PoolScheduler, store, keys)),
        running_farm(store, keys, "farm-b", make_scheduler=partial(PoolScheduler, store, keys)),
    ):
        await fleet.until_placed("big", ["n1", "n2", "n3"])
        await _create(fleet, "late", 2, 500)
        status = await fleet.until_state("late", "short")
        assert "n1: needs 500m cpu, 400m free of 1000m" in status.reasons[-1].message
        await fleet.rcs.set_replicas("big", 1)
        await fleet.until_placed("big", ["n1"])
        await fleet.rcs.set_replicas("late", 3)  # reconciles again at once, not only after its retry time
        await fleet.until_placed("late", ["n2", "n3"])
    pods = await reserved(store, keys)
    assert {node: set(held) for node, held in pods.items()} == {"n1": {"big"}, "n2": {"late"}, "n3": {"late"}}
    assert not any(overcommitted(held, NODE) for held in pods.values())


async def test_a_moved_pod_takes_its_reservation_along(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A dynamic RC leaves a node that left the pool; its reservation there is free at once."""
    await _create(fleet, "web", 2, 600, allocation_strategy="dynamic")
    async with running_farm(store, keys, make_scheduler=partial(PoolScheduler, store, keys)):
        await fleet.until_placed("web", ["n1", "n2"])
        await _set_node(store, keys, "n1", "db")
        await fleet.until_placed("web", ["n2", "n3"])
        await fleet.until(lambda: _are_reserved(store, keys, {"n2", "n3"}))
        await fleet.rcs.delete("web", force=True)
        await fleet.until(lambda: _are_reserved(store, keys, set()))


async def _are_reserved(store: EmbeddedStore, keys: Keys, nodes: set[str]) -> bool:
    return set(await reserved(store, keys)) == nodes
