"""The alerts are rules that Prometheus loads, are those on the pages, and each leads to a section of the runbook."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from rcfarm.farm.incidents import RUNBOOK
from store.schema.records import IncidentKind

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
DOCUMENTED = ("operating.md", "operating-on-kubernetes.md", "hived-running.md", "tasks-operating.md")
ROW = re.compile(r"^\| \[([^]]+)\]\((runbook\.md#[\w-]+)\) \| `(.+)`(?: for (\d+) min)? \| .+ \|$", re.MULTILINE)


def rules() -> list[dict[str, Any]]:
    """Return the rules of all groups."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def sections() -> dict[str, str]:
    """Return the sections of the runbook by their anchors, which are made of the headings as mkdocs does."""
    slugify = pytest.importorskip("markdown.extensions.toc", reason="install the extra `docs`").slugify
    parts = re.split(r"^### (.+)\n", (PAGES / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    return {
        slugify(title, "-"): text.partition("\n## ")[0] for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_rule_is_complete() -> None:
    """Names are unique; a rule has a severity, the three annotations and nothing that Prometheus does not know."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert all(set(group) == {"name", "rules"} and group["rules"] for group in groups)
    for names in ([group["name"] for group in groups], [rule["alert"] for rule in rules()]):
        assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"Rcfarm[A-Z]\w+", rule["alert"])
        assert re.fullmatch(r"[1-9]\d*m", rule.get("for", "1m")), rule["alert"]
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert all(text.strip() for text in rule["annotations"].values())
        shown = re.findall(r"\{\{ (.+?) \}\}", rule["annotations"]["description"])
        for label in re.findall(r"\$labels\.(\w+)", " ".join(shown)):
            grouped = re.search(r"\bby \(([\w, ]+)\)", rule["expr"])
            assert grouped is None or label in grouped[1].split(", "), f"{rule['alert']} loses the label {label}"


def test_every_expression_is_of_metrics_that_exist(hooks: ModuleType) -> None:
    """The series in an expression are those that a daemon serves, with the suffixes of a histogram."""
    page = hooks.metrics_page()
    kinds = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE))
    series = {
        name + suffix
        for name, kind in kinds.items()
        for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
    }
    for rule in rules():
        code = re.sub(r'\{[^}]*\}|"[^"]*"|\b(?:by|on|group_left) \([^)]*\)', " ", rule["expr"])
        named = set(re.findall(r"\b[a-z]+_\w+\b(?! *\()", code)) - {"group_left"}
        assert named, rule["alert"]
        assert named <= series, rule["alert"]
        for function, name in re.findall(r"\b(rate|increase|deriv|delta)\((\w+)", rule["expr"]):
            counts = name.endswith(("_total", "_bucket", "_count"))
            assert counts == (function in ("rate", "increase")), f"{rule['alert']}: {function} of {name}"
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert re.search(r"[<>] [\d.]+$|^absent\(", rule["expr"]), f"{rule['alert']} compares with nothing"


def test_the_pages_show_the_rules() -> None:
    """Each row of the tables of alerts is a rule, with its expression and duration, and each rule is in a table."""
    by_summary = {rule["annotations"]["summary"]: rule for rule in rules()}
    shown = set()
    for page in DOCUMENTED:
        text = (PAGES / page).read_text()
        rows = ROW.findall(text)
        tables = re.findall(r"^\| [Aa]lert \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
        assert len(rows) == sum(table.count("\n") for table in tables) > 0, f"{page}: a row without link, or no rule"
        for summary, link, expression, minutes in rows:
            rule = by_summary[summary]
            assert expression.replace("\\|", "|") == rule["expr"], summary
            assert (f"{minutes}m" if minutes else None) == rule.get("for"), summary
            assert rule["annotations"]["runbook_url"] == f"docs/pages/{link}"
            shown.add(summary)
    paged, _, _ = (PAGES / "operating.md").read_text().partition("Alerts for working hours")
    for summary, *_ in ROW.findall((PAGES / "operating.md").read_text()):
        assert (by_summary[summary]["labels"]["severity"] == "critical") == (f"| [{summary}](" in paged), summary
    assert shown == by_summary.keys()


def test_every_alert_has_a_section_with_commands() -> None:
    """The runbook has one section for each alert, and none for an alert that is gone."""
    found = sections()
    assert {rule["annotations"]["runbook_url"] for rule in rules()} == {
        f"docs/pages/runbook.md#{each}" for each in found
    }
    for anchor, text in found.items():
        assert re.search(r"^```console\n(\$ .+\n)+```$", text, re.MULTILINE), anchor


def test_every_incident_is_an_alert_too() -> None:
    """What the farms notify about has a rule of Prometheus, and both lead to the same section of the runbook."""
    assert RUNBOOK.keys() == set(get_args(IncidentKind))
    alerts = {rule["annotations"]["runbook_url"].partition("#")[2] for rule in rules()}
    assert set(RUNBOOK.values()) <= alerts


def test_the_commands_of_the_runbook_exist(hooks: ModuleType) -> None:
    """Each `rcfarm` command in the runbook, in blocks and in sentences, is one of ours with all of its options."""
    text = (PAGES / "runbook.md").read_text()
    reference = hooks.cli_page()
    typed = re.findall(r"^\$ (rcfarm .+)$", text, re.MULTILINE) + re.findall(r"`(rcfarm\s[^`]+)`", text)
    assert len(typed) > 60
    for line in typed:
        words = shlex.split(line.partition(" >")[0])
        named = [" ".join(words[:count]) for count in (3, 2) if f"{{ #{'-'.join(words[:count])} }}" in reference]
        assert named, line
        own = reference.partition(f"{{ #{named[0].replace(' ', '-')} }}")[2].partition("{ #")[0]
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", own), line
    for path in re.findall(r"`(deploy/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for unit in re.findall(r"(?:-u|systemctl status) ([\w-]+)", text):
        assert (ROOT / "deploy" / "systemd" / f"{unit}.service").is_file(), unit


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("arguments", [("check", RULES), ("test", Path(__file__).with_name("alerts.yaml"))])
def test_prometheus_evaluates_the_rules(arguments: tuple[str, Path]) -> None:
    """By Prometheus' own tool."""
    verb, file = arguments
    run = subprocess.run(["promtool", verb, "rules", file], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
