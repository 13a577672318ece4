"""HiveD's annotations, parsed into types as HiveD's `FromYaml` does: YAML 1.1 without strictness.

JSON is tried first: it is valid YAML, it is what we write, and it parses about twenty times faster. In YAML a text
field takes its scalar as written (a virtual cluster `8` is "8"), null means absent, unknown fields are ignored, and the
last of repeated fields counts.

Any user who can create a pod can write these texts, so aliases, which expand small texts, are refused, and so are texts
that are nested too deeply or have too many values (see `store.decoding`). A scalar longer than `MAX_YAML_NUMBER` stays
text: parsing YAML's base-60 numbers takes time quadratic in their length.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec
import yaml

from store.decoding import MAX_YAML_NUMBER, NotYaml, Undecodable, converted, from_json, problem_of, yaml_node
from store.errors import RcfarmError

T = TypeVar("T")

_NULL = "tag:yaml.org,2002:null"
_OLD_NAMES = {
    "gpuType": "leafCellType",
    "gpuNumber": "leafCellNumber",
    "gpuIsolation": "leafCellIsolation",
    "physicalGpuIndices": "physicalLeafCellIndices",
}
_OLD_NAME = re.compile(rf"({'|'.join(_OLD_NAMES)})(?=[\"']?\s*:)")


class InvalidAnnotation(RcfarmError, ValueError):
    """An unusable text. The message names the field, if one is at fault, the problem and what to do."""


def with_new_names(text: str) -> str:
    """Rename the fields of early HiveD versions to today's names. A value that looks like one stays."""
    if "gpu" not in text and "Gpu" not in text:
        return text
    return _OLD_NAME.sub(lambda match: _OLD_NAMES[match[0]], text)


class AnnotationReader(Generic[T]):
    """Parser of texts into a msgspec type. `text_fields`: names of fields, at any depth, that hold text. `max_yaml`:
    the most characters of a text that is not JSON.
    """

    def __init__(self, kind: type[T], *text_fields: str, max_yaml: int) -> None:
        self._kind, self._max_yaml = kind, max_yaml
        self._decoder = msgspec.json.Decoder(kind)
        self._text_fields = frozenset(text_fields)

    def read(self, text: str) -> T:
        """Parse one text. Raises `InvalidAnnotation`."""
        try:
            return from_json(self._decoder, text)
        except Undecodable:
            pass  # not JSON, or JSON with values that only the YAML rules accept
        if len(text) > self._max_yaml:
            raise InvalidAnnotation(f"has {len(text)} characters, as YAML it may have {self._max_yaml}; write JSON")
        try:
            node = yaml_node(text)
        except Undecodable as error:
            raise InvalidAnnotation(f"is {error}" if isinstance(error, NotYaml) else str(error)) from None
        try:
            return converted(_Nodes(self._text_fields).value(node), self._kind)
        except Undecodable as error:
            raise InvalidAnnotation(_explained(error)) from None


class _Nodes:
    """Converter of one text's YAML nodes into values."""

    def __init__(self, text_fields: frozenset[str]) -> None:
        self._text_fields = text_fields
        self._constructor = yaml.constructor.SafeConstructor()
        self._seen: set[int] = set()

    def value(self, node: yaml.Node | None, is_text: bool = False) -> Any:
        if node is None or node.tag == _NULL:
            return None
        if id(node) in self._seen:
            raise InvalidAnnotation(f"{_at(node)}: aliases (*) are not allowed; write it out")
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            values = {
                self._key(key): self.value(value, self._key(key) in self._text_fields) for key, value in node.value
            }
            return {key: value for key, value in values.items() if value is not None}
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, is_text) for item in node.value]
        return node.value if is_text else self._scalar(node)

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise InvalidAnnotation(f"{_at(node)}: a list or map can't be the name of a field")
        return str(node.value)

    def _scalar(self, node: yaml.Node) -> object:
        if len(node.value) > MAX_YAML_NUMBER:
            return str(node.value)
        try:
            found: object = self._constructor.construct_object(node)
        except Exception:  # `!!bool x`, `!!int ""`, `!!binary é`: each raises its own type
            raise InvalidAnnotation(f"{_at(node)}: {str(node.value)[:100]!r} can't be read") from None
        return found


def _at(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def _explained(error: Undecodable) -> str:
    """Return the path followed by the problem, types under their JSON names."""
    problem = problem_of(error)
    if problem.missing:
        return f"{problem.field}: {problem.what}"
    text = problem.text.replace("`", "")
    return ": ".join(filter(None, (problem.path, text[:1].lower() + text[1:])))
