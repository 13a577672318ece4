"""What is left of a damaged spec is always a spec that can be stored and read."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rcfarm.operations.tasks import salvaged
from store.schema.records import decode, encode
from store.schema.tasks import TaskSpec, TaskState

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_DAMAGED = st.dictionaries(st.sampled_from(TaskSpec.__struct_fields__) | st.text(max_size=8), _VALUES, max_size=12)


@given(
    _DAMAGED.map(msgspec.json.encode) | st.binary(max_size=200), st.none() | st.just(TaskState(plugin="job", rerun=2))
)
def test_the_rest_of_a_spec_can_be_stored(raw: bytes, state: TaskState | None) -> None:
    spec = salvaged("broken", raw, state)
    assert decode(TaskSpec, "key", encode(spec)) == spec
    assert (spec.id, spec.abort) == ("broken", None)
    assert state is None or (spec.plugin, spec.rerun >= 2) != ("", False)


@given(
    st.builds(
        TaskSpec,
        id=st.just("broken"),
        type=st.text(max_size=9),
        priority=st.integers(-9, 9),
        labels=st.just({"a": "b"}),
    ),
    st.sampled_from(["retries", "weight", "inputs"]),
)
def test_one_bad_field_costs_only_that_field(spec: TaskSpec, field: str) -> None:
    raw = msgspec.json.encode(msgspec.json.decode(encode(spec)) | {field: "bad"})
    blank = getattr(TaskSpec(id="", type=""), field)
    assert salvaged("broken", raw, None) == msgspec.structs.replace(spec, **{field: blank})
