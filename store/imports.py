"""Imports of libraries without the slow modules that they take along for uses which do not occur here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def absent(module: str) -> Iterator[None]:
    """While the context is open, an import of `module` raises `ImportError`, unless it was imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # the import system's mark of an absent module
    try:
        yield
    finally:
        del sys.modules[module]
