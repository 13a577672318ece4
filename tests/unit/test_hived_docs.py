"""What the pages on running HiveD show is what is shipped, and what the commands print."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from typer.testing import CliRunner

from rcfarm.cli.main import app
from tests.support.hived_manifests import EXAMPLES, scheduler_configurations
from tests.support.manifests import ROOT

PAGES = {
    name: (ROOT / "docs" / "pages" / f"{name}.md").read_text() for name in ("hived-running", "migrating-from-hived")
}
MISTAKES = {  # what the page's hived.yaml has instead of the example's
    "{cellType: A100-RACK.A100-NODE, cellNumber: 2}": "{cellType: A100-RACK.A100-NODE, cellNumber: 4}",
    "cellAddress: t4-2": "cellAddress: t4-1",
}


def transcripts() -> dict[str, str]:
    """What is shown of commands that need no cluster, by command."""
    found: dict[str, str] = {}
    for block in re.findall(r"^ *```console\n(.*?)^ *```", PAGES["hived-running"], re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", dedent(block), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if output.strip() and command.startswith(("rcfarm hived validate ", "rcfarm hived show ")):
                found[command] = output
    return found


@pytest.mark.parametrize("command", transcripts())
def test_a_transcript_is_what_the_command_prints(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the example, and on the example with two mistakes in it."""
    text = (EXAMPLES / "hived.yaml").read_text()
    for right, wrong in MISTAKES.items():
        text = text.replace(right, wrong)
    (tmp_path / "hived.yaml").write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, command.split()[1:])
    assert _lines(ran.output) == _lines(transcripts()[command])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_there_are_transcripts() -> None:
    """One of each command."""
    assert {command.split()[2] for command in transcripts()} == {"validate", "show"}


def test_the_scheduler_shown_is_the_one_shipped() -> None:
    """The KubeSchedulerConfiguration on the page is that of the tenant `prod`."""
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGES["hived-running"], re.DOTALL)]
    shown = [block for block in blocks if block.get("kind") == "KubeSchedulerConfiguration"]
    assert shown == [scheduler_configurations()["prod"]]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_is_there(page: str) -> None:
    """Those of the repository."""
    named = set(re.findall(r"\b(?:deploy|examples)/[\w./-]*\w", PAGES[page]))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
