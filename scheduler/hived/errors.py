"""What can go wrong, and whose fault it is.

HivedError
├── UserError       a request that can't be right: answered with 400, or logged and skipped; the scheduler goes on
├── PlatformError   our own state contradicts itself: answered with 500 and logged with its stack
└── ConfigError     the configuration file: names the path in it and what to do
"""

from __future__ import annotations


class HivedError(Exception):
    """`code` is the HTTP status that it is answered with."""

    code = 500


class UserError(HivedError):
    """What somebody asked for can't be right; the message names the object, the field and what to do."""

    code = 400


class PlatformError(HivedError):
    """A defect of ours, or a state of the cluster that the configuration excludes."""


class ConfigError(HivedError):
    """`path` in the configuration file, such as `physicalCluster.physicalCells[3].cellType`, and what is wrong."""

    code = 400

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem
