"""HiveD's configuration file: its fields as types, before names are resolved, and how `read_config` reads them.

Keys in the file are the types' names in camel case. The text under each field gives its default and its purpose; the
reference page is generated from it.

YAML 1.1 is read as HiveD does: by the expected type, not by the look of the text. Each problem is collected with the
path of the field, and reading continues with the default. Text is taken as written: an unquoted `8`, `10.10`, `0x10` or
`yes` stays those characters where a name or an address is expected. A number must be an unquoted integer, a switch an
unquoted boolean. Unknown keys and repeated keys (the last one counts) are accepted with a warning. `resolve` checks
whether the values make sense as a cluster.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from scheduler.hived.errors import ConfigError, InvalidConfig
from store.decoding import NotYaml, Undecodable, check_yaml, plain_yaml_loader, yaml_reason


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


_INT: Final = "tag:yaml.org,2002:int"
_BOOL: Final = "tag:yaml.org,2002:bool"
_NULL: Final = "tag:yaml.org,2002:null"
_MERGE: Final = "tag:yaml.org,2002:merge"
_TRUE: Final = frozenset({"true", "yes", "on", "y"})
_ONE_LETTER_BOOLEANS: Final = frozenset("yYnN")  # YAML 1.1 has them; PyYAML does not

Fields = Mapping[str, yaml.Node]


class NodeReader:
    """Reads one graph and collects `problems` and `warnings`."""

    def __init__(self, warnings: list[ConfigWarning]) -> None:
        self.problems: list[ConfigError] = []
        self.warnings = warnings

    def mapping(self, node: yaml.Node | None, path: str, known: frozenset[str] | None = None) -> dict[str, yaml.Node]:
        """Return the fields by name; null is an empty mapping. A name that is not `known` adds a warning."""
        if node is None or _is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            self._problem(path, f"must be a mapping of fields, not {_kind(node)}")
            return {}
        fields: dict[str, yaml.Node] = {}
        merged: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                inner: dict[str, yaml.Node] = {}
                for source in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                    inner |= self.mapping(source, join(path, "<<"))  # of several mappings the first one counts
                merged = inner | merged
            elif not isinstance(key, yaml.ScalarNode):
                self._problem(path, f"line {key.start_mark.line + 1}: a key must be text, not {_kind(key)}")
            else:
                if key.value in fields:
                    self.warnings.append(ConfigWarning(join(path, key.value), "is given twice; the last one counts"))
                elif known is not None and key.value not in known:
                    what = "is not a field of this file and has no effect"
                    self.warnings.append(ConfigWarning(join(path, key.value), what))
                fields[key.value] = value
        return merged | fields if merged else fields

    def entries(self, node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.Node, str]]:
        """Yield name, node and path of each entry of a map with free names."""
        for name, value in self.mapping(node, path).items():
            yield name, value, join(path, name)

    def items(self, node: yaml.Node | None, path: str) -> Iterator[tuple[yaml.Node, str]]:
        """Yield node and path of each item of a list; null is an empty list."""
        if node is None or _is_null(node):
            return
        if not isinstance(node, yaml.SequenceNode):
            self._problem(path, f"must be a list, not {_kind(node)}")
            return
        for position, item in enumerate(node.value):
            yield item, f"{path}[{position}]"

    def required(self, fields: Fields, path: str, name: str) -> yaml.Node | None:
        """Return the field's node; add a problem if it is missing."""
        node = fields.get(name)
        if node is None or _is_null(node):
            self._problem(join(path, name), "is missing")
            return None
        return node

    def text(self, fields: Fields, path: str, name: str, default: str = "") -> str:
        """Return the characters as written."""
        node = fields.get(name)
        if node is None or _is_null(node):
            return default
        if not isinstance(node, yaml.ScalarNode):
            self._problem(join(path, name), f"must be text, not {_kind(node)}")
            return default
        return str(node.value)

    def integer(self, fields: Fields, path: str, name: str, default: int) -> int:
        """Return an unquoted integer, in any YAML 1.1 notation but base 60."""
        node = fields.get(name)
        if node is None or _is_null(node):
            return default
        if node.tag == _INT:
            text = str(node.value).replace("_", "")
            digits = text.lstrip("+-")
            is_octal = digits.startswith("0") and digits[1:].isdigit()
            with suppress(ValueError):  # such as base 60
                return int(text, 8 if is_octal else 0)
        self._problem(join(path, name), f"must be a whole number without quotes, not {_shown(node)}")
        return default

    def natural(self, fields: Fields, path: str, name: str, default: int) -> int:
        """Return an integer of at least 0."""
        value = self.integer(fields, path, name, default)
        if value < 0:
            self._problem(join(path, name), f"must be at least 0, not {value}")
        return value

    def boolean(self, fields: Fields, path: str, name: str) -> bool:
        """Return an unquoted YAML 1.1 boolean; false by default."""
        node = fields.get(name)
        if node is None or _is_null(node):
            return False
        is_letter = isinstance(node, yaml.ScalarNode) and not node.style and node.value in _ONE_LETTER_BOOLEANS
        if node.tag != _BOOL and not is_letter:
            self._problem(join(path, name), f"must be true or false without quotes, not {_shown(node)}")
            return False
        return str(node.value).lower() in _TRUE

    def _problem(self, path: str, problem: str) -> None:
        self.problems.append(ConfigError(path, problem))


