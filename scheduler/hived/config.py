"""The configuration file of HiveD, as types: what was written, with defaults, before anything is resolved.

The names in the file are these in camel case. The text under each field gives its default and why it is there; the
reference page is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CellTypeSpec:
    """What a type of cell consists of. A type without such an entry is a leaf: one device, and its name is the
    `leafCellType` that pods ask for."""

    child_cell_type: str
    """The type of the cells that it consists of. Required."""

    child_cell_number: int
    """Of how many. At least 1. Required."""

    is_node_level: bool = False
    """Whether a cell of this type is one Kubernetes node. Default: false. On the way from a chain's top type down to
    its leaves exactly one type is, because a pod can't span nodes."""


@dataclass(frozen=True, slots=True)
class PhysicalCellSpec:
    """One physical cell, and what is below it."""

    cell_type: str = ""
    """One of the `cellTypes`, and at least a node. Required at the top, where it names the chain that the cell belongs
    to; below it follows from the type above. Default there: that."""

    cell_address: str = ""
    """The last part of the cell's address: of a node the name of the Kubernetes node, required; of a leaf the index of
    its device in the node, a whole number. Default: of a top cell its position in `physicalCells`; of others the number
    that counts the cells of its level through the node, or above nodes through the top cell."""

    pinned_cell_id: str = ""
    """A name by which one virtual cluster can be given this very cell for ever. Default: none. Unique in the file, and
    not inside of another pinned cell."""

    cell_children: tuple[PhysicalCellSpec, ...] = ()
    """All cells that it consists of, or none of them: those are made up, with default addresses. Default: none, which
    is possible from the nodes down."""


@dataclass(frozen=True, slots=True)
class VirtualCellSpec:
    """So many cells of one kind, in a virtual cluster's quota."""

    cell_type: str
    """A chain, a dot, and the type of the cells in that chain, such as `A100-RACK.A100-HOST`; just the chain for its
    top cells. What stands between the first and the last part has no effect. Required."""

    cell_number: int
    """How many. At least 0. Required. All quotas together must fit into the physical cells."""


@dataclass(frozen=True, slots=True)
class VirtualClusterSpec:
    """The quota of one tenant: what it is guaranteed, with its topology."""

    virtual_cells: tuple[VirtualCellSpec, ...] = ()
    """Cells that can be anywhere in their chain. Default: none."""

    pinned_cells: tuple[str, ...] = ()
    """Physical cells that are this cluster's own, a list of `{pinnedCellId: ID}`. Default: none. Each in one virtual
    cluster, once."""


@dataclass(frozen=True, slots=True)
class ConfigWarning:
    """Something at `path` that does no harm but is hardly meant."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


@dataclass(frozen=True, slots=True)
class HivedConfig:
    """The whole file; the first two fields stand under `physicalCluster`. `warnings`: what was found odd in reading it;
    they do not count when two are compared."""

    cell_types: Mapping[str, CellTypeSpec]
    """Types of cells by name: how devices, sockets, nodes, racks contain each other. Default: none."""

    physical_cells: tuple[PhysicalCellSpec, ...]
    """The trees of cells that are there. Required. Those of the same type at the top are a chain; a node may be in
    several chains, with other devices in each."""

    virtual_clusters: Mapping[str, VirtualClusterSpec]
    """Quotas by the name of the tenant. Required, if only as `{}`: a file that was cut off must not take them away."""

    kube_api_server_address: str = ""
    """Address of the API server. Default: `$KUBE_APISERVER_ADDRESS`, else what the kubeconfig says."""

    kube_config_file_path: str = ""
    """The kubeconfig. Default: `$KUBECONFIG`, without it `~/.kube/config`, if that file exists. Neither this nor an
    address: the service account of the pod that we run in."""

    web_server_address: str = ":9096"
    """Where kube-scheduler's calls and inspections are answered. Default: `:9096`, on every address."""

    force_pod_bind_threshold: int = 3
    """How many times kube-scheduler may ask for a pod whose place is decided before we bind it ourselves. Default: 3:
    it has then forgotten to."""

    waiting_pod_scheduling_block_milli_sec: int = 0
    """Milliseconds for which nothing else is decided after a pod must wait. Default: 0. More makes scheduling closer to
    first come, first served, and slower."""

    warnings: tuple[ConfigWarning, ...] = field(default=(), compare=False)
    """Not in the file."""
