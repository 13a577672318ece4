"""What can go wrong, and whose fault it is.

HivedError
├── UserError       a request that can't be right: answered with 400, or logged and skipped; the scheduler goes on
├── NotNow          not ready yet, or the API server refused: answered with 503; whoever asked tries again
├── PlatformError   our own state contradicts itself: answered with 500 and logged with its stack
└── ConfigError     the configuration file: names the path in it and what to do
    └── InvalidConfig   all that is wrong with it, one ConfigError each
"""

from __future__ import annotations

from collections.abc import Sequence


class HivedError(Exception):
    """`code` is the HTTP status that it is answered with. `is_news`: whoever asked was told something else before."""

    code = 500
    is_news = True


class UserError(HivedError):
    """What somebody asked for can't be right; the message names the object, the field and what to do."""

    code = 400


class NotNow(HivedError):
    """Nobody's fault: asking again later may help."""

    code = 503


class PlatformError(HivedError):
    """A defect of ours, or a state of the cluster that the configuration excludes."""


class ConfigError(HivedError):
    """`path` in the configuration file, such as `physicalCluster.physicalCells[3].cellType`, and what is wrong."""

    code = 400

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class InvalidConfig(ConfigError):
    """Everything that was found wrong in one reading: `errors`, never empty, in the order in which it was found."""

    MOST_SHOWN = 20

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        lines = [str(error) for error in self.errors[: self.MOST_SHOWN]]
        if len(self.errors) > self.MOST_SHOWN:
            lines.append(f"... and {len(self.errors) - self.MOST_SHOWN} more")
        super().__init__("", "\n".join(lines))
