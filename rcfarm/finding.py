"""One thing that `rcfarm doctor` has looked at."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """`check` is stable, for machines. `advice`: what to do, when it is not good. An error makes the exit code 1."""

    level: Literal["ok", "warning", "error"]
    check: str
    message: str
    advice: str = ""


def ok(check: str, message: str) -> Finding:
    """All is well."""
    return Finding("ok", check, message)


def warning(check: str, message: str, advice: str) -> Finding:
    """It works, but someone should know."""
    return Finding("warning", check, message, advice)


def error(check: str, message: str, advice: str) -> Finding:
    """Something does not work."""
    return Finding("error", check, message, advice)
