"""Snapshots: a scheduler's whole state as data, to inspect or continue elsewhere without touching the scheduler.

A snapshot holds the configuration, the healthy nodes, every group with its exact cells, the doomed cells, and the
waiting pods. `restore` builds an algorithm that decides as the original would have: unlike recovery, which has only the
pods' annotations, it keeps virtual cells, claims and downgrades.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.cells.cells import PhysicalCell, PhysicalLeaf, VirtualCell
from scheduler.hived.cells.groups import AffinityGroup, GroupState, LazyPreemptionStatus, Placement, PodPlace, PodSlot
from scheduler.hived.cells.topology import Topology, bits
from scheduler.hived.contract import PodSchedulingSpec
from scheduler.hived.errors import UserError
from store.decoding import Undecodable, from_json
from store.kube.api.objects import Object, annotations_of

VERSION = 1


class SavedSlot(msgspec.Struct, rename="camel", omit_defaults=True):
    """A pod's place. `leaves`: device indices; `virtual`: addresses of virtual leaves. `pod`: the pod there, if any."""

    node: str
    devices: tuple[int, ...]
    preassigned_types: tuple[str, ...]
    leaves: tuple[int, ...]
    virtual: tuple[str, ...] = ()
    pod: Object | None = None


class SavedGroup(msgspec.Struct, rename="camel", omit_defaults=True):
    """A group. `preemption_time`: seconds since the epoch, when `preemptor` took its quota."""

    spec: PodSchedulingSpec
    chain: str
    state: GroupState
    slots: tuple[SavedSlot, ...]
    preempting_pods: tuple[Object, ...] = ()
    preemptor: str = ""
    preemption_time: float = 0.0


class WaitingPod(msgspec.Struct, rename="camel", omit_defaults=True):
    """A pod without a place, with its last answer. Only the pod's `identity` is written."""

    pod: Object
    state: str
    reason: str = ""


class Snapshot(msgspec.Struct, rename="camel"):
    """`config`: the file's text. `doomed`: (virtual, physical) addresses. `groups`: JSON of `SavedGroup`, by name."""

    version: int
    config: str
    healthy_nodes: list[str]
    doomed: list[tuple[str, str]]
    waiting: list[WaitingPod]
    groups: list[msgspec.Raw]

    def saved_groups(self) -> list[SavedGroup]:
        """Decode the groups. Raises `UserError` for groups in another format."""
        try:
            return [from_json(_group_decoder, bytes(group)) for group in self.groups]
        except Undecodable as error:
            raise UserError(f"this is not a snapshot of rcfarm extender: {error}") from error

    def pieces(self) -> Iterator[bytes]:
        """Yield a JSON document in pieces: the groups and pods, which are the bulk of it, one by one."""
        yield _encode(msgspec.structs.replace(self, waiting=[], groups=[]))[: -len(b'],"groups":[]}')]
        yield from separated(_encode(msgspec.structs.replace(each, pod=identity(each.pod))) for each in self.waiting)
        yield b'],"groups":['
        yield from separated(bytes(group) for group in self.groups)
        yield b"]}"


