"""The documentation matches the code."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
import tomllib
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
from store.schema.quota import QuotaGrant, QuotaLimit
from store.schema.records import (
    AuditEvent,
    Health,
    Incident,
    Intent,
    NodeSpec,
    Owner,
    RCSpec,
    RCStatus,
    Reality,
    Revision,
    Rollout,
    RolloutRequest,
)
from store.schema.schedules import ScheduleSpec, ScheduleState
from store.schema.tasks import CatalogEntry, TaskEvent, TaskSpec, TaskState

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
pytest.importorskip("mkdocs", reason="mkdocs is not installed; install the extra `docs`")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. A warning of the build is an error: every link and anchor is valid."""
    folder = tmp_path_factory.mktemp("site")
    config = str(DOCS / "mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", config]
    result = subprocess.run([*command, "--site-dir", folder], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    """Nothing on a page is fetched from another host."""
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text())
        assert not fetched, page.name


def test_the_site_is_read_from_disk(site: Path) -> None:
    """Each page has the button for colours, and loads the stand-in for workers before the program that starts one; the
    search's index is a script. All pages of the navigation but the first and the last have neighbours."""
    index = (site / "search" / "search_index.js").read_text()
    assert json.loads(index.removeprefix("var __index = "))["docs"]
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    for page in pages:
        text = page.read_text()
        worker, program = re.findall(r'<script src="([^"]+)"', text)
        assert worker.endswith("assets/iframe-worker.js")
        assert "/bundle." in program
        assert all((page.parent / path).is_file() for path in (worker, program)), page.name
        assert text.count('name="__palette"') == 3
    for side in ("prev", "next"):
        (end,) = [page for page in pages if f"md-footer__link--{side}" not in page.read_text()]
        assert (end == site / "index.html") == (side == "prev")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(("word", "found"), [("brake", "operating.html#the-brake"), ("xyzzy", "")])
def test_the_search_works_from_disk(site: Path, word: str, found: str) -> None:
    """The search's own program runs in the stand-in for workers, without a server."""
    script = Path(__file__).with_name("search_from_disk.js")
    run = subprocess.run(["node", script, site, word], capture_output=True, text=True, check=True, timeout=60)
    assert found in run.stdout.split("\n")
    assert bool(run.stdout) == bool(found)


def test_the_links_of_the_first_pages_are_valid(site: Path) -> None:
    """Files and anchors that README.md, CONTRIBUTING.md and SECURITY.md link to."""
    for name in FIRST_PAGES:
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", (ROOT / name).read_text()):
            assert (ROOT / path).exists(), f"{name}: {path}"
            if anchor:
                page = site / Path(path).relative_to("docs/pages").with_suffix(".html")
                assert f'id="{anchor}"' in page.read_text(), f"{name}: {path}#{anchor}"


def test_the_readme_is_one_screen() -> None:
    """What it is, for whom and for whom not, a recording, a diagram, and the commands come before anything else."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    beginning, _, _ = text.partition("\n## Read on\n")
    assert len(beginning.splitlines()) <= 60
    assert re.findall(r"/(\w+)\.svg\)", beginning) == ["badges", "session", "services"]
    for part in ("**For** ", "**Not for** ", "$ make dev ", "$ make test ", "$ pip install ", "$ docker build "):
        assert part in beginning


IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def test_every_picture_is_described_and_complete() -> None:
    """Each has a text in its place, and is a file beside the pages that no page is without. It scales, fetches nothing,
    is small, and has colours for light and dark, unless it brings its own background."""
    shown = set()
    for page in (ROOT / "README.md", *(DOCS / "pages").rglob("*.md")):
        for alternative, path in IMAGE.findall(page.read_text()):
            assert len(alternative) > 40, f"{page.name}: {path} has no text in its place"
            shown.add((page.parent / path).resolve())
    assert shown == set((DOCS / "pages" / "assets").glob("*.svg"))
    for picture in shown:
        text = picture.read_text()
        assert len(text) < 200_000
        assert re.match(
            r'<svg xmlns="http://www\.w3\.org/2000/svg" viewBox="0 0 [\d. ]+" role="img" aria-label="', text
        )
        assert "<title>" in text
        assert re.findall(r"(?:https?:)?//[\w.]+", text) == ["http://www.w3.org"] or picture.name == "session.svg"
        assert not re.search(r"<(?:script|image|use|foreignObject)|@import|@font-face|url\((?!#)|href", text), (
            picture.name
        )
        assert "prefers-color-scheme" in text or picture.name == "session.svg"


def test_drawings_are_pictures() -> None:
    """No page draws with characters."""
    for page in (ROOT / "README.md", *(DOCS / "pages").rglob("*.md")):
        assert not re.search("[─│┌┐└┘├┤┬┴┼▶◀▲▼]", page.read_text()), page.name


def test_the_recording_shows_commands_that_exist(hooks: ModuleType) -> None:
    """It was made by docs/record.py; a command that is renamed needs a new recording."""
    text = html.unescape(re.sub("<[^>]+>", "", (DOCS / "pages" / "assets" / "session.svg").read_text())).replace(
        "\xa0", " "
    )
    typed = set(re.findall(r"^\$ rcfarm ((?:dev|rc \w+))", text, re.MULTILINE))
    assert typed == {"dev", "rc status"}
    assert "--down`" in text
    for command in typed:
        assert f"rcfarm {command} " in hooks.cli_page()


def test_the_badges_are_true() -> None:
    """They are drawn here, by no other host, and say what pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = (DOCS / "pages" / "assets" / "badges.svg").read_text()
    said = re.findall(r"<text[^>]*>([^<]+)</text>", badges)
    assert said == [
        "license",
        project["license"],
        "python",
        project["requires-python"].replace(">=", "≥ "),
        "runs on",
        "Linux",
    ]
    assert any("Linux" in classifier for classifier in project["classifiers"])


