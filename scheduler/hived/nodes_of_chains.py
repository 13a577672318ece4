"""Kubernetes nodes and their devices: each is in the configuration once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from scheduler.hived.errors import ConfigError
from scheduler.hived.physical_trees import ChainPlaces
from scheduler.hived.topology import ChainTopology


def problems_of_nodes(chains: Mapping[str, ChainTopology], places: Mapping[str, ChainPlaces]) -> Iterator[ConfigError]:
    """A node that is twice in a chain; a device that is twice in a node, be it in one chain or in several."""
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
        for index in _devices(chain, position):
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


def _devices(chain: ChainTopology, position: int) -> Sequence[int]:
    leaves = chain.leaves_at(chain.node_level)
    return chain.leaf_indices[position * leaves : (position + 1) * leaves]
