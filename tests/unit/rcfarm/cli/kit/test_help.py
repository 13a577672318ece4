"""The help of every command: examples that the parser accepts, and exit codes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_command

from rcfarm.cli.kit.help import EXAMPLES, EXITS, examples_of, exits_of
from rcfarm.cli.main import app


def commands(command: Any, context: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yield each command with its path and the context of its group; without former names."""
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if not child.hidden:
                inner = child.make_context(name, [], context, resilient_parsing=True)
                yield from commands(inner.command, inner, (*path, name))
    else:
        yield " ".join(path), command, context


ROOT = get_command(app)
TOP = ROOT.make_context("rcfarm", [], resilient_parsing=True)
COMMANDS = {path: command for path, command, _ in commands(ROOT, TOP)}


def parse(example: str) -> str:
    """Parse an example as the program would. Return the path of the command that would run."""
    words = shlex.split(example, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    assert words.pop(0) == "rcfarm"
    command, context, path = ROOT, TOP, list[str]()
    while hasattr(command, "get_command"):
        name = words.pop(0)
        path.append(name)
        found = command.get_command(context, name)
        assert found is not None, f"{example}: no command {name}"
        if not hasattr(found, "get_command"):
            found.make_context(name, words, context)  # raises for what the parser refuses
            return " ".join(path)
        command, context = found, found.make_context(name, [], context, resilient_parsing=True)
    raise AssertionError(example)


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_every_command_has_a_true_example(path: str) -> None:
    """The parser accepts each example, for the command that it is shown with; none is wider than a terminal."""
    examples = examples_of(path)
    assert examples
    for example in examples:
        assert parse(example) == path
        assert len(example) + 2 <= 80, example


def test_no_example_is_of_a_command_that_does_not_exist() -> None:
    """Each line is shown with exactly one command; exit codes are of commands that exist."""
    shown = [example for path in COMMANDS for example in examples_of(path)]
    assert sorted(shown) == sorted(f"rcfarm {line}" for line in EXAMPLES.split("\n") if line)
    assert EXITS.keys() <= COMMANDS.keys()


def test_a_wrong_example_would_be_noticed() -> None:
    """The parser of these tests refuses what the program refuses."""
    with pytest.raises(typer.BadParameter.__base__):  # type: ignore[arg-type]
        parse("rcfarm rc scale web --bogus")
    with pytest.raises(typer.BadParameter.__base__):  # type: ignore[arg-type]
        parse("rcfarm rc lock web")


@pytest.mark.parametrize("path", ["rc scale", "dev", "ready", "barrier", "job scale", "hived validate"])
def test_help_ends_with_examples_and_exit_codes(path: str) -> None:
    """Also of daemons, and of commands on a cluster or on files."""
    context = COMMANDS[path].make_context(f"rcfarm {path}", [], resilient_parsing=True)
    command = context.command
    lines = command.get_help(context).splitlines()
    assert f"  {examples_of(path)[0]}" in lines[lines.index("Examples:") :]
    assert "Exit codes:" in lines
    assert all(len(line) <= 80 for line in lines)


def test_exit_codes_follow_from_the_parameters() -> None:
    """A command that waits may be late; one that only reads may not."""
    assert set(exits_of("rc scale", {"detach", "timeout"})) == {0, 1, 2, 3}
    assert set(exits_of("rc list", {"selector"})) == {0, 1}
    assert set(exits_of("rc lock", {"reason"})) == {0, 1, 3}
    assert set(exits_of("barrier", ())) == {0, 1, 201, 210}
