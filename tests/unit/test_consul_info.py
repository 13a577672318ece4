"""Reading what a Consul agent says of itself."""

from __future__ import annotations

import pytest

from store.consul_info import seconds


@pytest.mark.parametrize(
    ("text", "value"), [("0s", 0), ("10s", 10), ("1m30s", 90), ("1h0m0s", 3600), ("250ms", 0.25), ("1.5s", 1.5)]
)
def test_go_durations_are_seconds(text: str, value: float) -> None:
    """As Go prints them, in whatever units."""
    assert seconds(text) == pytest.approx(value)
