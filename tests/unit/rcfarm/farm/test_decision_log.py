"""The decision log: what is written comes back as it was, small, bounded, and without any harm to the farm."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rcfarm.farm import decision_log, decisions
from rcfarm.farm.decision_log import DecisionLog, Recorded
from rcfarm.farm.planner import Plan, PlanInput, plan
from rcfarm.farm.replay import Logged, read, replayed, segments
from rcfarm.farm.rollout import Placement, PodClock
from scheduler.protocol import Absence, Eligibility
from store.schema.records import Health, RCSpec, Rollout, UpdatePolicy
from tests.support.farm import virtual_fleet

NODES = [f"node-{number:04}" for number in range(400)]
OLD, NEW = "a" * 64, "b" * 64


class Journal:
    """A log under a clock that the test moves, from the machine's time on, which files have. `now`: Unix seconds."""

    def __init__(self, directory: Path, max_size: int = 2**27, max_age: float = 86400.0) -> None:
        self.directory, self.now, self.count = directory, time.time(), 0
        self.log = DecisionLog(directory, "farm-a", "1", max_size=max_size, max_age=max_age, now=lambda: self.now)

    def note(self, given: PlanInput, decision: Plan | None = None, rc: str = "web") -> Recorded:
        self.count += 1
        recorded = self.log.record(rc, given, decision or plan(given))
        assert recorded
        self.log.written(recorded, self.count)
        return recorded

    def found(self, damaged: list[str] | None = None) -> list[Logged]:
        noted: list[str] = [] if damaged is None else damaged
        found = [one for path in segments(self.directory) for one in read(path, noted.append)]
        assert damaged is not None or not noted, noted
        return found

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in segments(self.directory))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "log")


def small(number: int = 0, replicas: int = 3) -> PlanInput:
    """An RC on a few nodes. Each number makes it another decision."""
    spec = RCSpec(id="web", manifest=OLD, replicas_desired=replicas)
    return PlanInput(spec, {}, Eligibility(frozenset(NODES[:9]), tuple(NODES[:9])), now=1.8e9 + number)


def rollout_of_many(pods: int) -> Iterator[tuple[PlanInput, Plan]]:
    """A rollout of many pods, a few at a time, while a node leaves or comes with each decision."""
    rng, clock, record, now = random.Random(1), PodClock(), None, 0.0
    policy = UpdatePolicy(canary="0", max_unavailable="5%", min_healthy_time=2.0)
    spec = RCSpec(id="web", manifest=NEW, replicas_desired=pods, revision=2, update=policy)
    intents, changed = dict.fromkeys(NODES[:pods], OLD), dict.fromkeys(NODES[:pods], -60.0)
    while record is None or record.state != "done":
        since = {node: "" if now - at < 1 else f"at {at}" for node, at in changed.items()}
        current = {
            node: Placement(on, "passing" if since[node] else "unknown", Health("passing", on, since=since[node]))
            for node, on in intents.items()
        }
        gone = frozenset(rng.sample(NODES[pods:], 2))
        nodes = Eligibility(frozenset(NODES) - gone, tuple(node for node in NODES if node not in gone))
        ages = clock.read(current, now, 2.0)
        given = PlanInput(spec, current, nodes, rollout=record, ages=ages, now=1.8e9 + now)
        decision = plan(given)
        yield given, decision
        record = decision.rolled.record or record
        intents |= dict.fromkeys(decision.update, NEW)
        changed |= dict.fromkeys(decision.update, now)
        now += 0.25


def same(found: list[Logged], given: list[tuple[PlanInput, Plan]]) -> None:
    """Check that the decisions came back as they were, and are decided in the same way."""
    assert len(found) == len(given)
    for logged, (asked, decided) in zip(found, given, strict=True):
        again = replayed(logged)
        assert not again.differs
        assert decisions.canonical((again.given, again.decision)) == decisions.canonical((asked, decided))


