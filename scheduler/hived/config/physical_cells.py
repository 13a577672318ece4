"""The physical cells of one chain, level by level: checked, and generated where the file omits them.

Every tree is made as regular as its type says, even where the file lists too many or too few children: that is one
problem, and the rest is checked as if the number were right. So a cell's place in the file follows from its level and
position alone, and paths are built only for problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler.hived.cells.topology import ChainTopology, Hierarchy
from scheduler.hived.config.types import PhysicalCellSpec
from scheduler.hived.errors import ConfigError

PHYSICAL_CELLS = "physicalCluster.physicalCells"
MAX_LEAF_INDEX = 2**31 - 1

_UNLISTED = PhysicalCellSpec()  # stands for a generated cell


@dataclass(frozen=True, slots=True)
class ChainPlaces:
    """Paths of a chain's cells in the file. `places`: the positions of its top cells in `physicalCells`."""

    hierarchy: Hierarchy
    places: Sequence[int]

    def path(self, level: int, position: int) -> str:
        """Return the path of a cell, listed or generated."""
        place, offset = divmod(position, self.hierarchy.cells_in(self.hierarchy.top_level, level))
        steps = []
        for upper in range(self.hierarchy.top_level - 1, level - 1, -1):
            child, offset = divmod(offset, self.hierarchy.cells_in(upper, level))
            steps.append(f".cellChildren[{child}]")
        return f"{PHYSICAL_CELLS}[{self.places[place]}]" + "".join(steps)


