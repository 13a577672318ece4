"""Record the session that README.md and the first page show: `python docs/record.py [--text FILE]`.

It runs `rcfarm dev` and other commands in pseudo terminals, in an empty home directory, and draws what they print, at
the times at which they print it, as docs/pages/assets/session.svg. `rcfarm` is the one on the PATH. The picture needs
no script, no font and no other host; where animations are off, it shows the whole session.

Shown as they are not: the path of the home directory, and pauses of more than `LONGEST` seconds.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "pages" / "assets" / "session.svg"
COLUMNS = 100
LONGEST = 1.6  # seconds that the picture shows nothing new
TYPING = 0.9  # seconds until a typed command answers
HOME = "/home/me"
PATIENCE = 60.0  # seconds that a step may take
PROMPT = "\x1b[1;32m$\x1b[0m "
TITLE = "make dev, and what happens when a process, and then the fleet's own program, end"
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="TITLE">
<title>TITLE</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }}
.{unique_id}-matrix text {{ white-space: pre }}
.{unique_id}-title {{ display: none }}
.{unique_id}-matrix text {{ animation: appear 1ms backwards }}
@keyframes appear {{ from, to {{ opacity: 0 }} }}
@media (prefers-reduced-motion: reduce) {{ .{unique_id}-matrix text {{ animation: none }} }}
{styles}
APPEARANCES
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Recording:
    """The lines of a session, each with the second of the picture at which it appears."""

    def __init__(self, home: str) -> None:
        self.lines: list[tuple[float, str]] = []
        self._home, self._now = home, 0.0

    def typed(self, command: str) -> None:
        """Show a command after a prompt."""
        self.note(f"{PROMPT}{command}", TYPING)

    def note(self, line: str = "", pause: float = 0.0) -> None:
        """Show a line `pause` seconds after the one before."""
        self._now += min(pause, LONGEST)
        self.lines.append((self._now, line.replace(self._home, HOME)))

    def printed(self, chunks: list[tuple[float, str]], started: float) -> None:
        """Show what a program has printed, with the times of the clock at which it did."""
        before = started
        for at, line in chunks:
            self.note(line, at - before)
            before = at
        self._now += TYPING


class Terminal:
    """A program in a pseudo terminal. `lines`: what it has printed, each with the time of its end."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, cwd=ROOT, start_new_session=True
        )
        os.close(slave)
        self.lines: list[tuple[float, str]] = []
        self._rest = b""

    def until(self, is_done: Callable[[], bool]) -> None:
        """Read until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not is_done():
            if time.monotonic() > deadline:
                sys.exit("not within a minute; it has printed:\n" + "\n".join(line for _, line in self.lines))
            if select.select([self._master], [], [], 0.05)[0]:
                self._read()

    def ended(self) -> bool:
        """Return whether the program has ended, with all of its output read."""
        if self.process.poll() is None:
            return False
        self.drain()
        return True

    def drain(self) -> None:
        """Read what has been printed until now."""
        while select.select([self._master], [], [], 0)[0] and self._read():
            pass

    def _read(self) -> bool:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self.lines.append((time.monotonic(), line.decode().rstrip("\r").rpartition("\r")[2]))
        return bool(data)


def plain(line: str) -> str:
    """Return a line without its colours."""
    return Text.from_ansi(line).plain


def record(home: str, environ: dict[str, str]) -> Recording:
    """Run the session. Return the recording."""
    recording = Recording(home)

    def run(command: str, holds: str = "") -> str:
        """Record a command, once its output matches. Return the output."""
        deadline = time.monotonic() + PATIENCE
        while True:
            terminal = Terminal(command.split(), environ)
            terminal.until(terminal.ended)
            text = "\n".join(plain(line) for _, line in terminal.lines)
            if re.search(holds, text):
                recording.typed(command)
                recording.printed(terminal.lines, terminal.started)
                return text
            if time.monotonic() > deadline:
                sys.exit(f"`{command}` does not show {holds!r}:\n{text}")
            time.sleep(0.5)

    command = "rcfarm dev --apply examples/hello.yaml"
    dev = Terminal(command.split(), environ)
    try:
        dev.until(lambda: any("converged" in line for _, line in dev.lines))
        recording.typed(command)
        recording.printed(dev.lines, dev.started)
        recording.note("\x1b[2m# in another terminal\x1b[0m", TYPING)
        status = run("rcfarm rc status hello", "3 of 3 placed, 3 healthy")
        pids = re.findall(r"\(pid (\d+)\)", status)
        run(f"kill -9 {pids[0]}")
        run("rcfarm rc status hello", r"(?s)3 of 3 placed, 3 healthy.*SIGKILL")
        recording.note("\x1b[2m# and Ctrl-C in the first one\x1b[0m", TYPING)
        dev.drain()
        seen = len(dev.lines)
        os.kill(dev.process.pid, signal.SIGINT)
        stopping = time.monotonic()
        dev.until(dev.ended)
        recording.printed([line for line in dev.lines[seen:] if line[1] != "^C"], stopping)
    finally:
        dev.process.kill()
        dev.process.wait()
        if not recording.lines or "keep running" not in recording.lines[-1][1]:
            subprocess.run(["rcfarm", "dev", "--down"], env=environ, check=False)
    run("rcfarm dev --down", "3 pods stopped")
    return recording


def drawn(recording: Recording) -> str:
    """Return the recording as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    appearances, row = [], 0
    for at, line in recording.lines:
        text = Text.from_ansi(line)
        height = len(text.wrap(console, COLUMNS)) or 1
        rule = "[clip-path$='-line-{})']{{animation-duration:{:.2f}s}}"
        appearances += [rule.format(number, at + 0.01) for number in range(row, row + height)]
        console.print(text)
        row += height
    svg = console.export_svg(title="", code_format=FORMAT, unique_id="s")
    svg = svg.replace("TITLE", TITLE).replace("APPEARANCES", "\n".join(appearances))
    return re.sub(r"[ \t]+\n", "\n", svg)


def main() -> None:
    """Record, draw, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="also write the session as text, for the pages")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        environ = {"PATH": os.environ["PATH"], "HOME": home, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        recording = record(home, environ)
    TARGET.write_text(drawn(recording))
    if arguments.text:
        arguments.text.write_text("".join(f"{plain(line).rstrip()}\n" for _, line in recording.lines))
    print(f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size} bytes, {recording.lines[-1][0]:.0f} s")


if __name__ == "__main__":
    main()
