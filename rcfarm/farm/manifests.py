"""Manifests: a cache to read them through, and the collector of those that nothing references any more.

A farm needs the manifest of each RC that it owns, for its pod id and for its requirements on nodes. Manifests are
immutable and named by their digest, so a cached one is never stale. One read is in flight at a time, for every request
that has come since the last one and for the manifests that are expected to be needed: up to 64 per transaction, or the
whole folder when many are missing, as at the start of a farm.

Manifests are shared, so a farm that drops a reference can't simply delete one. It notes each manifest that one of its
RCs no longer names, and later checks whether any spec or intent still names it. The order makes it safe: first the
manifest's index is read, then the references, and the delete is a compare-and-set on that index. A client that
references a manifest writes it again in the same transaction, with other flags so that its index always rises, and the
delete fails. The notes of a farm that was killed are lost. So a single farm periodically searches the whole folder for
manifests that were there at the last search and that nothing references, and notes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog

from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import (
    MAX_TXN_OPS,
    BadRecord,
    Entry,
    Op,
    OwnershipLost,
    Store,
    StoreError,
    TxnConflict,
    Unavailable,
)
from store.schema.keys import Keys
from store.schema.manifest import BadManifest, Manifest, digest, parse
from store.schema.records import decode
from store.timing import give_way, in_turns

log = structlog.get_logger(__name__)

WHOLE_FOLDER = 4 * MAX_TXN_OPS  # from this many missing manifests on, one listing is cheaper
SETTLE = 1.0  # seconds between a drop and the check, so that many drops are checked together
WORK_SHARE = 0.01  # share of the time spent on reading references, at most
BATCH = MAX_TXN_OPS - 1
SWEEP_INTERVALS = 10  # a full search is expensive, and only needed after a farm was killed

_GIVE_AGAIN = "give the RC its manifest again (`rcfarm rc apply -f FILE`)"

Found = Manifest | str  # a text: why the manifest is unusable


class ManifestUnusable(RcfarmError):
    """The manifest is missing, damaged or malformed; the message says which and what to do."""


class Manifests:
    """Reads manifests through a cache."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys
        self._cache: dict[str, Found] = {}
        self._wanted: dict[str, asyncio.Future[Found]] = {}
        self._expected: set[str] = set()
        self._reading = asyncio.Lock()

    async def get(self, sha256: str) -> Manifest:
        """Return the manifest. Raises `ManifestUnusable`, and the store's `Unavailable` and `Denied`."""
        found = self._cache.get(sha256)
        if found is None:
            is_first = not self._wanted  # since the start of a read: it makes the next one, for all requests
            answer = self._wanted.setdefault(sha256, asyncio.get_running_loop().create_future())
            if is_first:
                await self._fetch_wanted()
            found = await asyncio.shield(answer)
        if isinstance(found, str):
            raise ManifestUnusable(f"manifest {sha256[:12]} {found}")
        return found

    def keep(self, wanted: Iterable[str]) -> None:
        """Drop every cached manifest that is not in `wanted`."""
        self._cache = {sha256: self._cache[sha256] for sha256 in set(wanted) if sha256 in self._cache}

    def expect(self, wanted: Iterable[str]) -> None:
        """Have these manifests read together with the next one that is not cached."""
        self._expected.update(wanted)

    async def _fetch_wanted(self) -> None:
        wanted = self._wanted
        try:
            async with self._reading:
                await asyncio.sleep(0)
                self._wanted = {}
                missing = (wanted.keys() | self._expected) - self._cache.keys()
                self._expected.clear()
                if missing:
                    await self._read(sorted(missing), wanted)
        except BaseException as error:  # also a cancellation: other requests wait for this read
            if self._wanted is wanted:
                self._wanted = {}
            interrupted = Unavailable("reading manifests was interrupted")
            for answer in wanted.values():
                if not answer.done():
                    answer.set_exception(error if isinstance(error, StoreError) else interrupted)
                    answer.exception()  # marks it as retrieved: our own request raises instead
            raise
        for sha256, answer in wanted.items():
            if not answer.done():
                answer.set_result(self._cache.get(sha256, f"is not in the store: {_GIVE_AGAIN}"))

    async def _read(self, missing: list[str], requests: Mapping[str, asyncio.Future[Found]]) -> None:
        """Read and cache manifests, and answer the requests for them. Bytes of another digest are not cached: they may
        be repaired."""
        entries: list[Entry] = []
        if len(missing) >= WHOLE_FOLDER:
            listing = await self._store.list(self._keys.manifests)
            entries = [entry for entry in listing.entries if self._keys.name_of(entry.key) not in self._cache]
        else:  # get-tree, because a get of a missing key would fail the whole transaction
            reads = [ops.get_tree(self._keys.manifest(sha256)) for sha256 in missing]
            for start in range(0, len(reads), MAX_TXN_OPS):
                entries += (await self._store.txn(reads[start : start + MAX_TXN_OPS])).entries
        for entry in entries:
            await give_way()  # thousands of YAML manifests take seconds, in which leases must be renewed
            sha256 = self._keys.name_of(entry.key)
            found: Found = f"is damaged: its bytes have another digest; {_GIVE_AGAIN}"
            if digest(entry.value) == sha256:
                try:
                    found = parse(entry.value)
                except BadManifest as error:
                    found = f"can't be used: {error}"
                self._cache[sha256] = found
            answer = requests.get(sha256)
            if answer is not None and not answer.done():
                answer.set_result(found)


