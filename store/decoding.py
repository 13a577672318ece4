"""Decoding of untrusted bytes: JSON and YAML, bounded in depth and in work, and what is wrong with a value.

A decoder fails in one way, `Undecodable`, whatever is in the text: nesting beyond the stack, numbers beyond any type,
broken UTF-8. So a caller that reads many values can set a bad one aside and continue with the rest.

No accepted value is nested more than `MAX_DEPTH` levels. Without that bound a value could be read in one place and
overflow the stack in another, which happens to run deeper when it writes, copies or reads the value again.

`problem_of` takes msgspec's message apart, for callers that name the field in words of their own.

YAML is read event by event before anything is built from it, because the parser's own tree is built by recursion in C
and crashes the process at some ten thousand levels. An alias counts as what it stands for, so a small text can't grow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from store.errors import RcfarmError

if TYPE_CHECKING:
    import yaml  # takes 15 ms to import; programs that read none must not pay

MAX_DEPTH = 200  # levels of lists and mappings within each other; a pod has some ten
MAX_YAML_VALUES = 5_000  # scalars, lists and mappings, aliases written out: some 50 ms of work
MAX_FILE_VALUES = 100_000  # the same, of a file that an operator names: seconds
MAX_YAML_GROWTH = 50  # characters that aliases may bring, for each of the values that a text may have
MAX_YAML_NUMBER = 100  # characters: a longer scalar stays text, because base-60 numbers take quadratic time
CUT = b'"\\u0000nested too deep\\u0000"'  # the placeholder that `cut_below` writes for the parts that it removes

T = TypeVar("T")

_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
_CONTAINERS = (dict, list, tuple, set, frozenset, msgspec.Struct)
# a string (to the end of the text if nothing ends it, so that no text is searched twice), or one bracket
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_TEXT = "tag:yaml.org,2002:str"
_TEXT_TAGS = frozenset({None, "!", _TEXT, "tag:yaml.org,2002:binary"})
# msgspec has its message in words only
_PROBLEM = re.compile(r"(?P<text>.*?)(?: - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_MISMATCH = re.compile(r"Expected `(.*?)(?: \| null)?`, got `(.*)`")
_BOUND = re.compile(r"Expected `(int|float)` (>=|<=|<|>) (\S+)")
_BOUNDS = {">=": "of at least", "<=": "of at most", "<": "below", ">": "above"}
_PATTERNS = {"Expected `str` matching regex '^[0-9]{1,3}%$'": "expected a whole number, or a share such as 25%"}
_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}


class Undecodable(RcfarmError, ValueError):
    """A text that can't be decoded; the message says why, and where if that is known."""


class NotJson(Undecodable):
    """A text that is not JSON; it may be another format, such as YAML."""


class NotYaml(Undecodable):
    """A text that the YAML parser refuses."""


class Problem(NamedTuple):
    """What msgspec finds wrong with a value.

    `path`: that of the value, such as `a.b[...]`; "" for the whole. `text`: the problem, without the path, as msgspec
    words it. `missing`, `unknown`: the name of the field that is absent, or that does not exist. `wanted`, `got`: the
    types of a mismatch, in YAML's terms.
    """

    path: str
    text: str
    missing: str = ""
    unknown: str = ""
    wanted: str = ""
    got: str = ""

    @property
    def field(self) -> str:
        """The path of the field at fault."""
        return ".".join(filter(None, (self.path, self.missing or self.unknown)))

    @property
    def what(self) -> str:
        """The problem with that field, in YAML's terms."""
        if self.missing:
            return "is missing"
        if self.unknown:
            return "there is no such field"
        if self.wanted:
            return f"expected {self.wanted}, got {self.got}"
        if bound := _BOUND.fullmatch(self.text):
            return f"expected {_TYPES[bound[1]]} {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
        return _PATTERNS.get(self.text, self.text)


class PlainDocument(NamedTuple):
    """A document of a YAML text: the line on which its mapping begins, from 1, and what is in it."""

    line: int
    fields: dict[str, Any]


def problem_of(error: Exception) -> Problem:
    """Return the parts of the message of an `Undecodable`, or of msgspec's own error."""
    found = _PROBLEM.fullmatch(str(error))
    assert found is not None, "the pattern fits any text"
    path, text = found["path"] or "", found["text"]
    if missing := _MISSING.fullmatch(text):
        return Problem(path, text, missing=missing[1])
    if unknown := _UNKNOWN.fullmatch(text):
        return Problem(path, text, unknown=unknown[1])
    if mismatch := _MISMATCH.fullmatch(text):
        wanted, got = (" or ".join(_TYPES.get(each, each) for each in name.split(" | ")) for name in mismatch.groups())
        return Problem(path, text, wanted=wanted, got=got)
    return Problem(path, text)


