"""The catalog: results of executions by what they were computed from, and the right to compute one.

The model: a key names a task, its cache version, its declared outputs and its inputs. The document of a result is a
blob of the catalog's own, named by its content; the store's entry refers to it. So a result outlives the files of the
execution that produced it, and an entry never refers to half of a document.

A *reservation* makes several executions with the same key compute the result once. It is a time-limited part of the
entry: its owner extends it by reserving again at least every `heartbeat` seconds, putting the result ends it in the
same write, and `release` ends it otherwise. After three heartbeats without an extension another owner may take it. An
owner that has lost it may continue: results of one key are equal, and the last one put stays. Engines compare the end
with their own clocks, so a difference between these shortens or lengthens it.

Nothing here fails an execution: an answer carries a status and, if something did not work, the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import msgspec

from controllers.tasks.api.data import (
    CatalogFuture,
    CatalogKey,
    DownloadRequest,
    DownloadResponse,
    Literals,
    OutputError,
    UploadRequest,
)
from controllers.tasks.api.errors import TaskError
from controllers.tasks.api.phase import CacheStatus
from controllers.tasks.io.data import BadReference, DataError, DataNotFound, DataStore, DataTooLarge
from controllers.tasks.io.literals import BadLiteral, decode_literals, digest_of, encode_literals
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Store, StoreError
from store.schema.keys import Keys
from store.schema.records import decode, encode, rfc3339
from store.schema.tasks import CachedResult, CatalogEntry, Reservation, TaskSpec
from store.timing import Backoff, retried

HEARTBEAT = 10.0  # seconds
EXPIRES_AFTER = 3  # heartbeats
WORKERS = 10  # results of batches that are copied at the same time
ATTEMPTS = 3  # of one copy in a batch
MAX_BATCHES = 10_000  # that are remembered until they are asked for
_READS = 3  # of an entry whose document another engine replaces

R = TypeVar("R")
T = TypeVar("T")


class CatalogFailure(TaskError):
    """A batch could not be copied, or other engines change an entry all the time; the text names the result."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the catalog did. `outputs`: of a HIT. `reason`: why a call failed, or why an entry is no hit; else ""."""

    status: CacheStatus
    outputs: Literals | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReservationAnswer:
    """`held`: the caller may compute. Otherwise `owner` does, at least until `until` (seconds since the epoch).
    `cached`: there is a result already."""

    held: bool
    owner: str
    until: float
    cached: bool


def key_of(spec: TaskSpec, inputs: Literals) -> CatalogKey:
    """Return the key of an execution's result. Projects and domains have results of their own."""
    task = "/".join(part.replace("/", "%2F") for part in (spec.project, spec.domain, spec.type, spec.name or spec.id))
    return CatalogKey(task=task, cache_version=spec.cache_version, inputs=dict(inputs), outputs=spec.outputs)


def owner_of(execution: str, attempt: int) -> str:
    """Return the name under which an attempt reserves."""
    return f"{execution}/{attempt}"


def digest_of_key(key: CatalogKey) -> str:
    """Return the key's digest, as 64 hexadecimal digits. Raises `BadLiteral` for inputs that have no JSON form."""
    identity = [1, key.task, key.cache_version, sorted(key.outputs.items()), digest_of(key.inputs)]
    return hashlib.sha256(msgspec.json.encode(identity)).hexdigest()


