"""Tables where standard output is no terminal: plain padded lines."""

from __future__ import annotations

import pytest
from rich.text import Text

from rcfarm.cli.kit.output import UNLIMITED, Output, state


def test_columns_are_padded_by_their_width_on_screen(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[tuple[str | Text, ...]] = [
        ("web", "7", state("converged"), "ok"),
        ("日本", "12", Text(""), "two\nlines\x1b"),
        ("", "", "x", ""),
    ]
    Output().table(("RC", "PODS>", "STATE", "WHAT"), rows, indent=2)
    assert capsys.readouterr().out.splitlines() == [
        "  RC    PODS  STATE      WHAT",
        "  web      7  converged  ok",
        "  日本    12             two lines\\x1b",
        "              x",
    ]


def test_a_table_without_rows_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table(("RC",), [])
    assert capsys.readouterr().out == ""


def test_a_cell_wider_than_any_table_is_still_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = "word " * UNLIMITED
    Output().table(("RC", "WHAT"), [("web", text)])
    assert "".join(capsys.readouterr().out.split()).count("word") == UNLIMITED
