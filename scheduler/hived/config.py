"""The configuration file of HiveD, as types: what was written, with defaults, before anything is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CellTypeSpec:
    """A type of cell with children; a type that no `cellTypes` entry defines is a leaf: one device."""

    child_cell_type: str
    child_cell_number: int
    is_node_level: bool = False


@dataclass(frozen=True, slots=True)
class PhysicalCellSpec:
    """One physical cell as written. `cell_type` only at the top; missing children and addresses are generated later."""

    cell_type: str = ""
    cell_address: str = ""
    pinned_cell_id: str = ""
    cell_children: tuple[PhysicalCellSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class VirtualCellSpec:
    """So many cells of a VC's quota. `cell_type` is dotted: chain first, type of the cell last."""

    cell_type: str
    cell_number: int


@dataclass(frozen=True, slots=True)
class VirtualClusterSpec:
    """The quota of one tenant. `pinned_cells`: ids of physical cells that are always its own."""

    virtual_cells: tuple[VirtualCellSpec, ...] = ()
    pinned_cells: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigWarning:
    """Something at `path` that does no harm but is hardly meant."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


@dataclass(frozen=True, slots=True)
class HivedConfig:
    """The whole file."""

    cell_types: Mapping[str, CellTypeSpec]
    physical_cells: tuple[PhysicalCellSpec, ...]
    virtual_clusters: Mapping[str, VirtualClusterSpec]
    kube_api_server_address: str = ""
    kube_config_file_path: str = ""
    web_server_address: str = ":9096"
    force_pod_bind_threshold: int = 3
    waiting_pod_scheduling_block_milli_sec: int = 0
    warnings: tuple[ConfigWarning, ...] = field(default=(), compare=False)
