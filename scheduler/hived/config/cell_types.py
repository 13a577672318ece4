"""The cell types of a configuration, checked, and the hierarchy below a type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scheduler.hived.cells.topology import Hierarchy
from scheduler.hived.config.types import CellTypeSpec
from scheduler.hived.errors import ConfigError

CELL_TYPES = "physicalCluster.cellTypes"


def problems_of_types(cell_types: Mapping[str, CellTypeSpec]) -> Iterator[ConfigError]:
    """Yield the problems of the types themselves, whether physical cells use them or not."""
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
    """Yield one problem for each cycle, at its first type."""
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
    """Return the hierarchy below a top type; `path` is the first physical cell that uses it.

    Raises `ConfigError` if such cells are impossible or can't be scheduled on. For types with problems of their own,
    which `problems_of_types` reports, the error has an empty `problem`.
    """
    if top not in cell_types:
        raise ConfigError(path, f"{top!r} is not in {CELL_TYPES}; add it there, or correct the name")
    descending = [top]
    while (spec := cell_types.get(descending[-1])) is not None:
        if spec.child_cell_number < 1 or not spec.child_cell_type or spec.child_cell_type in descending:
            raise ConfigError("", "")
        descending.append(spec.child_cell_type)
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
