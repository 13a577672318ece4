"""The check of the prose refuses its words where people read them, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.modules import load_module

CHECK = Path(__file__).parents[2] / "docs" / "prose.py"
PHRASES = [
    "told",
    "tell of",  # prose: quoted
    "tells of",  # prose: quoted
    "anew",
    "whoever",
    "wish",
    "let go",  # prose: quoted
    "may be had",  # prose: quoted
    "is had",  # prose: quoted
    "by himself",  # prose: quoted
    "by itself",  # prose: quoted
    "so many",  # prose: quoted
    "meanwhile",
    "is over",  # prose: quoted
    "there for good",  # prose: quoted
    "in our eyes",  # prose: quoted
    "mended",
    "mend",
    "hardly meant",  # prose: quoted
    "typing mistake",  # prose: quoted
]


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    """docs/prose.py, which is no part of a package."""
    return load_module(CHECK, "rcfarm_docs_prose")


@pytest.mark.parametrize("phrase", PHRASES)
def test_refused_where_people_read(phrase: str, prose: ModuleType) -> None:
    """A hit has the line where the phrase begins, in any kind of prose, and says what to write instead."""
    for source, line in (
        (f'"""First line.\n\nThe farm, {phrase}.\n"""\n', 3),
        (f"x = 1  # the farm {phrase}\n", 1),
        (f'\nlog("the farm {phrase}.")\n', 2),
        (f"\nlog(f'{{name}} {phrase}.')\n", 2),
        (f"log(f\"{{name}}: {{'it is {phrase}.' if lost else 1}}\")\n", 1),
    ):
        (hit,) = prose.hits_in_python(source)
        assert (hit.line, hit.word) == (line, phrase), source
        assert hit.instead
    (hit,) = prose.hits_in_markdown(f"# Title\n\n- The farm, *{phrase.title()}*.\n".replace("*", ""))
    assert (hit.line, hit.word) == (3, phrase.title())


def test_refused_across_lines(prose: ModuleType) -> None:
    """Of a docstring, a page, a comment, and of literals that are one message."""
    for source in (
        '"""RCs are let\n    go here."""\n',
        "# RCs are let\n# go here\n",
        "log('RCs are let '\n    'go here')\n",
    ):
        assert [(hit.line, hit.word) for hit in prose.hits_in_python(source)] == [(1, "let go")]  # prose: quoted
    assert [hit.line for hit in prose.hits_in_markdown("Title\n\nRCs are let\ngo here.\n")] == [3]  # prose: quoted


@pytest.mark.parametrize(
    "source",
    [
        "told = anew(whoever=wish)\n",  # prose: quoted
        "told()  # a comment\n# over\n",  # prose: quoted
        "kinds = {'told': b'they are told'}\n",  # prose: quoted
        "log(f'{told} and {anew!r:>{wish}} of {{n}}')\n",  # prose: quoted
        "log('the line says \"by itself\" twice')\n",
        r'log("the line says \"by itself\" twice")' + "\n",  # prose: quoted
        '"""What is `told`, or "so\nmany"."""\n',  # prose: quoted
        "log('the time is over')  # prose: quoted\n",
        "# the farm waits; meanwhile it reads\n",
        "# the year is\nover = 1\n",  # prose: quoted
        "'the end is', 'over all'\n",
        "# untold wishful amendments\n",
    ],
)
def test_accepted_in_python(source: str, prose: ModuleType) -> None:
    """Identifiers, single words, bytes, quotations, marked lines, and words that only contain one of the list."""
    assert prose.hits_in_python(source) == []


@pytest.mark.parametrize(
    "text",
    [
        '`told` and "by itself", and “so\nmany”.\n',
        "Text.\n\n```console\n$ run\nthe time is over\n```\n\nText.\n",
        "- An item:\n\n    ~~~\n    told\n    ~~~\n",  # prose: quoted
        "The time is over. <!-- prose: quoted -->\n",
        "Meanwhile, in the view, nothing changes.\n",
    ],
)
def test_accepted_in_markdown(text: str, prose: ModuleType) -> None:
    """Quotations, blocks of code, marked lines."""
    assert prose.hits_in_markdown(text) == []


def test_what_follows_a_quotation_is_read(prose: ModuleType) -> None:
    """A quotation that does not end before the next paragraph is none; a fence ends where it ends."""
    text = 'A screen of 5" is\nfine.\n\nIt is told "x".\n\n```\ntold\n```\n\nanew\n'  # prose: quoted
    assert [(hit.line, hit.word) for hit in prose.hits_in_markdown(text)] == [(4, "told"), (10, "anew")]


def test_the_program_names_file_and_line(tmp_path: Path) -> None:
    """`file:line: word: what to write instead` on standard output, and exit code 1; 0 without a hit."""
    (tmp_path / "good.py").write_text('"""Return the farms."""\n')
    clean = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True, check=False)
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("Title\n\nIt reads anew.\n")  # prose: quoted
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.md").write_text("It reads anew.\n")  # prose: quoted
    found = subprocess.run([sys.executable, CHECK, tmp_path], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, f"{tmp_path}/docs/page.md:3: anew: again\n")  # prose: quoted
