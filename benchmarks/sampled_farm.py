"""`rcfarm farm` that also records how late its event loop is: `python -m benchmarks.sampled_farm FILE [OPTION …]`.

Every 10 ms a timer is due. FILE gets one line of JSON per second: its start (`time.time()`), and for each timer how
late it was and how much processor time the loop's thread used since the previous timer, both in milliseconds. The
second figure distinguishes a blocked loop from a machine that was busy with other processes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from rcfarm.cli.main import run
from rcfarm.farm.farm import Farm

PERIOD = 0.01  # seconds between two timers
FLUSH = 1.0  # seconds per line


async def sample(output: TextIO) -> None:
    """Write lines until cancelled."""
    began, late, used = time.time(), list[float](), list[float]()
    cpu = time.thread_time()
    while True:
        due = time.perf_counter() + PERIOD
        await asyncio.sleep(PERIOD)
        now, before, cpu = time.perf_counter(), cpu, time.thread_time()
        late.append(round(max(0.0, now - due) * 1000, 1))
        used.append(round((cpu - before) * 1000, 1))
        if time.time() - began >= FLUSH:
            print(json.dumps({"at": began, "late": late, "used": used}), file=output, flush=True)
            began, late, used = time.time(), [], []


def main() -> None:
    """Run the farm's command with the remaining arguments, sampled from its start."""
    start = Farm.start
    with Path(sys.argv.pop(1)).open("a") as output:

        async def sampled(self: Farm) -> None:
            sampling = asyncio.create_task(sample(output))
            try:
                await start(self)
            finally:
                sampling.cancel()

        Farm.start = sampled  # type: ignore[assignment, method-assign]  # the program itself is unchanged
        sys.argv.insert(1, "farm")
        run()


if __name__ == "__main__":
    main()
