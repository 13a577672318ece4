"""Manifests by digest: fetched many at a time, verified, kept.

A farm needs the manifest of each RC that it owns, for its pod id and for what it asks of a node. They are immutable,
so a cached one is never wrong. Requests that come together are read together: up to 64 per transaction, or the whole
folder in one go when many are missing, as at the start of a farm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from store import ops
from store.keys import Keys
from store.kv import MAX_TXN_OPS, Entry, Store, StoreError, Unavailable
from store.manifest import BadManifest, Manifest, digest, parse
from store.turns import give_way

WHOLE_FOLDER = 4 * MAX_TXN_OPS  # from this many missing ones on, one listing is cheaper

Found = Manifest | str  # a text says why there is no manifest that can be used


class ManifestUnusable(Exception):
    """The manifest is missing, damaged or malformed; the message says which and what to do."""


class Manifests:
    """Reads manifests through a cache."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys
        self._cache: dict[str, Found] = {}
        self._wanted: dict[str, asyncio.Future[Found]] = {}

    async def get(self, sha256: str) -> Manifest:
        """The manifest. Raises `ManifestUnusable`, and the store's `Unavailable` and `Denied`."""
        found = self._cache.get(sha256) or await self._fetch(sha256)
        if isinstance(found, str):
            raise ManifestUnusable(f"manifest {sha256[:12]} {found}")
        return found

    def keep(self, wanted: Iterable[str]) -> None:
        """Drop every cached manifest that is not `wanted`."""
        self._cache = {sha256: self._cache[sha256] for sha256 in set(wanted) if sha256 in self._cache}

    async def _fetch(self, sha256: str) -> Found:
        """Ask for one manifest. The first of several requests in a turn of the loop reads for all of them."""
        leads = not self._wanted
        answer = self._wanted.setdefault(sha256, asyncio.get_running_loop().create_future())
        if leads:
            await self._fetch_wanted()
        return await asyncio.shield(answer)

    async def _fetch_wanted(self) -> None:
        wanted = self._wanted
        try:
            await asyncio.sleep(0)
            self._wanted = {}
            found = await self._verified(await self._read(list(wanted)))
        except BaseException as error:  # also a cancellation: whoever waits for this reading must not wait for ever
            if self._wanted is wanted:
                self._wanted = {}
            interrupted = Unavailable("the reading of manifests was interrupted")
            for answer in wanted.values():
                answer.set_exception(error if isinstance(error, StoreError) else interrupted)
                answer.exception()  # our own request is answered by what we raise
            raise
        for sha256, answer in wanted.items():
            missing = "is not in the store: give the RC its manifest again"
            answer.set_result(found.get(sha256) or self._cache.get(sha256, missing))

    async def _verified(self, entries: list[Entry]) -> dict[str, Found]:
        """What was read, by digest; the cache keeps it. Bytes of another digest are not kept: they may be put right."""
        found: dict[str, Found] = {}
        for entry in entries:
            await give_way()  # thousands of YAML manifests take seconds, in which leases must be renewed
            sha256 = entry.key.removeprefix(self._keys.manifests)
            if digest(entry.value) == sha256:
                found[sha256] = self._cache[sha256] = _parsed(entry.value)
            else:
                found[sha256] = "is damaged: its bytes have another digest; give the RC its manifest again"
        return found

    async def _read(self, wanted: list[str]) -> list[Entry]:
        if len(wanted) >= WHOLE_FOLDER:
            listing = await self._store.list(self._keys.manifests)
            return [
                entry for entry in listing.entries if entry.key.removeprefix(self._keys.manifests) not in self._cache
            ]
        # get-tree, because a get of a key that is missing would refuse the whole transaction
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
