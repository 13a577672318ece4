"""An engine with its store's file is killed at random moments; `python -m tests.chaos.tasks` does so for longer."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.tasks import Drill


def test_an_engine_that_is_killed_again_and_again(tmp_path: Path) -> None:
    drill = Drill(tmp_path, seed=5)
    try:
        drill.embedded(kills=3, live=12)
    finally:
        drill.stop()
    assert drill.operators.violations == []
    assert drill.operators.ended >= 12
