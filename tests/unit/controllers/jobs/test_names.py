"""The job library has no name that nothing uses."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[4]
LIBRARY = ROOT / "controllers" / "jobs"
USERS = ("controllers", "rcfarm", "scheduler", "store", "examples", "benchmarks", "docs")


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, fields and attributes, as often as they are defined."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name
            case ast.Assign(targets=targets):
                found = [inner for target in targets for inner in ast.walk(target)]
                yield from (inner.id for inner in found if isinstance(inner, ast.Name))
                yield from (inner.attr for inner in found if isinstance(inner, ast.Attribute))
            case _:
                pass


def test_every_name_is_used_by_code_or_documented_for_users() -> None:
    """A test alone does not keep a name, nor does an export."""
    files = [path for top in USERS for pattern in ("*.py", "*.md") for path in (ROOT / top).rglob(pattern)]
    words = Counter(
        word for path in files if path.name != "__init__.py" for word in re.findall(r"\w+", path.read_text())
    )
    definitions = Counter(name for path in LIBRARY.glob("*.py") for name in defined(ast.parse(path.read_text())))
    unused = [name for name, times in definitions.items() if words[name] <= times and not name.startswith("__")]
    assert unused == []
