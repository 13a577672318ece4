"""The cell types of a configuration, checked, and the hierarchy below a type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scheduler.hived.config import CellTypeSpec
from scheduler.hived.errors import ConfigError
from scheduler.hived.topology import Hierarchy

CELL_TYPES = "physicalCluster.cellTypes"


def problems_of_types(cell_types: Mapping[str, CellTypeSpec]) -> Iterator[ConfigError]:
    """What is wrong with the types themselves, whether physical cells use them or not."""
    for name, spec in cell_types.items():
        path = f"{CELL_TYPES}.{name}"
        if not name:
            yield ConfigError(CELL_TYPES, "a cell type has an empty name; give it one")
        if not spec.child_cell_type:
            yield ConfigError(f"{path}.childCellType", "is missing; name the type of the cells that it consists of")
        if spec.child_cell_number < 1:
            yield ConfigError(
                f"{path}.childCellNumber",
                f"is {spec.child_cell_number}; a cell has at least 1 child, and a leaf has no entry here",
            )
    yield from _cycles(cell_types)


def _cycles(cell_types: Mapping[str, CellTypeSpec]) -> Iterator[ConfigError]:
    """One problem for each cycle, at its first type."""
    settled: set[str] = set()
    for first in cell_types:
        trail: dict[str, None] = {}
        name = first
        while name in cell_types and name not in settled and name not in trail:
            trail[name] = None
            name = cell_types[name].child_cell_type
        if name in trail:
            cycle = " > ".join([*list(trail)[list(trail).index(name) :], name])
            yield ConfigError(f"{CELL_TYPES}.{name}.childCellType", f"the type would contain itself: {cycle}")
        settled |= trail.keys()


def hierarchy_of(top: str, cell_types: Mapping[str, CellTypeSpec], path: str) -> Hierarchy:
    """The hierarchy below a top type, which the physical cell at `path` is the first to use.

    Raises `ConfigError` when such cells can't be, or can't be scheduled on. Types with problems of their own raise one
    with an empty `problem`: it has been told.
    """
    if top not in cell_types:
        raise ConfigError(path, f"{top!r} is not in {CELL_TYPES}; add it there, or correct the name")
    descending = _types_below(top, cell_types)
    node_types = [name for name in descending[:-1] if cell_types[name].is_node_level]
    if len(node_types) > 1:
        raise ConfigError(
            f"{CELL_TYPES}.{node_types[1]}.isNodeLevel",
            f"{node_types[0]}, which contains it, is a node already; only one type on the way from {top} to "
            f"{descending[-1]} can be",
        )
    if not node_types:
        raise ConfigError(
            path,
            f"no type from {top} down to {descending[-1]} is a node, and a cell below a node can't be a physical cell "
            "of its own; set isNodeLevel in one of them, or begin with a type that contains nodes",
        )
    ascending = descending[::-1]
    fanouts = (0, *(cell_types[name].child_cell_number for name in ascending[1:]))
    return Hierarchy(tuple(ascending), fanouts, ascending.index(node_types[0]) + 1)


def _types_below(top: str, cell_types: Mapping[str, CellTypeSpec]) -> list[str]:
    """From the top to the leaf."""
    names = [top]
    while (spec := cell_types.get(names[-1])) is not None:
        if spec.child_cell_number < 1 or not spec.child_cell_type or spec.child_cell_type in names:
            raise ConfigError("", "")
        names.append(spec.child_cell_type)
    return names
