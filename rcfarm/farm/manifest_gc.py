"""Delete manifests that nothing references any more.

Manifests are immutable and shared, so a farm that drops a reference can't simply delete one. It notes each manifest
that one of its RCs no longer names, and later checks whether any spec or intent still names it. The order makes it
safe: first the manifest's index is read, then the references, and the delete is a compare-and-set on that index. A
client that references a manifest writes it again in the same transaction, with other flags so that its index always
rises, and the delete fails.

The notes of a farm that was killed are lost. So a single farm periodically searches the whole folder for manifests that
were there at the last search and that nothing references, and notes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, BadRecord, Entry, Op, OwnershipLost, Store, StoreError, TxnConflict
from store.schema.keys import Keys
from store.schema.records import decode
from store.turns import in_turns

log = structlog.get_logger(__name__)

SETTLE = 1.0  # seconds between a drop and the check, so that many drops are checked together
WORK_SHARE = 0.01  # share of the time spent on reading references, at most
BATCH = MAX_TXN_OPS - 1
SWEEP_INTERVALS = 10  # a full search is expensive, and only needed after a farm was killed


class _Reference(msgspec.Struct):
    """The field of specs and intents that names a manifest."""

    manifest: str


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
                self.collected += await self._collect(candidates, ops.check_session(member_key, session))
            except StoreError as error:
                log.info("Manifests could not be collected; retrying", error=str(error))
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
                log.info("Manifests could not be searched; retrying", error=str(error))
            else:
                before = stored

    async def _collect(self, candidates: set[str], fence: Op) -> int:
        entries = [
            entry for sha256 in sorted(candidates) if (entry := await self._store.get(self._keys.manifest(sha256)))
        ]
        if not entries:
            return 0
        referenced = await self._referenced()
        doomed = [entry for entry in entries if self._keys.name_of(entry.key) not in referenced]
        return sum([await self._delete(doomed[start : start + BATCH], fence) for start in range(0, len(doomed), BATCH)])

    async def _referenced(self) -> set[str]:
        """Return every manifest that a spec or an intent names. Raises `StoreError` if one of them is undecodable."""
        specs = await self._store.list(self._keys.rcs, consistent=True)
        intents = await self._store.list(self._keys.intents, consistent=True)
        entries = [entry async for entry in in_turns(specs.entries) if self._keys.is_spec(entry.key)]
        entries += intents.entries
        try:
            return {decode(_Reference, entry.key, entry.value).manifest async for entry in in_turns(entries)}
        except BadRecord as error:
            raise StoreError(f"references are unknown while a record is undecodable: {error}") from error

    async def _delete(self, doomed: list[Entry], fence: Op) -> int:
        """Delete the manifests that were not written again since they were read. Return their number."""
        while doomed:
            try:
                await self._store.txn([fence, *(ops.delete_cas(entry.key, entry.modify_index) for entry in doomed)])
            except OwnershipLost:
                raise
            except TxnConflict as conflict:
                wanted_again = {failure.op_index - 1 for failure in conflict.failures}
                doomed = [entry for number, entry in enumerate(doomed) if number not in wanted_again]
            else:
                break
        return len(doomed)
