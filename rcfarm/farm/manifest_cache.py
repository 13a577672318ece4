"""Manifests by digest: fetched in batches, verified, cached.

A farm needs the manifest of each RC that it owns, for its pod id and for its requirements on nodes. They are immutable,
so a cached one is never stale. One read is in flight at a time, for every request that has come since the last one and
for the manifests that are expected to be needed: up to 64 per transaction, or the whole folder when many are missing,
as at the start of a farm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, Entry, Store, StoreError, Unavailable
from store.schema.keys import Keys
from store.schema.manifest import BadManifest, Manifest, digest, parse
from store.turns import give_way

WHOLE_FOLDER = 4 * MAX_TXN_OPS  # from this many missing manifests on, one listing is cheaper

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
        found = self._cache.get(sha256) or await self._fetch(sha256)
        if isinstance(found, str):
            raise ManifestUnusable(f"manifest {sha256[:12]} {found}")
        return found

    def keep(self, wanted: Iterable[str]) -> None:
        """Drop every cached manifest that is not in `wanted`."""
        self._cache = {sha256: self._cache[sha256] for sha256 in set(wanted) if sha256 in self._cache}

    def expect(self, wanted: Iterable[str]) -> None:
        """Have these manifests read together with the next one that is not cached."""
        self._expected.update(wanted)

    async def _fetch(self, sha256: str) -> Found:
        """Ask for one manifest. The first request after the start of a read makes the next read, for all of them."""
        leads = not self._wanted
        answer = self._wanted.setdefault(sha256, asyncio.get_running_loop().create_future())
        if leads:
            await self._fetch_wanted()
        return await asyncio.shield(answer)

    async def _fetch_wanted(self) -> None:
        wanted = self._wanted
        try:
            async with self._reading:
                await asyncio.sleep(0)
                self._wanted = {}
                missing = (wanted.keys() | self._expected) - self._cache.keys()
                self._expected.clear()
                if missing:
                    await self._verify(await self._read(sorted(missing)), wanted)
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
                answer.set_result(self._cache.get(sha256, "is not in the store: give the RC its manifest again"))

    async def _verify(self, entries: list[Entry], wanted: Mapping[str, asyncio.Future[Found]]) -> None:
        """Cache the entries' manifests, and answer the requests for them. Bytes of another digest are not cached: they
        may be repaired."""
        for entry in entries:
            await give_way()  # thousands of YAML manifests take seconds, in which leases must be renewed
            sha256 = self._keys.name_of(entry.key)
            found: Found = "is damaged: its bytes have another digest; give the RC its manifest again"
            if digest(entry.value) == sha256:
                found = self._cache[sha256] = _parsed(entry.value)
            answer = wanted.get(sha256)
            if answer is not None and not answer.done():
                answer.set_result(found)

    async def _read(self, wanted: list[str]) -> list[Entry]:
        if len(wanted) >= WHOLE_FOLDER:
            listing = await self._store.list(self._keys.manifests)
            return [entry for entry in listing.entries if self._keys.name_of(entry.key) not in self._cache]
        # get-tree, because a get of a missing key would fail the whole transaction
        reads = [ops.get_tree(self._keys.manifest(sha256)) for sha256 in wanted]
        entries: list[Entry] = []
        for start in range(0, len(reads), MAX_TXN_OPS):
            entries += (await self._store.txn(reads[start : start + MAX_TXN_OPS])).entries
        return entries


def _parsed(raw: bytes) -> Found:
    try:
        return parse(raw)
    except BadManifest as error:
        return f"can't be used: {error}"
