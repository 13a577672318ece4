"""Reading HiveD's configuration file: YAML 1.1 text -> `HivedConfig`, with HiveD's defaults.

Text is taken as written: an unquoted `8`, `10.10`, `0x10` or `yes` stays those characters where a name or an address is
expected. A number must be an unquoted integer, a switch an unquoted boolean. Unknown keys and repeated keys (the last
one counts) are accepted with a warning. `resolve` checks whether the values make sense as a cluster.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from scheduler.hived.config.types import (
    CellTypeSpec,
    ConfigWarning,
    HivedConfig,
    PhysicalCellSpec,
    VirtualCellSpec,
    VirtualClusterSpec,
)
from scheduler.hived.config.yaml import NodeReader, line_at
from scheduler.hived.errors import ConfigError, InvalidConfig
from store.decoding import NotYaml, Undecodable, check_yaml, plain_yaml_loader, yaml_reason

MAX_VALUES = 5_000_000  # of YAML, aliases written out: a cluster of 10,000 nodes has half a million

ROOT_FIELDS = frozenset(
    {
        "kubeApiServerAddress",
        "kubeConfigFilePath",
        "webServerAddress",
        "forcePodBindThreshold",
        "waitingPodSchedulingBlockMilliSec",
        "physicalCluster",
        "virtualClusters",
    }
)
CELL_TYPE_FIELDS = frozenset({"childCellType", "childCellNumber", "isNodeLevel"})
PHYSICAL_CELL_FIELDS = frozenset({"cellType", "cellAddress", "pinnedCellId", "cellChildren"})
VIRTUAL_CLUSTER_FIELDS = frozenset({"virtualCells", "pinnedCells"})
VIRTUAL_CELL_FIELDS = frozenset({"cellType", "cellNumber"})


def read_config(text: str, *, environ: Mapping[str, str], home: Path) -> HivedConfig:
    """Parse the file. `environ` and `home` give the defaults for access to Kubernetes, as in HiveD.

    Raises `InvalidConfig` with every problem found.
    """
    with _paused_gc():
        root, warnings = _compose(text)
        reader = NodeReader(warnings)
        kubeconfig = environ.get("KUBECONFIG") or str(home / ".kube" / "config")
        defaults = environ.get("KUBE_APISERVER_ADDRESS", ""), kubeconfig if Path(kubeconfig).exists() else ""
        fields = reader.mapping(root, "", ROOT_FIELDS)
        cluster = reader.required(fields, "", "physicalCluster")
        physical = reader.mapping(cluster, "physicalCluster", frozenset({"cellTypes", "physicalCells"}))
        is_mapping = isinstance(cluster, yaml.MappingNode)
        cells = reader.required(physical, "physicalCluster", "physicalCells") if is_mapping else None
        clusters = reader.required(fields, "", "virtualClusters")
        shared: dict[int, PhysicalCellSpec] = {}
        config = HivedConfig(
            cell_types={
                name: _cell_type(reader, node, path)
                for name, node, path in reader.entries(physical.get("cellTypes"), "physicalCluster.cellTypes")
            },
            physical_cells=tuple(
                _physical_cell(reader, node, path, shared)
                for node, path in reader.items(cells, "physicalCluster.physicalCells")
            ),
            virtual_clusters={
                name: _virtual_cluster(reader, node, path)
                for name, node, path in reader.entries(clusters, "virtualClusters")
            },
            kube_api_server_address=reader.text(fields, "", "kubeApiServerAddress", defaults[0]),
            kube_config_file_path=reader.text(fields, "", "kubeConfigFilePath", defaults[1]),
            web_server_address=reader.text(fields, "", "webServerAddress", ":9096"),
            force_pod_bind_threshold=reader.natural(fields, "", "forcePodBindThreshold", 3),
            waiting_pod_scheduling_block_milli_sec=reader.natural(fields, "", "waitingPodSchedulingBlockMilliSec", 0),
            warnings=tuple(reader.warnings),
        )
    if reader.problems:
        raise InvalidConfig(reader.problems)
    return config


def lines_of(text: str, paths: Sequence[str]) -> list[int | None]:
    """Return the line, from 1, of each `ConfigError.path`, or of its nearest enclosing key in the file."""
    with _paused_gc():
        try:
            root, _ = _compose(text)
        except InvalidConfig:
            return [None] * len(paths)
        return [line_at(root, path) for path in paths]


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Pause garbage collection: a large file is half a million live objects, and collecting takes five times the
    parsing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compose(text: str) -> tuple[yaml.Node, list[ConfigWarning]]:
    loader = plain_yaml_loader()(text)
    try:
        try:
            check_yaml(text, max_values=MAX_VALUES)
        except NotYaml:
            pass  # the parser below says what is wrong, if it is in the first document
        except Undecodable as error:
            raise InvalidConfig([ConfigError("", str(error))]) from error
        if not loader.check_node():
            raise InvalidConfig([ConfigError("", "the file is empty")])
        root = loader.get_node()
        has_more = loader.check_node()
    except yaml.YAMLError as error:
        raise InvalidConfig([ConfigError("", f"is not YAML: {yaml_reason(error)}")]) from error
    finally:
        loader.dispose()
    return root, [ConfigWarning("", "only the first YAML document of the file counts")] if has_more else []


def _cell_type(reader: NodeReader, node: yaml.Node, path: str) -> CellTypeSpec:
    fields = reader.mapping(node, path, CELL_TYPE_FIELDS)
    return CellTypeSpec(
        child_cell_type=reader.text(fields, path, "childCellType"),
        child_cell_number=reader.integer(fields, path, "childCellNumber", 0),
        is_node_level=reader.boolean(fields, path, "isNodeLevel"),
    )


def _physical_cell(
    reader: NodeReader, node: yaml.Node, path: str, shared: dict[int, PhysicalCellSpec]
) -> PhysicalCellSpec:
    """Convert a physical cell. `shared` maps nodes to cells already converted, so that an alias is converted once."""
    if id(node) in shared:
        return shared[id(node)]
    fields = reader.mapping(node, path, PHYSICAL_CELL_FIELDS)
    cell = PhysicalCellSpec(
        cell_type=reader.text(fields, path, "cellType"),
        cell_address=reader.text(fields, path, "cellAddress"),
        pinned_cell_id=reader.text(fields, path, "pinnedCellId"),
        cell_children=tuple(
            _physical_cell(reader, child, child_path, shared)
            for child, child_path in reader.items(fields.get("cellChildren"), f"{path}.cellChildren")
        ),
    )
    shared[id(node)] = cell
    return cell


def _virtual_cluster(reader: NodeReader, node: yaml.Node, path: str) -> VirtualClusterSpec:
    fields = reader.mapping(node, path, VIRTUAL_CLUSTER_FIELDS)
    return VirtualClusterSpec(
        virtual_cells=tuple(
            _virtual_cell(reader, cell, cell_path)
            for cell, cell_path in reader.items(fields.get("virtualCells"), f"{path}.virtualCells")
        ),
        pinned_cells=tuple(
            reader.text(reader.mapping(cell, cell_path, frozenset({"pinnedCellId"})), cell_path, "pinnedCellId")
            for cell, cell_path in reader.items(fields.get("pinnedCells"), f"{path}.pinnedCells")
        ),
    )


def _virtual_cell(reader: NodeReader, node: yaml.Node, path: str) -> VirtualCellSpec:
    fields = reader.mapping(node, path, VIRTUAL_CELL_FIELDS)
    reader.required(fields, path, "cellNumber")
    return VirtualCellSpec(
        cell_type=reader.text(fields, path, "cellType"), cell_number=reader.integer(fields, path, "cellNumber", 0)
    )
