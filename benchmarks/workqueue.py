"""Cycles of add, get and done per second through one work queue, on one core.

`python -m benchmarks.workqueue [--cycles N]` prints one JSON line. Three loads: keys handed over without waiting, as a
busy worker sees them; a producer and four workers taking turns on the loop; and the first load with metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from controllers.loop.workqueue import ShutDown, WorkQueue
from rcfarm.telemetry.prometheus import FarmMetrics


async def in_line(queue: WorkQueue[int], cycles: int) -> None:
    for number in range(cycles):
        queue.add(number & 1023)
        queue.done(await queue.get())


async def with_workers(queue: WorkQueue[int], cycles: int) -> None:
    async def worker() -> None:
        while True:
            try:
                key = await queue.get()
            except ShutDown:
                return
            queue.done(key)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(worker())
        for number in range(cycles):
            queue.add(number)
            if number % 16 == 0:
                await asyncio.sleep(0)
        await queue.shut_down_with_drain()


def rate(load: Callable[[WorkQueue[int], int], Awaitable[None]], queue: WorkQueue[int], cycles: int) -> int:
    async def run() -> float:
        start = time.perf_counter()
        await load(queue, cycles)
        return time.perf_counter() - start

    return round(cycles / asyncio.run(run()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=500_000)
    cycles = parser.parse_args().cycles
    result = {
        "benchmark": "workqueue",
        "cycles": cycles,
        "in_line_per_second": rate(in_line, WorkQueue(), cycles),
        "with_workers_per_second": rate(with_workers, WorkQueue(), cycles),
        "measured_per_second": rate(in_line, WorkQueue("bench", metrics=FarmMetrics().workqueue), cycles),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
