"""What farms see happen to farms, nodes and ownership, as events of the audit log: for `rcfarm events`.

The model: callbacks note, in the farm's loop, what they see; one task per term writes it, `GATHER` seconds after the
first note, in one transaction that the farm's member record fences. Notes of one kind are one event, which counts them
and names the first `NAMED`: a farm that claims ten thousand RCs writes an event per second while it does, and a quiet
fleet writes none. Each farm writes about the RCs that it claims and releases; about nodes and other farms, the one that
leads writes for all. A note that can't be written is kept; while the store is away, later ones join it.

What is missed: what happened while no farm was live, and the few seconds in which the leading farm dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime

import structlog

from scheduler.nodes import NodeChange
from store.kv import ops
from store.kv.protocol import Store, StoreError, TxnConflict, Unavailable
from store.schema import audit
from store.schema.keys import Keys
from store.timing import Backoff

log = structlog.get_logger(__name__)

GATHER = 1.0  # seconds from the first note to the event
NAMED = 100  # names in one event
FIRST_RETRY, LAST_RETRY = 1.0, 30.0  # seconds
_OF_THE_FLEET = ("NODES_DEAD", "NODES_LOST", "NODES_BACK", "FARMS_LOST", "FARMS_LEFT")


class Chronicle:
    """The notes of one farm. `leads()`: whether this farm writes about nodes and other farms.

    `problem`: why the audit log can't be written, "" while it can, or while the store is away. `on_problem()` is called
    when that changes.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        farm: str,
        leads: Callable[[], bool],
        on_problem: Callable[[], None] = lambda: None,
    ) -> None:
        self.problem = ""
        self._on_problem, self._is_doubted = on_problem, False
        self._store, self._keys, self._farm, self._leads = store, keys, farm, leads
        self._notes: dict[str, dict[str, None]] = {}  # names by type of event, in order
        self._times: dict[str, datetime] = {}  # of the first note of each type
        self._noted = asyncio.Event()
        self._members: frozenset[str] | None = None

    def claimed(self, rc_id: str) -> None:
        """Note that this farm owns the RC now."""
        self._note("RCS_CLAIMED", [rc_id], undoes="RCS_RELEASED")

    def released(self, rc_id: str) -> None:
        """Note that this farm does not own the RC any more."""
        self._note("RCS_RELEASED", [rc_id], undoes="RCS_CLAIMED")

    def nodes_changed(self, changes: Iterable[NodeChange]) -> None:
        """Note which agents have stopped to answer, are lost, or are back."""
        for name, old, new in changes:
            if old is None or new is None:
                continue
            if old.live and not new.live:
                self._note("NODES_DEAD", [name])
            elif not old.live and new.live:
                self._note("NODES_BACK", [name])
            if new.lost and not old.lost:
                self._note("NODES_LOST", [name])

    def members_changed(self, live: Collection[str], known: Collection[str]) -> None:
        """Note which farms have gone. `known`: those with a record; a farm that leaves in order removes its own."""
        former, self._members = self._members, frozenset(live)
        for name in sorted((former or frozenset()) - self._members - {self._farm}):
            self._note("FARMS_LOST" if name in known else "FARMS_LEFT", [name])

    def doubt(self) -> None:
        """Find out whether the audit log can be written: a change was denied, which may be why."""
        self._is_doubted = True
        self._noted.set()

    async def run(self, member_key: str, session: str) -> None:
        """Write the notes of a term, until cancelled."""
        self._note("FARM_JOINED", [self._farm])
        backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        while True:
            await self._noted.wait()
            await asyncio.sleep(GATHER)
            self._noted.clear()
            if not self._leads():
                for event in _OF_THE_FLEET:
                    self._notes.pop(event, None)
            notes, self._notes = self._notes, {}
            times, self._times = self._times, {}
            if not (notes or self._is_doubted):
                continue
            probe = ops.delete(self._keys.audit_event("probe", self._farm))  # needs the right, and changes nothing
            writing = [
                ops.check_session(member_key, session),
                *([probe] if self._is_doubted else []),
            ]
            for event, names in notes.items():
                kind = "rcs" if event.startswith("RCS_") else "nodes" if event.startswith("NODES_") else "farms"
                details = {kind: list(names)[:NAMED], "count": len(names)}
                writing.append(audit.event_op(self._keys, event, details, actor=self._farm, now=times.get(event)))
            try:
                await self._store.txn(writing)
            except StoreError as error:
                if not isinstance(error, Unavailable | TxnConflict):
                    self._found(str(error))
                for event, names in notes.items():
                    self._notes[event] = names | self._notes.get(event, {})
                self._times |= times
                self._noted.set()
                pause = backoff.pause()
                log.info("What happened to farms and nodes could not be recorded; retrying", error=str(error))
                await asyncio.sleep(pause)
            else:
                self._is_doubted = False
                self._found("")
                backoff.reset()

    def _found(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem()

    def _note(self, event: str, names: Iterable[str], *, undoes: str = "") -> None:
        for name in names:
            self._notes.get(undoes, {}).pop(name, None)
            self._notes.setdefault(event, {})[name] = None
            self._times.setdefault(event, datetime.now(UTC))
        if not self._notes.get(undoes, True):
            del self._notes[undoes]
        self._noted.set()