class _Reference(msgspec.Struct):
    """The fields of specs, rollouts, revisions, intents and deleted RCs that name manifests."""

    manifest: str
    stable: str | bool = ""


class ManifestCollector:
    """Deletes manifests reported to `note` once nothing references them.

    `interval` is the longest pause between checks, in seconds. A full search takes place every `SWEEP_INTERVALS`
    intervals.
    """

    def __init__(
        self, store: Store, keys: Keys, interval: float = 60.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.collected = 0
        self._store, self._keys, self._interval, self._clock = store, keys, interval, clock
        self._dropped: set[str] = set()
        self._wake = asyncio.Event()

    def note(self, manifests: Iterable[str]) -> None:
        """Note that these manifests have lost a reference."""
        self._dropped.update(manifests)
        if self._dropped:
            self._wake.set()

    async def run(self, member_key: str, session: str) -> None:
        """Collect until cancelled. Deletes are fenced by the farm's member record."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(SETTLE)
            self._wake.clear()
            candidates, self._dropped = self._dropped, set()
            began = self._clock()
            try:
                await self._collect(candidates, ops.check_session(member_key, session))
            except StoreError as error:
                log.info("Unused manifests could not be removed; retrying", error=str(error))
                self.note(candidates)
                await asyncio.sleep(self._interval)
            await asyncio.sleep(min(self._interval, (self._clock() - began) / WORK_SHARE))

    async def sweep(self, is_ours: Callable[[], bool]) -> None:
        """Search for unreferenced manifests without a note, until cancelled, while `is_ours()`.

        A manifest must be unreferenced in two searches: an operator may write one by hand and reference it later.
        """
        before: set[str] = set()
        while True:
            await asyncio.sleep(SWEEP_INTERVALS * self._interval)
            if not is_ours():
                before = set()
                continue
            try:
                names = await self._store.keys(self._keys.manifests)
                stored = {self._keys.name_of(name) for name in names}
                self.note((stored & before) - await self._referenced())
            except StoreError as error:
                log.info("Unused manifests could not be searched for; retrying", error=str(error))
            else:
                before = stored

    async def _collect(self, candidates: Iterable[str], fence: Op) -> None:
        """Delete those of the candidates that nothing references, unless they were written again after the check."""
        found = [await self._store.get(self._keys.manifest(sha256)) for sha256 in sorted(candidates)]
        entries = [entry for entry in found if entry]
        referenced = await self._referenced() if entries else set()
        doomed = [entry for entry in entries if self._keys.name_of(entry.key) not in referenced]
        while doomed:
            batch = doomed[:BATCH]
            try:
                await self._store.txn([fence, *(ops.delete_cas(entry.key, entry.modify_index) for entry in batch)])
            except OwnershipLost:
                raise
            except TxnConflict as conflict:
                for number in sorted((failure.op_index - 1 for failure in conflict.failures), reverse=True):
                    del doomed[number]
            else:
                self.collected += len(batch)
                del doomed[:BATCH]

    async def _referenced(self) -> set[str]:
        """Return every manifest that a record of an RC, of a deleted one, or an intent names. Raises `StoreError` if
        one of them is undecodable."""
        specs = await self._store.list(self._keys.rcs, consistent=True)
        intents = await self._store.list(self._keys.intents, consistent=True)
        # After the RCs: what is deleted in between is seen here. What is restored writes its manifest again.
        deleted = await self._store.list(self._keys.deleted, consistent=True)
        entries = [entry async for entry in in_turns(specs.entries) if self._keys.names_manifests(entry.key)]
        entries += [*intents.entries, *deleted.entries]
        try:
            found = [decode(_Reference, entry.key, entry.value) async for entry in in_turns(entries)]
        except BadRecord as error:
            raise StoreError(f"references are unknown while a record is undecodable: {error}") from error
        return {each.manifest for each in found} | {each.stable for each in found if isinstance(each.stable, str)}
