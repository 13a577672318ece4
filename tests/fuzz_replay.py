"""Log and replay many decisions: `python -m tests.fuzz_replay --decisions 100000`.

The lives of `tests.fuzz_rollout` (RCs under updates, failures, requests, deaths of nodes, take-overs, scaling), each
decision of which goes through the files of a real decision log, in batches of random size, and rollouts of hundreds of
pods among them. Then every decision is read back, compared byte by byte with what was logged, decided once more, and
compared again. A line of JSON reports the result; the exit code is 1 if one differs, or if one takes more than 1 KB in
the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from rcfarm.farm.decision_log import DecisionLog
from rcfarm.farm.decisions import canonical
from rcfarm.farm.planner import Plan, PlanInput, plan
from rcfarm.farm.replay import read, replayed, segments
from tests.support.farm import virtual_fleet

RCS = 50  # names that the lives share
LARGE_EVERY = 10  # lives


class Noting:
    """In place of the planner: logs each decision, and keeps its digest. `rc`: the name of the RC that lives now."""

    def __init__(self, log: DecisionLog) -> None:
        self.log, self.rc, self.digests, self.plain = log, "", list[bytes](), 0

    def plan(self, given: PlanInput) -> Plan:
        decision = plan(given)
        raw = canonical((given, decision))
        self.digests.append(hashlib.sha256(raw).digest())
        self.plain += len(raw)
        recorded = self.log.record(self.rc, given, decision)
        assert recorded
        self.log.written(recorded, len(self.digests))
        return decision


def large(rng: random.Random) -> None:
    """Roll a version out to hundreds of pods, while nodes die."""
    pods = rng.randint(100, 400)
    made = virtual_fleet.fleet(pods + 20, pods, canary="1", policy_max="10%", min_healthy_time=1.0)
    made.update("good-1")
    for _ in range(5):
        made.run(2.0)
        made.nodes[rng.choice(list(made.nodes))].died = made.now
    made.run(20.0)


async def write(noting: Noting, wanted: int, seed: int) -> None:
    """Live until there are that many decisions."""
    rng = random.Random(seed)
    life = seed
    while len(noting.digests) < wanted:
        noting.rc = f"web-{life % RCS}"
        (large if life % LARGE_EVERY == 7 else virtual_fleet.life)(random.Random(life))
        life += 1
        if rng.random() < 0.3:
            await noting.log.flush()
    await noting.log.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=100_000, help="at least")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        room = arguments.decisions * 512  # for all of them, in several segments
        log = DecisionLog(Path(directory), "farm-a", "fuzz", max_size=room, max_age=1e9)
        noting = Noting(log)
        virtual_fleet.plan = noting.plan  # type: ignore[attr-defined]  # its own name for the planner's function
        asyncio.run(write(noting, arguments.decisions, arguments.seed))
        files = segments(Path(directory))
        size = sum(path.stat().st_size for path in files)
        began, count, errors = time.perf_counter(), 0, list[str]()
        for path in files:
            for logged in read(path, errors.append):
                again = replayed(logged)
                restored = hashlib.sha256(canonical((again.given, again.decision))).digest()
                if again.differs or logged.index != count + 1 or restored != noting.digests[count]:
                    errors.append(f"decision {count}, {logged.id}: {dict(again.differs)}")
                count += 1
        seconds = time.perf_counter() - began
    if count != len(noting.digests) or log.unrecorded:
        errors.append(f"{count} of {len(noting.digests)} decisions came back")
    figures = {"decisions": count, "different": len(errors), "bytes_per_decision": round(size / count)}
    figures |= {"plain_bytes": round(noting.plain / count), "segments": len(files)}
    print(json.dumps(figures | {"replayed_per_second": round(count / seconds)}))
    for error in errors[:5]:
        print(error, file=sys.stderr)
    return 1 if errors or size / count > 1024 else 0


if __name__ == "__main__":
    sys.exit(main())
