"""When a schedule's runs are due, and what to do for them: pure, without a clock.

`decide` takes one step: it begins one run, or asks for an abort, or only records what was skipped. The caller writes
the new state in the same transaction, and asks again until nothing is left to do.

Expressions are read by cronsim, as Debian's cron reads them. It finds local times only; `_placed` finds their moments,
also when clocks are put forward or back, by whatever time: an expression with a fixed minute and hour runs once on such
a day, right after the gap where its time does not exist; any other runs at each moment that fits. Moments are whole
minutes, in seconds since the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from heapq import merge
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import msgspec

from store.errors import RcfarmError
from store.schema.schedules import ScheduleSpec, ScheduleState, Skip, SkipCode

ON_TIME = 60.0  # seconds after its moment within which a run is not missed: an engine may have died
KEPT_SKIPS = 5
COUNTED = 100  # missed runs are counted up to this number
MAX_ACTIVE = 50  # executions that a state names; one transaction aborts all of them
_NEAR = 25 * 3600.0  # seconds: a change of the clocks moves local times by up to a day
_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class BadSchedule(RcfarmError, ValueError):
    """A schedule that can't be followed. `field` is `cron` or `time_zone`; the message says what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"{field}: {problem}")


@dataclass(frozen=True, slots=True)
class Decision:
    """The next step. `state`: to be written, if it differs from the former one. `run`: the moment of the run that
    begins in the same transaction, and `execution` its id. `abort`: executions to be aborted in it. `wake`: when the
    clock alone changes the decision; None: never, or at once if the state differs."""

    state: ScheduleState
    run: float | None = None
    execution: str = ""
    abort: tuple[str, ...] = ()
    wake: float | None = None


def check(spec: ScheduleSpec, now: float) -> None:
    """Raise `BadSchedule` unless each expression can be read and has a run after `now`."""
    zone = _zone(spec.time_zone)
    for expression in spec.cron:
        if next(_runs(expression, zone, now), None) is None:
            raise BadSchedule("cron", f"{expression!r} never fits a date; correct its days and months")


def upcoming(spec: ScheduleSpec, after: float) -> Iterator[float]:
    """Yield the moments of runs after `after`, in order. Raises `BadSchedule`."""
    zone = _zone(spec.time_zone)
    return _distinct(merge(*(_runs(expression, zone, after) for expression in spec.cron)))


def execution_id(schedule: str, moment: float) -> str:
    """Return the id of the run's execution."""
    return f"{schedule}-{int(moment) // 60}"


def is_due(spec: ScheduleSpec, state: ScheduleState | None, now: float) -> bool:
    """Return whether `decide` needs to know which executions are active. Raises `BadSchedule`."""
    state = state or ScheduleState()
    if spec.paused:
        return bool(state.requested)
    return bool(state.pending) or next(upcoming(spec, max(spec.since, state.decided)), now + 1) <= now