def from_json(decoder: msgspec.json.Decoder[T], text: bytes | str | msgspec.Raw, *, check_depth: bool = True) -> T:
    """Return the decoded JSON text. Raises `Undecodable` and nothing else: `NotJson` for bad syntax.

    `check_depth` False: for a type that bounds the depth, so that a large text is not searched for brackets.
    """
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
    if check_depth and _may_be_deep(text) and is_deep(value):
        raise Undecodable(_TOO_DEEP)
    return value


@cache
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type, made once."""
    return msgspec.json.Decoder(kind)


def converted(
    value: object, into: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None
) -> T:
    """Return `value`, made of plain dicts, lists and scalars, as the type. Raises `Undecodable`, and nothing else.

    `strict` and `dec_hook` are msgspec's: whether texts may become numbers, and what reads types that it does not know.
    """
    try:
        return msgspec.convert(value, into, strict=strict, dec_hook=dec_hook)
    except RecursionError:
        raise Undecodable(_TOO_DEEP) from None
    except Exception as error:
        raise Undecodable(_reason(error)) from error


def without_nulls(value: Any, opaque: Collection[str] = ()) -> Any:
    """Return a copy without null fields; the contents of the fields named `opaque` stay as they are."""
    if isinstance(value, dict):
        return {
            name: field if name in opaque else without_nulls(field, opaque)
            for name, field in value.items()
            if field is not None
        }
    return [without_nulls(item, opaque) for item in value] if isinstance(value, list) else value


def is_deep(value: object, limit: int = MAX_DEPTH) -> bool:
    """Return whether containers are nested in more than `limit` levels. Works level by level, without recursion."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(limit):
        if not level:
            return False
        level = [child for each in level for child in _children(each) if isinstance(child, _CONTAINERS)]
    return bool(level)


def cut_below(text: bytes, depth: int = MAX_DEPTH) -> bytes:
    """Return the JSON text with `CUT` in the place of every list and mapping that lies deeper than `depth` levels.

    Broken JSON stays broken; the decoder refuses it.
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

    Duplicate keys in a mapping are an error. Scalars of more than `MAX_YAML_NUMBER` characters stay text.
    """
    check_yaml(text, max_values=max_values)
    import yaml

    try:
        return yaml.load(text, Loader=yaml_loader())
    except Exception as error:
        raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error