def separated(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces with commas between them."""
    before = b""
    for piece in pieces:
        yield before + piece
        before = b","


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Snapshot)
_group_decoder = msgspec.json.Decoder(SavedGroup)


def save_group(group: AffinityGroup) -> bytes:
    """Return a group's current state as JSON."""
    lazy = group.lazy_preemption
    return _encode(
        SavedGroup(
            spec=group.spec,
            chain=group.chain,
            state=group.state,
            slots=tuple(
                SavedSlot(
                    slot.node,
                    slot.devices,
                    slot.preassigned_types,
                    tuple(leaf.device for leaf in slot.leaves),
                    tuple(cell.address for cell in slot.virtual),
                    None if slot.pod is None else identity(slot.pod),
                )
                for slot in group.slots
            ),
            preempting_pods=tuple(identity(pod) for pod in group.preempting_pods.values()),
            preemptor="" if lazy is None else lazy.preemptor,
            preemption_time=0.0 if lazy is None else lazy.preemption_time,
        )
    )


def identity(pod: Object) -> Object:
    """Return the part of a pod that is kept: name, UID, and annotations for HiveD."""
    kept = {key: pod["metadata"][key] for key in ("namespace", "name", "uid") if key in pod["metadata"]}
    annotations = {key: text for key, text in annotations_of(pod).items() if key.startswith("hivedscheduler.")}
    return {"metadata": {**kept, "annotations": annotations}}


def take_snapshot(
    algorithm: HivedAlgorithm, config: str, waiting: Iterable[WaitingPod] = (), groups: Iterable[bytes] | None = None
) -> Snapshot:
    """Return the current state. `groups`: `save_group` of each group, if already computed."""
    saved = groups if groups is not None else map(save_group, algorithm.groups.values())
    doomed: list[tuple[str, str]] = []
    for chain in algorithm.chains.values():
        for (_, level), mask in chain.doomed.items():
            for index in bits(mask):
                physical = chain.levels[level - 1][index]
                if physical.virtual is not None:
                    doomed.append((physical.virtual.address, physical.address))
    return Snapshot(
        VERSION,
        config,
        sorted(algorithm.healthy_nodes),
        doomed,
        list(waiting),
        [msgspec.Raw(group) for group in saved],
    )


def decode_snapshot(text: bytes) -> Snapshot:
    """Decode a snapshot. Raises `UserError` for other data or another version."""
    try:
        snapshot = from_json(_decoder, text)
    except Undecodable as error:
        raise UserError(f"this is not a snapshot of rcfarm extender: {error}") from error
    if snapshot.version != VERSION:
        raise UserError(f"the snapshot has version {snapshot.version}; this program reads version {VERSION}")
    return snapshot


def restore(snapshot: Snapshot, topology: Topology, clock: Callable[[], float]) -> HivedAlgorithm:
    """Return an algorithm in the state of the snapshot.

    `topology`: of the snapshot's configuration, or one with more cells. Raises `UserError` if a group is on cells that
    `topology` lacks.
    """
    algorithm = HivedAlgorithm(topology, clock)
    algorithm.set_health({node for chain in topology.chains.values() for node in chain.nodes})
    cells = _Cells(algorithm)
    for saved in sorted(snapshot.saved_groups(), key=lambda saved: saved.state is GroupState.PREEMPTING):
        cells.put(saved)
    for virtual, physical in snapshot.doomed:
        cells.doom(virtual, physical)
    algorithm.set_health(snapshot.healthy_nodes)
    return algorithm


class _Cells:
    """Restores saved groups in an algorithm. Finds the cells of a group by their addresses."""

    def __init__(self, algorithm: HivedAlgorithm) -> None:
        self._algorithm = algorithm
        self._virtual: dict[str, VirtualCell] = {
            leaf.address: leaf
            for tenant in algorithm.virtual_clusters.values()
            for cell in tenant.preassigned
            for leaf in cell.leaf_cells()
        }
        self._preassigned = {
            cell.address: cell for tenant in algorithm.virtual_clusters.values() for cell in tenant.preassigned
        }
        self._physical: dict[tuple[str, int], dict[str, list[PhysicalCell]]] = {}

    def put(self, saved: SavedGroup) -> None:
        slots = [
            PodSlot(
                leaf_cell_number=len(slot.devices),
                node=slot.node,
                devices=slot.devices,
                leaves=tuple(self._leaf(slot.node, device) for device in slot.leaves),
                preassigned_types=slot.preassigned_types,
                virtual=tuple(_known(self._virtual, address) for address in slot.virtual),
                pod=slot.pod,
            )
            for slot in saved.slots
        ]
        places = tuple(PodPlace(slot.leaves, slot.virtual) for slot in slots)
        placement = Placement(self._algorithm.chains[saved.chain], places)
        group = self._algorithm.restore_group(saved.spec, placement, slots, saved.preempting_pods)
        if saved.preemptor:
            group.lazy_preemption = LazyPreemptionStatus(saved.preemptor, saved.preemption_time)

    def _leaf(self, node: str, device: int) -> PhysicalLeaf:
        leaf = self._algorithm.leaves.get((node, device))
        if leaf is None:
            raise UserError(f"the configuration has no leaf cell {device} of node {node}, which the snapshot uses")
        return leaf

    def doom(self, virtual: str, physical: str) -> None:
        """Bind a doomed cell. Above nodes several cells may have the same address: the first free one is taken."""
        cell = _known(self._preassigned, virtual)
        chain, level = cell.chain, cell.level
        by_address = self._physical.get((chain.name, level))
        if by_address is None:
            by_address = self._physical[chain.name, level] = {}
            for each in chain.levels[level - 1]:
                by_address.setdefault(each.address, []).append(each)
        cells = by_address.get(physical, [])
        found = next((each for each in cells if chain.free.is_obtainable(level, each.index)), None)
        if found is None:
            raise UserError(f"the configuration has no free cell {physical}, which the snapshot uses")
        chain.doom(cell, found)


def _known(cells: Mapping[str, Any], address: str) -> VirtualCell:
    cell = cells.get(address)
    if not isinstance(cell, VirtualCell):
        raise UserError(f"the configuration has no virtual cell {address}, which the snapshot uses")
    return cell
