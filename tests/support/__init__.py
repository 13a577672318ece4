"""What tests share: fakes with the real semantics, servers and programs to test against, and `require`."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def require(value: T | None) -> T:
    """Return the value; fail the test if there is none."""
    assert value is not None
    return value
