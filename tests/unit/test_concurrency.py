"""Many calls at once: bounded, complete, and slow at first."""

from __future__ import annotations

import asyncio

import pytest

from controllers.concurrency import attempt_all, slow_start

pytestmark = pytest.mark.looptime


class Calls:
    """Work of a second each; remembers how much of it was in flight."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.now, self.most, self.ended = bad, 0, 0, 0
        self.batches: dict[float, list[int]] = {}

    async def work(self, item: int) -> int:
        self.batches.setdefault(round(asyncio.get_running_loop().time(), 3), []).append(item)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.now -= 1
            self.ended += 1
        if item in self.bad:
            raise LookupError(item)
        return item * 10

    async def succeeds(self, item: int) -> bool:
        try:
            await self.work(item)
        except LookupError:
            return False
        return True


async def test_results_come_in_the_order_of_the_items() -> None:
    """An error of the listed kind is the result of its item, and only of that."""
    results = await attempt_all([1, 2, 3], Calls(2).work, errors=(LookupError,))

    assert results[0] == 10
    assert isinstance(results[1], LookupError)
    assert results[2] == 30


async def test_no_more_than_the_limit_at_once() -> None:
    """Ten calls of a second, three at a time, take four seconds."""
    calls = Calls()

    await attempt_all(list(range(10)), calls.work, errors=(), limit=3)

    assert calls.most == 3
    assert asyncio.get_running_loop().time() == pytest.approx(4.0)


async def test_an_unexpected_error_ends_the_others() -> None:
    """Nothing is left running behind the caller's back."""
    calls = Calls(0)

    async def work(item: int) -> int:
        return await calls.work(item) if item else await asyncio.wait_for(calls.work(item), 5)

    with pytest.raises(ExceptionGroup):
        await attempt_all([0, 1, 2], work, errors=())
    assert calls.now == 0


async def test_nothing_to_do_is_done_at_once() -> None:
    """An empty list costs no task and no time."""
    assert await attempt_all([], Calls().work, errors=()) == []
    assert await slow_start([], Calls().succeeds) == []


async def test_slow_start_doubles() -> None:
    """One, two, four, and the rest."""
    calls = Calls()

    assert await slow_start(list(range(9)), calls.succeeds) == []
    assert [len(batch) for batch in calls.batches.values()] == [1, 2, 4, 2]


@pytest.mark.parametrize(("bad", "tried"), [(0, 1), (1, 3), (2, 3), (5, 7)])
async def test_slow_start_stops_after_the_first_batch_with_a_failure(bad: int, tried: int) -> None:
    """Its batch is finished, the rest is handed back: a quota costs few requests, however large the job."""
    calls = Calls(bad)

    left = await slow_start(list(range(100)), calls.succeeds)

    assert list(left) == list(range(tried, 100))
    assert calls.ended == tried
