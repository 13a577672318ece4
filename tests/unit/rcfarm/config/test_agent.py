"""The settings of an agent: what is refused, and what it finds out about its machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rcfarm.config import BadSettings
from rcfarm.config.agent import AgentSettings, detected_address, detected_memory
from store.schema.records import Capacity


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node": "Node_1"}, "agent.node: 'Node_1' is not a DNS name"),
        ({"labels": {"a": "b c"}}, "agent.labels: .*'b c'"),
        ({"cpu": -1}, "agent.cpu: must not be negative"),
        ({"restart_backoff": 0}, "agent.restart_backoff: must be above zero"),
        ({"port_range": (30000, 20000)}, "agent.port_range: 30000 to 20000"),
        ({"port_range": (0, 100)}, "agent.port_range: 0 to 100"),
    ],
)
def test_settings_that_make_no_sense_are_named(fields: dict[str, Any], message: str) -> None:
    """A bad value is refused with the name of its setting."""
    with pytest.raises(BadSettings, match=message):
        AgentSettings(**{"node": "node-1", **fields}).checked()


def test_capacity_is_what_is_set_or_found() -> None:
    """Values that are not set are detected."""
    found = AgentSettings(node="node-1").capacity()
    assert found.cpu == 1000 * len(os.sched_getaffinity(0))
    assert found.memory > 0
    assert found.devices == {}
    given = AgentSettings(node="node-1", cpu=500, memory=0, devices={"gpu": 2}).capacity()
    assert given == Capacity(cpu=500, memory=0, devices={"gpu": 2})


@pytest.mark.parametrize(("limit", "bounded"), [("1048576\n", True), ("max\n", False), (None, False)])
def test_memory_is_bounded_by_the_control_group(tmp_path: Path, limit: str | None, bounded: bool) -> None:
    """In a container the node offers what the container may use."""
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(limit)
    assert (detected_memory(file) == 1048576) is bounded


def test_an_address_is_always_found() -> None:
    """On a machine without a network it is loopback."""
    assert detected_address().count(".") == 3
