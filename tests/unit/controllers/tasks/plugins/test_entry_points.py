"""The plugins that the distribution announces to the engine."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from controllers.tasks.api.plugin import PluginEntry
from controllers.tasks.registry import ENTRY_POINTS

PROJECT = Path(__file__).parents[5] / "pyproject.toml"


def test_each_entry_point_is_the_entry_of_the_plugin_of_its_name() -> None:
    announced = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"][ENTRY_POINTS]

    assert {"framework", "pod"} <= announced.keys()
    for name, value in announced.items():
        entry = EntryPoint(name, value, ENTRY_POINTS).load()
        assert isinstance(entry, PluginEntry)
        assert entry.id == name
