"""Every reason that an RC can be given is in the closed list, which a page shows; and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from rcfarm.farm.planner import HEALTH_CODES
from rcfarm.operations.rc_snapshot import ROLLOUT_CODES
from store.schema.reasons import REASONS

ROOT = Path(__file__).parents[2]
GIVERS = ("Reason", "because", "CannotReconcile")
ELSEWHERE = frozenset({"stable_unhealthy"})  # of a rollout's record; the RC's reason is rollout_failed


def given(source: Path) -> Iterator[str]:
    """Yield the codes that a module gives as text."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            first = node.args[0]
            if name in GIVERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def test_the_list_is_closed() -> None:
    sources = [*(ROOT / "rcfarm" / "farm").glob("*.py"), ROOT / "rcfarm" / "cli" / "rc" / "show.py"]
    sources += [ROOT / "rcfarm" / "cli" / "kit" / "json_views.py"]
    found = {code for source in sources for code in given(source)} | HEALTH_CODES | ROLLOUT_CODES
    assert found - ELSEWHERE == REASONS.keys()


def test_the_page_has_each(hooks: ModuleType) -> None:
    page = hooks.reasons_page()
    assert [code for code in REASONS if f"| `{code}` |" not in page] == []