@dataclass(slots=True)
class PhysicalTrees:
    """The trees of a chain during resolving; `problems` grows. `is_regular`: the file lists the right number
    of cells.
    """

    at: ChainPlaces
    problems: list[ConfigError] = field(default_factory=list)
    is_regular: bool = True

    def resolve(self, cells: Sequence[PhysicalCellSpec]) -> ChainTopology:
        """Return the chain with the top cells `cells`. If there are problems, at least its shape is right."""
        hierarchy = self.at.hierarchy
        specs, addresses = [cells], [self._segments(hierarchy.top_level, cells)]
        for level in range(hierarchy.top_level, 1, -1):
            specs.append(self._children(level, specs[-1]))
            segments, fanout = self._segments(level - 1, specs[-1]), hierarchy.fanouts[level - 1]
            addresses.append(
                [f"{addresses[-1][position // fanout]}/{segment}" for position, segment in enumerate(segments)]
            )
        specs.reverse()
        addresses.reverse()
        for level, at_level in enumerate(specs, start=1):
            expected = self.at.hierarchy.cell_types[level - 1]
            for position, spec in enumerate(at_level):
                if spec.cell_type not in ("", expected):
                    self._problem(
                        f"{self.at.path(level, position)}.cellType",
                        f"is {spec.cell_type}, but the cell around it consists of {expected}; leave it out here",
                    )
        return ChainTopology(
            name=hierarchy.cell_types[-1],
            cell_types=hierarchy.cell_types,
            fanouts=hierarchy.fanouts,
            node_level=hierarchy.node_level,
            addresses=tuple(addresses),
            nodes=self._nodes(specs[hierarchy.node_level - 1]),
            leaf_indices=self._leaf_indices(specs[0]),
            pinned=self._pinned(specs),
        )

    def _children(self, level: int, parents: Sequence[PhysicalCellSpec]) -> list[PhysicalCellSpec]:
        hierarchy = self.at.hierarchy
        fanout, child_type = hierarchy.fanouts[level - 1], hierarchy.cell_types[level - 2]
        unlisted = (_UNLISTED,) * fanout
        children: list[PhysicalCellSpec] = []
        for position, parent in enumerate(parents):
            listed = parent.cell_children
            if len(listed) != fanout and parent is not _UNLISTED:
                path = f"{self.at.path(level, position)}.cellChildren"
                self.is_regular &= not listed and level <= hierarchy.node_level
                if listed:
                    problem = f"lists {len(listed)}, but a cell of type {hierarchy.cell_types[level - 1]} has {fanout}"
                    self._problem(path, f"{problem} of {child_type}; list them all, or correct childCellNumber")
                elif level > hierarchy.node_level:
                    self._problem(
                        path, f"is missing; list the {fanout} of {child_type} down to the names of their nodes"
                    )
            children += listed if len(listed) == fanout else (*listed[:fanout], *unlisted[len(listed) :])
        return children

    def _segments(self, level: int, specs: Sequence[PhysicalCellSpec]) -> list[str]:
        """Return the last segment of each address of a level."""
        pairs = zip(specs, self._default_segments(level), strict=True)
        return [spec.cell_address or default for spec, default in pairs]

    def _default_segments(self, level: int) -> list[str]:
        """Return default segments: cells count through their node, those above nodes through all top cells
        of the file.
        """
        hierarchy, places = self.at.hierarchy, self.at.places
        if level < hierarchy.node_level:
            in_node = [str(number) for number in range(hierarchy.cells_in(hierarchy.node_level, level))]
            return in_node * (len(places) * hierarchy.cells_in(hierarchy.top_level, hierarchy.node_level))
        in_top = hierarchy.cells_in(hierarchy.top_level, level)
        return [str(place * in_top + number) for place in places for number in range(in_top)]

    def _nodes(self, specs: Sequence[PhysicalCellSpec]) -> list[str]:
        for position, spec in enumerate(specs):
            if not spec.cell_address and spec is not _UNLISTED:
                self._problem(
                    f"{self.at.path(self.at.hierarchy.node_level, position)}.cellAddress",
                    "is missing; a cell of the node level needs the name of its Kubernetes node",
                )
        return [spec.cell_address for spec in specs]

    def _leaf_indices(self, specs: Sequence[PhysicalCellSpec]) -> list[int]:
        indices = [int(default) for default in self._default_segments(1)]
        for position, spec in enumerate(specs):
            if spec is _UNLISTED:
                continue
            if spec.cell_children:
                leaf_type = self.at.hierarchy.leaf_cell_type
                path = f"{self.at.path(1, position)}.cellChildren"
                self._problem(path, f"{leaf_type} is one device, which has no children; leave them out")
            if spec.cell_address:
                text = spec.cell_address
                if text.isascii() and text.isdigit() and int(text) <= MAX_LEAF_INDEX:
                    indices[position] = int(text)
                else:
                    self._problem(
                        f"{self.at.path(1, position)}.cellAddress",
                        f"is {text!r}; a leaf needs the number of its device, a whole number from 0",
                    )
        return indices

    def _pinned(self, levels: Sequence[Sequence[PhysicalCellSpec]]) -> dict[str, tuple[int, int]]:
        """Return the pinned cells from the top level down, in file order within a level."""
        pinned: dict[str, tuple[int, int]] = {}
        for level in range(len(levels), 0, -1):
            for position, spec in enumerate(levels[level - 1]):
                if spec.pinned_cell_id in pinned:
                    first = self.at.path(*pinned[spec.pinned_cell_id])
                    self.problems.append(pinned_twice(self.at.path(level, position), spec.pinned_cell_id, first))
                elif spec.pinned_cell_id:
                    pinned[spec.pinned_cell_id] = (level, position)
        names = {cell: name for name, cell in pinned.items()}
        for name, cell in pinned.items():
            outer = next((names[above] for above in self._ancestors(*cell) if above in names), None)
            if outer is not None:
                self._problem(
                    f"{self.at.path(*cell)}.pinnedCellId",
                    f"{name!r} is inside of the pinned cell {outer!r}; a cell can be pinned only once: unpin one",
                )
        return pinned

    def _ancestors(self, level: int, position: int) -> Iterator[tuple[int, int]]:
        for upper in range(level + 1, self.at.hierarchy.top_level + 1):
            position //= self.at.hierarchy.fanouts[upper - 1]
            yield upper, position

    def _problem(self, path: str, problem: str) -> None:
        self.problems.append(ConfigError(path, problem))


def pinned_twice(path: str, name: str, first: str) -> ConfigError:
    """Return the error for two cells with the same ID."""
    return ConfigError(f"{path}.pinnedCellId", f"{name!r} is the id of {first}, too; ids must be unique")
