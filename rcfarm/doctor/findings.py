"""The result of a check of `rcfarm doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `check` is stable, for machines. `advice`: what to do, unless it is ok. An error makes
    the exit code 1. `codes`: of the reasons that are behind it, of the list of reasons."""

    level: Literal["ok", "warning", "error"]
    check: str
    message: str
    advice: str = ""
    codes: tuple[str, ...] = ()


def ok(check: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", check, message)


def warning(check: str, message: str, advice: str, codes: Iterable[str] = ()) -> Finding:
    """Return a finding of a problem that needs attention, but stops nothing."""
    return Finding("warning", check, message, advice, tuple(dict.fromkeys(codes)))


def error(check: str, message: str, advice: str, codes: Iterable[str] = ()) -> Finding:
    """Return a finding of a problem that must be fixed."""
    return Finding("error", check, message, advice, tuple(dict.fromkeys(codes)))


def counted(number: int, noun: str) -> str:
    """Return `1 node` or `3 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
