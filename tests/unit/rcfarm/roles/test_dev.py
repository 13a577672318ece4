"""`rcfarm dev`: where its log level comes from, and which lines it prints about RCs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rcfarm.config.settings import Settings
from rcfarm.config.sources import load
from rcfarm.roles import dev
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from store.schema.records import RCStatus, encode
from tests.support.programs.cli import run
from tests.support.waiting import background, until


def test_the_log_level_is_that_of_the_flag_the_variable_the_file_or_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them that is given, in this order."""
    levels: list[str] = []

    def run_dev(settings: Settings, **_: Any) -> int:
        levels.append(settings.log.level)
        return 0

    monkeypatch.setattr(dev, "run_dev", run_dev)
    file = tmp_path / "rcfarm.toml"
    file.write_text('[log]\nlevel = "debug"\n')
    for arguments, environ in (
        ((), {}),
        (("--config", str(file)), {}),
        (("--config", str(file)), {"RCFARM_LOG_LEVEL": "info"}),
        (("--config", str(file), "--log-level", "error"), {"RCFARM_LOG_LEVEL": "info"}),
        (("--set", "log.level=error"), {"RCFARM_LOG_LEVEL": "info"}),
    ):
        assert run("dev", *arguments, env=environ).code == 0
    assert levels == ["warning", "debug", "info", "error", "error"]


async def test_a_status_that_shows_nothing_new_is_no_second_line() -> None:
    """A restart that has ended when the printer reads the status changes only its time."""
    store, keys, printed = EmbeddedStore(None), Keys(), io.StringIO()
    printer = dev.status_printer(store, keys, Console(file=printed, width=200))
    async with background(printer.run()):
        key, status = (
            keys.status("web"),
            RCStatus(state="converged", generation=1, desired=2, placed=2, healthy=2, farm="a", token=1),
        )
        for time, healthy in enumerate((2, 2, 1, 2)):
            written = msgspec.structs.replace(status, healthy=healthy, updated_at=str(time))
            await store.put(key, encode(written))
            await until(lambda: [record.value for record in printer.records.values()] == [written])  # noqa: B023
        assert [line.split(", ")[1] for line in printed.getvalue().splitlines()] == [
            "2 healthy",
            "1 healthy",
            "2 healthy",
        ]
    await store.close()


def test_decisions_are_logged_in_the_directory_unless_the_settings_name_another(tmp_path: Path) -> None:
    assert dev._in_directory(Settings(), tmp_path).farm.decision_log == tmp_path / "decisions"
    elsewhere = load(overrides={"farm.decision_log": "/elsewhere"})
    assert dev._in_directory(elsewhere, tmp_path).farm is elsewhere.farm
