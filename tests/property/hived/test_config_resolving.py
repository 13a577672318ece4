"""Resolving compared with a naive implementation: addresses cell by cell, quotas by handing them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from scheduler.hived.cells.topology import ChainTopology
from scheduler.hived.config.file import CellTypeSpec, HivedConfig, PhysicalCellSpec, VirtualCellSpec, VirtualClusterSpec
from scheduler.hived.config.resolve import resolve
from scheduler.hived.errors import InvalidConfig

Cell = tuple[int, int]  # level, position


@dataclass(frozen=True, slots=True)
class Made:
    """A configuration, and the shape of each of its chains."""

    config: HivedConfig
    fanouts: dict[str, tuple[int, ...]]
    node_levels: dict[str, int]


@st.composite
def configurations(draw: st.DrawFn) -> Made:
    """Draw up to three chains of up to four levels, children listed or not, with quotas that may be too large."""
    types: dict[str, CellTypeSpec] = {}
    tops: list[PhysicalCellSpec] = []
    clusters: dict[str, list[VirtualCellSpec]] = {name: [] for name in draw(st.sampled_from(["a", "ab", "abc"]))}
    pins: dict[str, list[str]] = {name: [] for name in clusters}
    all_fanouts: dict[str, tuple[int, ...]] = {}
    node_levels: dict[str, int] = {}
    for number in range(draw(st.integers(1, 3))):
        fanouts = (0, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
        names = [f"t{number}-{level}" for level in range(1, len(fanouts) + 1)]
        node_level = draw(st.integers(2, len(fanouts)))
        for level in range(2, len(fanouts) + 1):
            types[names[level - 1]] = CellTypeSpec(names[level - 2], fanouts[level - 1], level == node_level)
        trees = _Trees(draw, names, fanouts, node_level)
        tops += trees.tops()
        all_fanouts[names[-1]], node_levels[names[-1]] = fanouts, node_level
        for pin in trees.pinned:
            pins[draw(st.sampled_from(sorted(pins)))].append(pin)
        for name in clusters:
            for level in draw(st.lists(st.integers(1, len(fanouts)), max_size=2)):
                spec = VirtualCellSpec(f"{names[-1]}.{names[level - 1]}", draw(st.integers(0, 3)))
                clusters[name].append(spec)
    virtual = {name: VirtualClusterSpec(tuple(cells), tuple(pins[name])) for name, cells in clusters.items()}
    config = HivedConfig(types, tuple(draw(st.permutations(tops))), virtual)
    return Made(config, all_fanouts, node_levels)


class _Trees:
    """Draws the trees of one chain. `pinned`: the IDs of the cells that it pins, none inside of another."""

    def __init__(self, draw: st.DrawFn, names: list[str], fanouts: tuple[int, ...], node_level: int) -> None:
        self._draw, self._names, self._fanouts, self._node_level = draw, names, fanouts, node_level
        self._nodes = 0
        self.pinned: list[str] = []

    def tops(self) -> list[PhysicalCellSpec]:
        return [self._cell(len(self._fanouts), True, number) for number in range(self._draw(st.integers(1, 3)))]

    def _cell(self, level: int, may_pin: bool, number: int) -> PhysicalCellSpec:
        is_pinned = may_pin and self._draw(st.integers(0, 4)) == 0
        if is_pinned:
            self.pinned.append(f"{self._names[-1]}-pin-{len(self.pinned)}")
        return PhysicalCellSpec(
            cell_type=self._names[level - 1] if level == len(self._fanouts) else "",
            cell_address=self._address(level, number),
            pinned_cell_id=self.pinned[-1] if is_pinned else "",
            cell_children=tuple(self._children(level, may_pin and not is_pinned)),
        )

    def _address(self, level: int, number: int) -> str:
        if level == self._node_level:
            self._nodes += 1
            return f"{self._names[-1]}-node-{self._nodes}"
        if level == 1:
            return ""
        return self._draw(st.sampled_from(["", f"x{number}"]))

    def _children(self, level: int, may_pin: bool) -> list[PhysicalCellSpec]:
        if level > self._node_level or (level > 1 and self._draw(st.booleans())):
            return [self._cell(level - 1, may_pin, number) for number in range(self._fanouts[level - 1])]
        return []


def plain_reading(made: Made, chain: str) -> tuple[list[list[str]], dict[str, Cell]]:
    """Return addresses by level, by walking every tree: an explicit segment, else the default index; and the pinned
    cells.
    """
    fanouts, node_level = made.fanouts[chain], made.node_levels[chain]
    by_level: list[list[str]] = [[] for _ in fanouts]
    pinned: dict[str, Cell] = {}

    def walk(spec: PhysicalCellSpec, level: int, index: int, above: str) -> None:
        address = above + (spec.cell_address or str(index))
        if spec.pinned_cell_id:
            pinned[spec.pinned_cell_id] = (level, len(by_level[level - 1]))
        by_level[level - 1].append(address)
        base = 0 if level == node_level else index
        fanout = fanouts[level - 1]
        for number, child in enumerate(spec.cell_children or [PhysicalCellSpec()] * fanout):
            walk(child, level - 1, base * fanout + number, f"{address}/")

    for place, top in enumerate(made.config.physical_cells):
        if top.cell_type == chain:
            walk(top, len(fanouts), place, "")
    return by_level, pinned


def can_be_handed_out(chain: ChainTopology, pinned: set[Cell], wanted: list[int]) -> bool:
    """Return whether cells of the levels `wanted` can be allocated beside the pinned ones: larger ones first, splitting
    the smallest possible cell.
    """
    around = {cell for level, position in pinned for cell in _ancestors(chain, level, position)}
    free: list[list[int]] = [[] for _ in range(chain.top_level + 1)]

    def put(level: int, position: int) -> None:
        if (level, position) in around:
            split(level, position)
        elif (level, position) not in pinned:
            free[level].append(position)

    def split(level: int, position: int) -> None:
        for child in range(chain.fanouts[level - 1]):
            put(level - 1, position * chain.fanouts[level - 1] + child)

    for position in range(len(chain.addresses[-1])):
        put(chain.top_level, position)
    for level in sorted(wanted, reverse=True):
        source = next((above for above in range(level, chain.top_level + 1) if free[above]), None)
        if source is None:
            return False
        for above in range(source, level, -1):
            split(above, free[above].pop())
        free[level].pop()
    return True


def _ancestors(chain: ChainTopology, level: int, position: int) -> Iterator[Cell]:
    for above in range(level + 1, chain.top_level + 1):
        position //= chain.fanouts[above - 1]
        yield above, position


def without_quotas(made: Made) -> HivedConfig:
    clusters = {
        name: VirtualClusterSpec((), cluster.pinned_cells) for name, cluster in made.config.virtual_clusters.items()
    }
    return HivedConfig(made.config.cell_types, made.config.physical_cells, clusters)


@settings(deadline=None)
@given(configurations())
def test_every_cell_is_where_the_rules_put_it(made: Made) -> None:
    """Addresses equal those of a naive walk, are unique, and extend their parents'; pinned cells are found."""
    topology = resolve(without_quotas(made))
    assert set(topology.chains) == {cell.cell_type for cell in made.config.physical_cells}
    for name, chain in topology.chains.items():
        expected, pinned = plain_reading(made, name)
        assert [list(level) for level in chain.addresses] == expected
        for level, addresses in enumerate(expected, start=1):
            assert len(set(addresses)) == len(addresses)
            for position, address in enumerate(addresses):
                for above, ancestor in _ancestors(chain, level, position):
                    assert address.startswith(f"{expected[above - 1][ancestor]}/")
        assert chain.nodes == [address.rpartition("/")[2] for address in expected[chain.node_level - 1]]
        assert chain.leaf_indices == [int(address.rpartition("/")[2]) for address in expected[0]]
        assert chain.pinned == pinned


