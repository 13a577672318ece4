"""From what the file says to the cluster that it means: `resolve`.

Every check looks at all of the file, so that one reading tells all that is wrong with it. Time and memory are linear in
the number of cells, but for some operations on a bit mask of them for each pinned cell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from scheduler.hived.cell_types import hierarchy_of, problems_of_types
from scheduler.hived.config import HivedConfig
from scheduler.hived.errors import ConfigError, InvalidConfig
from scheduler.hived.listen_address import problems_of_address
from scheduler.hived.nodes_of_chains import problems_of_nodes
from scheduler.hived.physical_trees import PHYSICAL_CELLS, ChainPlaces, PhysicalTrees, pinned_twice
from scheduler.hived.quotas import Quotas
from scheduler.hived.topology import ChainTopology, Hierarchy, Topology

MAX_LEAVES = 1 << 22  # a mistyped childCellNumber is told; it does not take all memory


def resolve(config: HivedConfig) -> Topology:
    """The chains and virtual clusters of a configuration.

    Raises `InvalidConfig` with every problem: an address that is none, types that contain themselves, trees that are
    not as their type says, nodes, devices or pinned cells that are there twice, quotas that name no cells or more of
    them than can be promised.
    """
    problems = [*problems_of_address(config.web_server_address), *problems_of_types(config.cell_types)]
    places, refused = _places(config, problems)
    chains, irregular = _chains(config, places, problems)
    problems += problems_of_nodes(chains, places)
    problems += _pinned_in_two_chains(chains, places)
    quotas = Quotas(chains, refused, irregular)
    virtual_clusters = quotas.resolve(config.virtual_clusters)
    problems += quotas.problems
    if problems:
        raise InvalidConfig(problems)
    return Topology(chains, virtual_clusters)


def _places(config: HivedConfig, problems: list[ConfigError]) -> tuple[dict[str, ChainPlaces], set[str]]:
    """Where the cells of each chain are, and the top types that can't be one."""
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
            _check_size(hierarchy, where)
        except ConfigError as error:
            if error.problem:
                problems.append(error)
        else:
            found[top] = ChainPlaces(hierarchy, where)
    return found, places.keys() - found.keys()


def _check_size(hierarchy: Hierarchy, places: Sequence[int]) -> None:
    """Raises `ConfigError`."""
    leaves = len(places) * hierarchy.cells_in(hierarchy.top_level, 1)
    if leaves > MAX_LEAVES:
        raise ConfigError(
            f"{PHYSICAL_CELLS}[{places[0]}]",
            f"the cells of type {hierarchy.cell_types[-1]} have {leaves:,} leaves in all, more than {MAX_LEAVES:,}; "
            "correct a childCellNumber",
        )


def _chains(
    config: HivedConfig, places: Mapping[str, ChainPlaces], problems: list[ConfigError]
) -> tuple[dict[str, ChainTopology], set[str]]:
    """The chains, and the names of those that lack cells or have too many."""
    chains, irregular = {}, set()
    for name, at in places.items():
        trees = PhysicalTrees(at, problems)
        chains[name] = trees.resolve([config.physical_cells[place] for place in at.places])
        if not trees.is_regular:
            irregular.add(name)
    return chains, irregular


def _pinned_in_two_chains(chains: Mapping[str, ChainTopology], places: Mapping[str, ChainPlaces]) -> list[ConfigError]:
    first: dict[str, str] = {}
    problems = []
    for chain in chains.values():
        for name, cell in chain.pinned.items():
            path = places[chain.name].path(*cell)
            if name in first:
                problems.append(pinned_twice(path, name, first[name]))
            first.setdefault(name, path)
    return problems
