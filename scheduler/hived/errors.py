"""HiveD's error tree, by who can fix it.

HivedError
├── UserError       an invalid request: answered with 400, or logged and skipped; the scheduler continues
├── NotNow          not ready yet, or the API server refused: answered with 503; the caller tries again
├── PlatformError   our own state contradicts itself: answered with 500 and logged with its stack
└── ConfigError     the configuration file: names the path in it and what to do
    └── InvalidConfig   every problem of the file, one ConfigError each
"""

from __future__ import annotations

from collections.abc import Sequence

from store.errors import RcfarmError


class HivedError(RcfarmError):
    """`code` is the HTTP status of the answer. `is_news`: the caller received a different answer before."""

    code = 500
    is_news = True


class UserError(HivedError):
    """An invalid request; the message names the object, the field and what to do."""

    code = 400


class NotNow(HivedError):
    """A temporary failure: the call may succeed later."""

    code = 503


class PlatformError(HivedError):
    """A defect of the scheduler, or a cluster state that the configuration excludes."""


class ConfigError(HivedError):
    """`path` in the configuration file, such as `physicalCluster.physicalCells[3].cellType`, and the problem there."""

    code = 400

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


class InvalidConfig(ConfigError):
    """All problems of one configuration file: `errors`, never empty, in the order in which they were found."""

    MOST_SHOWN = 20

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        lines = [str(error) for error in self.errors[: self.MOST_SHOWN]]
        if len(self.errors) > self.MOST_SHOWN:
            lines.append(f"... and {len(self.errors) - self.MOST_SHOWN} more")
        super().__init__("", "\n".join(lines))