@settings(deadline=None)
@given(configurations())
def test_quotas_are_accepted_if_and_only_if_they_can_be_handed_out(made: Made) -> None:
    """Safety: everything that `resolve` promises exists, beside pinned cells; and it refuses no quota that fits."""
    chains = resolve(without_quotas(made)).chains
    wanted: dict[str, list[int]] = {name: [] for name in chains}
    for cluster in made.config.virtual_clusters.values():
        for spec in cluster.virtual_cells:
            name, _, kind = spec.cell_type.partition(".")
            wanted[name] += [chains[name].cell_types.index(kind) + 1] * spec.cell_number
    possible = all(can_be_handed_out(chain, set(chain.pinned.values()), wanted[name]) for name, chain in chains.items())
    event(f"possible: {possible}")
    try:
        topology = resolve(made.config)
    except InvalidConfig:
        assert not possible
        return
    assert possible
    for name, cells in topology.virtual_clusters.items():
        assert [cell.address for cell in cells] == [f"{name}/{number}" for number in range(len(cells))]
        assert [cell.pinned_cell_id for cell in cells if cell.pinned_cell_id] == list(
            made.config.virtual_clusters[name].pinned_cells
        )
    found = sorted((cell.chain, cell.level) for cells in topology.virtual_clusters.values() for cell in cells)
    pins = [(name, level) for name, chain in chains.items() for level, _ in chain.pinned.values()]
    assert found == sorted([*pins, *((name, level) for name in wanted for level in wanted[name])])
