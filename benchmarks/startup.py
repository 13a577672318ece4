"""Start of the command line: help and completion (claimed: 0.15 s), and commands (claimed: 0.25 s).

`python -m benchmarks.startup [--runs N] [--all]` prints a JSON line for each: the median and the best run, and the
median of processor time, which a busy machine changes less; with `--all`, also for the help of every command. The same
for a Python that does nothing. Needs the server programs in `$RCFARM_SERVERS`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.main import get_command

from benchmarks.fleet import consul, fill, rc_name, report, servers_required
from rcfarm.cli.main import app

HIVED = Path(__file__).parent.parent / "examples" / "hived" / "hived.yaml"
NONE: Mapping[str, str] = {}
COMPLETION = {"_RCFARM_COMPLETE": "complete_bash", "COMP_WORDS": "rcfarm rc ", "COMP_CWORD": "2"}


class Run(NamedTuple):
    """The seconds that one process took from start to end, and those of processor time."""

    seconds: float
    cpu: float


def run(arguments: list[str], code: int, variables: Mapping[str, str]) -> Run:
    """Run a Python process to its end, which is this exit code."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= variables
    quiet = subprocess.DEVNULL
    done = subprocess.run([sys.executable, *arguments], check=False, stdout=quiet, stderr=quiet, env=environ)
    if done.returncode != code:
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


def measured(name: str, runs: int, arguments: list[str], code: int = 0, variables: Mapping[str, str] = NONE) -> float:
    """Print and return the median of several runs, after one that compiles what is not compiled yet."""
    run(arguments, code, variables)
    taken = [run(arguments, code, variables) for _ in range(runs)]
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
        measured("startup_completion", runs, rcfarm, variables=COMPLETION)
        measured("startup_embedded", runs, [*rcfarm, "rc", "list", "--store", "memory:"])
        if asked.all:
            slowest: dict[str, float] = {}
            for arguments in helps(app):
                slowest[" ".join(arguments)] = measured(
                    f"help: {' '.join(arguments[:-1])}", runs, [*rcfarm, *arguments]
                )
            name = max(slowest, key=slowest.__getitem__)
            report("startup_slowest_help", command=name, median=round(slowest[name], 4))
        asyncio.run(on_consul(runs, rcfarm, Path(directory)))


async def on_consul(runs: int, rcfarm: list[str], directory: Path) -> None:
    """Measure a command of each kind, and the completion of an id, on a small fleet."""
    async with consul() as (server, store):
        await fill(store, rcs=10, replicas=3, nodes=10)
        rc = rc_name(0)
        changed, new = directory / "changed.yaml", directory / "new.yaml"
        settings = "replicas: 3\nnode_selector: pool=web\n"
        manifest = "manifest: {{id: {0}, launchables: {{main: {{command: [serve, better]}}}}}}\n"
        changed.write_text(f"id: {rc}\n{settings}{manifest.format(rc)}")
        new.write_text(f"id: new\n{settings}{manifest.format('new')}")
        commands: dict[str, tuple[list[str], int]] = {
            "list": (["rc", "list"], 0),
            "status": (["status"], 0),
            "rc_status": (["rc", "status", rc], 0),
            "apply": (["rc", "apply", "-f", str(new), "--yes", "--detach"], 0),
            "plan": (["plan", "-f", str(changed)], 2),
            "explain": (["explain", rc], 0),
            "doctor": (["doctor"], 1),
            "node_list": (["node", "list"], 0),
            "task_list": (["task", "list"], 0),
        }
        for name, (arguments, code) in commands.items():
            measured(f"startup_{name}", runs, [*rcfarm, *arguments, "--store", server.url], code)
        measured("startup_hived_validate", runs, [*rcfarm, "hived", "validate", str(HIVED)])
        words = f"rcfarm rc status --store {server.url} "
        measured(
            "startup_completion_of_id", runs, rcfarm, variables=COMPLETION | {"COMP_WORDS": words, "COMP_CWORD": "5"}
        )


if __name__ == "__main__":
    main()
