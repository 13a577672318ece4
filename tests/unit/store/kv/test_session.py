"""SessionKeeper on virtual time: when it renews, when it stops trusting its lease, and how it comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from store.kv.protocol import Denied, Invalid, SessionSpec, Unavailable
from store.kv.session import END_TIMEOUT, FIRST_BACKOFF, MAX_BACKOFF, SURVIVAL, SessionKeeper
from tests.support.consul.failing_sessions import FaultyStore, running
from tests.support.waiting import SkewedClock, loop_time, until

pytestmark = [pytest.mark.looptime]

SPEC = SessionSpec("keeper-test")  # a lease of 3 s: renewed every second, fenced 2.5 s after a renewal was sent
SPEC_LEASE = 3.0
AWAY = Unavailable("the store is away")


def keeper_of(store: FaultyStore, *, clock: Callable[[], float] = loop_time, seed: int = 1) -> SessionKeeper:
    return SessionKeeper(store, SPEC, clock=clock, rng=random.Random(seed))


@asynccontextmanager
async def holding(clock: Callable[[], float] = loop_time) -> AsyncIterator[tuple[FaultyStore, SessionKeeper, str]]:
    """A keeper at work on a store, and the session that it holds."""
    store = FaultyStore()
    keeper = keeper_of(store, clock=clock)
    async with running(keeper):
        yield store, keeper, await keeper.held()


async def test_it_renews_at_a_third_of_the_lease() -> None:
    """Renewals are sent at exactly a third of the lease, and the session stays the same."""
    async with holding() as (store, keeper, session_id):
        await asyncio.sleep(600.5)
        assert keeper.session_id == session_id
        assert keeper.renewals == 600
        assert store.times("renew")[:3] == pytest.approx([1, 2, 3])


async def test_a_stopped_process_knows_at_its_first_look() -> None:
    """The process was stopped past its lease: the very first look says so, before any task or timer could run."""
    clock = SkewedClock()
    async with holding(clock) as (_, keeper, session_id):
        clock.skew = 2.4
        assert (keeper.session_id, keeper.state) == (session_id, "held")
        clock.skew = 2.5
        assert (keeper.session_id, keeper.state) == (None, "fenced")


async def test_a_lease_counts_from_when_the_renewal_was_sent() -> None:
    """A renewal that took long to be answered does not make us believe in a longer lease."""
    async with holding() as (store, keeper, session_id):
        store.answer_delay = 0.75  # the renewal sent at 1.0 is answered at 1.75
        await asyncio.sleep(1.8)
        store.fault = AWAY
        await keeper.lost(session_id)
        assert loop_time() == pytest.approx(1.0 + 2.5)
        assert store.has_session(session_id), "the holder must be sure before the store is"


async def test_waiters_wake_exactly_when_the_lease_can_no_longer_be_trusted() -> None:
    """The store goes silent: everyone who waits for the loss wakes at the fence, not at the next poll."""
    async with holding() as (store, keeper, session_id):
        await asyncio.sleep(10.2)
        store.fault = AWAY
        woken = await asyncio.gather(*(_lost_at(keeper, session_id) for _ in range(20)))
        assert woken == pytest.approx([12.5] * 20)
        assert keeper.state == "fenced"


async def _lost_at(keeper: SessionKeeper, session_id: str) -> float:
    await keeper.lost(session_id)
    return loop_time()


async def test_a_renewal_that_never_answers_does_not_outlast_the_fence() -> None:
    """A dead connection: each attempt is given up in time for another, and the fence does not wait for any of them."""
    async with holding() as (store, keeper, session_id):
        store.request_delay = 3600
        await keeper.lost(session_id)
        assert loop_time() == pytest.approx(2.5)
        assert len(store.times("renew")) == 2


async def test_the_store_ending_the_session_is_a_loss_at_once() -> None:
    """An operator destroyed the session: noticed with the next renewal, and a new session is there right away."""
    async with holding() as (store, keeper, session_id):
        store.end_session(session_id)
        await keeper.lost(session_id)
        assert loop_time() == pytest.approx(1.0)
        assert await keeper.held() != session_id
        assert loop_time() == pytest.approx(1.0)
        assert keeper.losses == 1


async def test_a_blip_loses_nothing() -> None:
    """The store is unavailable for less than the lease, again and again: the session continues, no loss is reported,
    and after each renewal the back-off begins with its first pause."""
    async with holding() as (store, keeper, session_id):
        lost = asyncio.create_task(keeper.lost(session_id))
        for _ in range(6):
            before = len(store.times("renew"))
            store.fault = AWAY
            await asyncio.sleep(2.0)
            assert keeper.last_error == "the store is away"
            renewed, first, second = [0.0, *store.times("renew")][before : before + 3]
            assert first - renewed == pytest.approx(SPEC_LEASE / 3)
            assert second - first <= FIRST_BACKOFF
            store.fault = None
            await until(lambda: not keeper.last_error, every=0.001)
        assert keeper.session_id == session_id
        assert not lost.done()
        lost.cancel()


async def test_a_session_that_survived_is_taken_up_again() -> None:
    """We had to stop trusting the lease, but the store kept it: the same id is held again, and its locks are ours."""
    clock = SkewedClock()
    async with holding(clock) as (_, keeper, session_id):
        clock.skew = 5.0
        assert keeper.session_id is None
        assert await keeper.held() == session_id
        assert keeper.losses == 0


@pytest.mark.parametrize("outage", [5.0, 60.0, 7200.0])
async def test_after_an_outage_it_is_back_within_the_longest_backoff(outage: float) -> None:
    """However long the store was away, a session is held again within MAX_BACKOFF, and the store was not hammered."""
    async with holding() as (store, keeper, first):
        store.fault = AWAY
        await asyncio.sleep(outage)
        attempts = len(store.times("renew"))
        assert attempts <= 20 + outage / (MAX_BACKOFF / 2)
        store.fault = None
        back = loop_time()
        assert await keeper.held() != first
        assert loop_time() - back <= MAX_BACKOFF


@pytest.mark.parametrize("answers_late", [False, True], ids=["refused", "silent"])
async def test_a_session_that_may_survive_is_renewed_at_the_pace_of_its_lease(answers_late: bool) -> None:
    """While Consul elects a leader, a check that is passed in time keeps its session; the keeper goes on passing it."""
    async with holding() as (store, _, _):
        await asyncio.sleep(10.2)
        if answers_late:
            store.request_delay = 3600
        else:
            store.fault = AWAY
        await asyncio.sleep(SURVIVAL)
        sent = store.times("renew")
        longest = max(after - before for before, after in pairwise(sent))
        assert longest < SPEC_LEASE - 1.0, "a busy machine needs some of the lease, too"
        assert len(sent) < 10 + 30


async def test_backoff_is_jittered() -> None:
    """Two keepers that lose the store together don't come back in step."""
    attempts = []
    for seed in (1, 2):
        store = FaultyStore()
        store.fault = AWAY
        async with running(keeper_of(store, seed=seed)):
            await asyncio.sleep(60)
        attempts.append([at - store.times("create")[0] for at in store.times("create")])
    assert all(a != pytest.approx(b) for a, b in zip(attempts[0][1:], attempts[1][1:], strict=False))


