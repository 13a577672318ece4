"""The key layout's migration: the farms raise the schema once no live program writes a former layout. How long deleted
RCs are kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from rcfarm.farm.housekeeping import AUDIT_INTERVAL, LAYOUT_INTERVAL, DeletedRetention, Migration
from rcfarm.operations.errors import BadInput
from rcfarm.operations.fleet import ensure_meta, of_a_former_layout, read_meta
from store.kv import ops
from store.kv.protocol import OwnershipLost, SessionSpec
from store.schema import audit
from store.schema.keys import LAYOUT, Keys
from store.schema.records import DeletedRC, FarmMember, Health, Meta, NodeAlive, RCSpec, encode
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.waiting import background

pytestmark = pytest.mark.looptime

KEYS = Keys()
MANIFEST = "0" * 64
OLD_AGENT = b'{"agent":"host:1","since":"","address":"","version":"0.1.0"}'


async def session(store: ScriptedStore) -> str:
    return (await store.create_session(SessionSpec("test", ttl=86400.0, check_ttl=None))).id


async def a_former_tree(store: ScriptedStore) -> str:
    """Make a tree of schema 1 with a new farm in it. Return the farm's session."""
    await store.put(KEYS.meta, b'{"schema":1,"shards":32}')
    farm = await session(store)
    await store.txn([ops.lock(KEYS.farm("farm-a"), encode(FarmMember(farm="farm-a", layout=LAYOUT)), farm)])
    return farm


@contextlib.asynccontextmanager
async def migrating(store: ScriptedStore, farm: str, *, leads: bool = True) -> AsyncIterator[asyncio.Event]:
    lost = asyncio.Event()
    migration = Migration(store, KEYS, "farm-a", lambda: leads, lost)
    async with background(migration.run(KEYS.farm("farm-a"), farm)):
        yield lost


async def schema(store: ScriptedStore) -> int:
    meta = require(await read_meta(store, KEYS))
    return meta.schema


async def test_a_tree_is_migrated_when_the_last_old_agent_is_upgraded(store: ScriptedStore) -> None:
    """While an agent of layout 1 is live nothing changes; then its records are removed, and the schema is raised,
    once."""
    farm, agent = await a_former_tree(store), await session(store)
    verdict = encode(Health("passing", MANIFEST))
    await store.txn([ops.lock(KEYS.node_alive("n1"), OLD_AGENT, agent)])
    await store.txn([ops.lock(KEYS.former_health("web", "n1"), verdict, agent)])
    for number in range(200):  # of an agent that was killed: more than a transaction takes
        await store.put(KEYS.former_health(f"rc-{number}", "n2"), verdict)
    await store.put(KEYS.spec("web"), b"{}")
    async with migrating(store, farm):
        await asyncio.sleep(2.5 * LAYOUT_INTERVAL)
        assert await schema(store) == 1
        assert await of_a_former_layout(store, KEYS) == ["the agent of n1"]
        assert len(await store.keys(KEYS.rcs)) == 202
        await store.destroy_session(agent)
        successor = await session(store)
        alive = encode(NodeAlive("host:2", "", layout=LAYOUT))
        await store.txn([ops.lock(KEYS.node_alive("n1"), alive, successor)])
        await asyncio.sleep(1.5 * LAYOUT_INTERVAL)
    assert await schema(store) == LAYOUT
    assert await store.keys(KEYS.rcs) == [KEYS.spec("web")]
    [event] = await audit.events(store, KEYS)
    assert (event.event_type, event.event_details) == ("KEY_LAYOUT_MIGRATED", {"schema": LAYOUT, "removed": 201})


async def test_an_old_farm_holds_the_migration_back_while_it_lives(store: ScriptedStore) -> None:
    """It would not see the records of upgraded agents; an undecodable record counts as one of an old program."""
    farm, other = await a_former_tree(store), await session(store)
    await store.txn([ops.lock(KEYS.farm("farm-b"), b'{"farm":"farm-b"}', other)])
    await store.txn([ops.lock(KEYS.node_alive("n1"), b"nonsense", other)])
    assert await of_a_former_layout(store, KEYS) == ["farm farm-b", "the agent of n1"]
    async with migrating(store, farm):
        await asyncio.sleep(2.5 * LAYOUT_INTERVAL)
        assert await schema(store) == 1
        await store.destroy_session(other)
        await asyncio.sleep(1.5 * LAYOUT_INTERVAL)
    assert await schema(store) == LAYOUT


