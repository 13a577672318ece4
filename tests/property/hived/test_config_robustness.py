"""P20: any file results in a cluster or in `InvalidConfig`."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.hived.config.file import (
    CellTypeSpec,
    HivedConfig,
    PhysicalCellSpec,
    VirtualCellSpec,
    VirtualClusterSpec,
    lines_of,
)
from scheduler.hived.config.resolve import resolve
from scheduler.hived.errors import ConfigError, InvalidConfig
from tests.support.hived.config import RACKS, read

NAMES = st.sampled_from(["", "a", "b", "c", "d", "a.b", "1", "-1", "x/y"])
NUMBERS = st.integers(-1, 3)
CELLS = st.recursive(
    st.builds(PhysicalCellSpec, NAMES, NAMES, NAMES),
    lambda below: st.builds(PhysicalCellSpec, NAMES, NAMES, NAMES, st.lists(below, max_size=3).map(tuple)),
    max_leaves=8,
)
CLUSTERS = st.builds(
    VirtualClusterSpec,
    st.lists(st.builds(VirtualCellSpec, NAMES | st.just("c.b") | st.just("c.a"), NUMBERS), max_size=3).map(tuple),
    st.lists(NAMES, max_size=2).map(tuple),
)
CONFIGS = st.builds(
    HivedConfig,
    st.dictionaries(NAMES, st.builds(CellTypeSpec, NAMES, NUMBERS, st.booleans()), max_size=4),
    st.lists(CELLS, max_size=4).map(tuple),
    st.dictionaries(NAMES, CLUSTERS, max_size=3),
)


def problems_of(config: HivedConfig) -> list[ConfigError]:
    """Return the problems of resolving, [] if there are none."""
    try:
        resolve(config)
    except InvalidConfig as invalid:
        return list(invalid.errors)
    return []


def problems_in(text: str) -> list[ConfigError]:
    """Return the problems of reading and resolving, [] if there are none."""
    try:
        return problems_of(read(text))
    except InvalidConfig as invalid:
        return list(invalid.errors)


@settings(deadline=None)
@given(CONFIGS)
def test_resolving_ends_in_a_cluster_or_in_problems_with_places(config: HivedConfig) -> None:
    """No combination of names, counts and trees raises another error."""
    assert all(error.path and error.problem for error in problems_of(config))


@settings(deadline=None)
@given(st.integers(0, len(RACKS)), st.integers(0, 12), st.text("{}[]:,-&*<! \n\"'%0a", max_size=4))
def test_reading_a_damaged_file_ends_in_a_configuration_or_in_problems(at: int, gone: int, put: str) -> None:
    """A deletion or insertion anywhere in a file; the line of each problem can be found."""
    text = RACKS[:at] + put + RACKS[at + gone :]
    paths = [error.path for error in problems_in(text)]
    assert len(lines_of(text, paths)) == len(paths)
