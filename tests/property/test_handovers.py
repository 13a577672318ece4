"""Random hand-overs between two RCs on a virtual fleet; `python -m tests.fuzz_rollout` plays any number of them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.farm.virtual_handover import life

seeds = st.integers(0, 2**32).map(random.Random)


@given(seeds)
def test_the_minimum_works_whatever_happens(rng: random.Random) -> None:
    """Never does a pod pass where fewer than the minimum would then work, also of those that can't be seen to work; a
    good version gets everywhere in the end, and no pod passes twice."""
    life(rng)
