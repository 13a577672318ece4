"""`--watch`: what is printed of each state, and what is refused. Whole watches are tested with a farm, on Consul."""

from __future__ import annotations

import os

import pytest

from rcfarm.cli.kit.output import Output
from rcfarm.cli.kit.watch import _Changes, _Document, _Screen
from tests.support.programs.cli import CommandLine

MANIFEST = b'{"id":"web","launchables":{"main":{"command":["serve"]}}}'


def test_each_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Of what has not changed nothing is printed; what is gone is named."""
    show = _Changes[dict[str, str]](lambda items: items)
    show({"rc web": "progressing", "rc web on n1": "starting"})
    show({"rc web": "progressing", "rc web on n1": "running"})
    show({"rc web": "converged"})
    show({"rc web": "converged"})
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "rc web: progressing",
        "rc web on n1: starting",
        "rc web on n1: running",
        "rc web: converged",
        "rc web on n1: gone",
    ]


def test_each_state_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """On one line, once, and nothing where there is no object any more."""
    show = _Document[list[int]](lambda found: found or None)
    for view in ([1], [1], [1, 2], []):
        show(view)
    assert capsys.readouterr().out == "[1]\n[1,2]\n"


@pytest.mark.parametrize("command", [["rc", "status", "web"], ["status"]])
@pytest.mark.parametrize("form", ["yaml", "name"])
async def test_a_format_that_has_no_steps_is_refused(cli: CommandLine, command: list[str], form: str) -> None:
    await cli.rcs.create(MANIFEST, rc_id="web")
    ran = await cli(*command, "--watch", "-o", form)
    assert ran.code != 0
    assert ran.out == ""
    if command != ["status"] or form == "yaml":  # a name of the fleet is refused by the parser
        assert f"error: --watch: -o {form} can't show changes; use -o table or -o json" in ran.err


async def test_what_is_not_there_at_first_is_an_error(cli: CommandLine) -> None:
    ran = await cli("rc", "status", "nope", "--watch")
    assert (ran.code, ran.err) == (1, "error: there is no rc nope; `rcfarm rc list` shows those that exist\n")


async def test_a_store_that_is_away_at_first_is_an_error(cli: CommandLine) -> None:
    ran = await cli("status", "--watch", store="consul://127.0.0.1:1")
    assert ran.code == 1
    assert ran.err.startswith("error: ")


def test_only_lines_that_differ_are_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is counted; a line that is gone is cleared; another size is drawn from scratch."""
    sizes = [os.terminal_size(size) for size in [(80, 5)] * 4 + [(60, 5)]]
    monkeypatch.setattr("shutil.get_terminal_size", lambda: sizes.pop(0) if len(sizes) > 1 else sizes[0])

    def render(out: Output, lines: list[str]) -> None:
        for line in lines:
            out.line(line)

    screen = _Screen(Output(), render)
    screen(["one", "two", "three"])
    capsys.readouterr()
    screen(["one", "2", "three"])
    assert capsys.readouterr().out == "\x1b[3A\n\r\x1b[2K2\n\n"
    screen(["one"])
    assert capsys.readouterr().out == "\x1b[3A\n\x1b[J"
    screen([str(number) for number in range(9)])
    drawn = capsys.readouterr().out
    assert drawn.startswith("\x1b[2J\x1b[H")
    assert "… and 6 lines more" in drawn
