"""Every reason that any part can give is in the closed list, which a page shows; and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from rcfarm.farm.planner import HEALTH_CODES
from rcfarm.operations.rc_snapshot import ROLLOUT_CODES
from rcfarm.reports.framework_explain import CODES as OF_STATUSES
from rcfarm.roles.extender import WAITING_CODES
from scheduler.hived.inspection.explain import CODES as OF_VERDICTS
from store.schema.reasons import REASONS, SCOPES, Scope
from store.schema.tasks import END_CODES, WaitCode

ROOT = Path(__file__).parents[2]
CODES = re.compile(r'\bcode=~?"([^"]+)"')
HTTP = frozenset({"429"})  # client-go's label of the same name
GIVERS = ("Reason", "because", "CannotReconcile", "Wait", "_stay")
ELSEWHERE = frozenset({"stable_unhealthy"})  # of a rollout's record; the RC's reason is rollout_failed
ROLLOUTS = ["rcfarm/farm/rollout.py", "rcfarm/farm/handover.py", "rcfarm/farm/handover_driver.py"]
SOURCES: dict[Scope, list[str]] = {
    "rc": ["rcfarm/farm/*.py", "rcfarm/cli/rc/show.py", "rcfarm/cli/kit/json_views.py"],
    "rollout": ROLLOUTS,
    "node": ["rcfarm/operations/reasons.py", "rcfarm/cli/explain.py"],
    "task": ["controllers/tasks/**/*.py", "scheduler/quota/*.py", "rcfarm/operations/tasks.py"],
    "framework": ["rcfarm/reports/*.py"],
    "gpu": ["scheduler/hived/inspection/explain.py", "rcfarm/cli/hived/state.py"],
}
TYPED: dict[Scope, set[str]] = {  # what is given by way of tables
    "rc": set(HEALTH_CODES),
    "rollout": set(ROLLOUT_CODES),
    "node": set(),
    "task": {*get_args(WaitCode), *filter(None, END_CODES.values()), "unreadable"},
    "framework": set(OF_STATUSES),
    "gpu": {*OF_VERDICTS.values(), *WAITING_CODES.values()},
}


def given(source: Path) -> Iterator[str]:
    """Yield the codes that a module gives as text: the first argument of what makes a reason, in either branch of a
    choice, and what is assigned to a field `code`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            values = node.args[:1] if name in GIVERS else [each.value for each in node.keywords if each.arg == "code"]
            for value in values:
                yield from texts(value)
        elif isinstance(node, ast.Assign):
            fields = [getattr(target, "attr", "") for each in node.targets for target in getattr(each, "elts", [each])]
            if "code" in fields:
                yield from texts(node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value)


def texts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from texts(value.body)
        yield from texts(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
        yield value.value


def found_in(scope: Scope) -> set[str]:
    """Return the codes that a scope's modules give, with those of its tables."""
    paths = {path for pattern in SOURCES[scope] for path in ROOT.glob(pattern)}
    found = {code for path in paths for code in given(path)} | TYPED[scope]
    if scope in ("rc", "rollout"):  # one owner gives the reasons of both
        return found - SCOPES["rollout" if scope == "rc" else "rc"].keys()
    return found


@pytest.mark.parametrize("scope", ["rc", "rollout", "task", "framework", "gpu"])
def test_the_list_of_a_scope_is_closed(scope: Scope) -> None:
    assert found_in(scope) - ELSEWHERE == SCOPES[scope].keys()


def test_the_list_of_nodes_is_closed() -> None:
    """`explain` also gives reasons of pods, with the codes of their RCs."""
    assert found_in("node") - SCOPES["rc"].keys() | {"node_dead", "disk_full", "unreadable"} == SCOPES["node"].keys()


def test_a_code_means_the_same_in_each_scope_and_one_that_blocks_says_what_to_do() -> None:
    for codes in SCOPES.values():
        for code, kind in codes.items():
            assert REASONS[code] == kind, code
            assert kind.act or not kind.blocks, code


def test_the_page_has_each_under_its_scope(hooks: ModuleType) -> None:
    sections = hooks.reasons_page().split("\n## ")[1:]
    for section, (scope, codes) in zip(sections, SCOPES.items(), strict=True):
        assert [code for code in codes if f"| `{code}` |" not in section] == [], scope


def test_alerts_and_the_board_name_codes_of_the_list() -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules.yaml").read_text()
    board = (ROOT / "deploy" / "grafana" / "rcfarm.json").read_text().replace("\\", "")
    named = {code for text in (rules, board) for codes in CODES.findall(text) for code in codes.split("|")}
    assert named - REASONS.keys() - HTTP == set()
    assert {"crashing", "task_failed", "rollout_stuck", "disk_full"} <= named
