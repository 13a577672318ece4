"""Reading HiveD's file: text as written, HiveD's defaults, and every problem with its path."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from scheduler.hived.config.file import CellTypeSpec, ConfigWarning, VirtualCellSpec, lines_of
from scheduler.hived.config.resolve import host_and_port, resolve
from scheduler.hived.errors import ConfigError, InvalidConfig
from tests.support.hived.config import RACKS, problems, racks, read, resolved


@pytest.mark.parametrize("raw", ["8", "10.10", "0x10", "yes", "1_000", "2026-01-01", "1e3", "true", "0o7", "1:30"])
def test_names_are_the_characters_that_were_written(raw: str) -> None:
    """An unquoted scalar is a name wherever a name is expected, however YAML would type it."""
    text = f"""\
physicalCluster:
  cellTypes:
    {raw}: {{childCellType: {raw}-leaf, childCellNumber: 2, isNodeLevel: true}}
  physicalCells:
  - {{cellType: {raw}, cellAddress: {raw}, pinnedCellId: {raw}}}
virtualClusters:
  {raw}:
    pinnedCells: [{{pinnedCellId: {raw}}}]
"""
    config = read(text)

    assert config.cell_types == {raw: CellTypeSpec(f"{raw}-leaf", 2, True)}
    (cell,) = config.physical_cells
    assert (cell.cell_type, cell.cell_address, cell.pinned_cell_id) == (raw, raw, raw)
    assert config.virtual_clusters[raw].pinned_cells == (raw,)


def test_quotes_do_not_matter_to_names() -> None:
    """A name in quotes is the same name."""
    quoted = racks(("cellAddress: a0", 'cellAddress: "a0"'), ("cellType: RACK.HOST", "cellType: 'RACK.HOST'"))
    assert read(quoted) == read(RACKS)


@pytest.mark.parametrize(
    ("written", "number"), [("3", 3), ("+3", 3), ("0x10", 16), ("0b11", 3), ("010", 8), ("1_000", 1000), ("0", 0)]
)
def test_whole_numbers_in_every_notation(written: str, number: int) -> None:
    """YAML 1.1 has hexadecimal, binary, octal and grouped integers."""
    config = read(f"forcePodBindThreshold: {written}\nwaitingPodSchedulingBlockMilliSec: {written}\n{RACKS}")
    assert config.force_pod_bind_threshold == config.waiting_pod_scheduling_block_milli_sec == number


@pytest.mark.parametrize("written", ['"3"', "'3'", "3.0", "three", "yes", "1:30", "08", "[3]", "{}", "-3"])
def test_other_values_are_no_whole_numbers(written: str) -> None:
    """Quoted integers are refused as in HiveD; so are fractions, which HiveD truncates."""
    with pytest.raises(InvalidConfig, match=r"forcePodBindThreshold: must be .*not "):
        read(f"forcePodBindThreshold: {written}\n{RACKS}")


@pytest.mark.parametrize("written", ["true", "True", "yes", "YES", "on", "y", "Y"])
def test_truth_values_of_yaml_1_1(written: str) -> None:
    """Each of them makes a node."""
    assert not problems(racks(("isNodeLevel: true", f"isNodeLevel: {written}")))


@pytest.mark.parametrize("written", ["false", "No", "off", "n"])
def test_untruth_values_of_yaml_1_1(written: str) -> None:
    """Each of them is the default."""
    assert not read(racks(("isNodeLevel: true", f"isNodeLevel: {written}"))).cell_types["HOST"].is_node_level


@pytest.mark.parametrize("written", ['"true"', "1", "maybe", "[]", "'y'"])
def test_other_values_are_no_truth_values(written: str) -> None:
    """A quoted value is text."""
    path = "physicalCluster.cellTypes.HOST.isNodeLevel"
    assert (
        "must be true or false without quotes"
        in problems(racks(("isNodeLevel: true", f"isNodeLevel: {written}")))[path]
    )


def test_the_defaults_are_those_of_hived(tmp_path: Path) -> None:
    """Without fields and without environment variables."""
    config = read(RACKS, home=tmp_path)
    assert (config.kube_api_server_address, config.kube_config_file_path) == ("", "")
    assert config.web_server_address == ":9096"
    assert config.force_pod_bind_threshold == 3
    assert config.waiting_pod_scheduling_block_milli_sec == 0


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [(":9096", "", 9096), ("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:80", "::1", 80), ("0.0.0.0:9096", "0.0.0.0", 9096)],
)
def test_addresses_are_as_in_go(text: str, host: str, port: int) -> None:
    """An address without a host means all addresses."""
    assert host_and_port(read(f'webServerAddress: "{text}"\n{RACKS}').web_server_address) == (host, port)


@pytest.mark.parametrize("text", ["", "9096", ":http", "http://a:80", ":99999"])
def test_an_invalid_address_is_reported(text: str) -> None:
    """It is reported with all problems of the cells, so that `validate` and a reload find it before the next start."""
    with pytest.raises(InvalidConfig) as found:
        resolve(read(f'webServerAddress: "{text}"\n{RACKS}'))
    assert [str(error).startswith(f"webServerAddress: {text!r} is not :PORT") for error in found.value.errors] == [True]


def test_null_is_the_default() -> None:
    """A field without a value counts as absent; so do children that are null."""
    text = racks(("{cellAddress: a0}", "{cellAddress: a0, cellChildren: null, pinnedCellId: ~}"))
    assert read(f"webServerAddress:\nforcePodBindThreshold: null\n{text}") == read(RACKS)


def test_access_to_kubernetes_by_environment(tmp_path: Path) -> None:
    """`KUBE_APISERVER_ADDRESS` and `KUBECONFIG`, or the kubeconfig at home; a missing file is ignored."""
    home, other = tmp_path / "home", tmp_path / "other"
    at_home = home / ".kube" / "config"
    at_home.parent.mkdir(parents=True)
    environ = {"KUBE_APISERVER_ADDRESS": "http://127.0.0.1:8080", "KUBECONFIG": str(other)}

    assert read(RACKS, environ, home).kube_api_server_address == "http://127.0.0.1:8080"
    assert read(RACKS, environ, home).kube_config_file_path == ""
    other.touch()
    assert read(RACKS, environ, home).kube_config_file_path == str(other)
    at_home.touch()
    assert read(RACKS, {}, home).kube_config_file_path == str(at_home)


def test_the_file_overrides_the_environment(tmp_path: Path) -> None:
    """An empty address overrides it, too."""
    text = f'kubeApiServerAddress: ""\nkubeConfigFilePath: /etc/kubeconfig\n{RACKS}'
    config = read(text, {"KUBE_APISERVER_ADDRESS": "http://127.0.0.1:8080"}, tmp_path)
    assert (config.kube_api_server_address, config.kube_config_file_path) == ("", "/etc/kubeconfig")


def test_unknown_and_repeated_keys_give_warnings() -> None:
    """They are accepted, the last value counts, and files that differ in them alone are equal."""
    text = f"skuTypes: {{a: 1}}\n{racks(('cellAddress: a0', 'cellAddress: z, sku: 1, cellAddress: a0'))}"
    config = read(text)

    cell = "physicalCluster.physicalCells[0].cellChildren[0]"
    assert config == read(RACKS)
    assert config.warnings == (
        ConfigWarning("skuTypes", "is not a field of this file and has no effect"),
        ConfigWarning(f"{cell}.sku", "is not a field of this file and has no effect"),
        ConfigWarning(f"{cell}.cellAddress", "is given twice; the last one counts"),
    )


def test_anchors_and_merge_keys() -> None:
    """YAML's ways to avoid repetition; a field beside `<<` overrides merged ones."""
    text = racks(
        ("{cellType: RACK.HOST, cellNumber: 1}", "&quota {cellType: RACK.HOST, cellNumber: 1}"),
        ("{cellType: HOST.PAIR, cellNumber: 1}", "{<<: [*quota, {cellNumber: 9}], cellType: HOST.PAIR}"),
    )
    assert read(text).virtual_clusters["one"].virtual_cells[1] == VirtualCellSpec("HOST.PAIR", 1)


