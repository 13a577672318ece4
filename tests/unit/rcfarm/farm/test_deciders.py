"""What decides depends on its input alone: no clock, no environment, no chance, and no file. Only so can a logged
decision be decided once more."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import require

DECIDERS = (
    "rcfarm.farm.planner",
    "rcfarm.farm.rollout",
    "rcfarm.farm.preview",
    "rcfarm.operations.rc_snapshot",
    "scheduler.label",
    "scheduler.hived.cells",
    "scheduler.hived.planning",
)
MODULES = {"time", "os", "random", "secrets", "uuid", "asyncio", "socket", "subprocess", "pathlib", "io", "tempfile"}
NAMES = {"utc_now", "new_ulid", "open", "input", "id", "hash"}  # `hash` and `id` differ between two processes
CLOCKS = {"now", "utcnow", "today"}  # of datetime and date


def impurities(source: str) -> Iterator[str]:
    """Yield what a module imports or calls that is not in its input."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").partition(".")[0] in MODULES:
                yield str(node.module)
            yield from (alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in NAMES:
                yield f"{called.id}()"
            of = called.value if isinstance(called, ast.Attribute) else None
            if isinstance(called, ast.Attribute) and called.attr in CLOCKS and isinstance(of, ast.Name | ast.Attribute):
                named = of.id if isinstance(of, ast.Name) else of.attr
                if named in ("datetime", "date"):
                    yield f"{named}.{called.attr}()"


def sources(name: str) -> Iterator[Path]:
    """Yield the files of a module, or of a package."""
    spec = require(importlib.util.find_spec(name))
    yield Path(require(spec.origin))
    for found in pkgutil.walk_packages(spec.submodule_search_locations or [], f"{name}."):
        if spec.submodule_search_locations:
            yield from sources(found.name)


@pytest.mark.parametrize("name", DECIDERS)
def test_a_decider_has_no_clock_no_environment_and_no_chance(name: str) -> None:
    for path in sources(name):
        assert not list(impurities(path.read_text())), path


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from random import Random",
        "import secrets",
        "import uuid",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.utcnow()",
        "from datetime import date\ndate.today()",
        "from store.schema.records import utc_now",
        "open('x')",
        "hash('x')",
    ],
)
def test_each_impurity_is_found(source: str) -> None:
    assert list(impurities(source))
