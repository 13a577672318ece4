"""Reality and health of one pod in the store: written when they change, and only the newest version.

The model: `show` replaces the records to write; one task (`run`) writes them as soon as a session is held, so changes
made during a write are written together. Reality is fenced by the node's `alive` key. Health is a lock of the agent's
session, because it must not outlive the agent, and its transaction checks the pod's intent: the store refuses the
health of a pod that was removed in the meantime.

A pod of a task has no health: it has run, or it has not. Its reality is kept under `task-pods/`, and is written before
its process starts, in a transaction that checks the intent: a client that has removed the intent and then finds no
reality knows that the process will never run.

The last transitions of the pod are part of its reality. They are written with the change that they describe, that of
reality or that of health, so that they cost no write of their own.

Written records are verified: `beliefs` gives each with the modify index of its write, and `store.schema.history`
compares these with the store. A record that is missing or differs is written again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec
import structlog

from rcfarm.agent.pods.recent import joined, transitions
from store.kv import ops
from store.kv.protocol import BadRecord, Store, StoreError, TxnConflict
from store.schema.history import Belief
from store.schema.keys import Keys
from store.schema.records import RECENT, Health, Reality, Transition, decode, encode, utc_now
from store.timing import Backoff

log = structlog.get_logger(__name__)

_FIRST_RETRY = 0.2  # seconds
_LAST_RETRY = 5.0  # seconds


class NodeRegistration(Protocol):
    """Holds the node's `alive` key for this agent."""

    @property
    def session(self) -> str | None:
        """The session that holds the key, while it is safe to act under it."""

    async def held(self) -> str:
        """Wait until a session holds the key. Return it."""


