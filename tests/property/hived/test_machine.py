"""HiveD's algorithm under random lives of random clusters: P1 to P18 of docs/pages/invariants.md hold.

Hypothesis shrinks what it finds. Lives of fixed seeds cover more in the same time; a failed one is replayed, shorter.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.property.hived.world.choices import Drawn
from tests.property.hived.world.events import EVENTS, Event
from tests.property.hived.world.run import run
from tests.property.hived.world.world import World


class HivedMachine(RuleBasedStateMachine):
    """Every event is a rule; a more frequent one is several rules."""

    world: World

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.world = World(Drawn(data))


def _rule(event: Event) -> Any:
    def happens(self: HivedMachine, data: st.DataObject) -> None:
        event(self.world, Drawn(data))

    return rule(data=st.data())(happens)


for _event, _weight in EVENTS.items():
    for _number in range(-(-_weight // 4)):
        setattr(HivedMachine, f"{_event.__name__}_{_number}", _rule(_event))

TestHivedMachine = HivedMachine.TestCase
TestHivedMachine.settings = settings(
    max_examples=50, stateful_step_count=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(20))
def test_no_event_violates_an_invariant(seed: int) -> None:
    """P1 to P18: ten clusters live through 100 random events each, with a check of all invariants after each event."""
    _, failure = run(1000, seed)
    assert failure is None, failure
