"""Roll out many random changes: `python -m tests.fuzz_rollout --steps 1000000`.

Each life is one RC on a virtual fleet: versions that pass, fail, crash, kill their node or can't be started, one after
the other and on top of each other, while nodes die and return, farms take over, and operators interfere. Every plan is
checked. Then lives with a bad version alone, which must be taken back in time, daemon sets with a version that kills
its nodes or without the labels that they had, farms that are killed, and lives without any failure, which must be as
the preview has shown; and hand-overs between two RCs. A line of JSON reports the result; the exit code is 1 if a
promise was broken, and the seed is shown.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter

from tests.support.farm import virtual_handover
from tests.support.farm.virtual_fleet import as_shown, bad_version, interrupted, killing_update, life, wiped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="plans, at least")
    parser.add_argument("--bad", type=int, default=1_000, help="rollouts of bad versions, and wipes of labels")
    parser.add_argument("--kills", type=int, default=1_000, help="farms that are killed in the middle of a rollout")
    parser.add_argument("--plans", type=int, default=200, help="rollouts that are compared with their preview")
    parser.add_argument("--handovers", type=int, default=200, help="hand-overs between two RCs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    steps, kills, seed = 0, 0, arguments.seed
    ends: Counter[str] = Counter()
    try:
        while steps < arguments.steps:
            fleet = life(random.Random(seed))
            steps, seed = steps + fleet.plans, seed + 1
            ends[fleet.rollout.state if fleet.rollout else "none"] += 1
        for seed in range(arguments.seed, arguments.seed + arguments.bad):
            bad_version(random.Random(seed))
            killing_update(random.Random(seed))
            wiped(random.Random(seed))
        seed = arguments.seed
        while kills < arguments.kills:
            kills, seed = kills + interrupted(random.Random(seed)), seed + 1
        for seed in range(arguments.seed, arguments.seed + arguments.plans):
            as_shown(random.Random(seed))
        for seed in range(arguments.seed, arguments.seed + arguments.handovers):
            virtual_handover.life(random.Random(seed))
    except AssertionError as error:
        print(f"seed {seed}: {error}", file=sys.stderr)
        return 1
    counts = {"steps": steps, "bad versions": arguments.bad, "kills": kills, "plans": arguments.plans}
    counts["handovers"] = arguments.handovers
    print(json.dumps(counts | {"ends": dict(ends)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
