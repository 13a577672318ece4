"""Many steps of random lives: `python -m tests.property.hived.world.run --steps 1000000 --seed 1 --processes 1`.

A life that violates an invariant is replayed with fewer events, as far as it still does, and printed; the run then ends
with exit code 1. `--life SEED/NUMBER` replays one life.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import re
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from tests.property.hived.world.choices import Recorded, Seeded, Step, shrink
from tests.property.hived.world.events import step
from tests.property.hived.world.world import World

STEPS_OF_A_LIFE = 100


@dataclass(frozen=True)
class Failure:
    """The violation, and the shortest story found that leads to it."""

    life: str
    error: str
    story: Sequence[str]

    def __str__(self) -> str:
        lines = "\n".join(f"  {number}. {event}" for number, event in enumerate(self.story))
        return f"life {self.life} breaks\n{lines}\n{self.error}"


def live(life: str, steps: int = STEPS_OF_A_LIFE) -> Failure | None:
    """Run one life. Return None if no invariant was violated. `life` is the seed."""
    choices = Seeded(random.Random(life))
    records: list[Step] = [choices.record]
    try:
        world = World(choices)
        for _ in range(steps):
            choices.record = []
            records.append(choices.record)
            step(world, choices)
    except Exception:
        pass
    else:
        return None
    return _shortest(life, records)


def _shortest(life: str, records: list[Step]) -> Failure:
    birth, *events = records
    kind = _kind(_replayed(birth, events)[-1])
    shorter = shrink(events, lambda steps: _kind(_replayed(birth, steps)[-1]) == kind)
    *story, error = _replayed(birth, shorter)
    return Failure(life, error, story)


def _kind(error: str) -> str:
    """Return the kind of error: shortening a story must not replace one error by another."""
    found = re.findall(r"P\d+|safety|\w+Error", error.strip().rsplit("\n", 1)[-1])
    return found[0] if found else error[-20:]


def _replayed(birth: Step, steps: list[Step]) -> list[str]:
    """Replay a record and return its story; the last entry is the violation, or ""."""
    story: list[str] = []
    try:
        world = World(Recorded(birth))
        story = world.story
        for record in steps:
            step(world, Recorded(record))
    except Exception:
        return [*story, traceback.format_exc(chain=False)]
    return [*story, ""]


def run(steps: int, seed: int, processes: int = 1) -> tuple[int, Failure | None]:
    """Run at least `steps` steps. Return their number and the first failure."""
    lives = [f"{seed}/{number}" for number in range(-(-steps // STEPS_OF_A_LIFE))]
    if processes == 1:
        return _follow(map(live, lives))
    with multiprocessing.get_context("spawn").Pool(processes, silence) as pool:
        return _follow(pool.imap(live, lives))


def _follow(failures: Iterable[Failure | None]) -> tuple[int, Failure | None]:
    lived = 0
    for failure in failures:
        if failure is not None:
            return lived * STEPS_OF_A_LIFE, failure
        lived += 1
    return lived * STEPS_OF_A_LIFE, None


def silence() -> None:
    """Turn logging off: random lives log many warnings."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> int:
    parser = argparse.ArgumentParser(description="Random lives of HiveD's algorithm, checked after every step.")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--life", help="SEED/NUMBER: only this one")
    options = parser.parse_args()
    silence()
    started = time.monotonic()
    if options.life:
        failure = live(options.life)
        steps = STEPS_OF_A_LIFE
    else:
        steps, failure = run(options.steps, options.seed, options.processes)
    if failure is not None:
        print(failure)
    seconds = time.monotonic() - started
    print(f"{steps} steps of seed {options.seed} in {seconds:.0f} s: {'1 failure' if failure else 'no failure'}")
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
