"""Showing results: tables for people, JSON for programs.

Results go to standard output; progress, notes and errors to standard error, so that output can be piped. Colour is
used on terminals only and never alone: every state is a word, too. A table that is not on a terminal is never cut.

Everything that a command shows goes through `Output`, which shows control characters as text: output of pods, names and
messages come from other people. Only `text`, where it is not a terminal, gives what it gets.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rcfarm.visible import visible, visible_json

UNLIMITED = 4000  # columns: wider than any table

STYLES = {
    "converged": "green",
    "completed": "green",
    "unhealthy": "red",
    "crashing": "red",
    "passing": "green",
    "running": "green",
    "ready": "green",
    "live": "green",
    "progressing": "cyan",
    "starting": "cyan",
    "installing": "cyan",
    "stopping": "cyan",
    "deleting": "cyan",
    "AttemptCreationPending": "yellow",
    "AttemptCreationRequested": "cyan",
    "AttemptPreparing": "cyan",
    "AttemptRunning": "green",
    "AttemptDeletionPending": "cyan",
    "AttemptDeletionRequested": "cyan",
    "AttemptDeleting": "cyan",
    "AttemptCompleted": "yellow",
    "Unknown": "yellow",
    "short": "yellow",
    "warning": "yellow",
    "unknown": "yellow",
    "held": "yellow",
    "unowned": "yellow",
    "cordoned": "yellow",
    "evicting": "yellow",
    "backoff": "yellow",
    "quarantined": "red",
    "unreadable": "red",
    "critical": "red",
    "failed": "red",
    "dead": "red",
}


class Format(enum.StrEnum):
    """How results are shown."""

    table = "table"
    json = "json"


class Output:
    """Where a command writes to."""

    def __init__(self, form: Format = Format.table) -> None:
        self.as_json = form is Format.json
        self.stdout = _console(sys.stdout)
        self.stderr = _console(sys.stderr)

    def show(self, view: Any, render: Callable[[], None]) -> None:
        """The result: `view` as JSON, or what `render` prints."""
        if self.as_json:
            self.json(view)
        else:
            render()

    def json(self, view: Any) -> None:
        """One JSON document, indented."""
        print(visible_json(msgspec.json.format(msgspec.json.encode(view), indent=2).decode()))

    def text(self, content: str | bytes) -> None:
        """A document, as it is; on a terminal with its control characters as text."""
        stream = sys.stdout
        if stream.isatty():
            shown = content.decode(errors="backslashreplace") if isinstance(content, bytes) else content
            stream.write(visible(shown.replace("\t", " " * 8)))
        else:
            typer.echo(content, nl=False)

    def line(self, text: str | Text = "") -> None:
        """One line of the result."""
        self.stdout.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    def note(self, text: str | Text) -> None:
        """Something to know beside the result."""
        self.stderr.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Why it did not work."""
        self.note(Text.assemble(("error: ", "red"), text))

    @contextmanager
    def progress(self, prefix: str) -> Iterator[Callable[[str], None]]:
        """A function to call with every new progress: one line that changes on a terminal, else a line per change."""
        last = ""

        def say(text: str) -> None:
            nonlocal last
            if text != last:
                last = text
                self.note(prefix + text)

        if not self.stderr.is_terminal:
            yield say
            return
        with self.stderr.status(_shown(prefix)) as spinner:
            yield lambda text: spinner.update(_shown(prefix + text))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, indent: int = 0) -> None:
        """Columns under their names. A column whose name ends in ">" is aligned to the right."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_edge=False)
        for number, name in enumerate(columns):
            last = number == len(columns) - 1
            justify = "right" if name.endswith(">") else "left"
            table.add_column(name.rstrip(">"), justify=justify, no_wrap=not last, overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*(_shown(cell) for cell in row))
        with self.stdout.capture() as captured:
            self.stdout.print(table)
        for line in captured.get().splitlines():
            print(" " * indent + line.rstrip())


def state(word: str) -> Text:
    """A state, in its colour."""
    return Text(word, style=STYLES.get(word, ""))


def _shown(text: str | Text) -> Text:
    """The text with its control characters as text; one that has any loses its colours, but for a common one."""
    if isinstance(text, str):
        return Text(visible(text))
    shown = visible(text.plain)
    return text if shown == text.plain else Text(shown, style=text.style)


def _console(stream: Any) -> Console:
    return Console(file=stream, width=None if stream.isatty() else UNLIMITED, highlight=False, emoji=False)
