"""Reading HiveD's configuration file: YAML 1.1 text -> `HivedConfig`, with HiveD's defaults.

Text is taken as it was written: an unquoted `8`, `10.10`, `0x10` or `yes` stays those characters where a name or an
address is wanted. A number must be an unquoted integer, a switch an unquoted truth value. Keys that HiveD does not have
and keys given twice (the last one counts) are accepted and become warnings. Whether the file makes sense as a cluster
is not asked here, but in `resolving`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from scheduler.hived.config import (
    CellTypeSpec,
    ConfigWarning,
    HivedConfig,
    PhysicalCellSpec,
    VirtualCellSpec,
    VirtualClusterSpec,
)
from scheduler.hived.errors import ConfigError, InvalidConfig
from scheduler.hived.yaml_nodes import NodeReader, line_at
from store.decoding import NotYaml, Undecodable, check_yaml

_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

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
    """What the file says. `environ` and `home` give the defaults of the access to Kubernetes, as for HiveD.

    Raises `InvalidConfig` with everything that can't be read.
    """
    with _paused_gc():
        root, warnings = _compose(text)
        reader = NodeReader(warnings)
        config = _config(reader, root, _default_access(environ, home))
    if reader.problems:
        raise InvalidConfig(reader.problems)
    return config


def lines_of(text: str, paths: Sequence[str]) -> list[int | None]:
    """The line, from 1, of what each `ConfigError.path` names, or of the nearest thing around it that is written."""
    with _paused_gc():
        try:
            root, _ = _compose(text)
        except InvalidConfig:
            return [None] * len(paths)
        return [line_at(root, path) for path in paths]


@contextmanager
def _paused_gc() -> Iterator[None]:
    """A large file is half a million objects, none of them garbage: looking for it takes five times the reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compose(text: str) -> tuple[yaml.Node, list[ConfigWarning]]:
    loader = _Loader(text)
    try:
        _check(text)
        if not loader.check_node():
            raise InvalidConfig([ConfigError("", "the file is empty")])
        root = loader.get_node()
        has_more = loader.check_node()
    except yaml.YAMLError as error:
        raise InvalidConfig([ConfigError("", f"is not YAML: {where_and_why(error)}")]) from error
    finally:
        loader.dispose()
    return root, [ConfigWarning("", "only the first YAML document of the file counts")] if has_more else []


def _check(text: str) -> None:
    """The C parser builds its nodes by recursion: some ten thousand levels would end the process. Raises
    `InvalidConfig`; bad syntax is left for the parser to name."""
    try:
        check_yaml(text, max_values=MAX_VALUES)
    except NotYaml:
        pass
    except Undecodable as error:
        raise InvalidConfig([ConfigError("", str(error))]) from error


def where_and_why(error: yaml.YAMLError) -> str:
    """In one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


def _default_access(environ: Mapping[str, str], home: Path) -> tuple[str, str]:
    """Address of the API server and path of the kubeconfig where the file names none."""
    kubeconfig = environ.get("KUBECONFIG") or str(home / ".kube" / "config")
    return environ.get("KUBE_APISERVER_ADDRESS", ""), kubeconfig if Path(kubeconfig).exists() else ""


def _config(reader: NodeReader, root: yaml.Node, access: tuple[str, str]) -> HivedConfig:
    fields = reader.mapping(root, "", ROOT_FIELDS)
    cluster = reader.required(fields, "", "physicalCluster")
    physical = reader.mapping(cluster, "physicalCluster", frozenset({"cellTypes", "physicalCells"}))
    is_mapping = isinstance(cluster, yaml.MappingNode)
    cells = reader.required(physical, "physicalCluster", "physicalCells") if is_mapping else None
    clusters = reader.required(fields, "", "virtualClusters")
    shared: dict[int, PhysicalCellSpec] = {}
    return HivedConfig(
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
        kube_api_server_address=reader.text(fields, "", "kubeApiServerAddress", access[0]),
        kube_config_file_path=reader.text(fields, "", "kubeConfigFilePath", access[1]),
        web_server_address=reader.text(fields, "", "webServerAddress", ":9096"),
        force_pod_bind_threshold=reader.natural(fields, "", "forcePodBindThreshold", 3),
        waiting_pod_scheduling_block_milli_sec=reader.natural(fields, "", "waitingPodSchedulingBlockMilliSec", 0),
        warnings=tuple(reader.warnings),
    )


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
    """`shared` knows cells by the node that they were read from: an alias is read once, however often it is used."""
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
