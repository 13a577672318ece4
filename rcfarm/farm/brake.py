"""The brake: when the desired state looks like an accident, the farms stop removing.

A truncated restore, a wrong root or a script gone wrong shows up as a tree of RCs that is suddenly empty, much smaller,
or all zero. Acting on it would stop the fleet. So a farm that sees it holds at once, reads the whole tree consistently,
and if that confirms it, writes the key `<root>/brake`. While that key exists no farm removes or moves anything; adding
and repairing go on. The operator either restores the desired state or confirms it with `rcfarm brake release`.
Operators engage it, too, with a reason: `rcfarm brake engage`.

A tree that was always empty is normal, and so are changes that the audit log explains: RCs that were deleted, and RCs
that an operator scaled to zero, however many and however fast.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Literal, NamedTuple

import structlog

from store.kv import ops
from store.kv.protocol import BadRecord, Store, StoreError, TxnConflict
from store.kv.view import Change, TreeView
from store.schema import audit
from store.schema.keys import Keys
from store.schema.records import Brake, RCSpec, decode, encode, utc_now
from store.timing import in_turns

log = structlog.get_logger(__name__)

WINDOW = 30.0  # seconds: changes within it count as "at once"
AUDITED_WITHIN = 3600.0  # seconds that the audit log is searched back
RETRY = 1.0  # seconds between attempts to read the tree
Code = Literal["no_rcs_found", "zero_replicas_found", "too_many_gone"]


class Evidence(NamedTuple):
    """Evidence of an accident. `lost`: RCs that vanished without being deleted; `known`: how many were known before.

    `zeroed`: RCs whose replicas went to zero at once, though no operator scaled them. `total` and `positive`: what the
    tree holds now.
    """

    known: int
    lost: int
    zeroed: int
    total: int
    positive: int


def judge(evidence: Evidence, share: float) -> tuple[Code, str] | None:
    """Return a code and a message if the evidence shows an accident, else None."""
    known, lost, zeroed, total, positive = evidence
    if lost and total == 0:
        return "no_rcs_found", f"all {known} RCs are gone from the store, and none of them was deleted"
    if lost > share * known:
        return "too_many_gone", f"{lost} of {known} RCs are gone from the store at once, and none of them was deleted"
    if zeroed and total and positive == 0:
        return "zero_replicas_found", f"every one of {total} RCs asks for zero replicas"
    return None


class BrakeWatch:
    """Watches for accidents and for the brake key. Feed it with `seen`, `gone` and `forget`; ask `reason`.

    `on_change()` is called when the farm begins or ceases to hold. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        farm: str,
        on_change: Callable[[], None],
        *,
        share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keys, self._farm = store, keys, farm
        self._on_change, self._share, self._clock = on_change, share, clock
        self._known: dict[str, int] = {}
        self._positive = 0  # how many of the known RCs desire replicas
        self._lost: dict[str, float] = {}  # RC id -> when it vanished, oldest first
        self._zeroed: dict[str, float] = {}  # RC id -> when it went to zero, oldest first
        self._suspicious = asyncio.Event()
        self._suspicions = 0
        self.view: TreeView[Brake] = TreeView(
            store,
            keys.brake,
            lambda key, value: decode(Brake, key, value),
            on_change=self._fold,
            name="brake",
            clock=clock,
        )

    @property
    def engaged(self) -> Brake | None:
        """The brake record, while there is one."""
        record = self.view.records.get(self._keys.brake)
        return record.value if record else None

    @property
    def reason(self) -> str:
        """The reason for which nothing is removed now, or ""."""
        if self._keys.brake in self.view.bad:
            return f"the brake record {self._keys.brake} can't be read; `rcfarm brake release` ends it"
        if brake := self.engaged:
            return f"the brake is on since {brake.since}: {brake.words}; `rcfarm brake release` ends it"
        return "a sudden loss of desired state is being checked" if self._suspicious.is_set() else ""

    @property
    def reason_is_known(self) -> bool:
        """Return whether the store holds a brake record, readable or not."""
        return self.engaged is not None or self._keys.brake in self.view.bad

    def seen(self, spec: RCSpec) -> None:
        """Note an RC's new or changed desired state."""
        before = self._known.get(spec.id, 0)
        self.forget([spec.id])
        if spec.deleting:
            return
        self._known[spec.id] = spec.replicas_desired
        self._positive += spec.replicas_desired > 0
        if before > 0 >= spec.replicas_desired:
            self._zeroed[spec.id] = self._clock()
            self._consider()

    def gone(self, rc_id: str) -> None:
        """Note that an RC's spec has vanished."""
        if rc_id in self._known:
            self.forget([rc_id])
            self._lost[rc_id] = self._clock()
            self._consider()

    def forget(self, rc_ids: Iterable[str]) -> None:
        """Drop these RCs: this farm no longer watches them."""
        for rc_id in rc_ids:
            self._positive -= self._known.pop(rc_id, 0) > 0
            self._lost.pop(rc_id, None)
            self._zeroed.pop(rc_id, None)

    def check_start(self, present: Collection[str], *, pods: int) -> None:
        """Check the tree at the start of a term, once every watched RC was `seen`. `present`: the RCs in the tree.

        Some RCs known under an earlier session may have been deleted since. It is suspicious if all of them are gone,
        or, with pods to lose, if every RC desires zero replicas.
        """
        vanished = self._known.keys() - present
        if vanished and not present:
            for rc_id in vanished:
                self.forget([rc_id])
                self._lost[rc_id] = self._clock()
            self._suspect()
        self.forget(vanished - self._lost.keys())
        if pods and self._known and not self._positive:
            self._zeroed.update(dict.fromkeys(self._known, self._clock()))
            self._suspect()

    async def run(self, member_key: str, session: str) -> None:
        """Check every suspicion, until cancelled. Writes are fenced by the farm's member record."""
        while True:
            await self._suspicious.wait()
            looked_into = self._suspicions
            try:
                verdict = judge(await self._evidence(), self._share)
                if verdict and not self.reason_is_known:
                    code, message = verdict
                    log.critical("Brake engaged; removing nothing", alert=code, reason=message)
                    record = Brake(farm=self._farm, since=utc_now(), code=code, message=message)
                    details = {"code": code, "message": message}
                    writing = [
                        ops.check_session(member_key, session),
                        ops.create(self._keys.brake, encode(record)),
                        audit.event_op(self._keys, "BRAKE_ENGAGED", details, actor=self._farm),
                    ]
                    try:
                        self.view.apply(await self._store.txn(writing), writing)
                    except TxnConflict:
                        await self.view.refresh_key(self._keys.brake)  # another was first, or this is no member
            except StoreError as error:
                log.warning("The desired state could not be checked; removing nothing until it is", error=str(error))
                await asyncio.sleep(RETRY)
                continue
            if verdict and not self.reason_is_known:
                await asyncio.sleep(RETRY)  # this farm is not a member any more; the next term retries
                continue
            if self._suspicions == looked_into:  # else another suspicion arose after the tree was read
                self._suspicious.clear()
            if not verdict:
                log.info("Desired state checked; no unexpected loss of RCs")
            self._on_change()

    def _consider(self) -> None:
        horizon = self._clock() - WINDOW
        for times in (self._lost, self._zeroed):
            for rc_id, _ in list(takewhile(lambda item: item[1] < horizon, times.items())):
                del times[rc_id]
        many_gone = len(self._lost) > self._share * (len(self._known) + len(self._lost))
        if many_gone or (not self._positive and len(self._zeroed) > 1):
            self._suspect()

    def _suspect(self) -> None:
        self._suspicions += 1
        if not self._suspicious.is_set():
            self._suspicious.set()
            self._on_change()

    async def _evidence(self) -> Evidence:
        """Count the RCs in a consistent read of the tree. An undecodable spec counts as one that desires replicas."""
        listing = await self._store.list(self._keys.rcs, consistent=True)
        present: dict[str, bool] = {}
        async for entry in in_turns(listing.entries):
            if not self._keys.is_spec(entry.key):
                continue
            rc_id = self._keys.split_rc(entry.key).rc
            try:
                present[rc_id] = decode(RCSpec, entry.key, entry.value).replicas_desired > 0
            except BadRecord:
                present[rc_id] = True
        lost = self._lost.keys() - present.keys()
        if lost or (self._zeroed and not any(present.values())):
            # What an audited change explains: a deletion whose mark a view has missed, and a last count of zero.
            since = datetime.now(UTC) - timedelta(seconds=AUDITED_WITHIN)
            replicas: dict[str, object] = {}
            for event in await audit.events(self._store, self._keys, since=since):
                rc_id, details = str(event.event_details.get("rc")), event.event_details
                if event.event_type == "REPLICATION_CONTROLLER_DELETED":
                    if rc_id in lost:
                        self._lost.pop(rc_id, None)
                    continue
                changes = details.get("changes")
                change = changes.get("replicas_desired") if isinstance(changes, dict) else None
                desired = change[-1] if isinstance(change, list) and change else details.get("replicas_desired")
                if desired is not None:
                    replicas[rc_id] = desired
            for rc_id in [rc_id for rc_id in self._zeroed if replicas.get(rc_id) == 0]:
                del self._zeroed[rc_id]
            lost &= self._lost.keys()
        return Evidence(
            known=len(self._known) + len(lost),
            lost=len(lost),
            zeroed=len(self._zeroed),
            total=len(present),
            positive=sum(present.values()),
        )

    def _fold(self, changes: list[Change[Brake]]) -> None:
        released = [change for change in changes if change.new is None]
        if released:
            self._lost.clear()
            self._zeroed.clear()
            log.warning("Brake released; removals resume")
        self._on_change()
