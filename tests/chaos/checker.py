"""The invariants over snapshots of the tree, the audit log and the processes of the machine.

The model: `see` takes each snapshot, `see_processes` each look at the machine, `check_audit` the whole audit log after
a round. Violations are collected in `violations`. Nothing here does I/O.

A *history* is a time in which the tree only went forward. When it is rewound (`new_history`), the indexes and tokens
seen before mean something else, and are forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from store.kv.protocol import Entry
from store.schema.keys import Keys
from store.schema.records import POD_ID_LABEL, AuditEvent, decode
from tests.chaos.site import PodProcess
from tests.chaos.snapshot import Place, Snapshot

# Snapshots after a rewind, about 5 s of them, in which a farm may not have noticed it. Where its session holds the
# lock in both histories, it may then write a status with the token that the lock had in the other one.
UNNOTICED = 25

_CREATED = "REPLICATION_CONTROLLER_CREATED"
_DELETED = "REPLICATION_CONTROLLER_DELETED"


class Acknowledged(NamedTuple):
    """A change of an RC that was reported to an operator as done."""

    rc: str
    generation: int


class _Ownership(NamedTuple):
    rc: str
    create_index: int  # of the owner key: a deleted RC's tokens start again
    token: int


class Checker:
    """`snapshots` counts those that were checked; `events` are the keys of the audit log that were."""

    def __init__(self, keys: Keys) -> None:
        self.violations: list[str] = []
        self.snapshots = 0
        self.events: set[str] = set()
        self.acknowledged: list[Acknowledged] = []
        self.may_brake = False
        self._keys = keys
        self._last: Snapshot | None = None
        self._farms: dict[_Ownership, str] = {}
        self._freed: dict[_Ownership, int] = {}  # index at which the lock was given back, or lost
        self._ended: dict[_Ownership, int] = {}  # index at which that, or more, had happened
        self._farms_of: dict[str, str] = {}  # session -> farm
        self._excused: set[tuple[str, bytes]] = set()  # intents left by an operator's accident
        self._excuse_next = False
        self._since_rewind = UNNOTICED  # snapshots
        self._doubled: Collection[Place] = ()
        self._said: set[str] = set()

    def new_history(self, *, without_rcs: bool = False) -> None:
        """Forget indexes and tokens after a rewind. `without_rcs`: an operator removed `rcs/`, and left intents without
        placements.

        A later snapshot restore may bring these back, so they stay excused.
        """
        self._last, self._since_rewind = None, 0
        for forgotten in (self._farms, self._freed, self._ended, self._farms_of):
            forgotten.clear()
        self.acknowledged.clear()
        self._excuse_next = without_rcs
        self.may_brake = True

    def see(self, snapshot: Snapshot) -> None:
        """Check one snapshot, alone and against the one before it."""
        self.snapshots += 1
        self._since_rewind += 1
        for record in snapshot.malformed:
            self._violated("I1", f"a record can't be read: {record}")
        if self._excuse_next:
            self._excuse_next = False
            for place in snapshot.intents.keys() - _placed(snapshot).keys():
                entry = snapshot.entries[self._keys.intent(*place)]
                self._excused.add((entry.key, entry.value))
        self._check_places(snapshot)
        self._check_owners(snapshot)
        self._check_sessions(snapshot)
        if self._last is not None:
            self._check_steps(self._last, snapshot)
        if snapshot.entry(self._keys.brake) and not self.may_brake:
            self._violated("I9", f"the brake is on: {snapshot.entries[self._keys.brake].value!r}")
        self._last = snapshot

    def see_processes(self, processes: Iterable[PodProcess]) -> None:
        """Check that no pod has two processes, seen twice in a row because a look at /proc is not atomic."""
        counts = Counter((process.node, process.pod_id) for process in processes)
        doubled = {place for place, count in counts.items() if count > 1}
        for node, pod_id in sorted(doubled.intersection(self._doubled)):
            self._violated("I8", f"{counts[node, pod_id]} processes of pod {pod_id} on {node}")
        self._doubled = doubled

    def ended(self, program: str, code: int | None) -> None:
        """Record a violation: a daemon ended without a fault that ended it."""
        self._violated("I7", f"{program} ended on its own with {code}")

    def crashed(self, what: str) -> None:
        """Record a violation: a daemon or a command met an unexpected error."""
        self._violated("I7", what)

    def not_converged(self, what: str) -> None:
        self._violated("I5", what)

    def check_taken_up(self, before: Iterable[PodProcess], after: Collection[PodProcess]) -> None:
        """Check that RCs that were lost and applied again have adopted the processes of their pods."""
        for process in before:
            if process not in after:
                self._violated("I10", f"process {process.pid} of pod {process.pod_id} on {process.node} was ended")

    def check_audit(self, entries: Collection[Entry], snapshot: Snapshot) -> None:
        """Check the audit log, and the specs of a later snapshot against it."""
        log = [
            (entry.create_index, decode(AuditEvent, entry.key, entry.value))
            for entry in sorted(entries, key=lambda entry: entry.create_index)
        ]
        self.events.update(entry.key for entry in entries)
        created: dict[str, list[int]] = defaultdict(list)
        lives: dict[str, list[int]] = defaultdict(list)  # between two, an RC existed or did not
        for index, event in log:
            if event.event_type == _CREATED:
                created[event.event_details["rc"]].append(index)
                lives[event.event_details["rc"]].append(index)
            elif event.event_type == _DELETED:  # a farm that has not seen it may lock the RC once more, and gives it up
                lives[event.event_details["rc"]].append(index + 1)
        self._check_acts(log, created, lives)
        self._check_generations(log, created, snapshot)

    def _violated(self, invariant: str, what: str) -> None:
        text = f"{invariant}: {what}"
        if text not in self._said:
            self._said.add(text)
            self.violations.append(text)

    def _check_places(self, snapshot: Snapshot) -> None:
        placed = _placed(snapshot)
        for place, rcs in placed.items():
            if len(rcs) > 1:
                self._violated("I1", f"{_name(place)} belongs to {' and '.join(sorted(rcs))}")
            intent = snapshot.intents.get(place)
            if intent is None:
                self._violated("I2", f"{_name(place)} is placed by {rcs[0]}, without an intent")
            elif intent.rc not in rcs:
                self._violated("I1", f"{_name(place)} is placed by {rcs[0]}, and its intent is of {intent.rc}")
        for place in snapshot.intents.keys() - placed.keys():
            if not self._is_excused(snapshot, place):
                self._violated("I2", f"{_name(place)} has an intent of {snapshot.intents[place].rc}, and no placement")
        for rc in {rc for rc, _ in snapshot.placements} - snapshot.specs.keys():
            self._violated("I2", f"rc {rc} has pods and no spec")

    def _is_excused(self, snapshot: Snapshot, place: Place) -> bool:
        entry = snapshot.entries[self._keys.intent(*place)]
        return (entry.key, entry.value) in self._excused

    def _check_owners(self, snapshot: Snapshot) -> None:
        for rc, owner in snapshot.owners.items():
            entry = snapshot.entries[self._keys.owner(rc)]
            ownership = _Ownership(rc, entry.create_index, entry.lock_index)
            if entry.session is None:
                self._freed[ownership] = self._ended[ownership] = entry.modify_index
            else:
                farm = self._farms.setdefault(ownership, owner.farm)
                self._ended.setdefault(ownership._replace(token=entry.lock_index - 1), entry.modify_index)
                if farm != owner.farm:
                    self._violated("I3", f"rc {rc}: token {entry.lock_index} is of {farm} and of {owner.farm}")
            status = snapshot.statuses.get(rc) if self._since_rewind > UNNOTICED else None
            if status and status.token > entry.lock_index:
                self._violated("I4", f"rc {rc}: status has token {status.token}, the lock {entry.lock_index}")
            if status and status.token == entry.lock_index and status.farm != owner.farm:
                self._violated("I3", f"rc {rc}: status of {status.farm}, token {status.token} is of {owner.farm}")
        for place, intent in snapshot.intents.items():
            lock = snapshot.entry(self._keys.owner(intent.rc))
            if lock and intent.token > lock.lock_index and not self._is_excused(snapshot, place):
                self._violated("I4", f"{_name(place)}: intent has token {intent.token}, the lock {lock.lock_index}")

    def _check_sessions(self, snapshot: Snapshot) -> None:
        """Check that each session belongs to one farm."""
        owned = [(self._keys.owner(rc), owner.farm) for rc, owner in snapshot.owners.items()]
        members = [key for key in snapshot.entries if key.startswith(self._keys.farms)]
        for key, farm in owned + [(key, key.removeprefix(self._keys.farms)) for key in members]:
            session = snapshot.session(key)
            if session and self._farms_of.setdefault(session, farm) != farm:
                self._violated("I3", f"session {session} is of {self._farms_of[session]} and of {farm}: {key}")

    def _check_steps(self, old: Snapshot, new: Snapshot) -> None:
        """Check for changes that may not happen between two snapshots."""
        for rc in old.owners.keys() & new.owners.keys():
            before, after = old.entries[self._keys.owner(rc)], new.entries[self._keys.owner(rc)]
            if before.create_index == after.create_index and after.lock_index < before.lock_index:
                self._violated("I4", f"rc {rc}: the token went from {before.lock_index} to {after.lock_index}")
            both = before.create_index == after.create_index and rc in old.statuses and rc in new.statuses
            if both and self._since_rewind > UNNOTICED and new.statuses[rc].token < old.statuses[rc].token:
                self._violated("I4", f"rc {rc}: status went from token {old.statuses[rc]} to {new.statuses[rc]}")
        for rc in old.folders & new.folders:
            if _is_free_in_both(self._keys.owner(rc), old, new):
                changed = _differences(_written_by_owner(old, rc), _written_by_owner(new, rc))
                for key in changed:
                    self._violated("I4", f"{key} was written while rc {rc} had no owner")
        for node in old.nodes.keys() & new.nodes.keys():
            if _is_free_in_both(self._keys.node_alive(node), old, new):
                for key in _differences(_written_by_agent(old, node), _written_by_agent(new, node)):
                    self._violated("I4", f"{key} was written while {node} had no agent")
        for rc in old.specs.keys() & new.specs.keys():
            before, after = old.entries[self._keys.spec(rc)], new.entries[self._keys.spec(rc)]
            if before.create_index == after.create_index and before.modify_index != after.modify_index:
                step = new.specs[rc].generation - old.specs[rc].generation
                if step < 1:
                    self._violated("I6", f"rc {rc} was changed, and its generation by {step}")

    def _check_acts(
        self, log: list[tuple[int, AuditEvent]], created: Mapping[str, list[int]], lives: Mapping[str, list[int]]
    ) -> None:
        """Check that every act of a farm lies within the ownership that it names, and that its RC existed."""
        farms = {_life(lives, key): value for key, value in self._farms.items()}
        freed = {_life(lives, key): value for key, value in self._freed.items()}
        ended = {_life(lives, key): value for key, value in self._ended.items()}
        actors: dict[_Ownership, str] = {}
        newest: dict[tuple[str, int], int] = {}
        for index, event in log:
            if "token" not in event.event_details:
                continue
            rc, token = event.event_details["rc"], event.event_details["token"]
            what = f"{event.event_type} of rc {rc} by {event.actor}, token {token}, at {index}"
            ownership = _life(lives, _Ownership(rc, index, token))
            life = rc, ownership.create_index
            if ownership.create_index not in (0, *created.get(rc, ())):
                self._violated("I3", f"{what}, after the deletion of the RC")
            if token < newest.get(life, 0):
                self._violated("I4", f"{what}, after an act under token {newest[life]}")
            newest[life] = max(token, newest.get(life, 0))
            if actors.setdefault(ownership, event.actor) != event.actor:
                self._violated("I3", f"{what}: the same ownership was used by {actors[ownership]}")
            if (farm := farms.get(ownership, event.actor)) != event.actor:
                self._violated("I3", f"{what}, but that token is of {farm}")
            if index < (since := freed.get(ownership._replace(token=token - 1), 0)):
                self._violated("I3", f"{what}, but the lock was free at {since}")
            if index > ended.get(ownership, index):
                self._violated("I3", f"{what}, but that ownership ended by {ended[ownership]}")

    def _check_generations(
        self, log: list[tuple[int, AuditEvent]], created: Mapping[str, list[int]], snapshot: Snapshot
    ) -> None:
        """Check that every change of a spec builds on the previous one, and that every acknowledged one exists."""
        newest: dict[tuple[str, int], int] = {}
        seen: set[Acknowledged] = set()
        for index, event in log:
            generation = event.event_details.get("generation")
            is_request = event.event_type == "REPLICATION_CONTROLLER_ROLLOUT_REQUESTED"  # which changes no spec
            if generation is None or "token" in event.event_details or is_request:
                continue
            rc = event.event_details["rc"]
            seen.add(Acknowledged(rc, generation))
            life = rc, _life(created, _Ownership(rc, index, 0)).create_index
            if generation != newest.get(life, 0) + 1:
                self._violated("I6", f"rc {rc} went from generation {newest.get(life, 0)} to {generation} at {index}")
            newest[life] = generation
        for change in self.acknowledged:
            if change not in seen:
                self._violated("I6", f"an acknowledged change is not in the audit log: {change}")
        for rc, spec in snapshot.specs.items():
            life = rc, created[rc][-1] if created.get(rc) else 0
            if spec.generation != newest.get(life, 0):
                self._violated("I6", f"rc {rc} has generation {spec.generation}, the log ends at {newest.get(life)}")


def _placed(snapshot: Snapshot) -> dict[Place, list[str]]:
    """Return the RCs that placed a pod, by place."""
    placed: dict[Place, list[str]] = defaultdict(list)
    for (rc, node), placement in snapshot.placements.items():
        placed[node, placement.labels.get(POD_ID_LABEL, "")].append(rc)
    return placed


def _name(place: Place) -> str:
    return f"pod {place[1]} on {place[0]}"


def _is_free_in_both(lock: str, old: Snapshot, new: Snapshot) -> bool:
    """Return whether the lock was free all the time: it is unchanged, and has no holder."""
    before, after = old.entry(lock), new.entry(lock)
    if before is None or after is None:
        return before is after
    return before.modify_index == after.modify_index and after.session is None


def _written_by_owner(snapshot: Snapshot, rc: str) -> dict[str, bytes]:
    """Return what only the owner writes of an RC."""
    keys = [snapshot.keys.status(rc)]
    keys += [placement.entry.key for (of, _), placement in snapshot.placements.items() if of == rc]
    keys += [snapshot.keys.intent(*place) for place, intent in snapshot.intents.items() if intent.rc == rc]
    return _values(snapshot, keys)


def _written_by_agent(snapshot: Snapshot, node: str) -> dict[str, bytes]:
    """Return what only the agent writes of a node. Health may go without it, with the folder of a deleted RC."""
    keys = [snapshot.keys.reality(*place) for place in snapshot.realities if place[0] == node]
    return _values(snapshot, keys)


def _values(snapshot: Snapshot, keys: Iterable[str]) -> dict[str, bytes]:
    entries: list[Entry | None] = [snapshot.entry(key) for key in keys]
    return {entry.key: entry.value for entry in entries if entry is not None}


def _differences(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[str]:
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _life(lives: Mapping[str, list[int]], ownership: _Ownership) -> _Ownership:
    """Return the ownership with the index at which that life of the RC began, instead of a later one."""
    begun = lives.get(ownership.rc, [])
    number = bisect_right(begun, ownership.create_index)
    return ownership._replace(create_index=begun[number - 1] if number else 0)