async def test_decisions_come_back_as_they_were(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives of RCs with rollouts, failures and dead nodes, on nodes of which each life has others."""
    noted: list[tuple[PlanInput, Plan]] = []

    def noting(given: PlanInput) -> Plan:
        noted.append((given, plan(given)))
        journal.note(*noted[-1], rc=f"web-{len(noted) % 3}")
        return noted[-1][1]

    monkeypatch.setattr(virtual_fleet, "plan", noting)
    for seed in range(5):
        virtual_fleet.life(random.Random(seed))
        await journal.log.flush()
    found = journal.found()
    same(found, noted)
    assert [one.index for one in found] == list(range(1, len(noted) + 1))
    assert {(one.farm, one.version) for one in found} == {("farm-a", "1")}
    assert journal.log.recorded == len(noted)
    assert journal.size / len(noted) < 300, "bytes per decision"


async def test_large_decisions_name_only_what_differs(journal: Journal) -> None:
    """A rollout of 200 pods on 400 nodes, of which some come and go: less than 1 KB for each decision."""
    noted = list(rollout_of_many(200))
    for one in noted:
        journal.note(*one)
        await journal.log.flush()
    same(journal.found(), noted)
    assert len(noted) > 50
    assert len(decisions.canonical(noted[9])) > 50_000
    assert journal.size / len(noted) < 1024


async def test_equal_decisions_one_after_the_other(journal: Journal) -> None:
    """The same decision twice, and one that returns to a former one, at the same time of the clock."""
    first, second = list(rollout_of_many(50))[:2]
    noted = [first, first, second, first, second]
    for one in noted:
        journal.note(*one)
    await journal.log.flush()
    same(journal.found(), noted)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}),
        (frozenset("abc"), frozenset("bcd")),
        ([f"n{number}" for number in range(40)], [f"n{number}" for number in range(3, 44)]),
        ([f"n{number}" for number in range(40)], [f"n{number}" for number in range(40)][::-1]),
        (Absence("then", "later"), Absence("then", "later", True)),
        (RCSpec(id="web", manifest=OLD, replicas_desired=1), RCSpec(id="web", manifest=NEW, replicas_desired=1)),
        (None, RCSpec(id="web", manifest=NEW, replicas_desired=1)),
        ({f"n{n}": (None, 0.0, n / 4) for n in range(40)}, {f"n{n}": (None, 0.0, n / 4 + 2.5) for n in range(1, 42)}),
        ({f"n{n}": (1.0, 2.0) for n in range(40)}, {f"n{n}": (n + 0.1, 2.5) for n in range(40)}),
    ],
)
def test_a_patch_makes_the_new_of_the_old(old: object, new: object) -> None:
    plain = msgspec.msgpack.decode(decisions.canonical(old))
    change = msgspec.msgpack.decode(decisions.canonical(decisions.patch(old, new)))
    assert decisions.plain(decisions.patched(plain, change)) == decisions.canonical(new)


async def test_fields_that_are_added_leave_a_log_readable(journal: Journal) -> None:
    """A decision that lacks fields of the running code, and has one that is gone."""
    journal.note(small())
    await journal.log.flush()
    [logged] = journal.found()
    given = {name: value for name, value in logged.given.items() if name not in ("ages", "now")} | {"gone": 1}
    decision = {name: value for name, value in logged.decision.items() if name != "completed"}
    older = msgspec.structs.replace(logged, given=given, decision=decision)
    assert not replayed(older).differs


async def test_another_plan_is_a_difference(journal: Journal) -> None:
    journal.note(small(), replace(plan(small()), add=("node-0007",)))
    await journal.log.flush()
    [logged] = journal.found()
    assert replayed(logged).differs == {"add": (["node-0007"], ["node-0000", "node-0001", "node-0002"])}


async def test_a_cut_off_end_costs_what_was_in_it(journal: Journal) -> None:
    """Cut at any byte of its last part, the log has all before it, and says what is missing."""
    journal.note(small(1))
    await journal.log.flush()
    [path] = segments(journal.directory)
    kept = path.stat().st_size
    journal.note(small(2))
    await journal.log.flush()
    raw = path.read_bytes()
    for length in range(kept + 1, len(raw)):
        path.write_bytes(raw[:length])
        damaged: list[str] = []
        assert [one.index for one in journal.found(damaged)] == [1]
        assert damaged == [f"{path.name}: its end, from byte {kept}, is cut off"]


async def test_a_damaged_part_costs_what_refers_to_it(journal: Journal) -> None:
    """Any byte flipped: what comes back is as it was, what does not is named, and nothing else is lost."""
    for number, one in enumerate(list(rollout_of_many(50))[:12]):
        journal.note(*one)
        if number % 4 == 3:
            await journal.log.flush()
    whole = journal.found()
    [path] = segments(journal.directory)
    raw = path.read_bytes()
    rng = random.Random(3)
    for position in (*rng.sample(range(len(decisions.MAGIC), len(raw)), 60), len(raw) - 1):
        path.write_bytes(raw[:position] + bytes([raw[position] ^ 0x41]) + raw[position + 1 :])
        damaged: list[str] = []
        found = journal.found(damaged)
        assert damaged
        assert all(one in whole for one in found)
    assert len(found) == 8


async def test_size_and_age_are_bounded(tmp_path: Path) -> None:
    """The oldest decisions go first, by the eighth; what is kept is whole."""
    journal = Journal(tmp_path, max_size=40_000)
    for number in range(3000):
        journal.note(small(number))
        if number % 50 == 49:
            await journal.log.flush()
            assert journal.size <= 40_000
    found = journal.found()
    assert [one.index for one in found] == list(range(3001 - len(found), 3001))
    assert len(found) > 300
    assert journal.log.unrecorded == 0


async def test_old_segments_are_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_age=800.0)
    journal.note(small(1))
    await journal.log.flush()
    journal.now += 101.0
    journal.note(small(2))
    await journal.log.flush()
    assert len(segments(tmp_path)) == 2
    journal.now += 801.0
    journal.note(small(3))
    await journal.log.flush()
    assert [one.index for one in journal.found()] == [3]


async def test_a_decision_waits_for_its_transaction(journal: Journal) -> None:
    """A batch ends before the first decision whose transaction is under way, but not for ever."""
    first, second = (journal.log.record("web", small(number), plan(small(number))) for number in (1, 2))
    assert first
    assert second
    await journal.log.flush()
    assert not journal.directory.exists()
    journal.log.written(first, 17)
    await journal.log.flush()
    assert [one.index for one in journal.found()] == [17]
    journal.now += decision_log.LONGEST_WAIT + 1
    await journal.log.flush()
    journal.log.written(second, 18)
    assert [one.index for one in journal.found()] == [17, 0]


async def test_the_end_writes_what_is_left(journal: Journal) -> None:
    running = asyncio.create_task(journal.log.run())
    await asyncio.sleep(0)
    journal.log.record("web", small(), plan(small()))
    running.cancel()
    await asyncio.wait([running])
    assert len(journal.found()) == 1


async def test_an_unwritable_folder_harms_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and a count of what is missing; when writing works again, the log goes on, with whole decisions."""
    blocked = tmp_path / "log"
    blocked.write_text("a file where the folder should be")
    journal = Journal(blocked)
    noted = list(rollout_of_many(50))[:9]
    for one in noted[:6]:
        journal.note(*one)
        await journal.log.flush()
    assert (journal.log.recorded, journal.log.unrecorded) == (0, 6)
    assert capsys.readouterr().out.count("can't be logged") == 1
    blocked.unlink()
    for one in noted[6:]:
        journal.note(*one)
        await journal.log.flush()
    same(journal.found(), noted[6:])
    assert "logged again" in capsys.readouterr().out


async def test_a_full_disk_leaves_no_half_part(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not fit is taken back; the decisions after it, which would refer to it, begin another segment."""
    noted = list(rollout_of_many(50))[:6]
    journal.note(*noted[0])
    await journal.log.flush()
    [path] = segments(journal.directory)
    kept, opened = path.read_bytes(), decision_log.open_for_append

    class Full:
        def __init__(self, *arguments: object) -> None:
            self.file = opened(*arguments)  # type: ignore[arg-type]

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, packed: bytes) -> int:
            return self.file.write(packed[:7]) or 0

    monkeypatch.setattr(decision_log, "open_for_append", Full)
    for one in noted[1:3]:
        journal.note(*one)
        await journal.log.flush()
    assert [each.read_bytes() for each in segments(journal.directory)] == [kept]
    monkeypatch.undo()
    for one in noted[3:]:
        journal.note(*one)
        await journal.log.flush()
    same(journal.found(), [noted[0], *noted[3:]])
    assert (journal.log.recorded, journal.log.unrecorded) == (4, 2)


async def test_what_cannot_be_encoded_is_counted(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for all of them; the decisions around them are whole, also those that refer to a former one."""
    noted = list(rollout_of_many(50))[:9]
    for one in noted:
        journal.note(*one)
        given = replace(one[0], hold="no \udc80 Unicode")
        assert journal.log.record("web", given, one[1]) is None
    await journal.log.flush()
    same(journal.found(), noted)
    assert (journal.log.recorded, journal.log.unrecorded) == (9, 9)
    assert capsys.readouterr().out.count("can't be logged") == 1


async def test_a_slow_disk_fills_no_memory(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_log, "MOST_PENDING", 20_000)
    for number in range(100):
        journal.note(small(number))
    assert 0 < journal.log.unrecorded < 100
    await journal.log.flush()
    assert journal.log.recorded + journal.log.unrecorded == 100
    assert len(journal.found()) == journal.log.recorded


def test_the_order_of_the_inputs_decides_nothing() -> None:
    """A log has them sorted. So may the pods, the nodes that are taken, and the strays come in any order."""
    rng = random.Random(5)
    for _ in range(300):
        chosen = rng.sample(NODES[:12], 8)
        current = {
            node: Placement(
                rng.choice([None, OLD, OLD, NEW]), rng.choice(["passing", "passing", "critical", "unknown"])
            )
            for node in chosen[:6]
        }
        nodes = [node for node in NODES[:12] if rng.random() < 0.7]
        given = PlanInput(
            RCSpec(
                id="web",
                manifest=NEW,
                replicas_desired=rng.randint(1, 9),
                allocation_strategy=rng.choice(["static", "dynamic"]),
                update=UpdatePolicy(max_surge=rng.choice(["0", "2"])),
            ),
            current,
            Eligibility(frozenset(nodes), tuple(nodes)),
            taken=rng.sample(NODES[:12], 3),
            strays=chosen[6:],
            hold=rng.choice(["", "", "the brake is on"]),
            absent={node: Absence("2026-01-01T00:00:00Z", "") for node in chosen[:6] if rng.random() < 0.2},
            rollout=rng.choice([None, a_rollout()]),
            now=1.8e9,
        )
        shuffled = replace(
            given,
            current=dict(rng.sample(list(current.items()), len(current))),
            taken=given.taken[::-1],  # type: ignore[index]
            strays=given.strays[::-1],  # type: ignore[index]
        )
        assert decisions.canonical(plan(shuffled)) == decisions.canonical(plan(given))


def a_rollout() -> Rollout:
    at = "2027-01-15T08:00:00Z"
    return Rollout(revision=1, manifest=NEW, stable=OLD, state="rolling", since=at, started=at, progressed=at)
