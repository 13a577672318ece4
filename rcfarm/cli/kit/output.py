"""Show results: tables for people, JSON for programs.

Results go to standard output; progress, notes and errors to standard error, so that output can be piped. Colour is
used on terminals only and never alone: every state is also a word. A table is never cut: on a narrow terminal its
widest columns are written below their row.

Everything that a command shows goes through `Output`, which shows control characters as text: pods' output, names and
messages are untrusted. Only `text`, and only off a terminal, writes its input unchanged. The functions at the end
return the small texts of which results consist: times, counts, labels, amounts.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import typer
from rich.cells import cell_len
from rich.text import Text

from rcfarm.daemon.visible import visible, visible_json
from store.schema.records import Capacity, Reason

if TYPE_CHECKING:
    from rich.console import Console  # with which rich takes 20 ms to import: not for help and completion

UNLIMITED = 4000  # columns: wider than any table
READABLE = 40  # columns that a sentence in a table needs
LINES = 3  # lines that a sentence in a table may take, approximately
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))

STYLES = {
    "converged": "green",
    "completed": "green",
    "succeeded": "green",
    "timed-out": "red",
    "aborted": "yellow",
    "waiting": "yellow",
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
    "placed": "green",
    "full": "red",
    "refused": "red",
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
    yaml = "yaml"


class ListFormat(enum.StrEnum):
    """The format of a list: also with further columns, or only the names."""

    table = "table"
    wide = "wide"
    json = "json"
    yaml = "yaml"
    name = "name"


class Output:
    """The output of a command. `as_json`: results are documents for programs, in JSON, or YAML with the same fields."""

    def __init__(self, form: Format | ListFormat = Format.table) -> None:
        self.form = form.value
        self.as_json = self.form in ("json", "yaml")

    @cached_property
    def stdout(self) -> Console:
        """Standard output."""
        return _console(sys.stdout)

    @cached_property
    def stderr(self) -> Console:
        """Standard error."""
        return _console(sys.stderr)

    def show(self, view: Any, render: Callable[[], None], names: Iterable[str] = ()) -> None:
        """Show the result: print `view` as a document, the `names` of its objects, or call `render`."""
        if self.as_json:
            self.json(view)
        elif self.form == "name":
            for name in names:
                self.line(name)
        else:
            render()

    def json(self, view: Any) -> None:
        """Print one document, indented."""
        if self.form != "yaml":
            print(visible_json(msgspec.json.format(msgspec.json.encode(view), indent=2).decode()))
            return
        import yaml  # takes 15 ms; commands that show no YAML must not pay

        plain = msgspec.to_builtins(view, str_keys=True)
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
        if visible(text) != text:  # escaped, control characters are harmless
            text = yaml.safe_dump(plain, sort_keys=False, width=100)
        print(text, end="")

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
        """Print a text of the result. After its own line breaks, and where a terminal wraps it, it is indented by the
        width of `prefix`: a text from elsewhere can't pass for a line of the command."""
        before, rest = _shown(prefix), _shown(text)
        room = self.stdout.width - before.cell_len
        is_wrapped = self.stdout.is_terminal and room >= READABLE // 2
        for line in rest.wrap(self.stdout, room) if is_wrapped else rest.split(allow_blank=True):
            line.rstrip()
            self.line(Text.assemble(before, line))
            before = Text(" " * before.cell_len)

    def brief(self, text: str) -> str:
        """Return the text as one line, cut on a terminal to what a table's last column can show."""
        line, room = one_line(text), READABLE * LINES
        return line if not self.stdout.is_terminal or len(line) <= room else line[: room - 1] + "…"

    def note(self, text: str | Text) -> None:
        """Print a remark to standard error."""
        self.stderr.print(_shown(text), markup=False, highlight=False, soft_wrap=True)

    def error(self, text: str, *, about: str = "", field: str = "", exit_code: int = 1) -> None:
        """Print an error to standard error: a line, or with `-o json` a document that names the object (`about`) and
        the field where they are known."""
        if self.form != "json":
            self.note(Text.assemble(("error: ", "red"), text))
            return
        known = {"object": about, "field": field, "message": text}
        view = {"error": {name: value for name, value in known.items() if value} | {"exit_code": exit_code}}
        print(visible_json(msgspec.json.encode(view).decode()), file=sys.stderr)

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
        """Print columns under their names, or nothing if there is no row. A column whose name ends in ">" is aligned to
        the right. One whose name begins with "+" is shown with `-o wide` alone.

        On a terminal that is too narrow, the last column is wrapped while that is readable; otherwise the widest
        columns are written below their row, with their names.
        """
        given = list(rows)
        if not given:
            return
        if extra := {number for number, column in enumerate(columns) if column.startswith("+")}:
            kept = [number for number in range(len(columns)) if number not in extra or self.form == "wide"]
            columns = [columns[number].removeprefix("+") for number in kept]
            given = [[row[number] for number in kept] for row in given]
        names = [name.rstrip(">") for name in columns]
        lines = [names, *([visible(str(cell)).removesuffix("\n").replace("\n", " ") for cell in row] for row in given)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        room = (self.stdout.width if self.stdout.is_terminal else UNLIMITED) - indent
        if not self.stdout.is_terminal and sum(widths) + 2 * (len(widths) - 1) <= room:
            # As below, but without colours, for which rich takes seconds where there are ten thousand rows.
            is_right = [name.endswith(">") for name in columns]
            for line in lines:
                padding = [" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)]
                padded = [
                    blank + cell if right else cell + blank
                    for cell, blank, right in zip(line, padding, is_right, strict=True)
                ]
                print(" " * indent + "  ".join(padded).rstrip())
            return
        cells = [[Text(" ").join(_shown(cell).split()) for cell in row] for row in given]  # one line per row
        inline = list(range(len(widths)))  # the columns that are shown side by side; all of them, or none wraps
        last = len(widths) - 1

        def needed() -> int:
            wrapped = min(widths[last], max(READABLE, widths[last] // LINES)) - widths[last]
            shown = sum(widths[number] for number in inline) + (wrapped if len(inline) == len(widths) else 0)
            return shown + 2 * (len(inline) - 1)

        while len(inline) > 1 and needed() > room:
            inline.remove(max(inline[1:], key=lambda number: widths[number]))
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_edge=False)
        for number in inline:
            justify = "right" if columns[number].endswith(">") else "left"
            table.add_column(names[number], justify=justify, no_wrap=number != last, overflow="fold")  # type: ignore[arg-type]
        for row in cells:
            table.add_row(*(row[number] for number in inline))
        with self.stdout.capture() as captured:
            self.stdout.print(table)
        drawn = [" " * indent + line.rstrip() for line in captured.get().splitlines()]
        below = [number for number in range(len(widths)) if number not in inline]
        if not below:
            print("\n".join(drawn))
            return
        print(drawn[0])
        for text, row in zip(drawn[1:], cells, strict=True):
            print(text)
            for number in below:
                if row[number].plain not in ("", "-"):
                    self.hanging(f"{' ' * (indent + 4)}{names[number].lower()}: ", row[number])


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
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else UNLIMITED, highlight=False, emoji=False)


def one_line(text: str) -> str:
    """Return the text with each run of white space, line breaks included, as one space."""
    return " ".join(text.split())


def timestamp(moment: float) -> str:
    """Return RFC 3339 for seconds since the epoch, and "" for 0."""
    if not moment:
        return ""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ago(timestamp: str, now: datetime | None = None) -> str:
    """Return `3m ago` for an RFC 3339 time, "-" for "", and any other text unchanged."""
    try:
        past = -_seconds_until(timestamp, now)
    except ValueError:
        return timestamp or "-"
    if past < 1:
        return "now"
    size, unit = next((size, unit) for size, unit in _UNITS if past >= size)
    return f"{int(past // size)}{unit} ago"


def ahead(timestamp: str, now: datetime | None = None) -> str:
    """Return `in 20s` for a time in the future, else ""."""
    try:
        left = _seconds_until(timestamp, now)
    except ValueError:
        return ""
    return f"in {seconds(round(left))}" if left >= 1 else ""


def _seconds_until(timestamp: str, now: datetime | None) -> float:
    at = datetime.fromisoformat(timestamp)
    return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - (now or datetime.now(UTC))).total_seconds()


def times(reason: Reason) -> str:
    """Return ` (since 40s ago, acted on in 20s)`: when the reason was noticed, and when the owner acts on it."""
    parts = [f"since {ago(reason.since)}"] if reason.since else []
    parts += [f"acted on {left}"] if (left := ahead(reason.until)) else []
    return f" ({', '.join(parts)})" if parts else ""


def distinct(phrases: Iterable[str]) -> list[str]:
    """Return the phrases in order, without empty ones and without those contained in another."""
    given = [phrase for phrase in phrases if phrase]
    found: list[str] = []
    for phrase in sorted(given, key=len, reverse=True):
        if not any(phrase in other for other in found):
            found.append(phrase)
    return sorted(found, key=given.index)


def seconds(duration: float) -> str:
    """Return `0.4s`, `12s`, `3m 5s`, `11h 30m` or `2d 3h`."""
    if duration < 10:
        return f"{duration:.1f}s"
    minutes, rest = divmod(round(duration), 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return `1 pod` or `3 pods`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def placed(number: int, desired: int) -> str:
    """Return `2 of 3 placed`, or `3 placed, 1 desired` while pods are still to be removed."""
    return f"{number} of {desired} placed" if number <= desired else f"{number} placed, {desired} desired"


def labels(pairs: Mapping[str, str]) -> str:
    """Return `a=1,b=2`, or "-" for none."""
    return ",".join(f"{key}={value}" for key, value in sorted(pairs.items())) or "-"


def memory(size: int) -> str:
    """Return a number of bytes as `8.0 GiB` or `512 MiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def capacity(amount: Capacity) -> str:
    """Return `4 cores, 8.0 GiB, 2 gpu`, or "-" for nothing."""
    parts = []
    if amount.cpu:
        parts.append(f"{amount.cpu / 1000:g} {'core' if amount.cpu == 1000 else 'cores'}")
    if amount.memory:
        parts.append(memory(amount.memory))
    parts += [f"{number} {kind}" for kind, number in sorted(amount.devices.items())]
    return ", ".join(parts) or "-"
