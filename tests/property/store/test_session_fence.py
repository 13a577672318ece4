"""NeverActsOnAnEndedLease: whatever the network does, a session that the keeper shows is alive in the store."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

import looptime
from hypothesis import given, settings
from hypothesis import strategies as st

from store.kv.protocol import Denied, SessionSpec, Unavailable
from store.kv.session import MAX_BACKOFF, SessionKeeper
from tests.support.consul.failing_sessions import FaultyStore
from tests.support.waiting import background

LOOK_EVERY = 0.1


class Weather(NamedTuple):
    """Network conditions for `duration` seconds: calls fail, or are delayed in either direction."""

    duration: float
    fault: str
    request_delay: float
    answer_delay: float


seconds = st.floats(0, 8).map(lambda value: round(value, 2))
weathers = st.lists(
    st.builds(Weather, seconds, st.sampled_from(["", "", "away", "denied", "destroyed"]), seconds, seconds), max_size=12
)
timings = st.sampled_from([(3.0, None, None), (3.0, 1.5, 0.2), (10.0, None, None), (0.5, 0.1, 0.05)])


@given(weathers, timings, st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_a_shown_session_is_alive(
    weather: list[Weather], timing: tuple[float, float | None, float | None], seed: int
) -> None:
    """At no moment does the keeper show a session that the store has expired; afterwards it soon holds one again."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(_live_through(weather, timing, seed))


async def _live_through(weather: list[Weather], timing: tuple[float, float | None, float | None], seed: int) -> None:
    lease, interval, margin = timing
    store, loop = FaultyStore(), asyncio.get_running_loop()
    keeper = SessionKeeper(
        store,
        SessionSpec("property", check_ttl=lease),
        clock=loop.time,
        rng=random.Random(seed),
        renew_interval=interval,
        margin=margin,
    )
    destroyed: set[str] = set()  # by another client: the fence in each transaction answers for these, not the lease
    async with background(keeper.run()):
        for spell in weather:
            _set_in(store, spell, keeper, destroyed)
            end = loop.time() + spell.duration
            while loop.time() < end:
                shown = keeper.session_id
                assert shown is None or shown in destroyed or store.has_session(shown)
                await asyncio.sleep(LOOK_EVERY)
        store.fault, store.request_delay, store.answer_delay = None, 0.0, 0.0
        async with asyncio.timeout(8 + 8 + 8 + MAX_BACKOFF):  # a call still under way, then the back-off
            while (held := await keeper.held()) in destroyed:
                await keeper.lost(held)
    assert not store.has_session(held)


def _set_in(store: FaultyStore, spell: Weather, keeper: SessionKeeper, destroyed: set[str]) -> None:
    store.fault = {"away": Unavailable("away"), "denied": Denied("denied")}.get(spell.fault)
    store.request_delay, store.answer_delay = spell.request_delay, spell.answer_delay
    if spell.fault == "destroyed" and keeper.session_id is not None:
        destroyed.add(keeper.session_id)
        store.end_session(keeper.session_id)
