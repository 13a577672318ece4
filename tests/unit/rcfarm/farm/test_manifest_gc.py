"""Collecting manifests that nothing refers to, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from rcfarm.farm.manifests import SWEEP_INTERVALS, ManifestCollector
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Listing, SessionSpec, Store, Unavailable
from store.schema.keys import Keys
from store.schema.manifest import digest
from store.schema.records import DeletedRC, RCSpec, encode
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, manifest

pytestmark = pytest.mark.looptime

INTERVAL = 60.0
SEARCH = SWEEP_INTERVALS * INTERVAL
KEYS = Keys()


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    embedded = EmbeddedStore(clock=asyncio.get_running_loop().time)
    yield embedded
    await embedded.close()


@asynccontextmanager
async def collecting(store: Store, *, is_ours: bool = True) -> AsyncIterator[ManifestCollector]:
    """Yield a collector at work, for a farm that is a member."""
    session = await store.create_session(SessionSpec("farm", ttl=86400.0, check_ttl=None))
    await store.txn([ops.lock(KEYS.farm("farm-a"), b"{}", session.id)])
    collector = ManifestCollector(store, KEYS, INTERVAL, clock=asyncio.get_running_loop().time)
    tasks = [
        asyncio.create_task(collector.run(KEYS.farm("farm-a"), session.id)),
        asyncio.create_task(collector.sweep(lambda: is_ours)),
    ]
    yield collector
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def put_manifest(store: Store, pod_id: str) -> str:
    """Store a manifest that nothing references. Return its digest."""
    raw = manifest(pod_id)
    await store.put(KEYS.manifest(digest(raw)), raw)
    return digest(raw)


async def stored(store: Store) -> set[str]:
    return {name.removeprefix(KEYS.manifests) for name in await store.keys(KEYS.manifests)}


async def test_a_noted_manifest_goes_unless_something_refers_to_it(store: EmbeddedStore) -> None:
    """A manifest that an RC dropped is removed within seconds, unless another RC still uses it. A placement on a node
    called `spec` is no hindrance."""
    used = (await Fleet(store, KEYS).create("web", 1)).manifest
    await store.put(KEYS.pod("web", "spec"), b"{}")
    unused = await put_manifest(store, "other")
    async with collecting(store) as collector:
        collector.note([used, unused])
        await asyncio.sleep(5)
        assert await stored(store) == {used}


async def test_the_manifest_of_a_deleted_rc_stays_until_that_is_forgotten(store: EmbeddedStore) -> None:
    """It is needed to restore the RC."""
    sha256 = await put_manifest(store, "web")
    spec = RCSpec(id="web", manifest="0" * 64, replicas_desired=1, deleting=True)
    record = DeletedRC(spec=spec, manifest=sha256, farm="farm-a", deleted_at="2026-01-01T00:00:00Z")
    await store.put(KEYS.deleted_rc("web"), encode(record))
    async with collecting(store) as collector:
        collector.note([sha256])
        await asyncio.sleep(3 * SEARCH)
        assert await stored(store) == {sha256}
        await store.delete(KEYS.deleted_rc("web"))
        await asyncio.sleep(3 * SEARCH)
        assert await stored(store) == set()


async def test_what_a_killed_farm_had_noted_is_found(store: EmbeddedStore) -> None:
    """A manifest without references and without a note is removed after two searches, not after one."""
    used = (await Fleet(store, KEYS).create("web", 1)).manifest
    unused = await put_manifest(store, "other")
    async with collecting(store):
        await asyncio.sleep(1.5 * SEARCH)
        assert await stored(store) == {used, unused}
        await asyncio.sleep(SEARCH)
        assert await stored(store) == {used}


async def test_one_farm_searches_for_all(store: EmbeddedStore) -> None:
    """A farm whose turn it is not searches nothing."""
    unused = await put_manifest(store, "other")
    async with collecting(store, is_ours=False):
        await asyncio.sleep(5 * SEARCH)
        assert await stored(store) == {unused}


async def test_nothing_goes_while_a_reference_can_not_be_read(store: EmbeddedStore) -> None:
    """A record that can't be read may refer to anything: no manifest is removed before it is repaired."""
    unused = await put_manifest(store, "other")
    await store.put(KEYS.spec("bad"), b"{}")
    async with collecting(store) as collector:
        collector.note([unused])
        await asyncio.sleep(5 * SEARCH)
        assert await stored(store) == {unused}
        await store.delete(KEYS.spec("bad"))
        await asyncio.sleep(3 * SEARCH)
        assert await stored(store) == set()


class Interrupted(EmbeddedStore):
    """Does something right after the references were read."""

    def __init__(self, then: Callable[[Store], Awaitable[object]]) -> None:
        super().__init__(clock=asyncio.get_running_loop().time)
        self._then = then

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        listing = await super().list(prefix, consistent=consistent)
        if prefix == KEYS.intents:
            await self._then(self)
        return listing


async def test_a_manifest_that_is_wanted_again_meanwhile_stays() -> None:
    """An RC that references a manifest between the search for references and the delete keeps it; the others of the
    same transaction are deleted all the same."""
    created: list[str] = []

    async def create(store: Store) -> None:
        if not created:
            created.append((await Fleet(store, KEYS).create("web", 1)).manifest)

    store = Interrupted(create)
    unused, others = await put_manifest(store, "web"), [await put_manifest(store, f"other-{n}") for n in range(3)]
    async with collecting(store) as collector:
        collector.note([unused, *others])
        await asyncio.sleep(5)
        assert created == [unused]
        assert await stored(store) == {unused}
        assert collector.collected == 3
    await store.close()


async def test_what_is_noted_together_is_looked_at_together() -> None:
    """A hundred drops cost one read of the references and two transactions, not a hundred."""
    store = ScriptedStore(EmbeddedStore(clock=asyncio.get_running_loop().time))
    async with collecting(store) as collector:
        for number in range(100):
            collector.note([await put_manifest(store, f"pod-{number}")])
        store.transactions.clear()
        await asyncio.sleep(5)
        assert await stored(store) == set()
        assert store.calls["list"] == 3
        assert [len(sent) for sent in store.transactions] == [64, 38]
    await store.close()


async def test_a_farm_that_is_no_member_deletes_nothing(store: EmbeddedStore) -> None:
    """The fence: a farm that was paused and lost its membership deletes nothing, and keeps its notes."""
    unused = await put_manifest(store, "other")
    async with collecting(store) as collector:
        member = await store.get(KEYS.farm("farm-a"))
        await store.delete(KEYS.farm("farm-a"))
        collector.note([unused])
        await asyncio.sleep(3 * INTERVAL)
        assert (await stored(store), collector.collected) == ({unused}, 0)
        assert member is not None
        assert member.session is not None
        await store.txn([ops.lock(KEYS.farm("farm-a"), b"{}", member.session)])
        await asyncio.sleep(3 * INTERVAL)
        assert await stored(store) == set()


@pytest.mark.parametrize("verb", ["get", "list", "txn", "keys"])
async def test_a_store_that_is_away_is_tried_again(verb: str) -> None:
    """Whichever call fails, no note is lost and the search continues."""
    store = ScriptedStore(EmbeddedStore(clock=asyncio.get_running_loop().time))
    noted, found = await put_manifest(store, "noted"), await put_manifest(store, "found")
    async with collecting(store) as collector:
        store.faults[verb] = Unavailable("away")
        collector.note([noted])
        await asyncio.sleep(3 * SEARCH)
        store.faults.clear()
        await asyncio.sleep(3 * SEARCH)
        assert not {noted, found} & await stored(store)
    await store.close()
