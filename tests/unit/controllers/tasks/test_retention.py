"""Which ended executions go: against a model that sorts everything."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hypothesis import given
from hypothesis import strategies as st

from controllers.tasks.retention import Ended, Group, Kept, Limits, Surplus, surplus

NOW = 1000.0
GROUPS = st.builds(
    Group, st.sampled_from(("red", "blue")), st.sampled_from("pq"), st.sampled_from(("", "n", "m")), st.booleans()
)
ENDED = st.builds(Ended, st.integers(0, 999).map(float), GROUPS)
COUNTS = st.integers(0, 4)
KEPT = st.builds(Kept, st.none() | COUNTS, st.none() | COUNTS)


def expected(ended: dict[str, Ended], limits: Limits, schedules: dict[str, Kept]) -> list[Surplus]:
    left = sorted(ended, key=lambda task: (ended[task].ended_at, task))
    gone: dict[str, str] = {}

    def newest(most: int | None, key: Callable[[Group], Hashable], which: Hashable, schedule: str = "") -> None:
        of_set = [task for task in left if task not in gone and key(ended[task].group) == which]
        if most is not None:
            gone.update(dict.fromkeys(of_set[: max(0, len(of_set) - most)], schedule))

    for name, kept in schedules.items():
        newest(kept.succeeded, lambda group: (group.schedule, group.succeeded), (name, True), name)
        newest(kept.failed, lambda group: (group.schedule, group.succeeded), (name, False), name)
    if limits.max_age:
        gone.update({task: "" for task in left if task not in gone and NOW - ended[task].ended_at > limits.max_age})
    for kind in {(each.group.project, each.group.type) for each in ended.values()}:
        newest(limits.max_per_type or None, lambda group: (group.project, group.type), kind)
    newest(limits.max_count or None, lambda group: None, None)
    return [Surplus(task, gone[task]) for task in left if task in gone]


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), ENDED, max_size=30),
    st.builds(Limits, st.sampled_from((0.0, 300.0, 900.0)), COUNTS, COUNTS),
    st.dictionaries(st.sampled_from(("n", "gone")), KEPT),
)
def test_the_oldest_beyond_each_limit_go(ended: dict[str, Ended], limits: Limits, schedules: dict[str, Kept]) -> None:
    assert surplus(ended, limits, schedules, NOW) == expected(ended, limits, schedules)