def test_an_alias_that_contains_itself_is_refused() -> None:
    """The result is an error, not endless recursion."""
    with pytest.raises(InvalidConfig, match="refers to itself"):
        read(racks(("{cellAddress: a0}", "&a {cellChildren: [*a]}")))


def test_nested_aliases_are_refused_quickly() -> None:
    """Forty levels that each use the next one twice are refused at once."""
    levels = "".join(f"  x{n}: &x{n} {{cellChildren: [*x{n - 1}, *x{n - 1}]}}\n" for n in range(1, 40))
    text = f"anchors:\n  x0: &x0 {{cellAddress: a}}\n{levels}{racks(('{cellAddress: a0}', '*x39'))}"
    assert "physicalCluster.physicalCells[0].cellChildren[0].cellChildren" not in problems(text)
    assert problems(text)


@pytest.mark.parametrize("text", ["[" * 300_000, "{a: " * 100_000, "- " * 100_000 + "a", "? " * 100_000 + "a"])
def test_nesting_without_end_is_refused(text: str) -> None:
    """It would overflow the C parser's stack and end the process."""
    with pytest.raises(InvalidConfig, match="nested more than 200 levels"):
        read(text)


@pytest.mark.parametrize("text", ["\0", "*nowhere", "%YAML 9.9\n---\na: 1", "!!python/name:os.system {}"])
def test_other_oddities_are_refused(text: str) -> None:
    """For any text, the only error is `InvalidConfig`."""
    with pytest.raises(InvalidConfig):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# only this\n", "the file is empty"),
        ("physicalCluster: [\n", "is not YAML: line 2, column "),
        ("a: b: c", "is not YAML: line 1, column "),
        ("just text", "must be a mapping of fields, not just text"),
        ("{}", "physicalCluster: is missing"),
        ("physicalCluster: {}\nvirtualClusters: {}", "physicalCluster.physicalCells: is missing"),
        ("physicalCluster: {physicalCells: []}", "virtualClusters: is missing"),
        ("? [a]\n: b", "a key must be text"),
    ],
)
def test_files_that_are_no_configuration(text: str, message: str) -> None:
    """An empty or truncated file is distinguished from one that configures an empty cluster."""
    with pytest.raises(InvalidConfig) as refused:
        read(text)
    assert message in str(refused.value)


