"""Plugin state, configuration and the checks of loading."""

from __future__ import annotations

import functools
from typing import Any, cast

import msgspec
import pytest

from controllers.tasks.api.errors import BadConfig, BadPlugin, BadState, StateTooLarge
from controllers.tasks.api.plugin import (
    MAX_STATE_BYTES,
    Plugin,
    PluginEntry,
    PluginProperties,
    PluginStateReader,
    PluginStateWriter,
    SetupContext,
    TaskTemplate,
    load_plugin,
)
from controllers.tasks.api.resources import ResourceNamespace
from controllers.tasks.registry import AlwaysFailPlugin

NO_SETUP = cast(SetupContext, None)


class State(msgspec.Struct):
    job: str = ""
    seen: list[int] = []


def next_round(writer: PluginStateWriter, reader: PluginStateReader) -> PluginStateReader:
    """Return what the next round reads."""
    return reader if writer.written is None else PluginStateReader(*writer.written)


def test_without_state_the_reader_returns_the_zero_value() -> None:
    reader = PluginStateReader()
    assert reader.get(State) == (State(), 0)
    assert reader.get_state_version() == 0


def test_the_last_put_is_read_in_the_next_round_and_not_before() -> None:
    reader, writer = PluginStateReader({"job": "old"}, 1), PluginStateWriter()
    writer.put(2, State("a"))
    writer.put(3, State("b", [1]))
    assert reader.get(State) == (State("old"), 1)
    later = next_round(writer, reader)
    assert later.get(State) == (State("b", [1]), 3)
    assert later.get_state_version() == 3


def test_a_round_that_writes_nothing_keeps_the_state() -> None:
    reader = PluginStateReader({"job": "a"}, 1)
    assert next_round(PluginStateWriter(), reader).get(State) == (State("a"), 1)


def test_reset_removes_the_state() -> None:
    reader, writer = PluginStateReader({"job": "a"}, 4), PluginStateWriter()
    writer.put(5, State("b"))
    writer.reset()
    assert writer.written == (None, 0)
    assert next_round(writer, reader).get(State) == (State(), 0)
    writer.put(6, State("c"))
    assert next_round(writer, reader).get(State) == (State("c"), 6)


def test_reads_of_a_round_are_equal_even_if_the_plugin_changes_what_it_read() -> None:
    reader = PluginStateReader({"job": "a", "seen": [1]}, 1)
    first, _ = reader.get(State)
    first.seen.append(2)
    first.job = "b"
    assert reader.get(State) == (State("a", [1]), 1)
    mapping, _ = reader.get(dict)
    mapping["seen"].append(3)
    assert reader.get(State) == (State("a", [1]), 1)


def test_what_was_put_is_a_copy() -> None:
    state, writer = State("a"), PluginStateWriter()
    writer.put(1, state)
    state.job = "b"
    assert writer.written == ({"job": "a", "seen": []}, 1)


def test_a_state_above_the_limit_is_refused_and_the_earlier_one_kept() -> None:
    writer = PluginStateWriter()
    writer.put(1, "x" * (MAX_STATE_BYTES - 2))
    with pytest.raises(StateTooLarge) as refused:
        writer.put(2, "x" * (MAX_STATE_BYTES - 1))
    assert (refused.value.size, refused.value.limit, refused.value.retryable) == (16385, 16384, False)
    assert writer.written == ("x" * 16382, 1)


def nested(levels: int) -> list[Any]:
    return functools.reduce(lambda inner, _: [inner], range(levels - 1), [0])


DEEP, DEEPER = nested(150), nested(7_000)


@pytest.mark.parametrize(
    ("version", "value"),
    [(-1, "a"), (256, "a"), (True, "a"), (1, None), (1, object()), (1, "\ud800"), (1, DEEP), (1, DEEPER)],
    ids=["negative", "large", "bool", "none", "object", "surrogate", "deep", "deeper"],
)
def test_a_state_that_cannot_be_stored_is_refused(version: int, value: object) -> None:
    writer = PluginStateWriter()
    with pytest.raises(BadState):
        writer.put(version, value)
    assert writer.written is None


def test_a_stored_state_of_another_form_names_the_field() -> None:
    with pytest.raises(BadState, match=r"version 2\) is no State.*job"):
        PluginStateReader({"job": 1}, 2).get(State)


def test_the_configuration_of_a_task_names_the_field() -> None:
    template = TaskTemplate("t1", "http", {"job": "a"})
    assert template.config_as(State) == State("a")
    with pytest.raises(BadConfig, match=r"config of the http task t1.*job"):
        TaskTemplate("t1", "http", {"job": 1}).config_as(State)


@pytest.mark.parametrize(("length", "accepted"), [(None, 50), (8, 8), (10, 10), (7, 0), (5, 0)])
async def test_generated_names_have_at_least_eight_characters(length: int | None, accepted: int) -> None:
    class Named(AlwaysFailPlugin):
        def get_properties(self) -> PluginProperties:
            return PluginProperties(generated_name_max_length=length)

    async def load(context: SetupContext) -> Plugin:
        return Named()

    entry = PluginEntry("short", ("t",), load)
    if accepted:
        assert (await load_plugin(NO_SETUP, entry)).get_properties().name_length == accepted
    else:
        with pytest.raises(BadPlugin, match=f"'short' sets generated_name_max_length to {length}"):
            await load_plugin(NO_SETUP, entry)


async def test_a_loader_that_fails_or_returns_no_plugin_is_named() -> None:
    async def fails(context: SetupContext) -> Plugin:
        raise OSError("no network")

    async def returns(context: SetupContext) -> Any:
        return "plugin"

    with pytest.raises(BadPlugin, match="'p' can't be loaded: OSError: no network"):
        await load_plugin(NO_SETUP, PluginEntry("p", ("t",), fails))
    with pytest.raises(BadPlugin, match="'p'"):
        await load_plugin(NO_SETUP, PluginEntry("p", ("t",), returns))


def test_the_names_of_resources_have_levels() -> None:
    assert ResourceNamespace("a").create_sub_namespace(ResourceNamespace("b")) == "a:b"
