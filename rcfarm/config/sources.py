"""Read settings from a TOML file, `RCFARM_*` variables and flags; the later source wins.

The `frameworkcontroller.yaml` that `jobs.framework_config` names comes before all of them.

Unknown settings are refused, with the key, the line of the file and the nearest existing name. Values are converted one
by one, so that an error names exactly one of them and its source.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from rcfarm.config.kube import from_framework_config
from rcfarm.config.settings import BadSettings, Settings
from store.decoding import Undecodable, converted

PREFIX = "RCFARM_"
ALIASES = {"RCFARM_STORE": ("store", "url")}  # the same name as the flag `--store`
_SECTIONS: dict[str, type[msgspec.Struct]] = get_type_hints(Settings)


class _Value(NamedTuple):
    section: str
    field: str
    value: object
    source: str
    textual: bool  # from the environment or a flag: numbers arrive as text


def load(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Return the checked settings.

    `overrides`: values of flags by dotted name (`farm.name`); None means that the flag was not given. `defaults`: those
    of the role, which every source overrides. Raises `BadSettings`, which names the file and line, the variable or the
    flag.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for found in _given(path, environ or {}, overrides or {}):
        values[found.section][found.field] = _convert(found)
    if foreign := values["jobs"].get("framework_config"):
        for section, field, value in from_framework_config(Path(foreign)):
            values[section].setdefault(field, _convert(_Value(section, field, value, foreign, textual=False)))
    for name, value in (defaults or {}).items():
        section, _, field = name.partition(".")
        values[section].setdefault(field, value)
    sections: dict[str, Any] = {name: _SECTIONS[name](**fields) for name, fields in values.items()}
    return Settings(**sections).checked()


def _given(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]) -> Iterator[_Value]:
    """Yield the values of the file, the environment and the flags, in this order."""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadSettings(f"{path}: can't be read: {error}") from error
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise BadSettings(f"{path}: not valid TOML: {error}") from error
        for section, table in document.items():
            source = f"{path}:{line_of(text, section)}"
            _check_section(section, source)
            if not isinstance(table, dict):
                raise BadSettings(f"{source}: {section} is a section: write [{section}] and its keys below")
            for field, value in table.items():
                yield _known(_Value(section, field, value, f"{path}:{line_of(text, section, field)}", textual=False))
    known = variables()
    for name, value in environ.items():
        if name in known:
            yield _Value(*known[name], value, name, textual=True)
        elif name.startswith(PREFIX):  # the agent's pods get variables of this prefix, too
            in_section = any(name.startswith(f"{PREFIX}{section.upper()}_") for section in _SECTIONS)
            if in_section or difflib.get_close_matches(name, known, cutoff=0.92):
                raise BadSettings(f"{name} is not a setting{_did_you_mean(name, list(known))}")
    for name, given in overrides.items():
        if given is not None:
            section, _, field = name.partition(".")
            yield _known(_Value(section, field, given, f"flag for {name}", textual=True))


def _check_section(section: str, source: str) -> None:
    if section not in _SECTIONS:
        raise BadSettings(f"{source}: [{section}] is not a section{_did_you_mean(section, list(_SECTIONS))}")


def _known(found: _Value) -> _Value:
    _check_section(found.section, found.source)
    fields = _SECTIONS[found.section].__struct_fields__
    if found.field not in fields:
        guess = _did_you_mean(found.field, list(fields))
        raise BadSettings(f"{found.source}: {found.section}.{found.field} is not a setting{guess}")
    return found


def variables() -> dict[str, tuple[str, str]]:
    """Return every known variable, with its section and field."""
    names = {
        f"{PREFIX}{section}_{field}".upper(): (section, field)
        for section, settings in _SECTIONS.items()
        for field in settings.__struct_fields__
    }
    return names | ALIASES


def _convert(found: _Value) -> object:
    expected = get_type_hints(_SECTIONS[found.section])[found.field]
    value = found.value
    if found.textual and isinstance(value, str):  # `a=b,c=d` for a map, `1,2` for a sequence
        kinds = {get_origin(kind) or kind for kind in (expected, *get_args(expected))}
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if dict in kinds:
            value = {name.strip(): text.strip() for name, _, text in (part.partition("=") for part in parts)}
        elif tuple in kinds or list in kinds:
            value = parts
    try:
        return converted(value, expected, strict=not found.textual, dec_hook=_path)
    except Undecodable as error:
        raise BadSettings(f"{found.source}: {found.section}.{found.field}: {error}") from error


def _path(expected: type, value: object) -> object:
    if expected is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(sorted(known))}"


def line_of(text: str, *keys: str) -> int:
    """Return the line, counted from 1, of the statement that first sets `keys` in a valid TOML text.

    A text cut after a whole statement is valid, so trying the parser on each prefix finds where the statements end.
    """
    lines = text.splitlines()
    start = 1
    for end in range(1, len(lines) + 1):
        try:
            node: object = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if node is not None:
            return start
        start = end + 1
    return start
