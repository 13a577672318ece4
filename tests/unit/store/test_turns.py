"""Turns of the event loop: much work does not block other tasks."""

from __future__ import annotations

import asyncio
import time

from store.timing import SLICE, give_way


async def _work(steps: int, done: list[int]) -> None:
    for step in range(steps):
        await give_way()
        until = time.thread_time() + SLICE / 10
        while time.thread_time() < until:
            pass
        done.append(step)


async def test_others_run_between_the_steps() -> None:
    """A hundred workers share a slice: whatever else is ready runs after it, not after all of them."""
    done: list[int] = []
    workers = [asyncio.create_task(_work(10, done)) for _ in range(100)]
    await asyncio.sleep(0)
    most = last = 0
    while not all(worker.done() for worker in workers):
        await asyncio.sleep(0)
        most, last = max(most, len(done) - last), len(done)
    assert len(done) == 1000
    assert most <= 21, "steps in one turn: about ten of them fill a slice"


async def test_a_young_turn_goes_on() -> None:
    """Work that is done within the slice is not put off."""
    done: list[int] = []
    other = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(other.set_result, None)
    for step in range(20):
        await give_way()
        done.append(step)
    assert not other.done()
    await other
