"""Resolving a configuration file into the cluster that it describes.

`resolve` refuses an invalid one; `advice` warns of valid settings that are probably mistakes. Every check looks at all
of the file, so that one reading reports all problems. Time and memory are linear in the number of cells, except for
some operations on a bit mask of them for each pinned cell. The steps, in the order of this file:

Cell types are checked, and become the hierarchy below each top type.

Physical cells are checked chain by chain and level by level, and generated where the file omits them. Every tree is
made as regular as its type says, even where the file lists too many or too few children: that is one problem, and the
rest is checked as if the number were right. So a cell's place in the file follows from its level and position alone,
and paths are built only for problems.

Quotas must fit as buddy allocation will serve them: pinned cells split the trees that contain them, then every level,
from the top down, serves its quota from its free cells and from cells that the levels above left unsplit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from scheduler.hived.cells.topology import ChainTopology, FreeList, Hierarchy, PreassignedCell, Topology
from scheduler.hived.config.file import (
    CellTypeSpec,
    ConfigWarning,
    HivedConfig,
    PhysicalCellSpec,
    VirtualClusterSpec,
)
from scheduler.hived.errors import ConfigError, InvalidConfig

MAX_LEAVES = 1 << 22  # a mistyped childCellNumber is reported instead of filling the memory
MAX_LEAF_INDEX = 2**31 - 1

CELL_TYPES = "physicalCluster.cellTypes"
PHYSICAL_CELLS = "physicalCluster.physicalCells"
VIRTUAL_CLUSTERS = "virtualClusters"


def resolve(config: HivedConfig) -> Topology:
    """Return the chains and virtual clusters of a configuration.

    Raises `InvalidConfig` with every problem: an invalid address, types that contain themselves, trees that contradict
    their type, repeated nodes, devices or pinned cells, quotas of unknown cells or of more cells than can be promised.
    """
    problems: list[ConfigError] = []
    try:
        host_and_port(config.web_server_address)
    except ConfigError as error:
        problems.append(error)
    problems += problems_of_types(config.cell_types)
    places, refused = _places(config, problems)
    chains, irregular = {}, set()  # `irregular`: chains that lack cells or have too many
    for name, at in places.items():
        trees = PhysicalTrees(at, problems)
        chains[name] = trees.resolve([config.physical_cells[place] for place in at.places])
        if not trees.is_regular:
            irregular.add(name)
    problems += problems_of_nodes(chains, places)
    first: dict[str, str] = {}
    for chain in chains.values():
        for name, cell in chain.pinned.items():
            path = places[chain.name].path(*cell)
            if name in first:
                problems.append(pinned_twice(path, name, first[name]))
            first.setdefault(name, path)
    quotas = Quotas(chains, refused, irregular)
    virtual_clusters = quotas.resolve(config.virtual_clusters)
    problems += quotas.problems
    if problems:
        raise InvalidConfig(problems)
    return Topology(chains, virtual_clusters)


def _places(config: HivedConfig, problems: list[ConfigError]) -> tuple[dict[str, ChainPlaces], set[str]]:
    """Return the places of the cells of each chain, and the top types that can't be a chain."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, cell in enumerate(config.physical_cells):
        if cell.cell_type:
            places[cell.cell_type].append(place)
        else:
            problems.append(ConfigError(f"{PHYSICAL_CELLS}[{place}].cellType", "is missing; name one of the cellTypes"))
    found: dict[str, ChainPlaces] = {}
    for top, where in places.items():
        try:
            hierarchy = hierarchy_of(top, config.cell_types, f"{PHYSICAL_CELLS}[{where[0]}].cellType")
            leaves = len(where) * hierarchy.cells_in(hierarchy.top_level, 1)
            if leaves > MAX_LEAVES:
                raise ConfigError(
                    f"{PHYSICAL_CELLS}[{where[0]}]",
                    f"the cells of type {hierarchy.cell_types[-1]} have {leaves:,} leaves in all, more than "
                    f"{MAX_LEAVES:,}; correct a childCellNumber",
                )
        except ConfigError as error:
            if error.problem:
                problems.append(error)
        else:
            found[top] = ChainPlaces(hierarchy, where)
    return found, places.keys() - found.keys()