class Publisher:
    """Writes one pod's records. `intent_index`: the modify index of its intent, None while there is none."""

    def __init__(
        self, store: Store, keys: Keys, node: str, pod_id: str, registration: NodeRegistration, rng: random.Random
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
        self._health_rc = ""  # the RC of the health record, if known
        self._dirty = asyncio.Event()
        self._writing = asyncio.Lock()
        self._seen: Reality | None = None  # as it was last shown
        self._recent: tuple[Transition, ...] = ()
        self._was_adopted = self._is_adopted = False  # the latter: its former report may have more transitions

    def show(self, reality: Reality, health: Health | None) -> None:
        """Have these records written; `updated_at` and `recent` are filled in. `health` None: the last one stays."""
        is_first = self._health is None and self._was_adopted and health is not None and health.status == "passing"
        was = health if is_first else self._health  # a new agent's first look at a pod that passes is no transition
        found = tuple(transitions(self._seen, reality, was, health, utc_now()))
        self._seen = reality
        self._recent = (*self._recent, *found)[-RECENT:] if found else self._recent
        self._reality, self._health = msgspec.structs.replace(reality, recent=self._recent), health
        self._mark()

    def recall(self, rc: str) -> None:
        """Note that an earlier agent wrote the pod's health for this RC, and its report."""
        self._health_rc, self._is_adopted, self._was_adopted = rc, True, True

    def renew(self) -> None:
        """Write everything again: the session is new, and the tree may be."""
        self._reality_written = self._health_written = None
        self._mark()

    def beliefs(self) -> Iterator[Belief]:
        """Yield the written records, as the store should have them."""
        for key, index in self._indexes.items():
            yield Belief(key, index, partial(self._write_again, key))

    def _write_again(self, key: str) -> None:
        self._indexes.pop(key, None)
        if self._reality is not None and key == self._reality_key(self._reality):
            self._reality_written = None
        else:
            self._health_written = None
        self._mark()

    async def run(self) -> None:
        """Write the shown records until cancelled; a write that fails is retried with a bounded back-off."""
        backoff = Backoff(_FIRST_RETRY, _LAST_RETRY, rng=self._rng)
        while True:
            await self._dirty.wait()
            try:
                await self.flush()
            except StoreError as error:
                self._dirty.set()
                pause = backoff.pause()
                if backoff.failures == 3:  # earlier failures are mostly changes that the view has not shown yet
                    log.warning("The pod's state could not be written", pod=self._pod_id, error=str(error))
                await asyncio.sleep(pause)
            else:
                backoff.reset()

    async def flush(self) -> None:
        """Write the shown records, once a session is held. Raises the store's errors."""
        session = await self._registration.held()
        async with self._writing:
            self._dirty.clear()
            if self._is_adopted and self._reality is not None:
                # the transitions in the earlier agent's report are taken over before it is replaced
                entry = await self._store.get(self._reality_key(self._reality))
                self._is_adopted = False
                if entry is not None:
                    with suppress(BadRecord):
                        known = decode(Reality, entry.key, entry.value)
                        self._recent = joined(known.recent, self._recent)
                self._reality = msgspec.structs.replace(self._reality, recent=self._recent)
            fence = ops.check_session(self._keys.node_alive(self._node), session)
            if self._reality is not None and self._is_news(self._reality):
                reality, key = self._reality, self._reality_key(self._reality)
                value = encode(msgspec.structs.replace(reality, updated_at=utc_now()))
                result = await self._store.txn([fence, ops.put(key, value)])
                self._reality_written, self._indexes[key] = reality, result.index
            if self._health_pending(session):
                assert self._health is not None
                assert self._reality is not None
                assert self.intent_index is not None
                health, reality, rc = self._health, self._reality, self._reality.rc
                key = self._keys.health(rc, self._node)
                intent = ops.check_index(self._keys.intent(self._node, self._pod_id), self.intent_index)
                writing = [fence, intent, ops.lock(key, encode(health), session)]
                if self._health_rc not in ("", rc):  # the pod belongs to another RC now
                    writing.append(ops.delete(self._keys.health(self._health_rc, self._node)))
                adds = reality != self._reality_written  # its transitions are written along with the verdict
                if adds:
                    value = encode(msgspec.structs.replace(reality, updated_at=utc_now()))
                    writing.append(ops.put(self._reality_key(reality), value))
                result = await self._store.txn(writing)
                if adds:
                    self._reality_written, self._indexes[self._reality_key(reality)] = reality, result.index
                self._indexes.pop(self._health_written[0] if self._health_written else "", None)
                self._health_written, self._health_rc = (key, health, session), rc
                self._indexes[key] = result.index

    def _is_news(self, reality: Reality) -> bool:
        """Return whether more than the transitions differ from what is written."""
        written = self._reality_written
        return written is None or msgspec.structs.replace(reality, recent=written.recent) != written

    async def announce(self, reality: Reality) -> int:
        """Write the reality of a task's pod that is about to start, if its intent is still there. Return the index of
        the write. Raises the store's errors."""
        assert self.intent_index is not None
        session, key = await self._registration.held(), self._reality_key(reality)
        async with self._writing:
            fence = ops.check_session(self._keys.node_alive(self._node), session)
            intent = ops.check_index(self._keys.intent(self._node, self._pod_id), self.intent_index)
            value = encode(msgspec.structs.replace(reality, updated_at=utc_now()))
            result = await self._store.txn([fence, intent, ops.put(key, value)])
            self._reality_written, self._indexes[key] = reality, result.index
            return result.index

    async def remove(self, rc: str) -> bool:
        """Remove the pod's records, once its intent is gone. Return False when there is an intent again.

        `rc` is "" for a pod of a task, and for one whose RC is not known.
        """
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
            if not rc:  # only a pod of an RC is known to have no record there
                removing.append(ops.delete(self._keys.task_pod(self._node, self._pod_id)))
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

    def _reality_key(self, reality: Reality) -> str:
        keys = self._keys
        return (keys.task_pod if reality.task else keys.reality)(self._node, self._pod_id)

    def _mark(self) -> None:
        if (self._reality and self._is_news(self._reality)) or self._health_pending(self._registration.session):
            self._dirty.set()

    def _health_pending(self, session: str | None) -> bool:
        if self._health is None or self._reality is None or self.intent_index is None or self._reality.task:
            return False
        return self._health_written != (self._keys.health(self._reality.rc, self._node), self._health, session)
