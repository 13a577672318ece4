"""The pages on running HiveD show the shipped files, and the commands' real output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import yaml

from scheduler.hived.inspection.snapshot import WaitingPod, take_snapshot
from store.kube.api.objects import name_of
from tests.support.extender.manifests import EXAMPLES, example_pods, framework_pods, scheduler_configurations
from tests.support.hived.cluster import Cluster
from tests.support.kube.shipped_manifests import ROOT
from tests.support.programs.cli import run

PAGES = {
    name: (ROOT / "docs" / "pages" / f"{name}.md").read_text() for name in ("hived-running", "migrating-from-hived")
}
MISTAKES = {  # values of the example's hived.yaml, and those of the page
    "{cellType: A100-RACK.A100-NODE, cellNumber: 2}": "{cellType: A100-RACK.A100-NODE, cellNumber: 4}",
    "cellAddress: t4-2": "cellAddress: t4-1",
}
STATES = {  # by command: the examples whose pods are bound, and whether the chief of the Framework waits
    "explain": (["guaranteed.yaml", "gang.yaml"], True),
    "simulate": (["guaranteed.yaml"], False),
}


def transcripts(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what is shown of `rcfarm hived`: each command, and its output without empty lines."""
    for block in re.findall(r"^ *```console\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", dedent(block), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if output.strip() and command.startswith("rcfarm hived "):
                yield command, lines_of(output)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def state_for(command: str) -> bytes:
    """Return the snapshot that a command is shown on."""
    bound, waits = STATES[command]
    cluster = Cluster(yaml.safe_load((EXAMPLES / "hived.yaml").read_text()))
    for pod in (each for file in bound for each in example_pods(file)):
        pod["metadata"] |= {"namespace": "default", "uid": name_of(pod)}
        cluster.announce(pod)
        assert cluster.schedule(name_of(pod)).place
    waiting = []
    for pod in framework_pods()[:1] if waits else ():
        cluster.announce(pod)
        waiting.append(WaitingPod(pod, "Waiting", cluster.schedule(name_of(pod)).reason))
    text = yaml.safe_dump(cluster.config, sort_keys=False)
    return b"".join(take_snapshot(cluster.algorithm, text, waiting).pieces())


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands: it has the examples, and a file with two mistakes."""
    text = (EXAMPLES / "hived.yaml").read_text()
    for right, wrong in MISTAKES.items():
        text = text.replace(right, wrong)
    (tmp_path / "hived.yaml").write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHOWN = [*transcripts(PAGES["hived-running"])]


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_a_transcript_is_what_the_command_prints(command: str, shown: list[str], directory: Path) -> None:
    """On the examples: `explain` while the gang has its cells, `simulate` after it has gone. Dots stand for more."""
    arguments = command.split()[1:]
    if arguments[1] in STATES:
        (directory / "state.json").write_bytes(state_for(arguments[1]))
        arguments += ["--snapshot", "state.json"]
    ran = run(*arguments)
    printed = lines_of(ran.out + ran.err)
    assert printed[: shown.index("…")] == shown[:-1] if "…" in shown else printed == shown


def test_there_are_transcripts() -> None:
    """Each command with output has a transcript."""
    assert {command.split()[2] for command, _ in SHOWN} == {"validate", "show", *STATES}


def test_the_scheduler_shown_is_the_one_shipped() -> None:
    """The KubeSchedulerConfiguration on the page is that of the tenant `prod`."""
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGES["hived-running"], re.DOTALL)]
    kind = {"kind": "KubeSchedulerConfiguration"}.items()
    shown = [block for block in blocks if isinstance(block, dict) and kind <= block.items()]
    assert shown == [scheduler_configurations()["prod"]]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_is_there(page: str) -> None:
    """Every named file of the repository exists."""
    named = set(re.findall(r"\b(?:deploy|examples)/[\w./-]*\w", PAGES[page]))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
