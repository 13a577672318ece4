"""The JSON schema of the files that operators write for RCs, and the text of each of their fields.

Both are made of the structs that decode a file, and of the texts under their fields, so an editor, the reference and
the program agree.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from rcfarm.operations.rc_apply import ALL, STRUCTS
from store.schema.records import ALL_NODES

KINDS = ("rc", "manifest")

_REPLICAS = {"anyOf": [{"type": "integer", "minimum": 0, "exclusiveMaximum": ALL_NODES}, {"const": ALL}]}
_SHAPES: dict[tuple[str, str], dict[str, Any]] = {  # of fields that are decoded in a second step
    ("RCFields", "manifest"): {"$ref": "#/$defs/Manifest"},
    ("RCFields", "replicas"): _REPLICAS,
    ("RCFields", "allocation_strategy"): {"enum": ["static", "dynamic"]},
    ("UpdateFields", "analysis"): {"type": "array", "items": {"$ref": "#/$defs/AnalysisFields"}},
}


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a document of an RC's file, or of a manifest in a file of its own; draft 2020-12. `kind`: of
    `KINDS`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rcfarm: an RC" if kind == "rc" else "rcfarm: a manifest",
        "$ref": f"#/$defs/{'RCFields' if kind == 'rc' else 'Manifest'}",
        "$defs": definitions(),
    }


def definitions() -> dict[str, Any]:
    """Return the schema of each struct, by its name, with the texts of its fields."""
    _, found = msgspec.json.schema_components(STRUCTS.values(), ref_template="#/$defs/{name}")
    for struct in STRUCTS.values():
        properties = found[struct.__name__]["properties"]
        for field, text in field_texts(struct):
            shape = _SHAPES.get((struct.__name__, field))
            if shape is None:  # without null, which nobody writes, and without defaults, which its text has
                shape = {key: value for key, value in properties[field].items() if key != "default"}
                kinds = [each for each in shape.get("anyOf", ()) if each != {"type": "null"}]
                if kinds:
                    shape = kinds[0] if len(kinds) == 1 else {**shape, "anyOf": kinds}
            properties[field] = {**shape, "description": " ".join(text.split())}
    return found


def field_texts(struct: type) -> Iterator[tuple[str, str]]:
    """Yield each field of a struct with the text under it, first its own fields, then inherited ones. Raises ValueError
    for a field without a text."""
    names: list[str] = []
    found: dict[str, str] = {}
    for each in struct.__mro__:
        if each in (msgspec.Struct, object):
            break
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for statement, following in itertools.pairwise(body.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names.append(statement.target.id)
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    found.setdefault(statement.target.id, inspect.cleandoc(str(following.value.value)))
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{struct.__name__}.{missing[0]} has no text under it")
    yield from found.items()
