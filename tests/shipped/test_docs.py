"""The documentation matches the code."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from controllers.framework.config import FrameworkConfig
from rcfarm.config.settings import FarmSettings, JobsSettings, SessionSettings, Settings
from rcfarm.reports.hived_config import HivedClusterInfo, HivedFileInfo
from scheduler.hived.config.file import (
    CELL_TYPE_FIELDS,
    PHYSICAL_CELL_FIELDS,
    ROOT_FIELDS,
    VIRTUAL_CELL_FIELDS,
    VIRTUAL_CLUSTER_FIELDS,
)
from scheduler.hived.inspection.explain import PodExplanation, Simulation
from store.schema.keys import Keys
from store.schema.records import AuditEvent, Health, Intent, NodeSpec, Owner, RCSpec, RCStatus, Reality

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pytest.importorskip("mkdocs", reason="mkdocs is not installed; install the extra `docs`")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, loaded as mkdocs does."""
    spec = importlib.util.spec_from_file_location("rcfarm_docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Every link and anchor is valid, and nothing is fetched from another host."""
    config = str(DOCS / "mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", config]
    result = subprocess.run([*command, "--site-dir", tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text())
        assert not fetched, page.name


def test_every_path_on_the_pages_exists() -> None:
    """Files and folders of the repository, by their path; a bare file name is that of some file."""
    tops = ("benchmarks", "controllers", "deploy", "docs", "examples", "rcfarm", "scheduler", "store", "tests")
    names = {path.name for top in tops for path in (ROOT / top).rglob("*.*")}
    for page in [*(DOCS / "pages").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        paths = re.findall(rf"`((?:{'|'.join(tops)})/[\w./-]*(?:\.\w+|/))`", text)
        assert [path for path in paths if not (ROOT / path).exists()] == [], page.name
        assert set(re.findall(r"`(\w+\.py)`", text)) <= names, page.name


def test_every_setting_is_documented(hooks: ModuleType) -> None:
    """Each field has a text that names its default, and each appears on the page with its variable."""
    page = hooks.settings_page()
    for section in Settings.__struct_fields__:
        settings = type(getattr(Settings(), section))
        texts = dict(hooks.field_texts(settings))
        assert sorted(texts) == sorted(settings.__struct_fields__)
        for field, text in texts.items():
            assert re.search(r"Defaults? |Default:", text), f"{section}.{field} does not say its default"
            assert f"RCFARM_{section}_{field}".upper() in page


@pytest.mark.parametrize(
    "settings", [FarmSettings, SessionSettings, JobsSettings], ids=lambda settings: settings.__name__
)
def test_the_defaults_in_the_texts_are_the_real_ones(settings: type, hooks: ModuleType) -> None:
    """A number after "Default" is the field's default."""
    checked = 0
    for field, text in hooks.field_texts(settings):
        said = re.search(r"Default:? (\d+(?:\.\d+)?)\b", " ".join(text.split()))
        if said:
            assert float(said[1]) == getattr(settings(), field), field
            checked += 1
    assert checked >= 3


def test_every_field_of_the_framework_config_is_documented(hooks: ModuleType) -> None:
    """Each field is listed under its name in frameworkcontroller.yaml, with its default."""
    page = hooks.framework_config_page()
    for field in FrameworkConfig.__struct_encode_fields__:
        assert f"## {field} " in page
    assert "30 days" in page


def test_every_field_of_hiveds_file_is_documented(hooks: ModuleType) -> None:
    """Each field is listed under its name in the file, and its text says that it is required, or its default."""
    page = hooks.hived_config_page()
    fields = re.findall(r"^### (\S+) \{ #(\S+) \}\n\n`[a-z ]+`\n\n((?:.+\n)+)", page, re.MULTILINE)
    for name, _, text in fields:
        assert re.search(r"Required|Default", text), name
    assert {anchor for _, anchor, _ in fields} == {
        *(f"file.{name}" for name in ROOT_FIELDS - {"physicalCluster"}),
        "file.physicalCluster.cellTypes",
        "file.physicalCluster.physicalCells",
        *(f"cellTypes.{name}" for name in CELL_TYPE_FIELDS),
        *(f"physicalCells.{name}" for name in PHYSICAL_CELL_FIELDS),
        *(f"virtualClusters.{name}" for name in VIRTUAL_CLUSTER_FIELDS),
        *(f"virtualCells.{name}" for name in VIRTUAL_CELL_FIELDS),
    }


def test_the_commands_of_the_training_job_exist(hooks: ModuleType) -> None:
    """The tutorial uses only existing commands and options."""
    text = (DOCS / "pages" / "training-job.md").read_text()
    typed = set(re.findall(r"^\$ rcfarm (\w+ \w+)", text, re.MULTILINE))
    assert {"framework explain", "framework rescale", "framework stop"} <= typed
    for command in typed:
        assert f"rcfarm {command} " in hooks.cli_page()


def test_every_command_is_documented(hooks: ModuleType) -> None:
    """Commands of groups and lazily loaded commands are all listed, with their own options."""
    page = hooks.cli_page()
    for command in (
        "dev",
        "farm",
        "agent",
        "jobs",
        "extender",
        "status",
        "doctor",
        "rc apply",
        "rc scale",
        "node cordon",
        "brake release",
        "framework explain",
        "hived validate",
        "hived show",
        "hived explain",
        "hived simulate",
        "hived snapshot",
        "barrier",
    ):
        assert re.search(rf"^##+ rcfarm {command} ", page, re.MULTILINE), command
    assert "`--selector SELECTOR`" in page
    assert "--install-completion" not in page


def test_what_commands_print_as_json_is_documented(hooks: ModuleType) -> None:
    """Each `rcfarm hived` command with JSON output is listed, with the fields of its output."""
    page = hooks.json_page()
    for command, printed in (
        ("hived validate", HivedFileInfo),
        ("hived show", HivedClusterInfo),
        ("hived explain", PodExplanation),
        ("hived simulate", Simulation),
    ):
        assert f"| `{command}` | [{printed.__name__}](#{printed.__name__}) |" in page
        _, _, section = page.partition(f"## {printed.__name__} ")
        fields = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
        assert tuple(fields) == printed.__struct_encode_fields__


def test_every_metric_is_documented(hooks: ModuleType) -> None:
    """The metrics of farms, agents, work queues, the store, Kubernetes and HiveD are listed under their real names."""
    page = hooks.metrics_page()
    for name in (
        "rcfarm_rcs", "rcfarm_claims_total", "rcfarm_agent_pods", "workqueue_depth", "rcfarm_build_info",
        "rcfarm_frameworks", "leader_election_master_status", "rest_client_requests_total", "rcfarm_kube_events_total",
        "rcfarm_hived_pods", "rcfarm_hived_doomed_cells", "rcfarm_hived_decision_duration_seconds",
    ):  # fmt: skip
        assert f"| `{name}` |" in page


@pytest.mark.parametrize("name", ["operating.md", "operating-on-kubernetes.md", "hived-running.md"])
def test_the_documented_alerts_use_real_metrics(hooks: ModuleType, name: str) -> None:
    """Every metric named on the operating pages exists."""
    known = set(re.findall(r"^\| `(\w+)` \|", hooks.metrics_page(), re.MULTILINE))
    named = set(re.findall(r"\b(?:rcfarm|workqueue|rest_client|leader)_[a-z_]+", (DOCS / "pages" / name).read_text()))
    assert named
    assert {metric.removesuffix("_bucket") for metric in named} <= known


def test_the_board_shows_metrics_that_exist(hooks: ModuleType) -> None:
    """Every metric in the Grafana board is on the page of metrics, or one of every Python program."""
    page = hooks.metrics_page()
    series = {name for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE) if kind != "histogram"}
    for name in re.findall(r"^\| `(\w+)` \| histogram \|", page, re.MULTILINE):
        series |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    board = json.loads((ROOT / "deploy" / "grafana" / "rcfarm.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = set(re.findall(r"\b(\w+)\{", " ".join(expressions)))
    assert len(used) > 25
    assert {name for name in used if not name.startswith("process_")} <= series


def test_the_key_layout_page_is_the_layout() -> None:
    """Every key that `store.schema.keys` builds is described, and the records shown have exactly the fields of ours."""
    text = (DOCS / "pages" / "key-layout.md").read_text()
    keys = Keys("", 32)
    built = {
        keys.meta: "meta", keys.farm("f"): "farms/<farm>", keys.brake: "brake",
        keys.manifest("x"): "manifests/<sha256>",
        keys.spec("r"): "rcs/<shard>/<rc>/spec", keys.owner("r"): "rcs/<shard>/<rc>/owner",
        keys.mutation("r"): "rcs/<shard>/<rc>/mutation", keys.status("r"): "rcs/<shard>/<rc>/status",
        keys.pod("r", "n"): "rcs/<shard>/<rc>/pods/<node>", keys.health("r", "n"): "health/<group>/<node>/<rc>",
        keys.node_spec("n"): "nodes/<node>/spec", keys.node_alive("n"): "nodes/<node>/alive",
        keys.intent("n", "p"): "intent/<node>/<pod_id>", keys.reality("n", "p"): "reality/<node>/<pod_id>",
        keys.audit_event("d", "u"): "audit/<yyyy-mm-dd>/<ulid>",
    }  # fmt: skip
    for key, documented in built.items():
        assert f"| `{documented}` |" in text
        assert key.count("/") - 1 == documented.count("/")
    assert f"`{keys.pools.strip('/')}/…`" in text


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("spec", RCSpec), ("owner", Owner), ("status", RCStatus), ("intent", Intent), ("reality", Reality),
        ("health", Health), ("node spec", NodeSpec), ("audit", AuditEvent),
    ],
)  # fmt: skip
def test_the_records_shown_have_our_fields(name: str, record: type[msgspec.Struct]) -> None:
    """The example of each record has exactly its fields, in their order."""
    text = (DOCS / "pages" / "key-layout.md").read_text()
    section = text.split(f"**{name}**", 1)[1]
    shown = " ".join(section[section.index("{") :].split())
    example = shown[: _end(shown)].replace("…,", "0,").replace("{…}", "{}")
    assert tuple(json.loads(example)) == record.__struct_fields__


def _end(text: str) -> int:
    depth = 0
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return position + 1
    raise AssertionError("the example does not end")
