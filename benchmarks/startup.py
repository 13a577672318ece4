"""Start of the command line: help and completion (claimed: 0.15 s), and commands (claimed: 0.25 s).

`python -m benchmarks.startup [--runs N] [--all]` prints a JSON line for each: the median and the best run, and the
median of processor time, which a busy machine changes less; with `--all`, also for the help of every command. The same
for a Python that does nothing. Needs the server programs in `$RCFARM_SERVERS`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.main import get_command

from benchmarks.fleet import report, servers_required
from rcfarm.cli.main import app
from tests.support.consul.server import ConsulServer

COMPLETION = {"_RCFARM_COMPLETE": "complete_bash", "COMP_WORDS": "rcfarm rc ", "COMP_CWORD": "2"}


class Run(NamedTuple):
    """The seconds that one process took from start to end, and those of processor time."""

    seconds: float
    cpu: float


def run(arguments: list[str], variables: dict[str, str]) -> Run:
    """Run a Python process to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
    quiet = subprocess.DEVNULL
    done = subprocess.run([sys.executable, *arguments], check=False, stdout=quiet, stderr=quiet, env=environ)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(arguments)} exited with {done.returncode}")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def helps(app: typer.Typer) -> Iterator[list[str]]:
    """Yield the arguments of every command and group that show its help."""

    def below(command: Any, path: list[str]) -> Iterator[list[str]]:
        yield [*path, "--help"]
        context = typer.Context(command, info_name="rcfarm")
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                yield from below(command.get_command(context, name), [*path, name])

    yield from below(get_command(app), [])


def measured(name: str, runs: int, arguments: list[str], **variables: str) -> float:
    """Print and return the median of several runs, after one that compiles what is not compiled yet."""
    run(arguments, variables)
    taken = [run(arguments, variables) for _ in range(runs)]
    median = statistics.median(one.seconds for one in taken)
    report(
        name,
        median=round(median, 4),
        best=round(min(one.seconds for one in taken), 4),
        cpu_median=round(statistics.median(one.cpu for one in taken), 4),
    )
    return median


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--all", action="store_true", help="the help of every command, too")
    asked = parser.parse_args()
    runs, rcfarm = asked.runs, ["-m", "rcfarm"]
    with tempfile.TemporaryDirectory() as directory, servers_required():
        os.environ["PYTHONPYCACHEPREFIX"] = directory  # as if installed: compiled once
        measured("startup_python", runs, ["-c", "pass"])
        measured("startup_help", runs, [*rcfarm, "--help"])
        measured("startup_group_help", runs, [*rcfarm, "rc", "--help"])
        measured("startup_completion", runs, rcfarm, **COMPLETION)
        measured("startup_embedded", runs, [*rcfarm, "rc", "list", "--store", "memory:"])
        if asked.all:
            slowest: dict[str, float] = {}
            for arguments in helps(app):
                slowest[" ".join(arguments)] = measured(
                    f"help: {' '.join(arguments[:-1])}", runs, [*rcfarm, *arguments]
                )
            name = max(slowest, key=slowest.__getitem__)
            report("startup_slowest_help", command=name, median=round(slowest[name], 4))
        server = ConsulServer(Path(directory))
        server.start()
        try:
            measured("startup_consul", runs, [*rcfarm, "rc", "list", "--store", server.url])
        finally:
            server.stop()


if __name__ == "__main__":
    main()
