"""Random rollouts on a virtual fleet; `python -m tests.fuzz_rollout` plays any number of them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.farm.virtual_fleet import bad_version, interrupted, life

seeds = st.integers(0, 2**32).map(random.Random)


@given(seeds)
def test_no_life_breaks_a_promise(rng: random.Random) -> None:
    """Enough pods count whatever happens; canaries are no more than asked for; every rollout ends, or says why not."""
    life(rng)


@given(seeds)
def test_a_bad_version_touches_few_pods_and_is_taken_back(rng: random.Random) -> None:
    bad_version(rng)


@given(seeds)
def test_a_farm_that_dies_restarts_nothing_twice(rng: random.Random) -> None:
    interrupted(rng)
