"""The text of HiveD's annotations, read into types. Source: HiveD's `FromYaml`, which is YAML 1.1 without strictness.

JSON is tried first: it is valid YAML, it is what we write, and it is read some twenty times faster. In YAML a field
of text takes its scalar as it was written (a virtual cluster `8` is "8"), null is as good as absent, unknown fields are
ignored, the last of repeated ones counts.

The texts are anybody's who may create a pod, so aliases, which make small texts large, are refused, and what is deep
or has too many values (see `store.decoding`). No number, truth value or date is as long as `MAX_YAML_NUMBER`: what is
longer stays text, for YAML's numbers to the base 60 take time by the square of their length.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec
import yaml

from store.decoding import (
    MAX_YAML_NUMBER,
    NotYaml,
    Undecodable,
    check_yaml,
    converted,
    from_json,
    yaml_loader,
    yaml_reason,
)

T = TypeVar("T")

_NULL = "tag:yaml.org,2002:null"
_MSGSPEC_ERROR = re.compile(r"(?P<what>.*?)(?: - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_OLD_NAMES = {
    "gpuType": "leafCellType",
    "gpuNumber": "leafCellNumber",
    "gpuIsolation": "leafCellIsolation",
    "physicalGpuIndices": "physicalLeafCellIndices",
}
_OLD_NAME = re.compile(rf"({'|'.join(_OLD_NAMES)})(?=[\"']?\s*:)")


class InvalidAnnotation(ValueError):
    """A text that can't be used: the field, when it is one's fault, what is wrong and what to do."""


def with_new_names(text: str) -> str:
    """The fields as an early HiveD named them get the names of today; a value that reads alike stays."""
    if "gpu" not in text and "Gpu" not in text:
        return text
    return _OLD_NAME.sub(lambda match: _OLD_NAMES[match[0]], text)


class AnnotationReader(Generic[T]):
    """Reads texts into a msgspec type. `text_fields`: the names of fields, anywhere in it, that hold texts.
    `max_yaml`: characters of a text that is not JSON.
    """

    def __init__(self, kind: type[T], *text_fields: str, max_yaml: int) -> None:
        self._kind, self._max_yaml = kind, max_yaml
        self._decoder = msgspec.json.Decoder(kind)
        self._text_fields = frozenset(text_fields)

    def read(self, text: str) -> T:
        """Raises `InvalidAnnotation`."""
        try:
            return from_json(self._decoder, text)
        except Undecodable:
            pass  # not JSON, or JSON that YAML takes more liberally
        if len(text) > self._max_yaml:
            raise InvalidAnnotation(f"has {len(text)} characters, as YAML it may have {self._max_yaml}; write JSON")
        try:
            return converted(_Nodes(self._text_fields).value(_compose(text)), self._kind)
        except Undecodable as error:
            raise InvalidAnnotation(_explain(str(error))) from None


def _compose(text: str) -> yaml.Node | None:
    try:
        check_yaml(text)
        found: yaml.Node | None = yaml.compose(text, Loader=yaml_loader())
    except Undecodable as error:
        raise InvalidAnnotation(f"is {error}" if isinstance(error, NotYaml) else str(error)) from None
    except Exception as error:  # the parser's own errors are in no one tree
        raise InvalidAnnotation(f"is not valid YAML: {yaml_reason(error)}") from None
    return found


class _Nodes:
    """Turns the nodes of one text into values."""

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
        except Exception:  # `!!bool x`, `!!int ""`, `!!binary é`: each its own
            raise InvalidAnnotation(f"{_at(node)}: {str(node.value)[:100]!r} can't be read") from None
        return found


def _at(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"


def _explain(text: str) -> str:
    """`Expected ..., got ... - at $.a.b` the other way round: where, then what."""
    found = _MSGSPEC_ERROR.fullmatch(text)
    assert found is not None, "the pattern fits any text"
    path = [found["path"]] if found["path"] else []
    if missing := _MISSING.fullmatch(found["what"]):
        return f"{'.'.join([*path, missing['field']])}: is missing"
    what = found["what"].replace("`", "")
    return ": ".join([*path, what[:1].lower() + what[1:]])
