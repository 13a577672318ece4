"""`python -m tests.chaos`: play rounds of chaos, and report what was found.

A line for each round, and a line of JSON in the end. Exit codes: 0 no violation, 1 violations, 3 this machine can't run
it, 130 interrupted. A round is played again, alone on a fresh fleet, by `--seed SEED --first NUMBER --rounds 1`. The
logs of all programs are kept when something was found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.chaos import network
from tests.chaos.drill import Drill, Options, Round
from tests.chaos.faults import CATALOGUE, LOCAL_AGENTS, REWINDS
from tests.chaos.site import FARMS, NODES, SERVERS, Site
from tests.support.consul.server import consul_binary

CANNOT_RUN = 3
INTERRUPTED = 130


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="number of the first round")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no round after that time")
    parser.add_argument("--give-up", type=float, default=180.0, help="seconds to wait for convergence, at most")
    parser.add_argument("--rewinds", type=float, default=0.3, help="share of the rounds that rewind Consul's data")
    parser.add_argument("--only", nargs="+", default=[], choices=[*CATALOGUE, *LOCAL_AGENTS, *REWINDS], metavar="FAULT")
    parser.add_argument("--local-agents", action="store_true", help="a Consul agent beside each farm and node agent")
    parser.add_argument("--directory", type=Path, help="where logs and data go, and stay")
    return parser.parse_args()


async def run(options: argparse.Namespace, directory: Path, consul: Path) -> int:
    """Play the rounds. Return the exit code."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began, rounds = time.monotonic(), list[Round]()
    net = network.Network([*SERVERS, *FARMS, *NODES])
    site = Site(directory, net, consul, local_agents=options.local_agents)
    drill = Drill(site, Options(options.seed, options.only, options.rewinds, options.give_up))
    try:
        await net.start()
        async with drill.running():
            for number in range(options.first, options.first + options.rounds):
                if time.monotonic() - began > options.seconds:
                    break
                rounds.append(await drill.play(number))
                report(options.seed, rounds[-1], directory)
                if rounds[-1].converged is None:
                    break
    finally:
        await net.close()
        summarize(options.seed, rounds, drill)
    return 1 if drill.checker.violations else 0


def report(seed: int, played: Round, directory: Path) -> None:
    """Print one round."""
    faults = " + ".join([*([played.rewind] if played.rewind else []), *played.faults])
    converged = "not converged" if played.converged is None else f"converged in {played.converged:.1f} s"
    checked = f"{played.snapshots} snapshots, {played.events} events of the audit log"
    print(f"round {played.number} of seed {seed}: {faults}; {converged}; {checked}; {played.seconds:.0f} s", flush=True)
    for violation in played.violations:
        print(f"  VIOLATION {violation}", flush=True)
    if played.violations:
        print(f"  again: python -m tests.chaos --seed {seed} --first {played.number} --rounds 1; logs: {directory}")


def summarize(seed: int, rounds: list[Round], drill: Drill) -> None:
    """Print the line of JSON."""
    times = sorted(played.converged for played in rounds if played.converged is not None)
    print(
        json.dumps(
            {
                "seed": seed,
                "rounds": len(rounds),
                "faults": sum(len(played.faults) + bool(played.rewind) for played in rounds),
                "rewinds": sum(bool(played.rewind) for played in rounds),
                "snapshots": drill.checker.snapshots,
                "events": len(drill.checker.events),
                "operations": dict(drill.operators.done.most_common()),
                "converged_p50": round(statistics.median(times), 1) if times else None,
                "converged_max": round(times[-1], 1) if times else None,
                "replayed": drill.replayed,
                "violations": len(drill.checker.violations),
            }
        ),
        flush=True,
    )


def main() -> int:
    options = arguments()
    try:
        consul = consul_binary()
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        print(error, file=sys.stderr)
        return CANNOT_RUN
    if reason := network.missing():
        print(reason, file=sys.stderr)
        return CANNOT_RUN
    network.sweep()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="rcfarm-chaos-"))
    try:
        code = asyncio.run(run(options, directory, consul.resolve()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"interrupted; the logs are in {directory}", file=sys.stderr)
        return INTERRUPTED
    if code == 0 and options.directory is None:
        shutil.rmtree(directory)
    return code


if __name__ == "__main__":
    sys.exit(main())
