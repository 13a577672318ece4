"""Ledgers of several engines over one store that loses answers, while engines crash."""

from __future__ import annotations

import pytest

from tests.fuzz_quota import World


@pytest.mark.parametrize("seed", range(3))
async def test_no_limit_is_exceeded_and_no_unit_leaks(seed: int) -> None:
    """The witness beside the store checks each write: limits and caps hold, a token has one grant, every execution is
    granted, and nothing is left when all have ended."""
    found = await World(seed, engines=2, executions=25, faults=0.05).run(400, crash_every=100)
    assert found["crashes"] == 4
    assert found["lost_answers"]
    assert found["fewest_rounds"]
