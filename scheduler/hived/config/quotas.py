"""The quotas of the virtual clusters, checked against the physical cells, and their top virtual cells.

Quotas must fit as buddy allocation will serve them: pinned cells split the trees that contain them, then every level,
from the top down, serves its quota from its free cells and from cells that the levels above left unsplit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from scheduler.hived.cells.topology import ChainTopology, FreeList, PreassignedCell
from scheduler.hived.config.types import VirtualCellSpec, VirtualClusterSpec
from scheduler.hived.errors import ConfigError

VIRTUAL_CLUSTERS = "virtualClusters"


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
        return {name: _preassigned(name, quotas[name]) for name in clusters}

    def _of_cells(self, name: str, cluster: VirtualClusterSpec) -> Iterator[_Quota]:
        if not name:
            self._problem(VIRTUAL_CLUSTERS, "a virtual cluster has an empty name; give it one")
        for number, spec in enumerate(cluster.virtual_cells):
            path = f"{VIRTUAL_CLUSTERS}.{name}.virtualCells[{number}]"
            if spec.cell_number < 0:
                self._problem(f"{path}.cellNumber", f"is {spec.cell_number}; a quota is at least 0")
            elif (found := self._find(f"{path}.cellType", spec)) is not None:
                chain, level = found
                yield _Quota(path, name, chain, level, spec.cell_number)

    def _find(self, path: str, spec: VirtualCellSpec) -> tuple[str, int] | None:
        """Return the chain and level of a dotted type. The parts between the first and the last are ignored."""
        parts = spec.cell_type.split(".")
        if not spec.cell_type:
            self._problem(path, "is missing; name a chain and, after a dot, the type of the cells in it")
            return None
        chain = self.chains.get(parts[0])
        if chain is None:
            if parts[0] not in self.refused:
                known = ", ".join(self.chains) or "none"
                self._problem(
                    path, f"begins with {parts[0]!r}, which no physical cell has as its cellType; there are: {known}"
                )
            return None
        level = chain.level_of(parts[-1])
        if level is None:
            known = ", ".join(reversed(chain.cell_types))
            self._problem(path, f"{parts[-1]!r} is not in the chain {chain.name}, which consists of: {known}")
            return None
        return chain.name, level

    def _of_pinned(self, clusters: Mapping[str, VirtualClusterSpec]) -> dict[str, _Quota]:
        places: dict[str, tuple[str, int]] = {}
        for chain in self.chains.values():
            for pinned, (level, _) in chain.pinned.items():
                places.setdefault(pinned, (chain.name, level))
        quotas: dict[str, _Quota] = {}
        for name, cluster in clusters.items():
            for number, pinned in enumerate(cluster.pinned_cells):
                path = f"{VIRTUAL_CLUSTERS}.{name}.pinnedCells[{number}].pinnedCellId"
                problem = self._problem_of_pinned(pinned, places, quotas)
                if problem:
                    self._problem(path, problem)
                elif pinned in places:
                    quotas[pinned] = _Quota(path, name, *places[pinned], 1, pinned)
        return quotas

    def _problem_of_pinned(
        self, pinned: str, places: Mapping[str, tuple[str, int]], quotas: Mapping[str, _Quota]
    ) -> str:
        if not pinned:
            return "is missing; name the pinnedCellId of a physical cell"
        if pinned in quotas:
            return f"{pinned!r} is at {quotas[pinned].path}, too; a pinned cell is given once, to one virtual cluster"
        if pinned not in places and not self.refused and not self.irregular:
            known = ", ".join(places) or "none"
            return f"{pinned!r} is not the pinnedCellId of a physical cell; there are: {known}"
        return ""

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


def _preassigned(name: str, quotas: Sequence[_Quota]) -> tuple[PreassignedCell, ...]:
    numbers = count()
    return tuple(
        PreassignedCell(f"{name}/{next(numbers)}", quota.chain, quota.level, quota.pinned_cell_id)
        for quota in quotas
        for _ in range(quota.number)
    )
