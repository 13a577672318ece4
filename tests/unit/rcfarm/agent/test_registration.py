"""The node's spec has two authors: the agent writes only what it changed itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcfarm.agent.registration import merged_spec
from rcfarm.agent.state import NodeRecord
from store.schema.records import Capacity, NodeSpec

LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("123"), max_size=3)


def record(labels: dict[str, str] | None = None, *, cpu: int = 4000) -> NodeRecord:
    return NodeRecord(labels=labels or {}, cpu=cpu, memory=1, devices={})


def spec(labels: dict[str, str] | None = None, *, cpu: int = 4000, schedulable: bool = True) -> NodeSpec:
    return NodeSpec(name="n", labels=labels or {}, capacity=Capacity(cpu=cpu, memory=1), schedulable=schedulable)


@pytest.mark.parametrize(
    ("live", "own", "applied", "expected"),
    [
        (None, record({"pool": "web"}), NodeRecord(), spec({"pool": "web"})),
        (None, record({"pool": "web"}), record({"pool": "web"}), spec({"pool": "web"})),
        (spec({"rack": "7"}), record({"pool": "web"}), NodeRecord(), spec({"pool": "web", "rack": "7"})),
        (spec({"pool": "db"}), record({"pool": "web"}), record({"pool": "web"}), spec({"pool": "db"})),
        (spec(), record({"pool": "web"}), record({"pool": "web"}), spec()),
        (spec({"pool": "db"}), record({"pool": "api"}), record({"pool": "web"}), spec({"pool": "api"})),
        (spec({"pool": "web"}), record(), record({"pool": "web"}), spec()),
        (spec({"pool": "db"}), record(), record({"pool": "web"}), spec({"pool": "db"})),
        (spec(cpu=1), record(), record(), spec(cpu=1)),
        (spec(cpu=1), record(cpu=8000), record(), spec(cpu=8000)),
        (spec(schedulable=False), record(cpu=8000), record(), spec(cpu=8000, schedulable=False)),
    ],
)
def test_a_change_of_settings_is_merged(
    live: NodeSpec | None, own: NodeRecord, applied: NodeRecord, expected: NodeSpec
) -> None:
    """A setting that changed is written; what an operator wrote otherwise stays."""
    assert merged_spec(live, "n", own, applied) == expected


@given(live=LABELS, own=LABELS, applied=LABELS)
def test_merging_again_changes_nothing(live: dict[str, str], own: dict[str, str], applied: dict[str, str]) -> None:
    """Once applied, settings leave the spec alone, so that agent and operator never fight."""
    merged = merged_spec(spec(live), "n", record(own), record(applied))
    assert merged_spec(merged, "n", record(own), record(own)) == merged
