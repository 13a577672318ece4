"""`rcfarm rc edit`: the editor is a script; a terminal is played where the file is opened again."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs.cli import CommandLine

MANIFEST = b'{"id":"web","launchables":{"main":{"command":["serve"]}}}'


@pytest.fixture(autouse=True)
def drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, in which no other test works."""
    folder = tmp_path / "drafts"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def editor(tmp_path: Path, *edits: str) -> str:
    """Return an editor that makes one edit each time that it is opened, in sed's words, and keeps what it was given."""
    script = tmp_path / "editor.sh"
    lines = [f"{number}) sed -i -e '{edit}' \"$1\" ;;" for number, edit in enumerate(edits, 1)]
    script.write_text(
        f'#!/bin/sh\necho >> {tmp_path}/opened\nn=$(wc -l < {tmp_path}/opened)\ncp "$1" {tmp_path}/given-$n\n'
        "case $n in\n" + "\n".join(lines) + "\nesac\n"
    )
    script.chmod(0o755)
    return str(script)


async def test_what_is_saved_is_applied(cli: CommandLine, tmp_path: Path, drafts: Path) -> None:
    """The editor gets the file that `get` prints; the difference is shown, and the file is gone afterwards."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    shown = (await cli("rc", "get", "web", "-o", "yaml")).out

    ran = await cli("rc", "edit", "web", "--yes", "--detach", EDITOR=editor(tmp_path, "s/replicas: 2/replicas: 3/"))

    assert (ran.code, ran.out) == (0, "rc web changed\n")
    assert "-replicas: 2\n  +replicas: 3" in ran.err
    given = (tmp_path / "given-1").read_text()
    assert given.startswith("#: rc web: save to apply, leave unchanged to cancel.")
    assert "".join(line for line in given.splitlines(True) if not line.startswith("#:")) == shown
    assert (await cli.rcs.get("web")).replicas_desired == 3
    assert list(drafts.iterdir()) == []


@pytest.mark.parametrize("edit", ["", "s/^#:.*//", "d", "s/replicas: 2/replicas:  2/"])
async def test_no_change_is_nothing(cli: CommandLine, tmp_path: Path, drafts: Path, edit: str) -> None:
    """Also when only the command's own lines, or the layout, were changed, and when everything was deleted."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)

    ran = await cli("rc", "edit", "web", EDITOR=editor(tmp_path, edit))

    assert (ran.code, ran.out, ran.err) == (0, "", "rc web: nothing to change\n")
    assert (await cli.rcs.get("web")).generation == 1
    assert list(drafts.iterdir()) == []


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ("s/replicas/replicsa/", r":2: replicsa: unknown field; did you mean replicas\?"),
        ("s/replicas: 2/replicas: -2/", r":1: replicas: -2 is negative"),
        ("s/id: web/id: wob/", r":1: id: another RC than rc web"),
        ("s/replicas: 2/replicas: [/", r":\d+: "),
    ],
)
async def test_a_refused_file_is_kept_and_named(
    cli: CommandLine, tmp_path: Path, drafts: Path, edit: str, problem: str
) -> None:
    """Without a terminal it is not opened again. The file has the text, without the command's own lines."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)

    ran = await cli("rc", "edit", "web", "--yes", EDITOR=editor(tmp_path, edit))

    (draft,) = drafts.iterdir()
    assert ran.code == 1
    note, error = ran.err.splitlines()
    assert note == f"rc web was not changed; your text is in {draft}"
    assert re.match(rf"error: {re.escape(str(draft))}{problem}", error)
    assert not draft.read_text().startswith("#:")
    assert (await cli.rcs.get("web")).generation == 1


async def test_on_a_terminal_a_refused_file_is_opened_again(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error as a comment, until it is accepted; leaving it as it is gives up."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("rcfarm.cli.rc.edit.sys", SimpleNamespace(stdin=terminal))
    edits = ["s/replicas: 2/replicas: two/", "s/replicas: two/replicas: 4/"]

    ran = await cli("rc", "edit", "web", "--yes", "--detach", EDITOR=editor(tmp_path, *edits))

    assert ran.code == 0, ran.err
    again = (tmp_path / "given-2").read_text()
    assert '#: error: replicas: expected a whole number or `all`, got "two"' in again
    assert (await cli.rcs.get("web")).replicas_desired == 4
    (tmp_path / "opened").unlink()
    given_up = await cli("rc", "edit", "web", "--yes", EDITOR=editor(tmp_path, "s/replicas: 4/replicas: no/", ""))
    assert given_up.code == 1
    assert "your text is in" in given_up.err


@pytest.mark.parametrize(
    ("program", "problem"),
    [("nosuch-editor", "can't be used: No such file"), ("false", "has failed with code 1"), ("'", "can't be used")],
)
async def test_an_editor_that_fails(cli: CommandLine, drafts: Path, program: str, problem: str) -> None:
    """One line; no file is left, as nothing was written into it."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)

    ran = await cli("rc", "edit", "web", EDITOR=program, VISUAL="")

    assert ran.code == 1
    assert ran.err.startswith("error: the editor ")
    assert problem in ran.err
    assert list(drafts.iterdir()) == []


async def test_what_was_changed_while_it_was_edited_is_not_overwritten(
    cli: CommandLine, tmp_path: Path, drafts: Path
) -> None:
    """The text stays in a file."""
    spec = await cli.rcs.create(MANIFEST, rc_id="web", replicas=2)
    script = tmp_path / "slow.py"
    url = f"{cli.url.replace('consul://', 'http://')}/v1/kv/{cli.keys.spec('web')}"
    script.write_text(
        f"""#!{sys.executable}
import sys, urllib.request as web
from pathlib import Path
from types import SimpleNamespace
draft = Path(sys.argv[1])
draft.write_text(draft.read_text().replace("replicas: 2", "replicas: 5"))
spec = web.urlopen("{url}?raw").read().replace(b'"replicas_desired":2', b'"replicas_desired":7')
web.urlopen(web.Request("{url}", spec, method="PUT"))
"""
    )
    script.chmod(0o755)

    ran = await cli("rc", "edit", "web", "--yes", EDITOR=str(script))

    assert ran.code == 3, ran.err
    assert "rc web was changed in the meantime; `rcfarm rc edit web` opens what it is now" in ran.err
    assert (await cli.rcs.get("web")).replicas_desired == 7
    assert spec.replicas_desired == 2
    assert len(list(drafts.iterdir())) == 1


async def test_an_unknown_rc_opens_no_editor(cli: CommandLine, tmp_path: Path) -> None:
    ran = await cli("rc", "edit", "nope", EDITOR=editor(tmp_path))
    assert (ran.code, ran.err) == (1, "error: there is no rc nope; `rcfarm rc list` shows those that exist\n")
    assert not (tmp_path / "opened").exists()