def problems_of_types(cell_types: Mapping[str, CellTypeSpec]) -> Iterator[ConfigError]:
    """Yield the problems of the types themselves, whether physical cells use them or not; of a cycle, at its first
    type.
    """
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
            expected = hierarchy.cell_types[level - 1]
            for position, spec in enumerate(at_level):
                if spec.cell_type not in ("", expected):
                    self._problem(
                        f"{self.at.path(level, position)}.cellType",
                        f"is {spec.cell_type}, but the cell around it consists of {expected}; leave it out here",
                    )
        for position, spec in enumerate(specs[hierarchy.node_level - 1]):
            if not spec.cell_address and spec is not _UNLISTED:
                self._problem(
                    f"{self.at.path(hierarchy.node_level, position)}.cellAddress",
                    "is missing; a cell of the node level needs the name of its Kubernetes node",
                )
        return ChainTopology(
            name=hierarchy.cell_types[-1],
            cell_types=hierarchy.cell_types,
            fanouts=hierarchy.fanouts,
            node_level=hierarchy.node_level,
            addresses=tuple(addresses),
            nodes=[spec.cell_address for spec in specs[hierarchy.node_level - 1]],
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
            level, position = cell
            for upper in range(level + 1, self.at.hierarchy.top_level + 1):
                position //= self.at.hierarchy.fanouts[upper - 1]
                if (outer := names.get((upper, position))) is not None:
                    self._problem(
                        f"{self.at.path(*cell)}.pinnedCellId",
                        f"{name!r} is inside of the pinned cell {outer!r}; a cell can be pinned only once: unpin one",
                    )
                    break
        return pinned

    def _problem(self, path: str, problem: str) -> None:
        self.problems.append(ConfigError(path, problem))


def pinned_twice(path: str, name: str, first: str) -> ConfigError:
    """Return the error for two cells with the same ID."""
    return ConfigError(f"{path}.pinnedCellId", f"{name!r} is the id of {first}, too; ids must be unique")


@dataclass(frozen=True, slots=True)
class _Quota:
    """A number of cells of a level of a chain; `pinned_cell_id` is "" for cells that may move."""

    path: str
    virtual_cluster: str
    chain: str
    level: int
    number: int
    pinned_cell_id: str = ""


@dataclass(slots=True)
class Quotas:
    """The quotas of all virtual clusters during resolving; `problems` grows.

    `refused`: top types that are no chain. `irregular`: chains whose cells can't be counted, so that their capacity is
    not checked.
    """

    chains: Mapping[str, ChainTopology]
    refused: Collection[str]
    irregular: Collection[str]
    problems: list[ConfigError] = field(default_factory=list)

    def resolve(self, clusters: Mapping[str, VirtualClusterSpec]) -> dict[str, tuple[PreassignedCell, ...]]:
        """Return the top virtual cells of each cluster. Empty if there are problems."""
        quotas = {name: [*self._of_cells(name, cluster)] for name, cluster in clusters.items()}
        pinned = self._of_pinned(clusters)
        by_chain = [quota for quotas_of_cluster in quotas.values() for quota in quotas_of_cluster]
        for chain in self.chains.values():
            if chain.name not in self.irregular:
                self._check_fit(chain, [quota for quota in by_chain if quota.chain == chain.name], pinned)
        if self.problems:
            return {}
        for quota in pinned.values():
            quotas[quota.virtual_cluster].append(quota)
        preassigned = {}
        for name in clusters:
            cells = [quota for quota in quotas[name] for _ in range(quota.number)]
            preassigned[name] = tuple(
                PreassignedCell(f"{name}/{number}", quota.chain, quota.level, quota.pinned_cell_id)
                for number, quota in enumerate(cells)
            )
        return preassigned

    def _of_cells(self, name: str, cluster: VirtualClusterSpec) -> Iterator[_Quota]:
        """Yield the quotas of cells that may move. The parts of a dotted type between the first and the last are
        ignored.
        """
        if not name:
            self._problem(VIRTUAL_CLUSTERS, "a virtual cluster has an empty name; give it one")
        for number, spec in enumerate(cluster.virtual_cells):
            path = f"{VIRTUAL_CLUSTERS}.{name}.virtualCells[{number}]"
            parts = spec.cell_type.split(".")
            chain = self.chains.get(parts[0])
            if spec.cell_number < 0:
                self._problem(f"{path}.cellNumber", f"is {spec.cell_number}; a quota is at least 0")
            elif not spec.cell_type:
                why = "is missing; name a chain and, after a dot, the type of the cells in it"
                self._problem(f"{path}.cellType", why)
            elif chain is None:
                if parts[0] not in self.refused:
                    known = ", ".join(self.chains) or "none"
                    why = f"begins with {parts[0]!r}, which no physical cell has as its cellType; there are: {known}"
                    self._problem(f"{path}.cellType", why)
            elif (level := chain.level_of(parts[-1])) is None:
                known = ", ".join(reversed(chain.cell_types))
                why = f"{parts[-1]!r} is not in the chain {chain.name}, which consists of: {known}"
                self._problem(f"{path}.cellType", why)
            else:
                yield _Quota(path, name, chain.name, level, spec.cell_number)

    def _of_pinned(self, clusters: Mapping[str, VirtualClusterSpec]) -> dict[str, _Quota]:
        places: dict[str, tuple[str, int]] = {}
        for chain in self.chains.values():
            for pinned, (level, _) in chain.pinned.items():
                places.setdefault(pinned, (chain.name, level))
        quotas: dict[str, _Quota] = {}
        for name, cluster in clusters.items():
            for number, pinned in enumerate(cluster.pinned_cells):
                path = f"{VIRTUAL_CLUSTERS}.{name}.pinnedCells[{number}].pinnedCellId"
                if not pinned:
                    self._problem(path, "is missing; name the pinnedCellId of a physical cell")
                elif pinned in quotas:
                    other = quotas[pinned].path
                    self._problem(
                        path, f"{pinned!r} is at {other}, too; a pinned cell is given once, to one virtual cluster"
                    )
                elif pinned in places:
                    quotas[pinned] = _Quota(path, name, *places[pinned], 1, pinned)
                elif not self.refused and not self.irregular:
                    known = ", ".join(places) or "none"
                    self._problem(path, f"{pinned!r} is not the pinnedCellId of a physical cell; there are: {known}")
        return quotas

    def _check_fit(self, chain: ChainTopology, quotas: Sequence[_Quota], pinned: Mapping[str, _Quota]) -> None:
        """Report the first level, from the top, that can't serve its quotas."""
        free = FreeList.whole(chain)
        for name, cell in reversed([*chain.pinned.items()]):  # nested pins are reported elsewhere; take the inner
            if name in pinned and pinned[name].chain == chain.name and free.is_obtainable(*cell):
                free.take(*cell)
        wanted = [0] * (chain.top_level + 1)
        for quota in quotas:
            wanted[quota.level] += quota.number
        left = free.splittable(wanted)
        level = next((level for level in range(chain.top_level, 0, -1) if left[level] < 0), None)
        if level is not None:
            askers = [quota for quota in quotas if quota.level == level and quota.number]
            available = left[level] + wanted[level]
            per_cluster: Counter[str] = Counter()
            for quota in askers:
                per_cluster[quota.virtual_cluster] += quota.number
            sums = ", ".join(f"{name} {number}" for name, number in per_cluster.items())
            kind = chain.cell_types[level - 1]
            totals = accumulate(quota.number for quota in askers)
            # the quota with which the sum first exceeds what is available
            beyond = next(quota for quota, total in zip(askers, totals, strict=True) if total > available)
            self._problem(
                f"{beyond.path}.cellNumber",
                f"the virtual clusters want {per_cluster.total()} of {kind} in {chain.name} ({sums}), but beside "
                f"pinned cells and quotas of larger cells there are {available}; lower a cellNumber, or add physical "
                "cells",
            )

    def _problem(self, path: str, problem: str) -> None:
        self.problems.append(ConfigError(path, problem))


def host_and_port(text: str) -> tuple[str, int]:
    """Parse an address; `:PORT` means all addresses, host "". Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError("webServerAddress", f"{text!r} is not :PORT, HOST:PORT or [IPV6]:PORT; HiveD's is :9096")
    return host, int(port)


def problems_of_nodes(chains: Mapping[str, ChainTopology], places: Mapping[str, ChainPlaces]) -> Iterator[ConfigError]:
    """Yield nodes repeated in a chain, and devices repeated in a node, in one chain or in several."""
    cells: defaultdict[str, list[tuple[ChainTopology, int]]] = defaultdict(list)
    for chain in chains.values():
        for position, node in enumerate(chain.nodes):
            if node:
                cells[node].append((chain, position))
    for node, found in cells.items():
        if len({chain.name for chain, _ in found}) < len(found):
            first: dict[str, str] = {}
            for chain, position in found:
                path = places[chain.name].path(chain.node_level, position)
                if chain.name in first:
                    yield ConfigError(
                        f"{path}.cellAddress",
                        f"node {node!r} is at {first[chain.name]}, too; a node can be once only in a chain "
                        f"({chain.name})",
                    )
                first.setdefault(chain.name, path)
        else:
            yield from _device_twice(node, found, places)


def _device_twice(
    node: str, found: Sequence[tuple[ChainTopology, int]], places: Mapping[str, ChainPlaces]
) -> Iterator[ConfigError]:
    first: dict[int, str] = {}
    for chain, position in found:
        path = places[chain.name].path(chain.node_level, position)
        where: defaultdict[str, set[int]] = defaultdict(set)
        leaves = chain.leaves_at(chain.node_level)
        for index in chain.leaf_indices[position * leaves : (position + 1) * leaves]:
            if index in first:
                where[first[index]].add(index)
            first.setdefault(index, path)
        for other, indices in where.items():
            devices = ", ".join(map(str, sorted(indices)))
            place = "here twice" if other == path else f"also in {other}"
            yield ConfigError(
                f"{path}.cellChildren",
                f"node {node!r} has device {devices} {place}; give every leaf its own cellAddress",
            )


def advice(config: HivedConfig, topology: Topology) -> Iterator[ConfigWarning]:
    """Yield the warnings from parsing `config`, then those about what its `topology` leaves unused."""
    yield from config.warnings
    used_types = {name for chain in topology.chains.values() for name in chain.cell_types}
    for name in config.cell_types:
        if name not in used_types:
            yield ConfigWarning(f"{CELL_TYPES}.{name}", "no physical cell consists of it")
    promised = {cell.chain for cells in topology.virtual_clusters.values() for cell in cells}
    tops = [cell.cell_type for cell in config.physical_cells]
    for name in topology.chains:
        if name not in promised:
            yield ConfigWarning(
                f"{PHYSICAL_CELLS}[{tops.index(name)}]",
                f"no virtual cluster has a quota in the chain {name}: only opportunistic pods can use it",
            )
    used_ids = {name for cluster in config.virtual_clusters.values() for name in cluster.pinned_cells}
    for path, name in _pinned(config.physical_cells, PHYSICAL_CELLS):
        if name not in used_ids:
            yield ConfigWarning(
                f"{path}.pinnedCellId", f"no virtual cluster has {name!r} in its pinnedCells, so it is an ordinary cell"
            )


def _pinned(cells: Sequence[PhysicalCellSpec], path: str) -> Iterator[tuple[str, str]]:
    """Yield path and ID of each cell that can be pinned."""
    for number, cell in enumerate(cells):
        if cell.pinned_cell_id:
            yield f"{path}[{number}]", cell.pinned_cell_id
        if cell.cell_children:
            yield from _pinned(cell.cell_children, f"{path}[{number}].cellChildren")
