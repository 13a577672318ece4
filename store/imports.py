"""Imports that cost less: libraries without the slow modules that they take along for uses which do not occur here, and
front doors that import what is slow at its first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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


def at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that exports these names, each from a module of its own."""

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return getattr_