class Catalog:
    """Results over a store and a data store; belongs to one event loop. `close` it there.

    `heartbeat`: seconds within which owners extend their reservations. `clock`: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        data: DataStore,
        *,
        heartbeat: float = HEARTBEAT,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.heartbeat = heartbeat
        self._store, self._keys, self._data = store, keys, data
        self._clock, self._rng = clock, rng or random.Random()
        self._workers = asyncio.Semaphore(WORKERS)
        self._batches: OrderedDict[object, CatalogFuture[Any]] = OrderedDict()

    async def look_up(self, key: CatalogKey) -> Answer:
        """Return HIT with the outputs, MISS, or LOOKUP_FAILURE. A missing or damaged document is a MISS."""
        reason = ""
        try:
            digest = digest_of_key(key)
            for _ in range(_READS):
                result = (await self._read(digest))[0].result
                if result is None:
                    break
                try:
                    document = await self._data.read(result.outputs)
                except (DataNotFound, DataTooLarge, BadReference) as error:
                    reason = str(error)
                    continue  # another engine may have replaced it
                if hashlib.sha256(document).hexdigest() != result.sha256:
                    return Answer(CacheStatus.MISS, reason=f"{result.outputs} has changed")
                return Answer(CacheStatus.HIT, decode_literals(document))
            return Answer(CacheStatus.MISS, reason=reason)
        except (StoreError, DataError, BadLiteral) as error:
            return Answer(CacheStatus.LOOKUP_FAILURE, reason=str(error))

    async def put(
        self, key: CatalogKey, outputs: Literals, *, owner: str = "", metadata: dict[str, str] | None = None
    ) -> Answer:
        """Keep a result and end `owner`'s reservation: POPULATED, or PUT_FAILURE, after which the reservation stays."""
        former: list[str] = []

        def populated(now: float, entry: CatalogEntry) -> CatalogEntry:
            former[:] = [entry.result.outputs] if entry.result else []
            held = entry.reservation
            result = CachedResult(
                outputs=reference,
                sha256=content,
                size=len(document),
                created_at=rfc3339(datetime.fromtimestamp(now, UTC)),
                metadata=metadata or {},
            )
            reservation = None if held is None or held.owner == owner else held
            return _changed(entry, key, result=result, reservation=reservation)

        try:
            digest, document = digest_of_key(key), encode_literals(outputs)
            content = hashlib.sha256(document).hexdigest()
            folder = self._data.construct_reference(self._data.base, "catalog", digest[:2], digest)
            reference = f"{folder}/{content}.json"
            await self._data.write(reference, document)
            await self._change(digest, populated)
        except (StoreError, DataError, CatalogFailure, BadLiteral) as error:
            return Answer(CacheStatus.PUT_FAILURE, reason=str(error))
        if former and former[0] != reference:
            with contextlib.suppress(DataError):
                await self._data.delete(former[0])
        return Answer(CacheStatus.POPULATED)

    async def reserve(self, key: CatalogKey, owner: str) -> ReservationAnswer:
        """Take or extend the reservation, if no other owner has it. Raises `StoreError`, `CatalogFailure` and
        `BadLiteral`.

        A reservation of which two thirds are left is not written again.
        """
        digest = digest_of_key(key)

        def reserved(now: float, entry: CatalogEntry) -> CatalogEntry:
            held = entry.reservation
            if held is not None and (held.until - now > lease * 2 / 3 if held.owner == owner else held.until > now):
                return entry
            return _changed(entry, key, reservation=Reservation(owner, now + lease))

        lease = self.heartbeat * EXPIRES_AFTER
        entry = await self._change(digest, reserved)
        assert entry.reservation is not None
        holder = entry.reservation
        return ReservationAnswer(holder.owner == owner, holder.owner, holder.until, entry.result is not None)

    async def release(self, key: CatalogKey, owner: str) -> None:
        """End the owner's reservation; no error if it has none. Raises as `reserve`."""

        def released(_: float, entry: CatalogEntry) -> CatalogEntry:
            if entry.reservation is None or entry.reservation.owner != owner:
                return entry
            return msgspec.structs.replace(entry, reservation=None)

        await self._change(digest_of_key(key), released)

    def download(self, requests: Sequence[DownloadRequest]) -> CatalogFuture[DownloadResponse]:
        """Start to copy results to the targets' output paths; see `AsyncCatalog`."""
        identity = ("download", *((digest_of_key(each.key), each.target.get_output_path()) for each in requests))
        return self._batch(identity, lambda: self._download(tuple(requests)))

    def upload(self, requests: Sequence[UploadRequest]) -> CatalogFuture[None]:
        """Start to keep results; see `AsyncCatalog`."""
        identity = ("upload", *(digest_of_key(each.key) for each in requests))
        return self._batch(identity, lambda: self._upload(tuple(requests)))

    async def close(self) -> None:
        """Cancel the batches in progress."""
        tasks = [batch.task for batch in self._batches.values()]
        self._batches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, digest: str) -> tuple[CatalogEntry, int]:
        """Return the entry, an empty one if there is none or it can't be read, and its modify index."""
        place = self._keys.cached(digest)
        entry: Entry | None = await self._store.get(place)
        if entry is None:
            return CatalogEntry(), 0
        try:
            return decode(CatalogEntry, place, entry.value), entry.modify_index
        except BadRecord:
            return CatalogEntry(), entry.modify_index

    async def _change(self, digest: str, change: Callable[[float, CatalogEntry], CatalogEntry]) -> CatalogEntry:
        """Apply a change to the newest entry, and return the result. An entry without content is deleted."""
        place = self._keys.cached(digest)

        async def attempt() -> CatalogEntry:
            entry, index = await self._read(digest)
            changed = change(self._clock(), entry)
            if changed != entry:
                empty = changed.result is None and changed.reservation is None
                write = ops.delete_cas(place, index) if empty else ops.cas(place, encode(changed), index)
                await self._store.txn([write])
            return changed

        return await ops.retry_conflicts(f"the catalog's entry {place}", attempt, rng=self._rng, error=CatalogFailure)

    def _batch(self, identity: object, start: Callable[[], Coroutine[Any, Any, T]]) -> CatalogFuture[T]:
        """Return the batch of that identity whose response was not taken yet, or start one."""
        batch = self._batches.get(identity)
        if batch is None:
            while len(self._batches) >= MAX_BATCHES and next(iter(self._batches.values())).done():
                self._batches.popitem(last=False)
            batch = CatalogFuture(asyncio.create_task(start()), lambda: self._batches.pop(identity, None))
            self._batches[identity] = batch
        return cast("CatalogFuture[T]", batch)

    async def _download(self, requests: Sequence[DownloadRequest]) -> DownloadResponse:
        async def copy(request: DownloadRequest) -> bool:
            answer = await self.look_up(request.key)
            if answer.status is CacheStatus.LOOKUP_FAILURE:
                raise CatalogFailure(f"{request.key.task}: {answer.reason}")
            if answer.outputs is not None:
                try:
                    await self._data.write(request.target.get_output_path(), encode_literals(answer.outputs))
                except DataError as error:
                    raise CatalogFailure(f"{request.key.task}: {error}") from error
            return answer.outputs is not None

        return DownloadResponse(tuple(await self._each(requests, copy)))

    async def _upload(self, requests: Sequence[UploadRequest]) -> None:
        async def copy(request: UploadRequest) -> None:
            try:
                outputs = await request.artifact_data.read()
            except DataError as error:
                raise CatalogFailure(f"{request.key.task}: {error}") from error
            if isinstance(outputs, OutputError):
                raise CatalogFailure(f"{request.key.task}: {outputs.error}")
            answer = await self.put(request.key, outputs, metadata=request.metadata)
            if answer.status is CacheStatus.PUT_FAILURE:
                raise CatalogFailure(f"{request.key.task}: {answer.reason}")

        await self._each(requests, copy)

    async def _each(self, requests: Sequence[R], copy: Callable[[R], Awaitable[T]]) -> list[T]:
        """Return what `copy` returns for each request. All have ended when the first error is raised."""

        async def one(request: R) -> T:
            async with self._workers:
                backoff = Backoff(0.2, 5.0, rng=self._rng)
                return await retried(lambda: copy(request), on=CatalogFailure, backoff=backoff, attempts=ATTEMPTS)

        results = await asyncio.gather(*map(one, requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return cast("list[T]", results)


def _changed(entry: CatalogEntry, key: CatalogKey, **changes: Any) -> CatalogEntry:
    return msgspec.structs.replace(entry, task=key.task, cache_version=key.cache_version, **changes)
