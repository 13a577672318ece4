"""When runs are due: expressions, clocks that change, overlap, and runs that were missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.tasks.schedule import (
    KEPT_SKIPS,
    BadSchedule,
    Decision,
    check,
    decide,
    execution_id,
    is_due,
    triggered,
    upcoming,
    without_run,
)
from store.schema.schedules import ScheduleSpec, ScheduleState
from store.schema.tasks import TaskSpec
from tests.support import require

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()


def schedule(*cron: str, **fields: Any) -> ScheduleSpec:
    return ScheduleSpec(name="s", cron=cron or ("*/10 * * * *",), task=TaskSpec(id="", type="job"), **fields)


def local(spec: ScheduleSpec, after: str, count: int) -> list[str]:
    zone = ZoneInfo(spec.time_zone)
    start = datetime.fromisoformat(after).replace(tzinfo=zone).timestamp()
    return [f"{datetime.fromtimestamp(each, zone):%m-%d %H:%M%z}" for each in islice(upcoming(spec, start), count)]


@pytest.mark.parametrize(
    ("cron", "after", "runs"),
    [
        ("30 2 * * *", "2026-03-28 12:00", ["03-29 03:00+0200", "03-30 02:30+0200"]),  # 02:30 does not exist
        ("15,30 2 * * *", "2026-03-28 12:00", ["03-29 03:00+0200", "03-30 02:15+0200"]),  # one run for both
        ("30 * * * *", "2026-03-29 01:00", ["03-29 01:30+0100", "03-29 03:30+0200"]),
        ("30 2 * * *", "2026-10-24 12:00", ["10-25 02:30+0200", "10-26 02:30+0100"]),  # 02:30 exists twice
        ("30 * * * *", "2026-10-25 01:59", ["10-25 02:30+0200", "10-25 02:30+0100", "10-25 03:30+0100"]),
        ("0 0 29 2 *", "2026-01-01 00:00", ["02-29 00:00+0100", "02-29 00:00+0100"]),
        ("0 0 31 * *", "2026-04-01 00:00", ["05-31 00:00+0200", "07-31 00:00+0200"]),
        ("0 0 L * *", "2028-02-01 00:00", ["02-29 00:00+0100", "03-31 00:00+0200"]),
        ("@Daily", "2026-06-01 00:00", ["06-02 00:00+0200"]),
        ("0 0 30 2 1", "2026-02-01 00:00", ["02-02 00:00+0100"]),  # either day counts
    ],
)
def test_moments(cron: str, after: str, runs: list[str]) -> None:
    assert local(schedule(cron, time_zone="Europe/Berlin"), after, len(runs)) == runs


def test_several_expressions_are_one_sequence() -> None:
    spec = schedule("0 9 * * *", "*/30 9 * * *", time_zone="UTC")
    assert local(spec, "2026-06-01 00:00", 3) == ["06-01 09:00+0000", "06-01 09:30+0000", "06-02 09:00+0000"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cron": ("0 0 30 2 *",)}, "cron: '0 0 30 2 *' never fits a date"),
        ({"cron": ("0 0 * * *", "0 0 31 4,6 *")}, "never fits"),
        ({"cron": ("61 0 * * *",)}, "has a bad minute"),
        ({"cron": ("hello",)}, "has 1 fields; write five"),
        ({"cron": ("* * * * * *",)}, "has 6 fields"),
        ({"time_zone": "Europe/Atlantis"}, "time_zone: 'Europe/Atlantis' is not known"),
        ({"time_zone": "Europe"}, "is not known"),
        ({"time_zone": "../etc/passwd"}, "is not known"),
    ],
)
def test_a_schedule_that_never_runs_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSchedule, match=message.replace("*", r"\*").replace("(", r"\(")):
        check(msgspec.structs.replace(schedule(), **fields), NOON)


# The moments, found again minute by minute.

FIELDS = st.sampled_from(("*", "*/7", "0", "30", "15,45", "1-3", "2"))
DAYS = st.sampled_from(("*", "*/2", "29", "1,31", "L"))


def members(field: str, least: int, most: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        body, _, step = part.partition("/")
        first, _, last = body.partition("-")
        low, high = (least, most) if body == "*" else (int(first), int(last or first))
        found |= set(range(low, high + 1, int(step or 1)))
    return found


def fits(cron: str) -> Callable[[datetime], bool]:
    minute, hour, day, month, weekday = cron.split()
    minutes, hours, months = members(minute, 0, 59), members(hour, 0, 23), members(month, 1, 12)
    weekdays = {each % 7 for each in members(weekday, 0, 7)}
    dates = set() if day == "L" else members(day, 1, 31)
    is_both = day.startswith("*") or weekday.startswith("*")

    def fits_day(at: datetime) -> bool:
        by_date = (at + timedelta(days=1)).day == 1 if day == "L" else at.day in dates
        by_weekday = at.isoweekday() % 7 in weekdays
        return (by_date and by_weekday) if is_both else (by_date or by_weekday)

    return lambda at: at.minute in minutes and at.hour in hours and at.month in months and fits_day(at)


def by_the_minute(cron: str, zone: ZoneInfo, start: datetime, minutes: int) -> Iterator[float]:
    fitting, is_fixed = fits(cron), not cron.startswith("*") and not cron.split()[1].startswith("*")
    before = (start - timedelta(minutes=1)).astimezone(zone).replace(tzinfo=None)
    for number in range(minutes):
        at = start + timedelta(minutes=number)
        here = at.astimezone(zone)
        naive = here.replace(tzinfo=None, fold=0)
        skipped = int((naive - before) / timedelta(minutes=1)) - 1
        in_gap = [naive - timedelta(minutes=back) for back in range(1, skipped + 1)] if is_fixed else []
        if any(fitting(each) for each in in_gap) or (fitting(naive) and not (is_fixed and here.fold)):
            yield at.timestamp()
        before = naive


@settings(max_examples=20, deadline=None)
@given(
    FIELDS,
    FIELDS.filter(lambda each: each not in ("30", "15,45")),
    DAYS,
    st.sampled_from(("*", "MON", "1-5", "0")),
    st.sampled_from(("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC")),
    st.sampled_from(("2026-03-07", "2026-03-28", "2026-10-24", "2026-10-31", "2026-04-04", "2026-10-03", "2028-02-28")),
    st.integers(0, 1440),
)
def test_the_moments_are_those_of_a_clock_that_is_read_each_minute(
    minute: str, hour: str, day: str, weekday: str, zone: str, date: str, offset: int
) -> None:
    cron = f"{minute} {hour} {day} * {weekday}"
    begin = datetime.fromisoformat(date).replace(tzinfo=UTC)
    window = 2 * 1440 + 180
    moments = list(by_the_minute(cron.replace("MON", "1"), ZoneInfo(zone), begin, window))
    after, end = begin.timestamp() + 60 * offset, begin.timestamp() + 60 * (window - 1)
    spec = schedule(cron, time_zone=zone)
    found = []
    for each in upcoming(spec, after):
        if each > end:
            break
        found.append(each)
    assert found == [each for each in moments if each > after]
    late = drive(
        schedule(cron, time_zone=zone, missed="all", max_missed=3, overlap="allow"),
        end,
        ScheduleState(decided=after),
    )[0]
    assert late == found[len(found) - len(late) :]
    assert len(late) >= min(3, len(found))


def changes() -> Iterator[tuple[str, float, float]]:
    """Yield a zone, a moment and the seconds by which its clocks are put forward then: one for each kind of change (by
    which time, at which local time) that any zone has since 1992."""
    found = set[tuple[float, int, int]]()
    begin, end = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (1992, 2038))
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        low, then = begin, datetime.fromtimestamp(begin, zone).utcoffset()
        for high in range(begin, end, 20 * 86400):  # no zone has two changes within twenty days
            now = datetime.fromtimestamp(high, zone).utcoffset()
            if now != then:
                assert now is not None
                assert then is not None
                before, after = low, high
                while after - before > 1:
                    middle = (before + after) // 2
                    is_before = datetime.fromtimestamp(middle, zone).utcoffset() == then
                    before, after = (middle, after) if is_before else (before, middle)
                at, by = datetime.fromtimestamp(after, zone), (now - then).total_seconds()
                if (by, at.hour, at.minute) not in found:
                    found.add((by, at.hour, at.minute))
                    yield name, float(after), by
            low, then = high, now


def test_no_zone_misses_or_repeats_a_run_when_its_clocks_change() -> None:
    kinds = list(changes())
    assert {by / 60 for _, _, by in kinds} >= {-180, -120, -60, -30, 30, 60, 120, 180, 1440}
    for name, change, by in kinds:
        zone = ZoneInfo(name)
        begin, end = change - abs(by) - 3 * 3600, change + abs(by) + 3 * 3600
        here = datetime.fromtimestamp(change, zone)
        around = sorted({(here.hour + number) % 24 for number in (-1, 0, 1)})
        hours = ",".join(map(str, around))
        for cron in (
            "*/17 * * * *",
            f"15 {hours} * * *",
            f"0,59 {around[0]}-23 * * *",
            f"*/9 {around[1]} * * *",
            "7 * * * *",
        ):
            start = datetime.fromtimestamp(begin, UTC)
            expected = list(by_the_minute(cron, zone, start, int(end - begin) // 60))
            spec = schedule(cron, time_zone=name, missed="all", max_missed=3, overlap="allow")
            for after in (begin, change - 60, change, change + abs(by)):
                found = list(takewhile(end.__gt__, upcoming(spec, max(begin, after) - 1)))
                assert found == [each for each in expected if each >= after], (name, cron, here)
            for now in (change, change + abs(by)):
                made_up = drive(spec, now, ScheduleState(decided=now - 2 * 3600))[0]
                due = [each for each in expected if now - 2 * 3600 < each <= now]
                assert made_up == due[len(due) - len(made_up) :], (name, cron, here)
                assert len(made_up) >= min(3, len(due)), (name, cron, here)


# What is done for them.


def drive(
    spec: ScheduleSpec, now: float, state: ScheduleState | None = None, active: set[str] | None = None
) -> tuple[list[float], Decision]:
    """Take steps until nothing is left to do. Return the moments of the runs, and the last decision."""
    alive, runs = active if active is not None else set[str](), list[float]()
    for _ in range(2000):
        decision = decide(spec, state, alive, now)
        if decision.state == (state or ScheduleState()):
            return runs, decision
        state = decision.state
        if decision.run is not None:
            runs.append(decision.run)
            alive.add(decision.execution)
    raise AssertionError("the schedule does not come to rest")


def codes(decision: Decision) -> list[str]:
    return [skip.code for skip in decision.state.skips]


def test_a_run_begins_at_its_moment() -> None:
    spec = schedule(since=NOON)
    runs, decision = drive(spec, NOON + 599)
    assert (runs, decision.wake) == ([], NOON + 600)
    assert not is_due(spec, None, NOON + 599)
    assert is_due(spec, None, NOON + 600)
    runs, decision = drive(spec, NOON + 600)
    assert (runs, decision.wake) == ([NOON + 600], NOON + 1200)
    assert decision.state.active == (decision.state.last,) == (execution_id("s", NOON + 600),)


def test_a_run_that_is_a_little_late_is_not_missed() -> None:
    assert drive(schedule(since=NOON, missed="none"), NOON + 659)[0] == [NOON + 600]
    runs, decision = drive(schedule(since=NOON, missed="none"), NOON + 661)
    assert runs == []
    assert codes(decision) == ["Missed"]


@pytest.mark.parametrize(("missed", "moments"), [("none", []), ("last", [5400]), ("all", [3600, 4200, 4800, 5400])])
def test_missed_runs(missed: Any, moments: list[float]) -> None:
    spec = schedule(since=NOON, missed=missed, max_missed=4, overlap="allow")
    runs, decision = drive(spec, NOON + 5700)
    assert runs == [NOON + each for each in moments]
    assert codes(decision) == ["Missed"]
    assert decision.state.skips[0].count == 9 - len(moments)
    assert decision.wake == NOON + 6000


def test_missed_runs_of_years_are_found_quickly() -> None:
    runs, decision = drive(schedule("* * * * *", since=NOON, missed="last"), NOON + 5 * 365 * 86400 + 30)
    assert len(runs) == 1
    assert decision.state.skips[-1].count >= 100


def test_the_last_run_is_the_one_on_time() -> None:
    runs, _ = drive(schedule(since=NOON, missed="last", overlap="allow"), NOON + 6010)
    assert runs == [NOON + 6000]


def test_a_start_deadline_ends_runs_that_are_late() -> None:
    spec = schedule(since=NOON, missed="all", start_deadline=900.0, overlap="allow")
    runs, decision = drive(spec, NOON + 3700)
    assert runs == [NOON + 3000, NOON + 3600]
    assert codes(decision) == ["DeadlinePassed"]


def test_forbid_skips_while_an_execution_is_active() -> None:
    spec = schedule(since=NOON, overlap="forbid")
    _, first = drive(spec, NOON + 600)
    runs, second = drive(spec, NOON + 1200, first.state, set(first.state.active))
    assert runs == []
    assert codes(second) == ["Overlap"]
    assert first.state.last in second.state.skips[0].message
    runs, third = drive(spec, NOON + 1800, second.state)
    assert runs == [NOON + 1800]
    assert third.state.active == (third.state.last,)


def test_allow_begins_beside_the_others() -> None:
    spec = schedule(since=NOON, overlap="allow")
    _, first = drive(spec, NOON + 600)
    runs, second = drive(spec, NOON + 1200, first.state, set(first.state.active))
    assert runs == [NOON + 1200]
    assert len(second.state.active) == 2


def test_replace_aborts_and_begins_after_the_end() -> None:
    spec = schedule(since=NOON, overlap="replace")
    _, first = drive(spec, NOON + 600)
    alive = set(first.state.active)
    decision = decide(spec, first.state, alive, NOON + 1200)
    assert (decision.abort, decision.run) == (tuple(alive), None)
    runs, waiting = drive(spec, NOON + 1260, decision.state, set(alive))
    assert runs == []
    assert is_due(spec, waiting.state, NOON + 1260)
    runs, newer = drive(spec, NOON + 1800, waiting.state, set(alive))
    assert (runs, codes(newer), newer.state.pending) == ([], ["Replaced"], NOON + 1800)
    runs, ended = drive(spec, NOON + 1850, newer.state, set())
    assert (runs, ended.state.pending) == ([NOON + 1800], 0.0)


def test_a_run_does_not_wait_beyond_its_start_deadline() -> None:
    spec = schedule(since=NOON, overlap="replace", start_deadline=100.0)
    _, first = drive(spec, NOON + 600)
    alive = set(first.state.active)
    runs, waiting = drive(spec, NOON + 1200, first.state, set(alive))
    assert waiting.wake == NOON + 1300
    runs, after = drive(spec, NOON + 1301, waiting.state, set(alive))
    assert (runs, codes(after), after.state.pending) == ([], ["DeadlinePassed"], 0.0)


def test_a_paused_schedule_does_nothing() -> None:
    assert drive(schedule(since=NOON, paused=True), NOON + 6000) == ([], Decision(ScheduleState()))


@pytest.mark.parametrize("overlap", ["allow", "forbid", "replace"])
def test_a_triggered_run_begins_at_once_when_no_other_is_active(overlap: Any) -> None:
    _, first = drive(schedule(since=NOON), NOON + 600)
    decision = require(triggered(schedule(since=NOON, overlap=overlap), first.state, set(), NOON + 700))
    assert (decision.execution, decision.abort) == (f"s-{int(NOON) + 700}", ())
    assert decision.state.active == (decision.execution,)
    assert decision.state.last == first.state.last


def test_a_triggered_run_obeys_the_overlap_rule() -> None:
    _, first = drive(schedule(since=NOON), NOON + 600)
    alive = set(first.state.active)
    assert triggered(schedule(since=NOON), first.state, alive, NOON + 700) is None
    beside = require(triggered(schedule(since=NOON), first.state, alive, NOON + 700, beside=True))
    assert beside.state.active == (first.state.last, beside.execution)
    runs, then = drive(schedule(since=NOON), NOON + 1200, beside.state, {beside.execution})
    assert (runs, codes(then)) == ([], ["Overlap"])


@pytest.mark.parametrize("paused", [False, True])
def test_a_triggered_run_replaces_and_begins_after_the_end(paused: bool) -> None:
    spec = schedule(since=NOON, overlap="replace", paused=paused)
    _, first = drive(schedule(since=NOON, overlap="replace"), NOON + 600)
    alive = set(first.state.active)
    asked = require(triggered(spec, first.state, alive, NOON + 610.5))
    assert (asked.run, asked.abort) == (None, tuple(alive))
    assert is_due(spec, asked.state, NOON + 620)
    runs, waiting = drive(spec, NOON + 620, asked.state, set(alive))
    assert runs == []
    decision = decide(spec, waiting.state, (), NOON + 630)
    assert (decision.run, decision.execution) == (NOON + 610.5, f"s-{int(NOON) + 610}")
    assert (decision.state.pending, decision.state.requested) == (0.0, "")
    assert decide(spec, decision.state, {decision.execution}, NOON + 640).run is None
    newer = require(triggered(spec, waiting.state, alive, NOON + 650))
    assert (newer.state.requested, codes(newer)) == (f"s-{int(NOON) + 650}", ["Replaced"])


def test_an_id_that_is_taken_costs_one_run() -> None:
    spec = schedule(since=NOON, overlap="allow")
    _, first = drive(spec, NOON + 600)
    decision = decide(spec, first.state, set(first.state.active), NOON + 1200)
    state = without_run(first.state, decision, "s-1 is another task")
    assert (state.last, state.active, state.decided) == (first.state.last, first.state.active, NOON + 1200)
    assert state.skips[-1].code == "IdTaken"


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(("allow", "forbid", "replace")),
    st.sampled_from(("none", "last", "all")),
    st.sampled_from((0.0, 30.0, 1000.0)),
    st.lists(st.tuples(st.floats(0, 4000), st.booleans(), st.booleans()), max_size=12),
)
def test_no_run_begins_twice_and_none_is_forgotten(
    overlap: Any, missed: Any, deadline: float, looks: list[tuple[float, bool, bool]]
) -> None:
    """However often and late the schedule is looked at, and triggered, each moment is run or skipped, once."""
    spec = schedule(since=NOON, overlap=overlap, missed=missed, start_deadline=deadline)
    state, alive, now = ScheduleState(), set[str](), NOON
    runs: list[float] = []
    for pause, ended, is_triggered in looks:
        now += pause
        if ended:
            alive.clear()
        asked = triggered(spec, state, alive, now) if is_triggered else None
        if asked is not None:
            state = asked.state
            alive |= {asked.execution} if asked.run is not None else set()
        begun, decision = drive(spec, now, state, alive)
        runs += begun
        state = decision.state
        assert not begun or overlap == "allow" or len(begun) == 1
        assert decision.wake is not None
        assert decision.wake > now
        assert len(state.skips) <= KEPT_SKIPS
        if overlap != "allow":
            assert len(alive) <= 1
    assert runs == sorted(set(runs))
    if overlap == "allow" and missed == "all" and not deadline and all(pause < 3000 for pause, *_ in looks):
        assert runs == [NOON + 600 * each for each in range(1, int((now - NOON) // 600) + 1)]
