"""The configuration file of HiveD, as types: the written values with defaults, before names are resolved.

Keys in the file are these names in camel case. The text under each field gives its default and its purpose; the
reference page is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CellTypeSpec:
    """The children of a cell type. A type without an entry is a leaf: one device, and its name is the `leafCellType`
    that pods ask for."""

    child_cell_type: str
    """The type of the children. Required."""

    child_cell_number: int
    """Number of children, at least 1. Required."""

    is_node_level: bool = False
    """Whether a cell of this type is one Kubernetes node. Default: false. On the way from a chain's top type down to
    its leaves exactly one type is, because a pod can't span nodes."""


@dataclass(frozen=True, slots=True)
class PhysicalCellSpec:
    """One physical cell with its descendants."""

    cell_type: str = ""
    """One of the `cellTypes`, and at least a node. Required at the top, where it names the chain that the cell belongs
    to; below it follows from the type above. Default there: that."""

    cell_address: str = ""
    """The last part of the cell's address: of a node the name of the Kubernetes node, required; of a leaf the index of
    its device in the node, a whole number. Default: of a top cell its position in `physicalCells`; of others the number
    that counts the cells of its level through the node, or above nodes through the top cell."""

    pinned_cell_id: str = ""
    """An ID by which one virtual cluster can be given this physical cell permanently. Default: none. Unique in the
    file, and not inside of another pinned cell.
    """

    cell_children: tuple[PhysicalCellSpec, ...] = ()
    """All its children, or none: then they are generated, with default addresses. Default: none, which is possible from
    the nodes down.
    """


@dataclass(frozen=True, slots=True)
class VirtualCellSpec:
    """A number of cells of one kind in a virtual cluster's quota."""

    cell_type: str
    """A chain, a dot, and the type of the cells in that chain, such as `A100-RACK.A100-HOST`; just the chain for its
    top cells. Parts between the first and the last have no effect. Required."""

    cell_number: int
    """How many. At least 0. Required. All quotas together must fit into the physical cells."""


@dataclass(frozen=True, slots=True)
class VirtualClusterSpec:
    """The quota of one tenant: the cells that it is guaranteed, with their topology."""

    virtual_cells: tuple[VirtualCellSpec, ...] = ()
    """Cells that can be anywhere in their chain. Default: none."""

    pinned_cells: tuple[str, ...] = ()
    """Physical cells that are this cluster's own, a list of `{pinnedCellId: ID}`. Default: none. Each in one virtual
    cluster, once."""


@dataclass(frozen=True, slots=True)
class ConfigWarning:
    """A valid setting at `path` that is probably a mistake."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


@dataclass(frozen=True, slots=True)
class HivedConfig:
    """The whole file; the first two fields are under `physicalCluster`. `warnings`, found while parsing, do not count
    in comparisons.
    """

    cell_types: Mapping[str, CellTypeSpec]
    """Types of cells by name: how devices, sockets, nodes, racks contain each other. Default: none."""

    physical_cells: tuple[PhysicalCellSpec, ...]
    """The trees of cells. Required. Those of the same type at the top are a chain; a node may be in several chains,
    with other devices in each."""

    virtual_clusters: Mapping[str, VirtualClusterSpec]
    """Quotas by the name of the tenant. Required, if only as `{}`, so that a truncated file does not remove all quotas.
    """

    kube_api_server_address: str = ""
    """Address of the API server. Default: `$KUBE_APISERVER_ADDRESS`, else the kubeconfig's."""

    kube_config_file_path: str = ""
    """The kubeconfig. Default: `$KUBECONFIG`, without it `~/.kube/config`, if that file exists. Neither this nor an
    address: the service account of the pod that the scheduler runs in."""

    web_server_address: str = ":9096"
    """Listen address for kube-scheduler's calls and inspection. Default: `:9096`, on every address."""

    force_pod_bind_threshold: int = 3
    """Number of filter calls for a pod that already has a placement before the scheduler binds it itself. Default: 3;
    kube-scheduler has then lost its bind call.
    """

    waiting_pod_scheduling_block_milli_sec: int = 0
    """Milliseconds without other decisions after a pod must wait. Default: 0. Larger values make scheduling closer to
    first come, first served, and slower.
    """

    warnings: tuple[ConfigWarning, ...] = field(default=(), compare=False)
    """Not in the file."""