def line_at(root: yaml.Node, path: str) -> int:
    """Return the line, from 1, of the node at the path, or of its nearest ancestor."""
    line, node, rest = int(root.start_mark.line) + 1, root, path
    while rest:
        found: tuple[yaml.Node, yaml.Node, str] | None = None
        if isinstance(node, yaml.SequenceNode) and rest.startswith("["):
            number, _, after = rest[1:].partition("]")
            if number.isdigit() and int(number) < len(node.value):
                item = node.value[int(number)]
                found = item, item, after.removeprefix(".")
        else:
            for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
                # A key may contain dots: the longest matching key counts, of equal ones the last.
                if not isinstance(key, yaml.ScalarNode) or not rest.startswith(key.value):
                    continue
                after = rest[len(key.value) :]
                if after[:1] in {"", ".", "["} and (found is None or len(after.removeprefix(".")) <= len(found[2])):
                    found = key, value, after.removeprefix(".")
        if found is None:
            break
        start, node, rest = found
        line = int(start.start_mark.line) + 1
    return line


def join(path: str, name: str) -> str:
    """Return the path of a field."""
    return f"{path}.{name}" if path else name


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _NULL)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else _shown(node)


def _shown(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return _kind(node)
    return f'"{node.value}"' if node.style else str(node.value)


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
        cell_types = {}
        for name, node, path in reader.entries(physical.get("cellTypes"), "physicalCluster.cellTypes"):
            spec = reader.mapping(node, path, CELL_TYPE_FIELDS)
            cell_types[name] = CellTypeSpec(
                child_cell_type=reader.text(spec, path, "childCellType"),
                child_cell_number=reader.integer(spec, path, "childCellNumber", 0),
                is_node_level=reader.boolean(spec, path, "isNodeLevel"),
            )
        physical_cells = tuple(
            _physical_cell(reader, node, path, shared)
            for node, path in reader.items(cells, "physicalCluster.physicalCells")
        )
        virtual_clusters = {}
        for name, node, path in reader.entries(clusters, "virtualClusters"):
            cluster_fields, virtual_cells = reader.mapping(node, path, VIRTUAL_CLUSTER_FIELDS), []
            for cell, at in reader.items(cluster_fields.get("virtualCells"), f"{path}.virtualCells"):
                spec = reader.mapping(cell, at, VIRTUAL_CELL_FIELDS)
                reader.required(spec, at, "cellNumber")
                cell_type = reader.text(spec, at, "cellType")
                virtual_cells.append(VirtualCellSpec(cell_type, reader.integer(spec, at, "cellNumber", 0)))
            pinned_cells = tuple(
                reader.text(reader.mapping(cell, at, frozenset({"pinnedCellId"})), at, "pinnedCellId")
                for cell, at in reader.items(cluster_fields.get("pinnedCells"), f"{path}.pinnedCells")
            )
            virtual_clusters[name] = VirtualClusterSpec(tuple(virtual_cells), pinned_cells)
        config = HivedConfig(
            cell_types=cell_types,
            physical_cells=physical_cells,
            virtual_clusters=virtual_clusters,
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