@pytest.mark.parametrize("length", [len(RACKS) * part // 16 for part in range(16)])
def test_no_beginning_of_a_file_takes_every_quota_away(length: int) -> None:
    """A partly written file is refused at least until the virtual clusters have begun."""
    try:
        config = read(RACKS[:length])
    except ConfigError:
        return
    assert config.virtual_clusters


def test_only_the_first_document_counts() -> None:
    """HiveD does the same, but without a warning."""
    config = read(f"{RACKS}---\nother: 1\n")
    assert config == read(RACKS)
    assert "only the first YAML document" in str(config.warnings[0])


def test_every_problem_of_reading_is_reported_at_once() -> None:
    """Each problem comes with its path."""
    text = racks(
        ("childCellNumber: 2", 'childCellNumber: "2"'),
        ("{cellAddress: a0}", "{cellAddress: [a0]}"),
        ("{cellType: HOST, cellAddress: b0}", "b0"),
        (", cellNumber: 1", ""),
        ("    - {pinnedCellId: pin}", "      pinnedCellId: pin"),
    )
    with pytest.raises(InvalidConfig) as refused:
        read(text)
    assert [error.path for error in refused.value.errors] == [
        "physicalCluster.cellTypes.PAIR.childCellNumber",
        "physicalCluster.physicalCells[0].cellChildren[0].cellAddress",
        "physicalCluster.physicalCells[1]",
        "virtualClusters.one.virtualCells[0].cellNumber",
        "virtualClusters.two.pinnedCells",
    ]


def test_many_problems_make_a_short_message() -> None:
    """The message has the first problems and the number of the others; `errors` has them all."""
    hosts = "".join("  - {cellType: HOST}\n" for _ in range(100))
    with pytest.raises(InvalidConfig) as refused:
        resolved(racks(("  - {cellType: HOST, cellAddress: b0}\n", hosts)))
    assert len(refused.value.errors) == 100
    assert str(refused.value).splitlines()[-1] == "... and 80 more"


def test_lines_of_paths() -> None:
    """The line of a field, of the nearest enclosing key for an absent one, and of names that contain dots."""
    text = RACKS.replace("  two:", "  two.of.three:")
    where = {
        "physicalCluster": 1,
        "physicalCluster.cellTypes.RACK.childCellNumber": 5,
        "physicalCluster.physicalCells[0].cellChildren[1].pinnedCellId": 10,
        "physicalCluster.physicalCells[0].cellChildren[7].cellAddress": 8,
        "physicalCluster.physicalCells[1].cellChildren": 11,
        "virtualClusters.two.of.three.pinnedCells[0]": 19,
        "nonsense": 1,
    }
    assert lines_of(text, list(where)) == list(where.values())
    assert lines_of("a: [", ["a"]) == [None]


def test_a_large_file_is_read_and_resolved_in_seconds() -> None:
    """2,048 nodes with all of their cells listed, a megabyte, in well under a second on a quiet machine."""
    pair = "{{cellChildren: [{{cellAddress: {}}}, {{cellAddress: {}}}]}}"
    host = f"{{{{cellType: HOST, cellAddress: n{{}}, cellChildren: [{pair}, {pair}]}}}}"
    listed = "".join(f"  - {host.format(number, 0, 1, 2, 3)}\n" for number in range(2048))
    text = racks(("  - {cellType: HOST, cellAddress: b0}\n", listed))
    began = time.process_time()
    assert len(resolved(text).chains["HOST"].leaf_indices) == 8192
    assert time.process_time() - began < 5