@pytest.mark.parametrize("leads", [True, False])
async def test_only_the_leading_farm_migrates_and_only_under_its_lease(store: ScriptedStore, leads: bool) -> None:
    """Other farms do nothing. Every write is fenced: neither a record is removed nor the schema raised."""
    farm = await a_former_tree(store)
    await store.put(KEYS.former_health("web", "n1"), b"{}")
    if leads:
        await store.destroy_session(farm)
    async with migrating(store, farm, leads=leads):
        await asyncio.sleep(2.5 * LAYOUT_INTERVAL)
    assert await schema(store) == 1
    assert await store.get(KEYS.former_health("web", "n1")) is not None


async def test_a_lost_meta_is_written_again(store: ScriptedStore) -> None:
    """Deleted with the root of the tree, it comes back with the number of shards that the farms use."""
    farm = await a_former_tree(store)
    async with migrating(store, farm) as lost:
        await asyncio.sleep(1.5 * LAYOUT_INTERVAL)
        await store.delete(KEYS.meta)
        lost.set()
        await asyncio.sleep(1.0)
    assert await read_meta(store, KEYS) == Meta(schema=LAYOUT, shards=KEYS.shards)


async def test_meta_is_created_once_and_then_obeyed(store: ScriptedStore) -> None:
    """The first program writes the number of shards; all others use that number, whatever their own setting."""
    assert await read_meta(store, Keys("test")) is None

    first = await ensure_meta(store, Keys("test", shards=8))
    second = await ensure_meta(store, Keys("test", shards=32))

    assert first == second == Keys("test", 8)


async def test_a_newer_schema_is_refused(store: ScriptedStore) -> None:
    """A store written by a newer rcfarm is left alone, with a clear message."""
    newer = json.dumps({"schema": 99, "shards": 32}).encode()
    await store.put(KEYS.meta, newer)

    with pytest.raises(BadInput, match=r"rcfarm/meta: the store is of schema 99, .* use a newer rcfarm"):
        await ensure_meta(store, KEYS)
    entry = require(await store.get(KEYS.meta))
    assert entry.value == newer


async def keep(store: ScriptedStore, rc_id: str, *, deleted_at: str = "", until: str = "") -> None:
    spec = RCSpec(id=rc_id, manifest=MANIFEST, replicas_desired=1)
    record = DeletedRC(spec=spec, manifest=MANIFEST, farm="farm-a", deleted_at=deleted_at, until=until)
    await store.put(KEYS.deleted_rc(rc_id), encode(record))


async def kept(store: ScriptedStore) -> list[str]:
    return [KEYS.name_of(name) for name in await store.keys(KEYS.deleted)]


async def test_deleted_rcs_are_forgotten_in_time(store: ScriptedStore) -> None:
    """Each after its own time, and the oldest ones beyond the number; what can't be read stays. One farm alone does it,
    fenced by its membership."""
    farm = await a_former_tree(store)
    await keep(store, "past", until="2026-03-10T11:59:59Z")
    await keep(store, "future", deleted_at="2026-03-03T00:00:00Z", until="2026-03-10T12:00:01Z")
    for number in range(70):
        await keep(store, f"rc-{number}", deleted_at=f"2026-03-04T00:00:{number % 60:02}Z")
    await store.put(KEYS.deleted_rc("bad"), b"{")
    leads, forgotten = False, list[str]()

    def retention(count: int) -> DeletedRetention:
        now = datetime(2026, 3, 10, 12, tzinfo=UTC)
        return DeletedRetention(
            store, KEYS, max_count=count, is_ours=lambda: leads, forgotten=forgotten.extend, now=lambda: now
        )

    running = asyncio.create_task(retention(0).run(KEYS.farm("farm-a"), farm))
    await asyncio.sleep(2 * AUDIT_INTERVAL)
    assert "past" in await kept(store)
    leads = True
    await asyncio.sleep(2 * AUDIT_INTERVAL)
    running.cancel()
    assert forgotten == [MANIFEST]
    assert set(await kept(store)) == {"bad", "future", *(f"rc-{number}" for number in range(70))}
    assert await retention(2).trim(KEYS.farm("farm-a"), farm) == 69
    assert set(await kept(store)) == {"bad", "rc-58", "rc-59"}
    await keep(store, "rc-60", until="2026-01-01T00:00:00Z")
    await store.destroy_session(farm)
    with pytest.raises(OwnershipLost):
        await retention(0).trim(KEYS.farm("farm-a"), farm)
    assert "rc-60" in await kept(store)