@pytest.mark.parametrize("error", [AWAY, Denied("session:write is missing")])
async def test_a_store_that_refuses_at_the_start_is_tried_until_it_answers(error: Unavailable | Denied) -> None:
    """Down, or not permitted yet: the keeper says why, and holds a session soon after that has changed."""
    store = FaultyStore()
    store.fault = error
    keeper = keeper_of(store)
    async with running(keeper):
        await asyncio.sleep(30)
        assert keeper.session_id is None
        assert keeper.state == "seeking"
        assert keeper.last_error == str(error)
        store.fault = None
        await keeper.held()
        assert loop_time() <= 30 + MAX_BACKOFF
        assert keeper.last_error == ""


async def test_an_impossible_session_ends_the_keeper() -> None:
    """A spec that the store can never take is an error for the caller of `run`, not an endless retry."""
    store = FaultyStore()
    store.fault = Invalid("TTL must be between 10s and 24h")
    with pytest.raises(Invalid, match="between 10s and 24h"):
        await keeper_of(store).run()


@pytest.mark.parametrize(("delay", "hurried"), [(0.5, False), (1.0, True), (3600.0, False)])
async def test_an_orderly_exit_destroys_the_session(delay: float, hurried: bool) -> None:
    """On cancellation the session is no longer usable, then it is destroyed, so its locks are free at once; also when
    someone in a hurry cancels again. When the store does not answer, the exit takes END_TIMEOUT."""
    store = FaultyStore()
    keeper = keeper_of(store)
    async with running(keeper) as task:
        session_id = await keeper.held()
        lost = asyncio.create_task(keeper.lost(session_id))
        store.request_delay, left = delay, loop_time()
        task.cancel()
        await lost
        assert keeper.session_id is None
        assert store.has_session(session_id), "waiters hear of the end before the store does"
        if hurried:
            await asyncio.sleep(delay / 2)
            task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert store.has_session(session_id) is (delay > END_TIMEOUT)
    assert loop_time() - left == pytest.approx(min(delay, END_TIMEOUT))


async def test_a_session_that_came_and_went_while_a_holder_was_stopping_is_skipped() -> None:
    """Session 2 appears and dies while the work done under session 1 is still stopping: the work goes on under 3."""
    store = FaultyStore()
    keeper = keeper_of(store)
    worked_under: list[str] = []

    async def work() -> None:
        while True:
            session_id = await keeper.held()
            worked_under.append(session_id)
            await keeper.lost(session_id)
            await asyncio.sleep(10)  # stopping takes its time

    async with running(keeper):
        worker = asyncio.create_task(work())
        first = await keeper.held()
        store.end_session(first)
        await keeper.lost(first)
        second = await keeper.held()
        await asyncio.sleep(2)
        store.end_session(second)
        await keeper.lost(second)
        third = await keeper.held()
        await asyncio.sleep(10)
        worker.cancel()
    assert len({first, second, third}) == 3
    assert worked_under == [first, third]


@pytest.mark.parametrize(
    ("spec", "timings", "complaint"),
    [
        (SPEC, {"renew_interval": 2.5, "margin": 0.5}, r"interval \(2.5 s\) plus margin \(0.5 s\).*lease \(3 s"),
        (SPEC, {"margin": 2.0}, r"plus margin \(2 s\)"),
        (SPEC, {"margin": 0.0}, "must be above 0"),
        (SPEC, {"renew_interval": -1.0}, "must be above 0"),
        (SessionSpec("nothing", ttl=0.0, check_ttl=None), {}, "must be above 0"),
    ],
)
def test_timings_that_cannot_work_are_refused(spec: SessionSpec, timings: dict[str, Any], complaint: str) -> None:
    """Timings that would give the session up between renewals are an error at construction, naming the numbers."""
    with pytest.raises(ValueError, match=complaint):
        SessionKeeper(FaultyStore(), spec, **timings)
