"""Fields of a YAML node graph, read as HiveD does: by the expected type, not by the look of the text.

Each problem is collected with the path of the field, and reading continues with the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import yaml

from scheduler.hived.config.types import ConfigWarning
from scheduler.hived.errors import ConfigError

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
                merged = self._merged(value, path) | merged
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

    def _merged(self, node: yaml.Node, path: str) -> dict[str, yaml.Node]:
        """Return the fields that `<<` merges in; of several mappings the first one counts."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        fields: dict[str, yaml.Node] = {}
        for source in reversed(sources):
            fields |= self.mapping(source, join(path, "<<"))
        return fields

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
        value = _integer(node) if node.tag == _INT else None
        if value is None:
            self._problem(join(path, name), f"must be a whole number without quotes, not {_shown(node)}")
            return default
        return value

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
    while rest and (step := _step(node, rest)) is not None:
        line, node, rest = step
    return line


def _step(node: yaml.Node, rest: str) -> tuple[int, yaml.Node, str] | None:
    """Return line and node one step down the path, and the rest of it."""
    if isinstance(node, yaml.MappingNode):
        # A key may contain dots: the longest matching key counts, of equal ones the last.
        found: tuple[int, yaml.Node, str] | None = None
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not rest.startswith(key.value):
                continue
            after = rest[len(key.value) :]
            if after[:1] in {"", ".", "["} and (found is None or len(after.removeprefix(".")) <= len(found[2])):
                found = (int(key.start_mark.line) + 1, value, after.removeprefix("."))
        return found
    if not isinstance(node, yaml.SequenceNode) or not rest.startswith("["):
        return None
    number, _, rest = rest[1:].partition("]")
    if not number.isdigit() or int(number) >= len(node.value):
        return None
    item = node.value[int(number)]
    return int(item.start_mark.line) + 1, item, rest.removeprefix(".")


def join(path: str, name: str) -> str:
    """Return the path of a field."""
    return f"{path}.{name}" if path else name


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == _NULL)


def _integer(node: yaml.Node) -> int | None:
    text = str(node.value).replace("_", "")
    digits = text.lstrip("+-")
    is_octal = digits.startswith("0") and digits[1:].isdigit()
    try:
        return int(text, 8 if is_octal else 0)
    except ValueError:
        return None


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else _shown(node)


def _shown(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return _kind(node)
    return f'"{node.value}"' if node.style else str(node.value)
