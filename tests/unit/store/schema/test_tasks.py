"""The records of tasks: what is refused, and how that is said."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from store.kv.protocol import BadRecord
from store.schema.records import decode, encode
from store.schema.tasks import TaskSpec, TaskState


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"retries": -1}, "retries"),
        ({"quotas": {"gpu": 0}}, "quotas"),
        ({"weight": 0}, "weight"),
        ({"active_deadline": -5}, "active_deadline"),
        ({"depends_on": "other"}, "depends_on"),
        ({"abort": "now"}, "abort"),
    ],
)
def test_a_bad_spec_names_the_key_and_the_field(change: dict[str, Any], says: str) -> None:
    """An operator finds the mistake from the message alone."""
    text = msgspec.json.encode({"id": "a", "type": "process", **change})
    with pytest.raises(BadRecord, match=rf"tasks/00/a/spec.*{says}"):
        decode(TaskSpec, "tasks/00/a/spec", text)


def test_a_phase_that_does_not_exist_is_refused() -> None:
    """A state of a newer program is an error that names the field; nothing is guessed."""
    with pytest.raises(BadRecord, match="phase"):
        decode(TaskState, "k", encode(TaskState()).replace(b"PhaseUndefined", b"PhaseLost"))
