"""A witness of farms: reads the tree while they work and checks it against the invariants.

Two things are checked. In every snapshot (one atomic read of all RCs and intents) each placement has its intent and
each intent its placement, so no (node, pod id) ever has two RCs. And in the audit log, which is written in the
transactions that it records, every act of a farm carries the fencing token that was current at that moment: it lies
between the acquisition and the end of the ownership that it names, and the actor had that ownership.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from store.kv import ops
from store.kv.protocol import Entry, Store, Unavailable
from store.schema.keys import Keys
from store.schema.records import POD_ID_LABEL, AuditEvent, Intent, Owner, RCSpec, decode, decode_labels

LOOK = 0.1  # seconds between two snapshots


class Act(NamedTuple):
    """An act of a farm in the audit log. `at`: index of its transaction."""

    at: int
    rc: str
    token: int
    actor: str


class Placed(NamedTuple):
    """A snapshot: RC by (node, pod id), by the placements and by the intents; and every spec."""

    placements: dict[tuple[str, str], str]
    intents: dict[tuple[str, str], str]
    specs: dict[str, RCSpec]


class Witness:
    """Run `watching()` while farms work; call `check_acts()` in the end.

    RC ids must not be used again after a deletion: tokens start again with each.
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self.looks = 0
        self._store, self._keys = store, keys
        self._taken: dict[tuple[str, int], tuple[int, str]] = {}
        self._ended: dict[tuple[str, int], int] = {}

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check snapshots repeatedly; a violation fails the block."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._watch())
            try:
                yield
            finally:
                task.cancel()

    async def look(self) -> Placed:
        """Check one snapshot. Return it."""
        result = await self._store.txn([ops.get_tree(self._keys.rcs), ops.get_tree(self._keys.intents)])
        self.looks += 1
        placed = _placed(self._keys, result.entries)
        assert placed.placements == placed.intents, (
            f"placements without their intent: {placed.placements.items() - placed.intents.items()}; "
            f"intents without their placement: {placed.intents.items() - placed.placements.items()}"
        )
        unknown = set(placed.placements.values()) - placed.specs.keys()
        assert not unknown, f"RCs that are gone still have pods: {unknown}"
        self._note_owners(entry for entry in result.entries if entry.key.endswith("/owner"))
        return placed

    async def acts(self) -> list[Act]:
        """Return the acts of farms, in the order in which the store applied them."""
        found = []
        for entry in (await self._store.list(self._keys.audit, consistent=True)).entries:
            event = decode(AuditEvent, entry.key, entry.value)
            if "token" in event.event_details:
                details = event.event_details
                found.append(Act(entry.create_index, details["rc"], details["token"], event.actor))
        return sorted(found)

    async def check_acts(self) -> list[Act]:
        """Check that every act was the current owner's. Return the acts."""
        acts = await self.acts()
        actors: dict[tuple[str, int], str] = {}
        newest: dict[str, int] = {}
        for act in acts:
            assert act.token >= newest.get(act.rc, 0), f"{act} comes after an act under token {newest[act.rc]}"
            newest[act.rc] = act.token
            first = actors.setdefault((act.rc, act.token), act.actor)
            assert act.actor == first, f"{act}: the same ownership was used by {first}"
            self._check_act(act)
        return acts

    def _check_act(self, act: Act) -> None:
        """Check that the act lies within the ownership that it names, as far as that was seen."""
        place = act.rc, act.token
        if place in self._taken:
            index, farm = self._taken[place]
            assert (index < act.at, farm) == (True, act.actor), f"{act}, but {farm} took the lock at {index}"
        if place in self._ended:
            assert act.at < self._ended[place], f"{act}, but that ownership ended at {self._ended[place]}"

    def _note_owners(self, owners: Iterable[Entry]) -> None:
        for entry in owners:
            place = self._keys.parse_rc(entry.key).rc, entry.lock_index
            if entry.session is None:
                self._ended.setdefault(place, entry.modify_index)
            else:
                self._taken.setdefault(place, (entry.modify_index, decode(Owner, entry.key, entry.value).farm))
                self._ended.setdefault((place[0], place[1] - 1), entry.modify_index)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):  # the test makes Consul unavailable
                await self.look()
            await asyncio.sleep(LOOK)


def _placed(keys: Keys, entries: Iterable[Entry]) -> Placed:
    placed = Placed({}, {}, {})
    for entry in entries:
        if entry.key.startswith(keys.intents):
            node, _, pod_id = entry.key.removeprefix(keys.intents).partition("/")
            placed.intents[node, pod_id] = decode(Intent, entry.key, entry.value).rc
            continue
        key = keys.parse_rc(entry.key)
        if key.kind == "pods":
            labels = decode_labels(entry.key, entry.value)
            place = key.node, labels[POD_ID_LABEL]
            assert place not in placed.placements, f"{place} belongs to {key.rc} and to {placed.placements[place]}"
            placed.placements[place] = key.rc
        elif key.kind == "spec":
            placed.specs[key.rc] = decode(RCSpec, entry.key, entry.value)
    return placed