def decide(spec: ScheduleSpec, state: ScheduleState | None, active: Collection[str], now: float) -> Decision:
    """Return the next step. `active`: those of the state's executions that have not ended. Raises `BadSchedule`.

    A run that begins late counts as missed after `ON_TIME` seconds. A paused schedule keeps a run that waits for the
    execution that it replaces, and begins it only if an operator triggered it.
    """
    state = state or ScheduleState()
    alive = tuple(each for each in state.active if each in active)
    if spec.paused and not state.requested:
        return Decision(state)
    start = max(spec.since, state.decided)
    moment = None if spec.paused else next(upcoming(spec, start), None)
    if moment is None or moment > now:
        if not state.pending:
            return Decision(state, wake=moment)
        if spec.start_deadline and now - state.pending > spec.start_deadline:
            skip = _skip("DeadlinePassed", "the execution before it did not end in time", [state.pending])
            state = msgspec.structs.replace(state, pending=0.0, requested="")
            return Decision(_skipped(state, skip.moment, skip), wake=moment)
        if alive and spec.overlap != "allow":
            deadline = state.pending + spec.start_deadline if spec.start_deadline else None
            return Decision(state, wake=min((each for each in (moment, deadline) if each), default=None))
        pending, execution = state.pending, state.requested or execution_id(spec.name, state.pending)
        state = msgspec.structs.replace(state, pending=0.0, requested="")
        return _begun(state, alive, pending, execution, decided=state.decided)
    wanted = {"none": 0, "last": 1, "all": spec.max_missed}[spec.missed]
    late = _latest(spec, start, now - ON_TIME, wanted + COUNTED)
    recent = [*takewhile(lambda each: each <= now, upcoming(spec, max(start, now - ON_TIME)))]
    if spec.start_deadline:
        expired = [each for each in (*late, *recent) if now - each > spec.start_deadline]
        if expired:
            return Decision(_skipped(state, expired[-1], _skip("DeadlinePassed", "its start deadline passed", expired)))
    if spec.missed == "last" and recent:
        wanted = 0  # the newest run is on time
    if len(late) > wanted:
        surplus = late[: len(late) - wanted]
        why = f"no engine began it in time, and missed is {spec.missed}"
        return Decision(_skipped(state, surplus[-1], _skip("Missed", why, surplus)))
    chosen = (*late, *recent)
    first, last = chosen[0], chosen[-1]
    if spec.overlap == "forbid" and alive:
        return Decision(_skipped(state, last, _skip("Overlap", f"{alive[-1]} had not ended", chosen)))
    if spec.overlap == "replace":
        state = _replaced(state, chosen[:-1])
        if alive:
            return Decision(msgspec.structs.replace(state, decided=last, pending=last, active=alive), abort=alive)
        return _begun(state, alive, last, execution_id(spec.name, last), decided=last)
    return _begun(state, alive, first, execution_id(spec.name, first), decided=first)


def triggered(
    spec: ScheduleSpec, state: ScheduleState | None, active: Collection[str], now: float, *, beside: bool = False
) -> Decision | None:
    """Return the step for a run that an operator triggers; None if the overlap rule forbids it. `beside`: it begins
    whatever the rule says. Its execution ends with the second, so that it has no other run's id."""
    state = state or ScheduleState()
    alive = tuple(each for each in state.active if each in active)
    execution = f"{spec.name}-{int(now)}"
    if not alive or beside or spec.overlap == "allow":
        active = (*alive, execution)[-MAX_ACTIVE:]
        return Decision(msgspec.structs.replace(state, active=active), run=now, execution=execution)
    if spec.overlap == "forbid":
        return None
    waiting = msgspec.structs.replace(_replaced(state), pending=now, requested=execution, active=alive)
    return Decision(waiting, abort=alive)


def without_run(before: ScheduleState | None, decision: Decision, why: str) -> ScheduleState:
    """Return the state of a decision whose run can't begin because its execution's id is taken."""
    before, state = before or ScheduleState(), decision.state
    skips = _kept(state.skips, _skip("IdTaken", why, [decision.run or state.decided]))
    return msgspec.structs.replace(
        state, last=before.last, last_moment=before.last_moment, active=state.active[:-1], skips=skips
    )


def _begun(state: ScheduleState, alive: tuple[str, ...], moment: float, execution: str, *, decided: float) -> Decision:
    active = (*alive, execution)[-MAX_ACTIVE:]
    state = msgspec.structs.replace(state, decided=decided, last=execution, last_moment=moment, active=active)
    return Decision(state, run=moment, execution=execution)


def _replaced(state: ScheduleState, moments: Collection[float] = ()) -> ScheduleState:
    """Return the state without the run that waits; that, and the runs of `moments`, are skipped for a newer one."""
    replaced = [each for each in (state.pending, *moments) if each]
    if not replaced:
        return state
    skip = _skip("Replaced", "a newer run took its place", replaced)
    return msgspec.structs.replace(state, pending=0.0, requested="", skips=_kept(state.skips, skip))


def _skipped(state: ScheduleState, decided: float, skip: Skip) -> ScheduleState:
    return msgspec.structs.replace(state, decided=max(decided, state.decided), skips=_kept(state.skips, skip))


def _skip(code: SkipCode, message: str, moments: Collection[float]) -> Skip:
    return Skip(code, message, max(moments), len(moments))


def _kept(skips: tuple[Skip, ...], skip: Skip) -> tuple[Skip, ...]:
    return (*skips, skip)[-KEPT_SKIPS:]


