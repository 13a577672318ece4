"""Start of the command line: `rcfarm --help` (claimed: below 0.15 s), a command, and the completion of one.

`python -m benchmarks.startup [--runs N]` prints a JSON line for each: the median and the best run, and the median of
processor time, which a busy machine changes less. The same for a Python that does nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.fleet import report

COMPLETION = {"_RCFARM_COMPLETE": "complete_bash", "COMP_WORDS": "rcfarm rc ", "COMP_CWORD": "2"}


class Run(NamedTuple):
    """The seconds that one process took from start to end, and those of processor time."""

    seconds: float
    cpu: float


def run(*arguments: str, **variables: str) -> Run:
    """Run a Python process to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environ = {**os.environ, **variables}
    quiet = subprocess.DEVNULL
    subprocess.run([sys.executable, *arguments], check=True, stdout=quiet, stderr=quiet, env=environ)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    for name, arguments, variables in (
        ("startup_python", ["-c", "pass"], {}),
        ("startup_help", ["-m", "rcfarm", "--help"], {}),
        ("startup_group_help", ["-m", "rcfarm", "rc", "--help"], {}),
        ("startup_completion", ["-m", "rcfarm"], COMPLETION),
        ("startup_command", ["-m", "rcfarm", "rc", "list", "--store", "memory:"], {}),
    ):
        taken = [run(*arguments, **variables) for _ in range(runs)]
        report(
            name,
            median=round(statistics.median(one.seconds for one in taken), 4),
            best=round(min(one.seconds for one in taken), 4),
            cpu_median=round(statistics.median(one.cpu for one in taken), 4),
        )


if __name__ == "__main__":
    main()
