"""Untrusted text can't control an operator's terminal, and secrets are refused on the command line."""

from __future__ import annotations

import io
import json
import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from rcfarm.cli.kit.output import Format, Output
from rcfarm.daemon.logging import configure
from rcfarm.daemon.visible import visible, visible_json
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.records import Health, encode
from tests.support.programs.cli import CommandLine, run

HOSTILE = "ok\x1b]0;TITLE\x1b\\\x1b[31m\x07\x9b2J\x7f\u202e\rred"
SHOWN = "ok\\x1b]0;TITLE\\x1b\\\\x1b[31m\\x07\\x9b2J\\x7f\\u202e\\x0dred"


@given(st.text())
def test_nothing_shown_can_move_the_cursor(text: str) -> None:
    """Of all unprintable characters only line feeds remain, and text without controls is unchanged."""
    shown = visible(text)
    for bad in (*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\ud800"):
        assert bad == "\n" or bad not in shown
    assert visible(shown) == shown


def test_ordinary_text_is_left_alone() -> None:
    """Letters of every language and line feeds are unchanged."""
    for text in (
        string.printable.replace("\t", "").replace("\r", "").replace("\x0b", "").replace("\x0c", ""),
        "ä→日本\n",
    ):
        assert visible(text) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_json_stays_json(text: str) -> None:
    """The escaped document says the same."""
    document = visible_json(json.dumps({text: text}, ensure_ascii=False))
    assert json.loads(document) == {text: text}
    assert "\x9b" not in document


def test_every_way_to_show_something(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, notes, errors, tables, progress and JSON escape control characters."""
    out = Output(Format.table)
    out.line(HOSTILE)
    out.line(Text.assemble((HOSTILE, "red")))
    out.note(HOSTILE)
    out.error(HOSTILE)
    out.table(("A",), [(HOSTILE,), (Text(HOSTILE, style="red"),)])
    with out.progress("[bold] ") as say:
        say(HOSTILE)
    out.json({"a": HOSTILE})
    shown = capsys.readouterr()
    for bad in "\x1b\x07\x9b\x7f\u202e\r":
        assert bad not in shown.out + shown.err
    assert shown.out.count(SHOWN) == 2
    assert shown.out.count("x1b]0;TITLE") == 4, "rich itself drops some controls of a Text"
    assert "[bold] " + SHOWN in shown.err
    assert json.loads(shown.out[shown.out.index("{") :]) == {"a": HOSTILE}


def test_documents_are_exact_but_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`rc get --manifest > file` writes the exact bytes; a terminal gets escaped text."""
    Output().text(b"a\x1b\xff\n")
    assert capfdbinary.readouterr().out == b"a\x1b\xff\n"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    Output().text(b"a\x1b\xff\n")
    assert terminal.getvalue() == "a\\x1b\\xff\n"


async def test_a_pods_health_output_is_text(cli: CommandLine) -> None:
    """The output of an exec check appears in `rc status` with its control characters escaped."""
    ran = await cli(
        "rc", "create", "-m", "-", "--id", "web", "-d", stdin='{"id":"web","launchables":{"a":{"command":["a"]}}}'
    )
    assert ran.code == 0, ran.err
    key = cli.keys.health("web", "node-1")
    await cli.store.put(cli.keys.pod("web", "node-1"), b"{}")
    session = await cli.store.create_session(SessionSpec("agent"))
    health = Health(status="critical", manifest="", output=HOSTILE)
    await cli.store.txn([ops.lock(key, encode(health), session.id)])
    ran = await cli("rc", "status", "web")
    assert "TITLE" in ran.out
    assert "\x1b" not in ran.out


def test_logs_on_a_terminal_are_text() -> None:
    """A logged value can't control the terminal either."""
    stream = io.StringIO()
    configure(style="console", stream=stream)
    import structlog

    structlog.get_logger("x").info("event", reason=HOSTILE)
    assert "TITLE" in stream.getvalue()
    assert "\x1b]0" not in stream.getvalue()
    structlog.reset_defaults()


@pytest.mark.parametrize("role", ["farm", "agent", "jobs", "extender", "dev"])
def test_no_secret_on_the_command_line(role: str) -> None:
    """A token given by --set would be visible in `ps`: the error names the alternatives without showing the token."""
    ran = run(role, "--set", "web.token=hunter2")
    assert ran.code == 1
    assert "web.token_file" in ran.err
    assert "RCFARM_WEB_TOKEN" in ran.err
    assert "hunter2" not in ran.err


def test_a_table_on_a_narrow_terminal_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """A column that does not fit is written below its row, with its name, and nothing is cut; a wide terminal, and a
    pipe, have one line per row."""
    columns = ("NODE", "PODS>", "ADDRESS", "DETAIL")
    why = "launchables.web.command: './bin/nope' is not an executable file in /var/lib/rcfarm/pods"
    rows = [("node-1", "12", "127.0.0.1:21253 and many more ports", why), ("node-2", "1", "-", "")]
    wide = (
        "NODE    PODS  ADDRESS                              DETAIL\n"
        f"node-1    12  127.0.0.1:21253 and many more ports  {why}\n"
        "node-2     1  -\n"
    )

    def shown(width: int) -> str:
        out = Output()
        if width:
            out.stdout = Console(width=width, force_terminal=True, color_system=None)
        out.table(columns, rows)
        return capsys.readouterr().out

    assert shown(0) == shown(200) == wide
    assert shown(60) == (
        "NODE    PODS  ADDRESS\n"
        "node-1    12  127.0.0.1:21253 and many more ports\n"
        "    detail: launchables.web.command: './bin/nope' is not an\n"
        "            executable file in /var/lib/rcfarm/pods\n"
        "node-2     1  -\n"
    )
    assert "    address: 127.0.0.1:21253 and many\n             more ports\n" in shown(40)


def test_every_row_of_a_table_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Line feeds in a record do not break a row; where columns go below their row, no other column wraps."""
    out = Output()
    out.table(("NODE", "WHY"), [("node-1", "first\nsecond"), (Text("node\n-2"), "-")])
    assert capsys.readouterr().out == "NODE     WHY\nnode-1   first second\nnode -2  -\n"
    out.stdout = Console(width=60, force_terminal=True, color_system=None)
    out.table(("NODE", "PROCESSES", "DETAIL"), [("node-1", "p" * 70, "two words " * 6), ("node-2", "-", "fine\nhere")])
    assert capsys.readouterr().out.splitlines()[0].split() == ["NODE"]
