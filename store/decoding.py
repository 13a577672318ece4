"""Decoding of bytes that anybody may have written: JSON and YAML, bounded in depth and in work.

A decoder has one way to fail, `Undecodable`, whatever is in the text: nesting beyond the stack, numbers beyond any
type, broken UTF-8. So whoever reads many values can set one aside and go on with its neighbours.

Nothing that passes is nested more than `MAX_DEPTH` levels. Without that bound a value could be read at one place and
overflow the stack at another, which happens to run deeper when it writes, copies or reads the value again.

YAML is read event by event before anything is built from it, because the parser's own tree is built by recursion in C
and ends the process at some ten thousand levels. An alias counts as what it stands for, so a small text can't grow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

import msgspec

MAX_DEPTH = 200  # levels of lists and mappings within each other; a pod has some ten
MAX_YAML_VALUES = 5_000  # scalars, lists and mappings, aliases written out: some 50 ms of work
MAX_FILE_VALUES = 100_000  # the same, of a file that an operator names: seconds
MAX_YAML_GROWTH = 50  # characters that aliases may bring, for each of the values that a text may have
MAX_YAML_NUMBER = 100  # characters: a longer scalar stays text, for numbers to the base 60 cost the square of theirs
CUT = b'"\\u0000nested too deep\\u0000"'  # what `cut_below` writes instead of what it leaves out

T = TypeVar("T")

_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_CONTAINERS = (dict, list, tuple, set, frozenset, msgspec.Struct)
# a string (to the end of the text if nothing ends it, so that no text is searched twice), or one bracket
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_TEXT_TAGS = frozenset({None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:binary"})


class Undecodable(ValueError):
    """A text that can't be read; the message says why, and where if that is known."""


class NotJson(Undecodable):
    """A text that is no JSON at all; it may be something else, such as YAML."""


class NotYaml(Undecodable):
    """A text that YAML's parser refuses."""


def from_json(decoder: msgspec.json.Decoder[T], text: bytes | str | msgspec.Raw) -> T:
    """Return what the decoder makes of a JSON text. Raises `Undecodable` and nothing else: `NotJson` for bad syntax."""
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise Undecodable(_TOO_DEEP) from None
    except msgspec.ValidationError as error:
        raise Undecodable(_reason(error)) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise NotJson(_reason(error)) from error
    except Exception as error:
        raise Undecodable(_reason(error)) from error
    if _may_be_deep(text) and is_deep(value):
        raise Undecodable(_TOO_DEEP)
    return value


def converted(value: object, into: type[T]) -> T:
    """Return `value`, made of plain dicts, lists and scalars, as the type. Raises `Undecodable`, and nothing else."""
    try:
        return msgspec.convert(value, into)
    except RecursionError:
        raise Undecodable(_TOO_DEEP) from None
    except Exception as error:
        raise Undecodable(_reason(error)) from error


