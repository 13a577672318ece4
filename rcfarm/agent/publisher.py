"""Reality and health of one pod in the store: written when they change, and only what is newest.

The model: `show` replaces what should be there; one task (`run`) writes it as soon as a session is held, so changes
that come while a write is on its way are written together. Reality is fenced by the node's `alive` key. Health is a
lock of the agent's session, because it must not outlive the agent, and it carries a check of the intent that it belongs
to: the health of a pod that was taken away meanwhile is refused, so nothing is resurrected.

What was written is asserted, not assumed: `beliefs` names each record with the modify index that its write got, and
`store.history` compares these with the store. A record that is missing there, or another, is written again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import Protocol

import msgspec
import structlog

from store import ops
from store.history import Belief
from store.keys import Keys
from store.kv import Op, Store, StoreError, TxnConflict
from store.records import Health, Reality, encode, utc_now

log = structlog.get_logger(__name__)

_FIRST_RETRY = 0.1  # seconds
_LAST_RETRY = 5.0  # seconds


class Holder(Protocol):
    """Who holds the node's `alive` key for us."""

    @property
    def session(self) -> str | None:
        """The session that holds it, while it is safe to act under it."""

    async def held(self) -> str:
        """Wait for such a session."""


class Publisher:
    """Writes one pod's records. `intent_index`: the modify index of its intent, None while there is none."""

    def __init__(
        self, store: Store, keys: Keys, node: str, pod_id: str, registration: Holder, rng: random.Random
    ) -> None:
        self.intent_index: int | None = None
        self._store, self._keys = store, keys
        self._node, self._pod_id = node, pod_id
        self._registration = registration
        self._rng = rng
        self._reality: Reality | None = None
        self._health: Health | None = None
        self._reality_written: Reality | None = None
        self._health_written: tuple[str, Health, str] | None = None  # key, value, session
        self._indexes: dict[str, int] = {}  # key -> modify index of our last write to it
        self._health_rc = ""  # whose folder the health on record is in, as far as is known
        self._dirty = asyncio.Event()
        self._writing = asyncio.Lock()

    def show(self, reality: Reality, health: Health | None) -> None:
        """Have these written; `updated_at` is filled in. No health: the last one stays."""
        self._reality, self._health = reality, health
        self._mark()

    def recall(self, rc: str) -> None:
        """An earlier agent wrote the pod's health, for this RC."""
        self._health_rc = rc

    def renew(self) -> None:
        """Write everything again: the session is a new one, or the tree may be."""
        self._reality_written = self._health_written = None
        self._mark()

    def beliefs(self) -> Iterator[Belief]:
        """The records that were written, as the store should have them."""
        for key, index in self._indexes.items():
            yield Belief(key, index, partial(self._write_again, key))

    def _write_again(self, key: str) -> None:
        self._indexes.pop(key, None)
        if key == self._keys.reality(self._node, self._pod_id):
            self._reality_written = None
        else:
            self._health_written = None
        self._mark()

    async def run(self) -> None:
        """Write what is shown until cancelled; what the store refuses is tried again with a bounded back-off."""
        failures = 0
        while True:
            await self._dirty.wait()
            try:
                await self.flush()
            except StoreError as error:
                failures += 1
                self._dirty.set()
                if failures == 3:  # before that it is most often a change that the view has not shown yet
                    log.warning("The pod's state can't be written", pod=self._pod_id, error=str(error))
                await asyncio.sleep(self._backoff(failures))
            else:
                failures = 0

    async def flush(self) -> None:
        """Write what is shown now, once a session is held. Raises the store's errors."""
        session = await self._registration.held()
        async with self._writing:
            self._dirty.clear()
            fence = ops.check_session(self._keys.node_alive(self._node), session)
            if self._reality is not None and self._reality != self._reality_written:
                await self._write_reality(self._reality, fence)
            if self._health_pending(session):
                await self._write_health(session, fence)

    async def remove(self, rc: str) -> bool:
        """Remove what was written, once the intent is gone. False when there is an intent again."""
        async with self._writing:
            self._reality = self._health = None
            self._dirty.clear()
            self._indexes.clear()
            session = await self._registration.held()
            removing = [
                ops.check_session(self._keys.node_alive(self._node), session),
                ops.check_not_exists(self._keys.intent(self._node, self._pod_id)),
                ops.delete(self._keys.reality(self._node, self._pod_id)),
            ]
            removing += [ops.delete(self._keys.health(each, self._node)) for each in {rc, self._health_rc} - {""}]
            try:
                await self._store.txn(removing)
            except TxnConflict as conflict:
                if any(failure.op_index == 1 for failure in conflict.failures):
                    return False
                raise
            self._reality_written = self._health_written = None
            self._health_rc = ""
            return True

    def _mark(self) -> None:
        if self._reality != self._reality_written or self._health_pending(self._registration.session):
            self._dirty.set()

    def _health_pending(self, session: str | None) -> bool:
        if self._health is None or self._reality is None or self.intent_index is None:
            return False
        return self._health_written != (self._keys.health(self._reality.rc, self._node), self._health, session)

    async def _write_reality(self, reality: Reality, fence: Op) -> None:
        value = encode(msgspec.structs.replace(reality, updated_at=utc_now()))
        key = self._keys.reality(self._node, self._pod_id)
        result = await self._store.txn([fence, ops.put(key, value)])
        self._reality_written, self._indexes[key] = reality, result.index

    async def _write_health(self, session: str, fence: Op) -> None:
        assert self._health is not None
        assert self._reality is not None
        assert self.intent_index is not None
        health, rc = self._health, self._reality.rc
        key = self._keys.health(rc, self._node)
        intent = ops.check_index(self._keys.intent(self._node, self._pod_id), self.intent_index)
        writing = [fence, intent, ops.lock(key, encode(health), session)]
        if self._health_rc not in ("", rc):  # the pod went over to another RC
            writing.append(ops.delete(self._keys.health(self._health_rc, self._node)))
        result = await self._store.txn(writing)
        self._indexes.pop(self._health_written[0] if self._health_written else "", None)
        self._health_written, self._health_rc = (key, health, session), rc
        self._indexes[key] = result.index

    def _backoff(self, failures: int) -> float:
        return self._rng.uniform(0.5, 1.0) * min(_LAST_RETRY, _FIRST_RETRY * 2.0 ** min(failures, 8))
