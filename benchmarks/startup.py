"""Seconds until `rcfarm --help` has been printed, in a fresh process; claimed: below 0.15.

`python -m benchmarks.startup [--runs N]` prints one JSON line: the median and the best run, and the same for a Python
that does nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time


def seconds(*arguments: str) -> float:
    """Return the seconds that one process takes from start to end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    help_ = [seconds("-m", "rcfarm", "--help") for _ in range(runs)]
    nothing = [seconds("-c", "pass") for _ in range(runs)]
    result = {
        "benchmark": "startup",
        "help_median": round(statistics.median(help_), 4),
        "help_best": round(min(help_), 4),
        "python_median": round(statistics.median(nothing), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