def _distinct(moments: Iterator[float]) -> Iterator[float]:
    last: float | None = None
    for moment in moments:
        if moment != last:
            yield moment
        last = moment


def _latest(spec: ScheduleSpec, start: float, end: float, most: int) -> list[float]:
    """Return the last moments after `start` and not after `end`, at most `most`, in order."""
    zone = _zone(spec.time_zone)
    backwards = merge(*(_runs(each, zone, end, reverse=True) for each in spec.cron), reverse=True)
    found: list[float] = []
    for moment in islice(_distinct(backwards), most):
        if moment <= start:
            break
        found.append(moment)
    return found[::-1]


def _runs(expression: str, zone: ZoneInfo, bound: float, *, reverse: bool = False) -> Iterator[float]:
    """Yield the moments of one expression after `bound`, in order; or not after it, backwards."""
    from cronsim import CronSim

    text = _parsed(expression)
    minute, hour = text.split()[:2]
    is_fixed = not minute.startswith("*") and not hour.startswith("*")
    try:
        offsets = [_offset(zone, bound + side * _NEAR) for side in (-1, 0, 1)]
        begin = datetime.fromtimestamp(bound, zone).replace(tzinfo=None)
        change = max(offsets) - min(offsets)  # local times from before the bound come again after it, or the other way
        begin += change + timedelta(seconds=1) if reverse else -change  # a run at the bound itself counts backwards
        for moment in _placed(CronSim(text, begin, reverse=reverse), zone, is_fixed=is_fixed, reverse=reverse):
            if (moment <= bound) if reverse else (moment > bound):
                yield moment
    except (OverflowError, ValueError):
        return  # the end of the calendar


def _placed(times: Iterator[datetime], zone: ZoneInfo, *, is_fixed: bool, reverse: bool) -> Iterator[float]:
    """Yield the moments of local times, in their order: of one that exists twice both, or the first if `is_fixed`; of
    one that does not exist none, or the end of the gap if `is_fixed`."""
    others = deque[float]()  # moments of times that exist twice, from the side of the change that is reached last
    for each in times:
        first, second = (each.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
        if first > second:
            if not is_fixed:
                continue
            first = second = _end_of_gap(zone, second, first)
        if is_fixed:
            yield first
            continue
        near, far = (second, first) if reverse else (first, second)
        while others and (others[0] > near if reverse else others[0] < near):
            yield others.popleft()
        yield near
        if near != far:
            others.append(far)
    yield from others


def _end_of_gap(zone: ZoneInfo, before: float, after: float) -> float:
    """Return the first minute with the offset of `after`; the clocks are put forward once between both."""
    offset, low, high = _offset(zone, after), int(before), int(after)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _offset(zone, middle) == offset else (middle, high)
    return -(-high // 60) * 60.0


def _offset(zone: ZoneInfo, moment: float) -> timedelta:
    return datetime.fromtimestamp(moment, zone).utcoffset() or timedelta()


@lru_cache(maxsize=1024)
def _parsed(expression: str) -> str:
    """Return the expression in five fields. Raises `BadSchedule` for one that can't be read or never fits."""
    from cronsim import CronSim, CronSimError

    text = _MACROS.get(expression.lower(), expression)
    fields = text.split()
    some_day = datetime(2000, 1, 1, tzinfo=UTC)
    if len(fields) != 5:
        raise BadSchedule("cron", f"{expression!r} has {len(fields)} fields; write five, such as '0 3 * * *'")
    try:
        CronSim(text, some_day)
    except CronSimError as error:
        try:
            CronSim(" ".join((*fields[:3], "*", fields[4])), some_day)
        except CronSimError:
            problem = str(error).removeprefix("Bad ")
            raise BadSchedule(
                "cron", f"{expression!r} has a bad {problem}; write five fields, such as '0 3 * * *'"
            ) from error
        raise BadSchedule("cron", f"{expression!r} never fits a date; correct its days and months") from error
    return text


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # an OSError for the name of a folder
        raise BadSchedule("time_zone", f"{name!r} is not known; write a name such as Europe/Berlin or UTC") from error
