"""The error tree: one root for whatever is not a defect."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import controllers
import rcfarm
import scheduler
import store
import store.errors
from store.errors import RcfarmError

SIGNALS = {
    "ShutDown",
    "Incomplete",
    "StatusNotKept",
    "Unmappable",
    "ConnectionLost",
    "NeverSent",
    "AlreadyCommitted",
    "RequestRefused",
    "TransactionRefused",
}


def _errors() -> dict[str, type[Exception]]:
    found = {}
    for package in (rcfarm, controllers, scheduler, store):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.name.endswith("__main__"):
                for name, member in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
                    if issubclass(member, Exception) and member.__module__ == info.name:
                        found[f"{info.name}.{name}"] = member
    return found


def test_every_error_has_one_root() -> None:
    """What is no defect can be caught by one name. Signals within a package are no errors of users."""
    strangers = {
        path
        for path, error in _errors().items()
        if not issubclass(error, RcfarmError)
        and error.__name__ not in SIGNALS
        and not error.__name__.startswith("_")
        and not issubclass(error, OSError)
    }
    assert strangers == set()


def test_the_tree_is_drawn_whole() -> None:
    """Each branch stands in the docstring of the module that has the root."""
    drawn = store.errors.__doc__ or ""
    branches = {error.__name__ for error in _errors().values() if RcfarmError in error.__bases__}
    assert {name for name in branches if name not in drawn} == set()
    assert len(branches) > 20
