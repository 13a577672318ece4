"""The catalog: cached results and reservations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from controllers.tasks.api.data import AsyncCatalog, Blob, CatalogKey, DownloadRequest, OutputError, UploadRequest
from controllers.tasks.api.phase import CacheStatus, ErrorKind, ExecutionError
from controllers.tasks.io.catalog import (
    Catalog,
    CatalogFailure,
    digest_of_key,
    key_of,
    owner_of,
)
from controllers.tasks.io.data import DataStore, DataUnavailable, MemoryBackend
from controllers.tasks.io.files import MemoryOutputReader, OutputFiles
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Op, TxnResult, Unavailable
from store.schema.keys import Keys
from store.schema.records import decode
from store.schema.tasks import CatalogEntry, TaskSpec
from tests.support import require
from tests.support.waiting import Clock

pytestmark = pytest.mark.looptime
KEY = CatalogKey("default/default/echo/job", "1", {"x": 1, "y": {"a": 1, "b": 2}}, {"out": "int"})
HIT, MISS, POPULATED = CacheStatus.HIT, CacheStatus.MISS, CacheStatus.POPULATED


class FailingStore(EmbeddedStore):
    """Raises `Unavailable` instead of, or after, the next `failures` transactions."""

    failures = 0
    applied = False
    writes = 0

    async def txn(self, ops: Sequence[Op]) -> TxnResult:
        self.writes += 1
        if self.failures:
            self.failures -= 1
            if self.applied:
                await super().txn(ops)
            raise Unavailable("no answer")
        return await super().txn(ops)


class World:
    """One store and data store; each engine has a catalog of its own."""

    def __init__(self) -> None:
        self.store, self.keys, self.clock = FailingStore(), Keys(), Clock()
        self.backend = MemoryBackend()
        self.data = DataStore("memory://data", self.backend)

    def catalog(self, data: DataStore | None = None) -> Catalog:
        return Catalog(self.store, self.keys, data or self.data, heartbeat=10.0, clock=self.clock, rng=random.Random(1))

    async def entry(self, key: CatalogKey = KEY) -> CatalogEntry | None:
        place = self.keys.cached(digest_of_key(key))
        found = await self.store.get(place)
        return decode(CatalogEntry, place, found.value) if found else None


def test_the_digest_is_of_the_content() -> None:
    digest = digest_of_key(KEY)
    same = CatalogKey(KEY.task, "1", {"y": {"b": 2, "a": 1}, "x": 1}, {"out": "int"})
    assert digest_of_key(same) == digest
    others = [
        CatalogKey("default/default/echo/job2", "1", KEY.inputs, KEY.outputs),
        CatalogKey(KEY.task, "2", KEY.inputs, KEY.outputs),
        CatalogKey(KEY.task, "1", {**KEY.inputs, "x": 2}, KEY.outputs),
        CatalogKey(KEY.task, "1", {**KEY.inputs, "z": None}, KEY.outputs),
        CatalogKey(KEY.task, "1", KEY.inputs, {"out": "str"}),
        CatalogKey(KEY.task, "1", {**KEY.inputs, "x": Blob("s3://a")}, KEY.outputs),
    ]
    assert len({digest, *map(digest_of_key, others)}) == 7


def test_parts_of_a_name_do_not_run_together() -> None:
    one = key_of(TaskSpec(id="i", type="t", project="a/b", domain="c"), {})
    other = key_of(TaskSpec(id="i", type="t", project="a", domain="b/c"), {})
    assert one.task != other.task
    assert key_of(TaskSpec(id="i", type="t", name="n"), {}) == key_of(TaskSpec(id="j", type="t", name="n"), {})


async def test_a_result_is_found_by_its_key() -> None:
    world = World()
    catalog = world.catalog()
    assert (await catalog.look_up(KEY)).status is MISS
    assert (await catalog.put(KEY, {"out": 1}, metadata={"execution": "a"})).status is POPULATED
    answer = await world.catalog().look_up(KEY)
    assert (answer.status, answer.outputs) == (HIT, {"out": 1})
    entry = require(await world.entry())
    assert entry.result is not None
    assert (entry.task, entry.result.metadata, entry.result.size) == (KEY.task, {"execution": "a"}, 9)


async def test_a_new_result_replaces_the_former_document() -> None:
    world = World()
    catalog = world.catalog()
    for value in (1, 1, 2):
        await catalog.put(KEY, {"out": value})
    assert (await catalog.look_up(KEY)).outputs == {"out": 2}
    assert len(world.backend.blobs) == 1


async def test_a_missing_or_damaged_document_is_a_miss_that_heals() -> None:
    world = World()
    catalog = world.catalog()
    for document in (None, b"{}"):
        await catalog.put(KEY, {"out": 1})
        for path in list(world.backend.blobs):
            if document is None:
                del world.backend.blobs[path]
            else:
                world.backend.blobs[path] = document
        answer = await catalog.look_up(KEY)
        assert (answer.status, answer.outputs) == (MISS, None)
        assert answer.reason
        await catalog.put(KEY, {"out": 1})
        assert (await catalog.look_up(KEY)).status is HIT


async def test_a_broken_entry_is_a_miss_that_heals() -> None:
    world = World()
    await world.store.put(world.keys.cached(digest_of_key(KEY)), b"{broken")
    assert (await world.catalog().look_up(KEY)).status is MISS
    assert (await world.catalog().reserve(KEY, "a/0")).held
    await world.catalog().put(KEY, {"out": 1})
    assert (await world.catalog().look_up(KEY)).status is HIT


async def test_failures_are_statuses() -> None:
    class Down(MemoryBackend):
        async def read(self, path: str, limit: int) -> bytes:
            raise DataUnavailable(path, "down")

        async def write(self, path: str, content: bytes) -> None:
            raise DataUnavailable(path, "down")

    world = World()
    await world.catalog().put(KEY, {"out": 1})
    down = world.catalog(DataStore("memory://data", Down()))
    answer = await down.look_up(KEY)
    assert answer.status is CacheStatus.LOOKUP_FAILURE
    assert answer.reason.endswith("down")
    assert (await down.put(KEY, {"out": 1})).status is CacheStatus.PUT_FAILURE
    world.store.failures = 1
    assert (await world.catalog().put(KEY, {"out": 2})).status is CacheStatus.PUT_FAILURE
    assert (await world.catalog().put(KEY, {"out": {3}})).status is CacheStatus.PUT_FAILURE
    bad = CatalogKey("t", "1", {"x": object()})
    assert (await world.catalog().look_up(bad)).status is CacheStatus.LOOKUP_FAILURE


async def test_one_of_many_gets_the_reservation() -> None:
    world = World()
    catalogs = [world.catalog() for _ in range(20)]
    answers = await asyncio.gather(*(each.reserve(KEY, f"e{at}/0") for at, each in enumerate(catalogs)))
    assert [answer.held for answer in answers].count(True) == 1
    assert len({answer.owner for answer in answers}) == 1


async def test_a_reservation_is_extended_by_its_owner_and_lost_by_silence() -> None:
    world = World()
    one, other = world.catalog(), world.catalog()
    first = await one.reserve(KEY, owner_of("e1", 0))
    assert (first.held, first.owner, first.until) == (True, "e1/0", world.clock.now + 30)
    for _ in range(10):
        world.clock.now += 10
        assert (await one.reserve(KEY, "e1/0")).held
        refused = await other.reserve(KEY, "e2/0")
        assert (refused.held, refused.owner) == (False, "e1/0")
    world.clock.now = refused.until - 0.001
    assert not (await other.reserve(KEY, "e2/0")).held
    world.clock.now = refused.until
    assert (await other.reserve(KEY, "e2/0")).held
    assert not (await one.reserve(KEY, "e1/0")).held  # lost
    await one.release(KEY, "e1/0")
    assert (await one.reserve(KEY, "e3/0")).owner == "e2/0"


async def test_a_fresh_reservation_is_not_written_again() -> None:
    world = World()
    catalog = world.catalog()
    first = await catalog.reserve(KEY, "e1/0")
    world.clock.now += 9
    assert (await catalog.reserve(KEY, "e1/0")) == first
    assert world.store.writes == 1
    world.clock.now += 2
    assert (await catalog.reserve(KEY, "e1/0")).until > first.until


async def test_another_attempt_is_another_owner() -> None:
    world = World()
    catalog = world.catalog()
    assert (await catalog.reserve(KEY, owner_of("e", 0))).held
    assert not (await catalog.reserve(KEY, owner_of("e", 1))).held
    await catalog.release(KEY, owner_of("e", 0))
    assert (await catalog.reserve(KEY, owner_of("e", 1))).held


async def test_a_result_ends_its_owners_reservation_alone() -> None:
    world = World()
    one, other = world.catalog(), world.catalog()
    await one.reserve(KEY, "e1/0")
    await other.put(KEY, {"out": 1}, owner="e2/0")  # had lost its reservation
    entry = require(await world.entry())
    assert entry.reservation is not None
    assert (await other.reserve(KEY, "e3/0")).cached
    await one.put(KEY, {"out": 1}, owner="e1/0")
    answer = await other.reserve(KEY, "e3/0")
    assert (answer.held, answer.cached) == (True, True)
    await other.release(KEY, "e3/0")
    assert (await one.look_up(KEY)).status is HIT


async def test_release_leaves_nothing_behind_and_is_idempotent() -> None:
    world = World()
    catalog = world.catalog()
    await catalog.release(KEY, "e1/0")
    await catalog.reserve(KEY, "e1/0")
    await catalog.release(KEY, "e1/0")
    await catalog.release(KEY, "e1/0")
    assert await world.entry() is None


@pytest.mark.parametrize("applied", [False, True])
async def test_a_call_without_an_answer_can_be_repeated(applied: bool) -> None:
    world = World()
    catalog = world.catalog()
    world.store.applied = applied
    for call in (catalog.reserve, catalog.release):
        world.store.failures = 1
        with pytest.raises(Unavailable):
            await call(KEY, "e1/0")
        await call(KEY, "e1/0")
    assert await world.entry() is None


def target(world: World, execution: str) -> OutputFiles:
    return OutputFiles(world.data, execution, 0)


async def test_batches_copy_results() -> None:
    world = World()
    catalog = world.catalog()
    typed: AsyncCatalog = catalog
    keys = [CatalogKey("t", "1", {"x": number}) for number in range(25)]
    await typed.upload([UploadRequest(key, MemoryOutputReader({"y": key.inputs["x"]})) for key in keys[:20]])
    targets = [target(world, f"e{at}") for at in range(25)]
    response = await typed.download([DownloadRequest(*each) for each in zip(keys, targets, strict=True)])
    assert response.cached_results == (True,) * 20 + (False,) * 5
    assert response.get_cached_count() == 20
    assert await world.data.read(targets[7].get_output_path()) == b'{"y":7}'


async def test_a_repeated_batch_joins_until_its_response_is_taken() -> None:
    world = World()
    catalog = world.catalog()

    def request() -> list[DownloadRequest]:
        return [DownloadRequest(KEY, target(world, "e"))]

    batch = catalog.download(request())
    assert not batch.done()
    with pytest.raises(asyncio.InvalidStateError):
        batch.result()
    assert catalog.download(request()) is batch
    waiting = asyncio.create_task(asyncio.wait_for(batch, 100))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (await batch).cached_results == (False,)
    await catalog.put(KEY, {"out": 1})
    assert (await catalog.download(request())).cached_results == (True,)
    assert batch.result().cached_results == (False,)


async def test_a_failed_batch_is_tried_again_and_does_not_stick() -> None:
    class Flaky(MemoryOutputReader):
        calls = 0

        async def read(self) -> Any:
            self.calls += 1
            if self.calls <= 2:
                raise DataUnavailable("x", "down")
            return await super().read()

    world = World()
    catalog = world.catalog()
    await catalog.upload([UploadRequest(KEY, Flaky({"out": 1}))])
    failed = MemoryOutputReader({}, OutputError(ExecutionError("E", "why", ErrorKind.USER)))
    reader = MemoryOutputReader()
    with pytest.raises(CatalogFailure, match="OutputsNotFound"):
        await catalog.upload([UploadRequest(KEY, reader), UploadRequest(KEY, failed)])
    await catalog.upload([UploadRequest(KEY, MemoryOutputReader({"out": 2}))])
    assert (await catalog.look_up(KEY)).outputs == {"out": 2}


async def test_batches_that_are_never_taken_are_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controllers.tasks.io.catalog.MAX_BATCHES", 5)
    catalog = World().catalog()
    for number in range(20):
        batch = catalog.upload([UploadRequest(CatalogKey("t", "1", {"x": number}), MemoryOutputReader({"y": 1}))])
        await asyncio.wait([batch.task])
    assert len(catalog._batches) == 5


async def test_closing_ends_what_is_in_progress() -> None:
    class Hanging(MemoryOutputReader):
        async def read(self) -> Any:
            await asyncio.Event().wait()

    catalog = World().catalog()
    batch = catalog.upload([UploadRequest(KEY, Hanging())])
    await asyncio.sleep(0)
    await catalog.close()
    assert batch.done()
    with pytest.raises(asyncio.CancelledError):
        batch.result()
