"""The checker of `tests.chaos` reports violations, and none in an orderly history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from store.kv.protocol import Entry
from store.schema.keys import Keys
from store.schema.records import AuditEvent, Brake, Intent, Owner, RCSpec, RCStatus, encode
from tests.chaos.checker import UNNOTICED, Acknowledged, Checker
from tests.chaos.site import PodProcess
from tests.chaos.snapshot import Snapshot

KEYS = Keys()
LABELS = {"pod_id": "web"}


def entry(key: str, value: Any, index: int = 10, *, session: str | None = None, lock: int = 0) -> Entry:
    raw = value if isinstance(value, bytes) else encode(value)
    return Entry(key, raw, create_index=5, modify_index=index, lock_index=lock, session=session)


def fleet(rc: str = "web", *, token: int = 1, index: int = 10, session: str | None = "s1") -> dict[str, Entry]:
    """Return an RC of one pod, owned by farm-a."""
    intent = Intent(manifest="m", rc=rc, shard="00", token=token, labels=LABELS)
    status = RCStatus(state="converged", generation=1, desired=1, placed=1, healthy=1, farm="farm-a", token=token)
    entries = [
        entry(KEYS.spec(rc), RCSpec(id=rc, manifest="m", replicas_desired=1)),
        entry(KEYS.owner(rc), Owner("farm-a", ""), index, session=session, lock=token),
        entry(KEYS.status(rc), status),
        entry(KEYS.pod(rc, "n1"), LABELS),
        entry(KEYS.intent("n1", "web"), intent),
    ]
    return {one.key: one for one in entries}


def seen(*snapshots: dict[str, Entry]) -> list[str]:
    checker = Checker(KEYS)
    for entries in snapshots:
        checker.see(Snapshot(KEYS, entries.values()))
    return checker.violations


def without(key: str) -> dict[str, Entry]:
    return {other: one for other, one in fleet().items() if other != key}


@pytest.mark.parametrize(
    ("snapshots", "violations"),
    [
        # An RC is owned, freed, and claimed by the next farm.
        ([fleet(), fleet(session=None, index=11), fleet(index=12, token=2, session="s2")], []),
        # A placement and its intent come and go together, and a place belongs to one RC.
        ([without(KEYS.intent("n1", "web"))], ["I2"]),
        ([without(KEYS.pod("web", "n1"))], ["I2"]),
        ([fleet("other") | fleet()], ["I1"]),
        # The lock is at its second acquisition, and so was the status; then the first owner's write arrives.
        ([fleet(token=2), fleet(token=2) | {KEYS.status("web"): fleet(token=1)[KEYS.status("web")]}], ["I4"]),
        # The brake needs an accident.
        (
            [
                fleet()
                | {KEYS.brake: entry(KEYS.brake, Brake(farm="farm-a", since="", code="no_rcs_found", message=""))}
            ],
            ["I9"],
        ),
    ],
)
def test_states(snapshots: list[dict[str, Entry]], violations: list[str]) -> None:
    assert [found[:2] for found in seen(*snapshots)] == violations


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({KEYS.status("web"): None}, "was written while rc web had no owner"),
        ({KEYS.owner("web"): entry(KEYS.owner("web"), Owner("farm-a", ""), 12, session="s1")}, "the token went from 1"),
    ],
)
def test_nothing_is_written_without_the_lock_and_tokens_never_go_back(
    change: dict[str, Entry | None], why: str
) -> None:
    free = fleet(session=None)
    changed = {key: one for key, one in (free | change).items() if one is not None}
    assert any(why in violation for violation in seen(free, changed))


def test_a_status_has_the_token_of_another_history_only_until_farms_notice() -> None:
    """After a rewind, and then as before it."""
    late = fleet()
    late[KEYS.owner("web")] = msgspec.structs.replace(late[KEYS.owner("web")], lock_index=0)
    checker = Checker(KEYS)
    checker.new_history()
    for _ in range(UNNOTICED):
        checker.see(Snapshot(KEYS, late.values()))
    assert not any("status has token" in violation for violation in checker.violations)
    checker.see(Snapshot(KEYS, late.values()))
    assert any("status has token" in violation for violation in checker.violations)


def act(farm: str, token: int, **details: Any) -> AuditEvent:
    return AuditEvent(event_type="X", event_details={"rc": "web", "token": token, **details}, timestamp="", actor=farm)


def deletion(farm: str, token: int) -> AuditEvent:
    return msgspec.structs.replace(act(farm, token), event_type="REPLICATION_CONTROLLER_DELETED")


def change(generation: int, event_type: str = "REPLICATION_CONTROLLER_SCALED", *, rc: str = "web") -> AuditEvent:
    details = {"rc": rc, "generation": generation}
    return AuditEvent(event_type=event_type, event_details=details, timestamp="", actor="operator")


CREATED = change(1, "REPLICATION_CONTROLLER_CREATED")


def audited(
    log: Iterable[AuditEvent],
    *,
    generation: int = 1,
    acknowledged: int = 1,
    earlier: Mapping[str, Entry] = MappingProxyType({}),
) -> list[str]:
    checker = Checker(KEYS)
    checker.see(Snapshot(KEYS, earlier.values()))
    checker.acknowledged.append(Acknowledged("web", acknowledged))
    entries = fleet()
    spec = RCSpec(id="web", manifest="m", replicas_desired=1, generation=generation)
    entries[KEYS.spec("web")] = entry(KEYS.spec("web"), spec)
    events = [Entry(f"audit/{index}", encode(event), index, index) for index, event in enumerate(log, start=1)]
    checker.check_audit(events, Snapshot(KEYS, entries.values()))
    return [violation[:2] for violation in checker.violations]


@pytest.mark.parametrize(
    ("log", "violations"),
    [
        # Acts are of one owner for each token, and tokens rise, until the RC is deleted.
        ([CREATED, act("farm-a", 1), act("farm-b", 2)], []),
        ([CREATED, act("farm-a", 1), act("farm-b", 1)], ["I3"]),
        ([CREATED, act("farm-b", 2), act("farm-a", 1)], ["I4"]),
        ([CREATED, act("farm-b", 2), CREATED, act("farm-a", 1)], []),
        # Nothing is done for an RC after its deletion.
        ([CREATED, act("farm-a", 1), deletion("farm-a", 1), CREATED], []),
        ([CREATED, act("farm-a", 1), deletion("farm-a", 1), act("farm-a", 1), CREATED], ["I3"]),
    ],
)
def test_acts(log: list[AuditEvent], violations: list[str]) -> None:
    assert audited(log) == violations


def test_the_lock_of_a_deleted_rc_is_another_one() -> None:
    """A farm that has not seen the deletion takes the lock again, as its first holder, until it sees the deletion."""
    late = {KEYS.owner("web"): entry(KEYS.owner("web"), Owner("farm-b", ""), session="s2", lock=1)}
    before = [CREATED, act("farm-a", 1), act("farm-a", 1)]
    assert audited([*before, deletion("farm-a", 1), change(1, rc="other"), CREATED], earlier=late) == []
    assert set(audited([*before, act("farm-a", 1)], earlier=late)) == {"I3"}


def test_no_update_is_lost() -> None:
    assert audited([CREATED, change(2)], generation=2, acknowledged=2) == []
    assert audited([CREATED, change(2), change(2)], generation=2) == ["I6"]
    requested = change(2, "REPLICATION_CONTROLLER_ROLLOUT_REQUESTED")
    assert audited([CREATED, change(2), requested, change(3)], generation=3) == []
    assert audited([CREATED], acknowledged=2) == ["I6"]
    assert audited([CREATED, change(2)], generation=1) == ["I6"]


def test_an_operators_accident_excuses_only_what_it_left() -> None:
    """After `rcs/` was removed the remaining intents are no violation; a new one is."""
    checker, left = Checker(KEYS), {key: one for key, one in fleet().items() if "/intent/" in key}
    checker.new_history(without_rcs=True)
    checker.see(Snapshot(KEYS, left.values()))
    assert checker.violations == []
    checker.see(Snapshot(KEYS, [entry(KEYS.intent("n1", "web"), Intent(manifest="m", rc="web", shard="00", token=2))]))
    assert [found[:2] for found in checker.violations] == ["I2"]


def test_two_processes_of_a_pod_are_found_when_they_stay() -> None:
    checker = Checker(KEYS)
    both = [PodProcess("n1", "web", 7), PodProcess("n1", "web", 8)]
    checker.see_processes(both)
    assert checker.violations == []
    checker.see_processes(both)
    assert checker.violations == ["I8: 2 processes of pod web on n1"]