def load_yaml_documents(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> list[Any]:
    """Return every document of a YAML text, read as by `load_yaml`. The bound is for all of them together."""
    return [value_of() for _, value_of in yaml_documents(text, max_values=max_values)]


def yaml_node(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> yaml.Node | None:
    """Return the root node of the one document of a YAML text, None for an empty text. Raises as `load_yaml`."""
    check_yaml(text, max_values=max_values)
    import yaml

    try:
        found: yaml.Node | None = yaml.compose(text, Loader=yaml_loader())
    except Exception as error:
        raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error
    return found


def yaml_documents(
    text: bytes | str, *, max_values: int = MAX_YAML_VALUES
) -> Iterator[tuple[yaml.Node, Callable[[], Any]]]:
    """Yield the root node of each document of a YAML text, and a function that returns its value. Raises as
    `load_yaml`, and so does that function. The bound is for all of them together."""
    check_yaml(text, max_values=max_values)
    loader = yaml_loader()(text)

    def value_of(node: yaml.Node) -> Any:
        try:
            return loader.construct_document(node)
        except Exception as error:  # an invalid date, a list as a key: each has its own type
            raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error

    while True:
        try:
            node = loader.get_node() if loader.check_node() else None
        except Exception as error:
            raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error
        if node is None:
            return
        yield node, partial(value_of, node)


def plain_yaml_documents(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> list[PlainDocument] | None:
    """Return the documents of a YAML text in a third of the time that `yaml_documents` takes, with the same values, if
    each is a mapping, all keys are texts, none is given twice, and nothing has an anchor or a tag.

    Return None for every other text, also for one that can't be read: `yaml_documents` says why.
    """
    try:
        return _plain_documents(yaml_loader()(text), max_values)
    except Exception:  # bad syntax, an invalid date: each has its own type
        return None


def check_yaml(text: bytes | str, *, max_values: int = MAX_YAML_VALUES) -> None:
    """Refuse a YAML text that can't be composed and constructed safely and in bounded time. Raises `Undecodable`;
    `NotYaml` for bad syntax."""
    import yaml

    try:
        _weigh(yaml.parse(text, Loader=yaml_loader()), max_values)
    except Undecodable:
        raise
    except Exception as error:
        if "maximum nesting depth" in str(error):  # libyaml's own bound, since 0.2.6, is met before the first event
            raise Undecodable(_TOO_DEEP) from error
        raise NotYaml(f"not valid YAML: {yaml_reason(error)}") from error


def _plain_documents(loader: Any, max_values: int) -> list[PlainDocument] | None:
    import yaml

    @cache
    def plain(written: str) -> Any:
        """Return the value of a text without quotes, such as a number."""
        tag = loader.resolve(yaml.ScalarNode, written, (True, False))
        return written if tag == _TEXT else loader.construct_object(yaml.ScalarNode(tag, written))

    found: list[PlainDocument] = []
    above: list[tuple[Any, str | None]] = []  # the collections around `inside`, each with the key that it waits for
    inside: Any = None
    key: str | None = None
    values = 0
    for event in iter(loader.get_event, None):
        kind = type(event)
        if kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
            inside, key = above.pop()
            continue
        if kind is yaml.ScalarEvent:
            value = plain(event.value) if event.implicit[0] else event.value
        elif kind is yaml.MappingStartEvent:
            value = {}
        elif kind is yaml.SequenceStartEvent:
            value = []
        elif kind is yaml.AliasEvent:
            return None
        else:
            continue  # the beginning or end of a document or of the text
        values += 1
        if event.anchor or event.tag or values > max_values or len(above) >= MAX_DEPTH:
            return None
        if inside is None:
            if kind is not yaml.MappingStartEvent:
                return None
            found.append(PlainDocument(event.start_mark.line + 1, value))
        elif type(inside) is list:
            inside.append(value)
        elif key is not None:
            inside[key], key = value, None
        elif type(value) is str and value not in inside:
            key = value
            continue
        else:
            return None  # a list as a key, a number, or a key that is given twice
        if kind is not yaml.ScalarEvent:
            above.append((inside, key))
            inside, key = value, None
    return found


def yaml_reason(error: Exception) -> str:
    """Return the message of a YAML error in one line."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark and problem:
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).split()) or type(error).__name__


def _weigh(events: Iterable[Any], max_values: int) -> None:
    """Count the values of a stream of events, aliases at the weight of what they stand for, and the characters that
    the aliases add."""
    import yaml

    weights: dict[str | None, tuple[int, int]] = {}  # values and characters of what has an anchor, once it is whole
    opened: list[tuple[str | None, int, int]] = []  # anchors of open collections, and the totals before each
    total = length = grown = 0
    for event in events:
        if isinstance(event, yaml.ScalarEvent):
            size = len(event.value)
            total, length = total + 1, length + size
            if size > MAX_YAML_NUMBER and event.tag not in _TEXT_TAGS:
                raise Undecodable(f"{_line(event)}: {size} characters are too many for {event.tag}")
            if event.anchor is not None:
                weights[event.anchor] = 1, size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in weights:
                raise Undecodable(f"{_line(event)}: the alias *{event.anchor} refers to itself, or to nothing")
            values, characters = weights[event.anchor]
            total, length, grown = total + values, length + characters, grown + characters
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


def plain_yaml_loader() -> Any:
    """Return PyYAML's loader class of plain values, which is in C where libyaml is there, and unbounded."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def yaml_loader() -> Any:
    """Return the loader class of `load_yaml`, for a text that `check_yaml` has passed.

    It is made when it is first needed, because YAML takes 15 ms to import.
    """
    import yaml

    base: Any = plain_yaml_loader()

    class Loader(base):  # type: ignore[misc]  # which of the two is only known at run time
        def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
            if kind is yaml.ScalarNode and len(value) > MAX_YAML_NUMBER:
                return _TEXT
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
    """Return whether the text has enough brackets: counting them is much cheaper than walking through the value."""
    if isinstance(text, str):
        return text.count("{") + text.count("[") > MAX_DEPTH
    raw = bytes(text)
    if len(raw) <= MAX_DEPTH:
        return False
    return raw.count(b"{") + raw.count(b"[") > MAX_DEPTH


def _children(container: Any) -> Iterable[object]:
    if isinstance(container, dict):
        return container.values()
    return msgspec.structs.astuple(container) if isinstance(container, msgspec.Struct) else container


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
