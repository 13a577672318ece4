"""Values of plugins: round trips, names that stay apart and legal, and rendering in one pass."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.tasks.api.names import flyte_name, generated_name
from controllers.tasks.api.phase import (
    CacheStatus,
    ErrorKind,
    ExecutionError,
    ExternalResource,
    Phase,
    ReasonInfo,
    TaskInfo,
    TaskLog,
)
from controllers.tasks.api.plugin import PluginStateReader, PluginStateWriter
from controllers.tasks.template import render
from tests.support.tasks.template import parameters

TEXT = st.text(max_size=20)
TIMES = st.datetimes(datetime(1970, 1, 2), datetime(9000, 1, 1), timezones=st.just(UTC))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
LOGS = st.lists(st.builds(TaskLog, TEXT, TEXT, TEXT, st.none() | st.floats(0, 1e6)), max_size=2).map(tuple)
RESOURCES = st.builds(
    ExternalResource,
    TEXT,
    st.sampled_from(CacheStatus),
    st.integers(0, 2**31),
    LOGS,
    st.integers(0, 9),
    st.sampled_from(Phase),
)
INFOS = st.builds(
    TaskInfo,
    LOGS,
    st.none() | TIMES,
    st.none() | TIMES,
    st.none() | st.dictionaries(TEXT, JSON, max_size=3),
    st.lists(RESOURCES, max_size=2).map(tuple),
    st.lists(st.builds(ReasonInfo, TEXT, st.none() | TIMES), max_size=2).map(tuple),
)
PARTS = st.tuples(st.text("ab-0Z:é", max_size=30), st.text("ab-0Z:é", max_size=30), st.integers(0, 99))


@settings(max_examples=40)
@given(INFOS)
def test_an_info_returns_from_stored_json(info: TaskInfo) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(info.to_json()))
    assert stored == info.to_json()
    assert TaskInfo.from_json(stored) == info


@given(TEXT, TEXT, st.sampled_from(ErrorKind))
def test_an_error_returns_from_stored_json(code: str, message: str, kind: ErrorKind) -> None:
    error = ExecutionError(code, message, kind)
    assert ExecutionError.from_json(msgspec.json.decode(msgspec.json.encode(error.to_json()))) == error


@given(st.integers(0, 255), JSON.filter(lambda value: value is not None))
def test_plugin_state_returns_in_the_next_round(version: int, value: Any) -> None:
    writer = PluginStateWriter()
    writer.put(version, value)
    assert writer.written is not None
    reader = PluginStateReader(*writer.written)
    assert reader.get(type(value)) == reader.get(type(value)) == (value, version)


@given(PARTS, PARTS, st.integers(16, 64), st.integers(0, 64))
def test_names_are_legal_within_bounds_and_stay_apart(
    one: tuple[str, str, int], other: tuple[str, str, int], longest: int, shortest: int
) -> None:
    shortest = min(shortest, longest)
    names = [generated_name(*parts, max_length=longest, min_length=shortest) for parts in (one, other)]
    assert all(re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name) for name in names)
    assert all(shortest <= len(name) <= longest for name in names)
    assert (names[0] == names[1]) == (one == other)


@given(PARTS, st.integers(8, 64))
def test_names_of_flyte_stay_within_the_maximum(parts: tuple[str, str, int], longest: int) -> None:
    assert len(flyte_name(*parts, max_length=longest)) <= longest


@given(st.lists(st.sampled_from(["{{ .Inputs.a }}", "{{ $INPUTS.b}}", "-", "{{", "}}", "{{ .Unknown }}"])), TEXT, TEXT)
def test_rendering_never_reads_inserted_text_again(pieces: list[str], one: str, other: str) -> None:
    """The result is that of replacing in pieces: whatever is inserted, it neither changes nor forms a placeholder."""
    values = {"{{ .Inputs.a }}": "{{ .Inputs.b }}" + one, "{{ $INPUTS.b}}": "}}" + other + "{{ .Input"}
    given_values = {"a": values["{{ .Inputs.a }}"], "b": values["{{ $INPUTS.b}}"]}
    (rendered,) = asyncio.run(render(["".join(pieces)], parameters(given_values)))
    assert rendered == "".join(values.get(piece, piece) for piece in pieces)
