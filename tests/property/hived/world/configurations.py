"""Random small clusters: racks, boxes and sub-node cells, pinned cells, nodes of two chains, and quotas that fit."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from store.kube.api.objects import Object
from tests.property.hived.world.choices import Choices, one_in, pick, shuffled

BOXES = ((2,), (2, 2), (1,), (4,), (2,), (3,), (2, 2, 2), (2, 3), (1, 2), (22,))  # fanouts of a node, from the top
RACKS = ((2,), (), (2,), (3,), (2, 2), (1,))  # fanouts above nodes, from the top
LEAF_TYPES = ("A", "B")
MOST_LEAVES = 16  # of a chain, about


@dataclass
class Plan:
    """A configuration under construction. `free`: by chain and level, cells that contain no pinned cell."""

    cell_types: Object = field(default_factory=dict)
    cells: list[Object] = field(default_factory=list)
    types: dict[str, list[str]] = field(default_factory=dict)
    fanouts: dict[str, list[int]] = field(default_factory=dict)
    free: dict[str, list[int]] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)
    nodes: int = 0

    def add_chain(self, choices: Choices, number: int) -> None:
        """Add all trees of one new top type."""
        leaf_type, box, rack = pick(choices, LEAF_TYPES), pick(choices, BOXES), pick(choices, RACKS)
        if _product([*box, *rack]) > MOST_LEAVES:
            rack = ()
        fanouts = [0, *reversed(box), *reversed(rack)]
        types = [leaf_type, *(f"{leaf_type}{number}-{level}" for level in range(2, len(fanouts) + 1))]
        top = types[-1]
        for level in range(1, len(types)):
            node = {"isNodeLevel": True} if level == len(box) else {}
            self.cell_types[types[level]] = {
                "childCellType": types[level - 1],
                "childCellNumber": fanouts[level],
                **node,
            }
        self.types[top], self.fanouts[top], self.free[top] = types, fanouts, [0] * len(types)
        size = _product(fanouts[1:])
        others = list(range(self.nodes))
        for _ in range(1 + choices.below(max(1, min(4, MOST_LEAVES // size)))):
            self.cells.append({"cellType": top, **self._cell(choices, top, len(types), len(box) + 1, others)})

    def _cell(self, choices: Choices, top: str, level: int, node_level: int, others: list[int]) -> Object:
        """Return a cell. `others`: nodes of other chains, one of which may be in this chain as well."""
        if level > node_level:
            children = self.fanouts[top][level - 1]
            return {"cellChildren": [self._cell(choices, top, level - 1, node_level, others) for _ in range(children)]}
        size = _product(self.fanouts[top][1:level])
        devices = list(range(size))
        if others and one_in(choices, 4):
            node = others.pop(choices.below(len(others)))
            devices = [100 * len(self.cells) + 100 + index for index in devices]
        else:
            node = self.nodes
            self.nodes += 1
        if one_in(choices, 6):
            devices = shuffled(choices, devices)
        return {"cellAddress": f"n{node}", **self._below(top, level, devices)}

    def _below(self, top: str, level: int, devices: list[int]) -> Object:
        if level == 1:
            return {"cellAddress": str(devices[0])}
        size = len(devices) // self.fanouts[top][level - 1]
        parts = [devices[start : start + size] for start in range(0, len(devices), size)]
        return {"cellChildren": [self._below(top, level - 1, part) for part in parts]}

    def pin(self, choices: Choices) -> None:
        """Pin cells at random, and count the cells left whole."""
        for cell in self.cells:
            top = cell["cellType"]
            self._pin(choices, cell, top, len(self.types[top]))

    def _pin(self, choices: Choices, cell: Object, top: str, level: int) -> bool:
        """Pin at random in a cell. Return whether it is still whole."""
        if one_in(choices, 8):
            cell["pinnedCellId"] = f"pin{len(self.pinned)}"
            self.pinned[cell["pinnedCellId"]] = top
            return False
        children = cell.get("cellChildren", [])
        whole = [self._pin(choices, child, top, level - 1) for child in children]
        if all(whole):
            if level == len(self.types[top]):
                self.free[top][level - 1] += 1
            return True
        self.free[top][level - 2] += sum(whole)
        return False

    def quotas(self, choices: Choices) -> Object:
        """Return virtual clusters that fit."""
        clusters: dict[str, Object] = {
            f"V{number}": {"virtualCells": [], "pinnedCells": []} for number in range(1 + choices.below(3))
        }
        names = list(clusters)
        for pinned in self.pinned:
            clusters[pick(choices, names)]["pinnedCells"].append({"pinnedCellId": pinned})
        wanted: Counter[tuple[str, int]] = Counter()
        for _ in range(1 + choices.below(7)):
            name, top = pick(choices, names), pick(choices, list(self.types))
            level, number = 1 + choices.below(len(self.types[top])), 1 + choices.below(2)
            wanted[top, level] += number
            if self._fits(top, wanted):
                dotted = top if level == len(self.types[top]) else f"{top}.{self.types[top][level - 1]}"
                clusters[name]["virtualCells"].append({"cellType": dotted, "cellNumber": number})
            else:
                wanted[top, level] -= number
        return clusters

    def _fits(self, top: str, wanted: Counter[tuple[str, int]]) -> bool:
        left = 0
        for level in range(len(self.types[top]), 0, -1):
            fanout = self.fanouts[top][level] if level < len(self.types[top]) else 0
            left = self.free[top][level - 1] + left * fanout - wanted[top, level]
            if left < 0:
                return False
        return True

    def configuration(self, choices: Choices) -> Object:
        """Return the configuration as in the file."""
        return {
            "physicalCluster": {"cellTypes": self.cell_types, "physicalCells": copy.deepcopy(self.cells)},
            "virtualClusters": self.quotas(choices),
        }


def _product(numbers: list[int]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def random_plan(choices: Choices) -> Plan:
    """Return a cluster of one to three chains."""
    plan = Plan()
    for number in range(1 + choices.below(2) + one_in(choices, 5)):
        plan.add_chain(choices, number)
    plan.pin(choices)
    return plan


def changed(choices: Choices, plan: Plan) -> Object:
    """Return the cluster after an edit of its file: other quotas, possibly a renamed node or entirely
    different cells.
    """
    if one_in(choices, 4):
        return random_plan(choices).configuration(choices)
    config = plan.configuration(choices)
    if one_in(choices, 4):
        _rename(pick(choices, config["physicalCluster"]["physicalCells"]), f"r{choices.below(9)}")
    return config


def _rename(cell: Object, name: str) -> None:
    while "cellAddress" not in cell:
        cell = cell["cellChildren"][0]
    cell["cellAddress"] = name


def picture(config: Object) -> str:
    """Return a configuration in short form: `top(node(device device)#pinned)`, and the quotas of each
    virtual cluster.
    """
    cells = [f"{cell['cellType']}{_picture(cell)}" for cell in config["physicalCluster"]["physicalCells"]]
    quotas = {
        name: [
            *(f"{cell['cellNumber']} {cell['cellType']}" for cell in cluster["virtualCells"]),
            *(cell["pinnedCellId"] for cell in cluster["pinnedCells"]),
        ]
        for name, cluster in config["virtualClusters"].items()
    }
    return f"{' '.join(cells)} {quotas}"


def _picture(cell: Object) -> str:
    below = f"({' '.join(_picture(child) for child in cell['cellChildren'])})" if "cellChildren" in cell else ""
    pinned = f"#{cell['pinnedCellId']}" if "pinnedCellId" in cell else ""
    return f"{cell.get('cellAddress', '')}{below}{pinned}"