def test_the_license_is_the_one_that_is_declared() -> None:
    """LICENSE has the text of the Apache Software Foundation, to the byte."""
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


def test_every_path_on_the_pages_exists() -> None:
    """Files and folders of the repository, by their path; a bare file name is that of some file."""
    tops = ("benchmarks", "controllers", "deploy", "docs", "examples", "rcfarm", "scheduler", "store", "tests")
    names = {path.name for top in tops for path in (ROOT / top).rglob("*.*")}
    for page in [
        *(DOCS / "pages").rglob("*.md"),
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    ]:
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
    text = (DOCS / "pages" / "first-framework.md").read_text()
    typed = set(re.findall(r"^\$ rcfarm (\w+ \w+)", text, re.MULTILINE))
    assert {"framework explain", "framework scale", "framework stop"} <= typed
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


@pytest.mark.parametrize(
    "name", ["operating.md", "operating-on-kubernetes.md", "hived-running.md", "tasks-operating.md"]
)
def test_the_documented_alerts_use_real_metrics(hooks: ModuleType, name: str) -> None:
    """Every metric named on the operating pages exists."""
    known = set(re.findall(r"^\| `(\w+)` \|", hooks.metrics_page(), re.MULTILINE))
    named = set(re.findall(r"\b(?:rcfarm|workqueue|rest_client|leader)_[a-z_]+\b", (DOCS / "pages" / name).read_text()))
    assert named
    assert {re.sub("_(bucket|count)$", "", metric) for metric in named} <= known


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
        keys.task_pod("n", "p"): "task-pods/<node>/<pod_id>",
        keys.engine("e"): "engines/<engine>", keys.task_spec("t"): "tasks/<shard>/<task>/spec",
        keys.task_owner("t"): "tasks/<shard>/<task>/owner", keys.task_state("t"): "tasks/<shard>/<task>/state",
        keys.task_event("t", 0): "task-events/<shard>/<task>/<n>",
        keys.schedule_spec("s"): "schedules/<name>/spec", keys.schedule_state("s"): "schedules/<name>/state",
        keys.cached("d"): "catalog/<digest>", keys.retention: "retention",
        keys.audit_event("d", "u"): "audit/<yyyy-mm-dd>/<ulid>",
        keys.incident("s", "t"): "incidents/<kind>/<about>",
        keys.quota_limit("s"): "quota/<resource>/limit", keys.quota_head("s"): "quota/<resource>/head",
        keys.quota_grant("s", "t"): "quota/<resource>/grants/<token>",
        keys.quota_ticket("s", "t"): "quota/<resource>/tickets/<token>",
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
        ("incident", Incident), ("rollout", Rollout), ("rollout request", RolloutRequest), ("revision", Revision),
        ("quota limit", QuotaLimit), ("quota grant", QuotaGrant),
        ("task spec", TaskSpec), ("task state", TaskState), ("task event", TaskEvent), ("catalog entry", CatalogEntry),
        ("schedule spec", ScheduleSpec), ("schedule state", ScheduleState),
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
