"""Arguments and options shared by several commands, and the functions that read their values."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from rcfarm.cli.kit.completion import complete_node, complete_rc, complete_task
from rcfarm.daemon.visible import visible
from rcfarm.operations.documents import STANDARD_INPUT
from store.errors import RcfarmError

RCId = Annotated[str, typer.Argument(metavar="RC", help="The RC's id.", autocompletion=complete_rc)]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", autocompletion=complete_node)]
TaskId = Annotated[str, typer.Argument(metavar="TASK", help="The execution's id.", autocompletion=complete_task)]
Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; default: its current one.")
]
Files = Annotated[
    list[Path],
    typer.Option(
        "--file", "-f", metavar="FILE", help='YAML or JSON, or a folder of it; "-" is standard input; may be repeated.'
    ),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the outcome.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait for the outcome.")
]
WaitHealthy = Annotated[
    float,
    typer.Option(
        "--wait-healthy",
        metavar="SECONDS",
        min=0,
        envvar="RCFARM_WAIT_HEALTHY",
        help="How long every pod must stay healthy before the change counts as done; 0: one passing check is enough.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_TIMES = "an RFC 3339 time (2026-01-31T08:00:00Z), a date, or a duration before now (90m, 24h, 7d)"
Since = Annotated[str, typer.Option("--since", metavar="TIME", help=f"Only events from this time on: {_TIMES}.")]
Until = Annotated[
    str, typer.Option("--until", metavar="TIME", help="Only events before this time; the format of --since.")
]

DEFAULT_TIMEOUT = 120.0
DEFAULT_WAIT_HEALTHY = 10.0  # a program that dies within its first seconds must not count as done
_DOCUMENTS = frozenset({".yaml", ".yml", ".json"})
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class UsageProblem(RcfarmError):
    """Invalid usage; the message says what to write instead."""


def read_file(option: str, path: Path) -> bytes:
    """Return the file's bytes; "-" is standard input. Raises `UsageProblem` if it can't be read or is empty."""
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageProblem(f"{option} {path}: can't be read: {error.strerror}") from error
    if not raw.strip():
        raise UsageProblem(f"{option} {path}: the file is empty")
    return raw


def read_files(paths: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the name, for errors, and the bytes of each `--file`. A folder stands for the YAML and JSON files in it and
    in the folders below it, in order of name; names that begin with a dot are left out.

    Raises as `read_file`.
    """
    for path in paths:
        if str(path) == "-":
            yield STANDARD_INPUT, read_file("--file", path)
        elif path.is_dir():
            found = [Path(folder, name) for folder, _, names in os.walk(path, onerror=_unread) for name in names]
            inside = sorted(
                each
                for each in found
                if each.suffix in _DOCUMENTS and not any(part.startswith(".") for part in each.relative_to(path).parts)
            )
            if not inside:
                raise UsageProblem(f"--file {path}: no file in the folder, or below it, ends in .yaml, .yml or .json")
            yield from ((str(each), _document(each)) for each in inside)
        else:
            yield str(path), _document(path)


def _unread(error: OSError) -> None:
    raise UsageProblem(f"--file {error.filename}: can't be read: {error.strerror}") from error


def _document(path: Path) -> bytes:
    """Return the file's bytes for a reader of YAML, which takes JSON, but for the tabs that may indent it."""
    raw = read_file("--file", path)
    return raw.replace(b"\t", b" ") if path.suffix == ".json" else raw


def whole_number(text: str) -> int:
    """Parse an argument. Raises `typer.BadParameter`, which quotes it: it may be a misspelled option."""
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a whole number") from error


def replica_count(text: str) -> int:
    """Parse a number of replicas, or `all`. Raises `typer.BadParameter`."""
    from rcfarm.operations.errors import BadInput
    from rcfarm.operations.rc_apply import ALL, replicas_of

    try:
        return replicas_of(text if text == ALL else whole_number(text))
    except BadInput as error:
        raise typer.BadParameter(str(error)) from error


def parse_pairs(option: str, items: Iterable[str], form: str = "KEY=VALUE") -> dict[str, str]:
    """Parse `KEY=VALUE` items. Raises `UsageProblem`, which shows `form` as the expected form."""
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageProblem(f"{option} {item!r}: write {form}")
        if key in pairs:
            raise UsageProblem(f"{option} {item!r}: {key} is given twice")
        pairs[key] = value
    return pairs


def parse_time(option: str, text: str) -> datetime | None:
    """Parse a time; return None for "". Raises `UsageProblem`."""
    if not text:
        return None
    number, unit = text[:-1], text[-1]
    try:
        if unit in _UNITS and number.isascii() and number.isdigit():
            return datetime.now(UTC) - timedelta(seconds=int(number) * _UNITS[unit])
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageProblem(f"{option} {text!r}: write {_TIMES}") from None


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `yes`. Any answer but "y" and "yes" is a no.

    Raises `UsageProblem` without a terminal, `typer.Abort` for a no, `KeyboardInterrupt` for Ctrl-C.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageProblem("not confirmed: standard input is not a terminal; give --yes to go ahead")
    # Ctrl-C must end the blocking read at once. asyncio's own handler only cancels the task, which does not run then: a
    # Ctrl-C that it has already handled would have no effect.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise KeyboardInterrupt
        typer.echo(f"{visible(question)} [y/N]: ", err=True, nl=False)
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        typer.echo(err=True)
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
    if not answer.endswith("\n"):
        typer.echo(err=True)  # Ctrl-D leaves the cursor behind the question
    if answer.strip().lower() not in ("y", "yes"):
        raise typer.Abort
