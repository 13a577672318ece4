"""Collecting manifests that nothing refers to any more.

Manifests are immutable and shared, so the one who drops a reference can't simply delete. A farm notes each manifest
that one of its RCs let go of, and after a while looks whether any spec or intent still names it. The order makes it
safe: first the manifest's index is read, then the references, and the delete is a compare-and-set on that index.
Whoever refers to a manifest writes it again in the same transaction, with other flags so that its index rises in any
case, and the delete fails.

What a farm had noted when it was killed is lost. So now and then one farm of all searches the whole folder for
manifests that were there the last time and that nothing refers to, and notes those.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from store import ops
from store.keys import Keys
from store.kv import MAX_TXN_OPS, Entry, Op, OwnershipLost, Store, StoreError, TxnConflict
from store.records import BadRecord, decode
from store.turns import in_turns

log = structlog.get_logger(__name__)

SETTLE = 1.0  # seconds between a drop and the look, so that many drops are looked at together
WORK_SHARE = 0.01  # of the time may go into reading references
BATCH = MAX_TXN_OPS - 1
SWEEP_INTERVALS = 10  # a search of everything is dear, and only makes up for farms that were killed


class _Reference(msgspec.Struct):
    """The one field of specs and intents that matters here."""

    manifest: str


class ManifestCollector:
    """Removes what `note` was told of, once unreferenced. `interval`: at most so many seconds between looks.

    A search of everything takes place after every `SWEEP_INTERVALS` of them.
    """

    def __init__(
        self, store: Store, keys: Keys, interval: float = 60.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.collected = 0
        self._store, self._keys, self._interval, self._clock = store, keys, interval, clock
        self._dropped: set[str] = set()
        self._wake = asyncio.Event()

    def note(self, manifests: Iterable[str]) -> None:
        """These manifests have lost a reference."""
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
                log.info("Manifests can't be collected yet", error=str(error))
                self.note(candidates)
                await asyncio.sleep(self._interval)
            await asyncio.sleep(min(self._interval, (self._clock() - began) / WORK_SHARE))

    async def sweep(self, is_ours: Callable[[], bool]) -> None:
        """Search for what nobody has noted, until cancelled, whenever it is this farm's turn.

        A manifest has to lie there for two searches: somebody may write one by hand and refer to it a little later.
        """
        before: set[str] = set()
        while True:
            await asyncio.sleep(SWEEP_INTERVALS * self._interval)
            if not is_ours():
                before = set()
                continue
            try:
                names = await self._store.keys(self._keys.manifests)
                stored = {name.removeprefix(self._keys.manifests) for name in names}
                self.note((stored & before) - await self._referenced())
            except StoreError as error:
                log.info("Manifests can't be searched yet", error=str(error))
            else:
                before = stored

    async def _collect(self, candidates: set[str], fence: Op) -> int:
        entries = [
            entry for sha256 in sorted(candidates) if (entry := await self._store.get(self._keys.manifest(sha256)))
        ]
        if not entries:
            return 0
        referenced = await self._referenced()
        doomed = [entry for entry in entries if entry.key.removeprefix(self._keys.manifests) not in referenced]
        return sum([await self._delete(doomed[start : start + BATCH], fence) for start in range(0, len(doomed), BATCH)])

    async def _referenced(self) -> set[str]:
        """Every manifest that a spec or an intent names. An unreadable one is no evidence: nothing is deleted then."""
        specs = await self._store.list(self._keys.rcs, consistent=True)
        intents = await self._store.list(self._keys.intents, consistent=True)
        entries = [entry async for entry in in_turns(specs.entries) if self._keys.is_spec(entry.key)]
        entries += intents.entries
        try:
            return {decode(_Reference, entry.key, entry.value).manifest async for entry in in_turns(entries)}
        except BadRecord as error:
            raise StoreError(f"references can't be told while a record is unreadable: {error}") from error

    async def _delete(self, doomed: list[Entry], fence: Op) -> int:
        """Delete what nobody has referred to since it was read; answers how many those are."""
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
