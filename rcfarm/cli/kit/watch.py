"""Keep a result current: `--watch`.

The model: views of the store say that something has changed; then everything is read and drawn again, after a short
pause in which further changes gather. What no view covers, and ages such as `3m ago`, are brought up to date every
`IDLE` seconds. On a terminal only the lines that differ are drawn. Elsewhere each change is a line of its own, and with
`-o json` a document on a line, so that a program can read on.

Ctrl-C is the ordinary end.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Generic, TypeVar

import msgspec
import typer

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.options import UsageProblem
from rcfarm.cli.kit.output import Format, Output
from rcfarm.daemon.visible import visible_json
from store.kv.protocol import Unavailable
from store.kv.view import Change, TreeView

T = TypeVar("T")

GATHER = 0.2  # seconds in which further changes gather
READING_SHARE = 0.2  # part of the time that is spent on reading, at most
IDLE = 10.0  # seconds without a change after which everything is read once more
STORE_RETRY = 2.0  # seconds between attempts while the store is unavailable

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Stay, and show each change; Ctrl-C ends it.")]


async def keep_showing(
    cli: Cli,
    prefixes: Iterable[str],
    read: Callable[[], Awaitable[T]],
    render: Callable[[Output, T], None],
    items: Callable[[T], Mapping[str, str]],
    *,
    concerns: Callable[[str], bool] = lambda key: True,
    until: Callable[[T], bool] = lambda view: False,
    document: Callable[[T], object] = lambda view: view,
) -> int:
    """Show what `read` returns, and again whenever a key under one of the prefixes, for which `concerns` is true, has
    changed; the end is when `until` is true of it. `render` draws it for people; `items` names its parts, each with its
    state in one line, for a pipe; `document` is what a program gets of it, nothing for None.

    Raises `UsageProblem` for a format that can't be shown in steps, and the errors of the first `read`.
    """
    out = cli.out
    if out.form not in ("table", "wide", "json"):
        raise UsageProblem(f"--watch: -o {out.form} can't show changes; use -o table or -o json")
    changed = asyncio.Event()

    def note(changes: list[Change[bytes]]) -> None:
        if any(concerns(change.key) for change in changes):
            changed.set()

    views: list[TreeView[bytes]] = [
        TreeView(cli.store, prefix, lambda _, value: value, on_change=note) for prefix in prefixes
    ]
    show: Callable[[T], None] = _Document(document) if out.form == "json" else _Changes(items)
    if out.form != "json" and out.stdout.is_terminal:
        show = _Screen(out, render)
    watching = [asyncio.create_task(each.run()) for each in views]
    is_first, is_away = True, False
    try:
        while True:
            changed.clear()
            began = time.monotonic()
            try:
                view = await read()
                show(view)
                is_first, is_away = False, False
                if until(view):
                    return 0
            except Unavailable as error:
                if is_first:
                    raise
                if not is_away:
                    out.note(f"the store does not answer: {error}; what is shown may be old")
                is_away = True
                await asyncio.sleep(STORE_RETRY)
                continue
            await asyncio.sleep(max(GATHER, (time.monotonic() - began) / READING_SHARE))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE):
                    await changed.wait()
    except asyncio.CancelledError:
        return 0
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        if isinstance(show, _Screen):
            show.close()


class _Document(Generic[T]):
    """Prints each state that differs from the one before as a JSON document on a line."""

    def __init__(self, document: Callable[[T], object]) -> None:
        self._document = document
        self._last = ""

    def __call__(self, view: T) -> None:
        document = self._document(view)
        text = visible_json(msgspec.json.encode(document).decode()) if document is not None else self._last
        if text != self._last:
            print(text, flush=True)
        self._last = text


class _Changes(Generic[T]):
    """Prints a line for each part that has changed."""

    def __init__(self, items: Callable[[T], Mapping[str, str]]) -> None:
        self._items = items
        self._last: Mapping[str, str] = {}

    def __call__(self, view: T) -> None:
        found, at = self._items(view), datetime.now().strftime("%H:%M:%S")
        out = Output()
        for name, text in found.items():
            if self._last.get(name) != text:
                out.line(f"{at} {name}: {text}")
        for name in self._last.keys() - found.keys():
            out.line(f"{at} {name}: gone")
        sys.stdout.flush()
        self._last = found


class _Captured(io.StringIO):
    """Takes what would be drawn on the terminal."""

    def isatty(self) -> bool:
        return True


class _Screen(Generic[T]):
    """Draws on a terminal, and afterwards only the lines that differ. What does not fit below the first line is left
    out, and counted."""

    def __init__(self, out: Output, render: Callable[[Output, T], None]) -> None:
        self._form, self._render = out.form, render
        self._lines: list[str] = []
        self._size = shutil.get_terminal_size()
        sys.stdout.write("\x1b[?7l")  # a line that the terminal wraps would be two

    def __call__(self, view: T) -> None:
        captured = _Captured()
        with contextlib.redirect_stdout(captured):
            self._render(Output(Format.table), view)
        lines = captured.getvalue().splitlines()
        size = shutil.get_terminal_size()
        room = max(2, size.lines - 1)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"… and {len(lines) - room + 1} lines more; a larger window shows them"]
        if size != self._size:
            sys.stdout.write("\x1b[2J\x1b[H")
            self._size, self._lines = size, []
        drawn = f"\x1b[{len(self._lines)}A" if self._lines else ""
        for number, line in enumerate(lines):
            is_same = number < len(self._lines) and self._lines[number] == line
            drawn += "\n" if is_same else f"\r\x1b[2K{line}\n"
        sys.stdout.write(drawn + ("\x1b[J" if len(lines) < len(self._lines) else ""))
        sys.stdout.flush()
        self._lines = lines

    def close(self) -> None:
        """Leave the terminal as it was."""
        sys.stdout.write("\x1b[?7h")
        sys.stdout.flush()