def is_deep(value: object, limit: int = MAX_DEPTH) -> bool:
    """Return whether containers lie within each other in more than `limit` levels. Looks level by level, so that no
    depth is too much for it."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(limit):
        if not level:
            return False
        level = [child for each in level for child in _children(each) if isinstance(child, _CONTAINERS)]
    return bool(level)


def cut_below(text: bytes, depth: int = MAX_DEPTH) -> bytes:
    """Return the JSON text with `CUT` in the place of every list and mapping that lies deeper than `depth` levels.

    Broken JSON stays broken, and is for the decoder to refuse.
    """
    pieces: list[bytes] = []
    level = copied = 0
    for token in _TOKENS.finditer(text):
        first = text[token.start()]
        if first in b"[{":
            level += 1
            if level == depth + 1:
                pieces.append(text[copied : token.start()])
        elif first in b"]}":
            if level == depth + 1:
                pieces.append(CUT)
                copied = token.end()
            level -= 1
    pieces.append(text[copied:])
    return b"".join(pieces)


def load_yaml(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> Any:
    """Return the one document of a YAML text, as `yaml.safe_load` reads it. Raises `Undecodable`, and nothing else.

    A mapping may give no field twice. Scalars of more than `MAX_YAML_NUMBER` characters stay text.
    """
    check_yaml(text, max_values=max_values)
    import yaml

    try:
        return yaml.load(text, Loader=yaml_loader())
    except Exception as error:
        raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error


def load_yaml_documents(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> list[Any]:
    """Return every document of a YAML text; else as `load_yaml`. The bound is for all of them together."""
    check_yaml(text, max_values=max_values)
    import yaml

    try:
        return list(yaml.load_all(text, Loader=yaml_loader()))
    except Exception as error:
        raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error


def check_yaml(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> None:
    """Refuse a YAML text that can't be composed and constructed safely and in bounded time. Raises `Undecodable`;
    `NotYaml` for bad syntax."""
    import yaml

    try:
        _weigh(yaml.parse(text, Loader=yaml_loader()), max_values)
    except Undecodable:
        raise
    except Exception as error:
        raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error


def yaml_reason(error: Exception) -> str:
    """Return what a YAML error says, in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark and problem:
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).split()) or type(error).__name__


def _weigh(events: Iterable[Any], max_values: int) -> None:
    """Count the values of a stream of events, aliases at the weight of what they stand for, and the characters that
    these bring."""
    import yaml

    weights: dict[str | None, tuple[int, int]] = {}  # values and characters of what has an anchor, once it is whole
    opened: list[tuple[str | None, int, int]] = []  # anchors of open collections, and the totals before each
    total = length = grown = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in weights:
                raise Undecodable(f"{_line(event)}: the alias *{event.anchor} stands within itself, or for nothing")
            values, characters = weights[event.anchor]
            total, length, grown = total + values, length + characters, grown + characters
        elif isinstance(event, yaml.ScalarEvent):
            total, length = total + 1, length + len(event.value)
            if event.tag not in _TEXT_TAGS and len(event.value) > MAX_YAML_NUMBER:
                raise Undecodable(f"{_line(event)}: {len(event.value)} characters are too many for {event.tag}")
            weights[event.anchor] = 1, len(event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            weights.pop(event.anchor, None)
            opened.append((event.anchor, total, length))
            total += 1
            if len(opened) > MAX_DEPTH:
                raise Undecodable(f"{_line(event)}: {_TOO_DEEP}")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, values, characters = opened.pop()
            weights[anchor] = total - values, length - characters
        if grown > max_values * MAX_YAML_GROWTH:
            raise Undecodable(f"{_line(event)}: its aliases stand for too much text; write less of them")
        if total > max_values:
            raise Undecodable(
                f"{_line(event)}: more than {max_values} values with aliases written out; write less, or write JSON"
            )


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"


@cache
def yaml_loader() -> Any:
    """Return the loader class of `load_yaml`, for a text that `check_yaml` has passed.

    It is made when it is first needed, because YAML takes 15 ms to import.
    """
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]  # which of the two is only known at run time
        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            if kind is yaml.ScalarNode and len(value) > MAX_YAML_NUMBER:
                return "tag:yaml.org,2002:str"
            return super().resolve(kind, value, implicit)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    if (key.tag, key.value) in seen:
                        line = key.start_mark.line + 1
                        raise Undecodable(f"line {line}: the field {key.value[:MAX_YAML_NUMBER]} is given twice")
                    seen.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

    return Loader


def _may_be_deep(text: bytes | str | msgspec.Raw) -> bool:
    """Whether the text has enough brackets at all: counting them is much cheaper than looking at the value."""
    if isinstance(text, str):
        return text.count("{") + text.count("[") > MAX_DEPTH
    raw = bytes(text)
    return raw.count(b"{") + raw.count(b"[") > MAX_DEPTH


def _children(container: Any) -> Iterable[object]:
    if isinstance(container, dict):
        return container.values()
    return msgspec.structs.astuple(container) if isinstance(container, msgspec.Struct) else container


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
