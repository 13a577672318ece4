"""Which ended executions are kept: pure, without a clock.

Four rules apply in turn, each to what those before it leave: the limits of an execution's schedule, the age, the number
of one type of task in one project, and the number of all. Each removes the oldest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple


class Group(NamedTuple):
    """What limits distinguish. `schedule`: "" for an execution of none."""

    project: str
    type: str
    schedule: str
    succeeded: bool


class Ended(NamedTuple):
    """An ended execution. `ended_at`: seconds since the epoch. `depends_on`: what it has waited for."""

    ended_at: float
    group: Group
    depends_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """How long, in seconds, and how many ended executions are kept; 0: no limit."""

    max_age: float = 0.0
    max_count: int = 0
    max_per_type: int = 0


class Kept(NamedTuple):
    """How many executions of a schedule are kept that succeeded, and that ended otherwise; None: no limit."""

    succeeded: int | None
    failed: int | None


class Surplus(NamedTuple):
    """An execution to be removed. `schedule`: whose limits ask for that; "" if others do."""

    id: str
    schedule: str = ""


def surplus(ended: Mapping[str, Ended], limits: Limits, schedules: Mapping[str, Kept], now: float) -> list[Surplus]:
    """Return the executions to remove, the oldest first. `ended`: by id. `schedules`: the limits of each, by name."""
    counts = Counter(each.group for each in ended.values())
    removed: dict[str, Surplus] = {}

    def remove(task: str, schedule: str = "") -> None:
        removed[task] = Surplus(task, schedule)
        counts[ended[task].group] -= 1

    def trim(rule: Callable[[Group], tuple[Hashable, int] | None], *, of_schedule: bool = False) -> None:
        """Remove the oldest of each set. `rule` returns the set of a group, and how many of the set are kept."""
        sets = {group: found for group in counts if (found := rule(group)) is not None}
        totals: Counter[Hashable] = Counter()
        for group, (name, _) in sets.items():
            totals[name] += counts[group]
        over = {group: name for group, (name, most) in sets.items() if totals[name] > most}
        members: dict[Hashable, list[tuple[float, str]]] = {name: [] for name in over.values()}
        for task, each in ended.items() if over else ():
            name = over.get(each.group)
            if name is not None and task not in removed:
                members[name].append((each.ended_at, task))
        kept = dict(sets.values())
        for name, candidates in members.items():
            for _, task in nsmallest(totals[name] - kept[name], candidates):
                remove(task, ended[task].group.schedule if of_schedule else "")

    def of_schedule(group: Group) -> tuple[Hashable, int] | None:
        limit = schedules.get(group.schedule)
        most = None if limit is None else limit.succeeded if group.succeeded else limit.failed
        return None if most is None else ((group.schedule, group.succeeded), most)

    trim(of_schedule, of_schedule=True)
    if limits.max_age:
        for task, each in ended.items():
            if now - each.ended_at > limits.max_age and task not in removed:
                remove(task)
    if limits.max_per_type:
        trim(lambda group: ((group.project, group.type), limits.max_per_type))
    if limits.max_count:
        trim(lambda group: ("", limits.max_count))
    return sorted(removed.values(), key=lambda each: (ended[each.id].ended_at, each.id))
