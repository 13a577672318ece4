"""Show results: tables for people, JSON for programs.

Results go to standard output; progress, notes and errors to standard error, so that output can be piped. Colour is
used on terminals only and never alone: every state is also a word. A table is never cut: on a narrow terminal its
widest columns are written below their row.

Everything that a command shows goes through `Output`, which shows control characters as text: pods' output, names and
messages are untrusted. Only `text`, and only off a terminal, writes its input unchanged.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rcfarm.daemon.visible import visible, visible_json

UNLIMITED = 4000  # columns: wider than any table
READABLE = 40  # columns that a sentence in a table needs
LINES = 3  # lines that a sentence in a table may take, approximately

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
    """The format of results."""

    table = "table"
    json = "json"


class Output:
    """The output of a command."""

    def __init__(self, form: Format = Format.table) -> None:
        self.as_json = form is Format.json
        self.stdout = _console(sys.stdout)
        self.stderr = _console(sys.stderr)

    def show(self, view: Any, render: Callable[[], None]) -> None:
        """Show the result: print `view` as JSON, or call `render`."""
        if self.as_json:
            self.json(view)
        else:
            render()

    def json(self, view: Any) -> None:
        """Print one JSON document, indented."""
        print(visible_json(msgspec.json.format(msgspec.json.encode(view), indent=2).decode()))

    def text(self, content: str | bytes) -> None:
        """Write a document unchanged; on a terminal, with its control characters as text."""
        stream = sys.stdout
        if stream.isatty():
            shown = content.decode(errors="backslashreplace") if isinstance(content, bytes) else content
            stream.write(visible(shown.replace("\t", " " * 8)))
        else:
            typer.echo(content, nl=False)

    def line(self, text: str | Text = "") -> None:
        """Print one line of the result."""
        self.stdout.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    def hanging(self, prefix: str | Text, text: str | Text) -> None:
        """Print one line of the result; if a terminal wraps it, the rest is indented by the width of `prefix`."""
        before, rest = _shown(prefix), _shown(text)
        room = self.stdout.width - before.cell_len
        if not self.stdout.is_terminal or room < READABLE // 2:
            self.line(Text.assemble(before, rest))
            return
        for line in rest.wrap(self.stdout, room):
            line.rstrip()
            self.line(Text.assemble(before, line))
            before = Text(" " * before.cell_len)

    def note(self, text: str | Text) -> None:
        """Print a remark to standard error."""
        self.stderr.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print an error to standard error."""
        self.note(Text.assemble(("error: ", "red"), text))

    @contextmanager
    def progress(self, prefix: str) -> Iterator[Callable[[str], None]]:
        """Return a callback for progress updates: one changing line on a terminal, else a line per change."""
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
        """Print columns under their names. A column whose name ends in ">" is aligned to the right.

        On a terminal that is too narrow, the last column is wrapped while that is readable; otherwise the widest
        columns are written below their row, with their names.
        """
        names, cells = [name.rstrip(">") for name in columns], [[_shown(cell) for cell in row] for row in rows]
        widths = (
            [
                max(cell_len(name), *(cell.cell_len for cell in column))
                for name, column in zip(names, zip(*cells, strict=True), strict=True)
            ]
            if cells
            else []
        )
        inline = self._inline(widths, indent)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_edge=False)
        for number in inline:
            is_last = number == len(names) - 1
            justify = "right" if columns[number].endswith(">") else "left"
            table.add_column(names[number], justify=justify, no_wrap=not is_last, overflow="fold")  # type: ignore[arg-type]
        for row in cells:
            table.add_row(*(row[number] for number in inline))
        below = [number for number in range(len(widths)) if number not in inline]
        with self.stdout.capture() as captured:
            self.stdout.print(table)
        lines = [" " * indent + line.rstrip() for line in captured.get().splitlines()]
        if not below:
            print("\n".join(lines))
            return
        print(lines[0])
        for line, row in zip(lines[1:], cells, strict=True):
            print(line)
            for number in below:
                if row[number].plain not in ("", "-"):
                    self.hanging(f"{' ' * (indent + 4)}{names[number].lower()}: ", row[number])

    def _inline(self, widths: Sequence[int], indent: int) -> list[int]:
        """Return the indices of the columns that are shown side by side."""
        room = (self.stdout.width if self.stdout.is_terminal else UNLIMITED) - indent
        inline = list(range(len(widths)))
        last = len(widths) - 1

        def needed() -> int:
            wrapped = min(widths[last], max(READABLE, widths[last] // LINES))
            shown = [wrapped if number == last else widths[number] for number in inline]
            return sum(shown) + 2 * (len(shown) - 1)

        while len(inline) > 1 and needed() > room:
            inline.remove(max(inline[1:], key=lambda number: widths[number]))
        return inline


def state(word: str) -> Text:
    """Return a state, coloured."""
    return Text(word, style=STYLES.get(word, ""))


def _shown(text: str | Text) -> Text:
    """Return the text with control characters made visible. A text that has any keeps only its overall style."""
    if isinstance(text, str):
        return Text(visible(text))
    shown = visible(text.plain)
    return text if shown == text.plain else Text(shown, style=text.style)


def _console(stream: Any) -> Console:
    return Console(file=stream, width=None if stream.isatty() else UNLIMITED, highlight=False, emoji=False)
