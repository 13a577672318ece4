"""Resolving a configuration file into the cluster that it describes.

`resolve` refuses an invalid one; `advice` warns of valid settings that are probably mistakes. Every check looks at all
of the file, so that one reading reports all problems. Time and memory are linear in the number of cells, except for
some operations on a bit mask of them for each pinned cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from scheduler.hived.cells.topology import ChainTopology, Topology
from scheduler.hived.config.cell_types import CELL_TYPES, hierarchy_of, problems_of_types
from scheduler.hived.config.physical_cells import PHYSICAL_CELLS, ChainPlaces, PhysicalTrees, pinned_twice
from scheduler.hived.config.quotas import Quotas
from scheduler.hived.config.types import ConfigWarning, HivedConfig, PhysicalCellSpec
from scheduler.hived.errors import ConfigError, InvalidConfig

MAX_LEAVES = 1 << 22  # a mistyped childCellNumber is reported instead of filling the memory


def resolve(config: HivedConfig) -> Topology:
    """Return the chains and virtual clusters of a configuration.

    Raises `InvalidConfig` with every problem: an invalid address, types that contain themselves, trees that contradict
    their type, repeated nodes, devices or pinned cells, quotas of unknown cells or of more cells than can be promised.
    """
    problems = [*problems_of_address(config.web_server_address), *problems_of_types(config.cell_types)]
    places, refused = _places(config, problems)
    chains, irregular = _chains(config, places, problems)
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


def _chains(
    config: HivedConfig, places: Mapping[str, ChainPlaces], problems: list[ConfigError]
) -> tuple[dict[str, ChainTopology], set[str]]:
    """Return the chains, and the names of those that lack cells or have too many."""
    chains, irregular = {}, set()
    for name, at in places.items():
        trees = PhysicalTrees(at, problems)
        chains[name] = trees.resolve([config.physical_cells[place] for place in at.places])
        if not trees.is_regular:
            irregular.add(name)
    return chains, irregular


PATH = "webServerAddress"


def host_and_port(text: str) -> tuple[str, int]:
    """Parse an address; `:PORT` means all addresses, host "". Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError(PATH, f"{text!r} is not :PORT, HOST:PORT or [IPV6]:PORT; HiveD's is :9096")
    return host, int(port)


def problems_of_address(text: str) -> Iterator[ConfigError]:
    """Yield the error of an invalid address."""
    try:
        host_and_port(text)
    except ConfigError as error:
        yield error


def problems_of_nodes(chains: Mapping[str, ChainTopology], places: Mapping[str, ChainPlaces]) -> Iterator[ConfigError]:
    """Yield nodes repeated in a chain, and devices repeated in a node, in one chain or in several."""
    cells: defaultdict[str, list[tuple[ChainTopology, int]]] = defaultdict(list)
    for chain in chains.values():
        for position, node in enumerate(chain.nodes):
            if node:
                cells[node].append((chain, position))
    for node, found in cells.items():
        if len({chain.name for chain, _ in found}) < len(found):
            yield from _twice_in_chain(node, found, places)
        else:
            yield from _device_twice(node, found, places)


def _twice_in_chain(
    node: str, found: Sequence[tuple[ChainTopology, int]], places: Mapping[str, ChainPlaces]
) -> Iterator[ConfigError]:
    first: dict[str, str] = {}
    for chain, position in found:
        path = places[chain.name].path(chain.node_level, position)
        if chain.name in first:
            yield ConfigError(
                f"{path}.cellAddress",
                f"node {node!r} is at {first[chain.name]}, too; a node can be once only in a chain ({chain.name})",
            )
        first.setdefault(chain.name, path)


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
