"""Replacing frameworkbarrier, frameworkcontroller and HiveD by changing only the image."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rcfarm.cli.daemons.drop_in import FRAMEWORKS, Undecided, arguments, role_of, without_klog

ROOT = Path(__file__).parents[5]
FRAMEWORK = {"FC_FRAMEWORK_NAMESPACE": "ns", "FC_FRAMEWORK_NAME": "gang"}
BARRIER = ["barrier", "--output-dir", "/mnt/frameworkbarrier"]


@pytest.mark.parametrize(
    ("given_", "rest", "verbosity"),
    [
        (["--v=2", "--logtostderr"], [], 2),
        (["-v", "4", "-logtostderr=false", "extender"], ["extender"], 4),
        (["-stderrthreshold", "ERROR", "--log_dir=/x", "--vmodule=a=2", "--alsologtostderr"], [], 0),
        (["--log-dir", "/x", "--skip-headers"], [], 0),
        (["--redact", "--output-dir", "/gang", "-v=x"], ["--redact", "--output-dir", "/gang"], 0),
        (["v", "-h"], ["v", "-h"], 0),
        (["-v"], [], 0),
    ],
)
def test_klogs_flags_are_taken(given_: list[str], rest: list[str], verbosity: int) -> None:
    """With one dash or two, with `=` or without; other arguments are left as they are."""
    assert without_klog(given_) == (rest, verbosity)


@given(st.lists(st.text(max_size=8)))
def test_any_arguments_can_be_split(words: list[str]) -> None:
    """Only klog's arguments are removed, whatever is given."""
    rest, _ = without_klog(words)
    left = iter(words)
    assert all(word in left for word in rest)


@pytest.mark.parametrize(
    ("environ", "files", "role"),
    [
        (FRAMEWORK, [], BARRIER),
        ({}, ["frameworkcontroller.yaml", "start.sh"], [*FRAMEWORKS, "--framework-config", "frameworkcontroller.yaml"]),
        ({}, ["hivedscheduler.yaml", "start.sh"], ["extender"]),
        ({"CONFIG": "/etc/hived.yaml"}, ["start.sh"], ["extender"]),
    ],
)
def test_the_role_follows_from_the_environment(environ: dict[str, str], files: list[str], role: list[str]) -> None:
    """Each of the three programs is recognised by what only its manifests set."""
    assert role_of(environ, files) == role


@pytest.mark.parametrize(
    ("environ", "files", "message"),
    [
        ({}, ["start.sh"], "there is no frameworkcontroller.yaml and no hivedscheduler.yaml"),
        ({"FC_FRAMEWORK_NAME": "gang"}, [], "FC_FRAMEWORK_NAME is not set"),
        ({}, ["hivedscheduler.yaml", "frameworkcontroller.yaml"], "Give a command: rcfarm barrier, jobs or extender"),
        (FRAMEWORK, ["hivedscheduler.yaml"], "Give a command"),
    ],
)
def test_what_is_not_clear_is_not_guessed(environ: dict[str, str], files: list[str], message: str) -> None:
    """If no role or several apply, the error names what was found and what to do."""
    with pytest.raises(Undecided, match=message):
        role_of(environ, files)


def test_a_command_is_never_replaced() -> None:
    """In a Framework's pod only a container without a command becomes the barrier; elsewhere none does."""
    assert arguments([], FRAMEWORK) == BARRIER
    assert arguments(["--v=2"], FRAMEWORK) == BARRIER
    assert arguments(["rc", "list"], FRAMEWORK) == ["rc", "list"]
    assert arguments(["--version"], FRAMEWORK) == ["--version"]
    assert arguments([], {}) == []


def run(directory: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=directory, env=variables, capture_output=True, text=True, check=False
    )


def test_an_init_container_never_passes_without_waiting(tmp_path: Path) -> None:
    """With the image replaced and no command the barrier runs: here it finds no cluster, and says so. Without a
    Framework's environment the program ends with an error, never with 0."""
    barrier = run(tmp_path, "rcfarm", **FRAMEWORK)
    assert barrier.returncode == 1
    assert barrier.stderr.splitlines()[-1].startswith("frameworkbarrier: exit 1 (")
    assert run(tmp_path, "rcfarm", "--v=2", **FRAMEWORK).returncode == 1
    assert run(tmp_path, "rcfarm").returncode != 0
    undecided = run(tmp_path, "rcfarm.cli.daemons.drop_in")
    assert undecided.returncode == 1
    assert undecided.stderr.startswith("error: can't determine the role to run")


def test_the_barrier_takes_klogs_flags_and_calls_others_permanent(tmp_path: Path) -> None:
    """An unknown flag is a mistake in the manifest: a retry would not help, and 2 would mean a defect."""
    program = ("-c", "from rcfarm.cli.daemons.drop_in import frameworkbarrier; frameworkbarrier()")
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT), **FRAMEWORK}

    def barrier(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *program, *flags]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

    assert barrier("-v=2", "--logtostderr").returncode == 1
    assert "no Kubernetes API server is configured" in barrier("-v=2").stderr
    refused = barrier("--bogus")
    assert refused.returncode == 210
    assert "No such option: --bogus" in refused.stderr


def test_start_sh_runs_the_operator_for_frameworkcontrollers_file(tmp_path: Path) -> None:
    """`cp frameworkcontroller.yaml . && ./start.sh`, as its StatefulSet says: the operator starts, not the extender."""
    (tmp_path / "frameworkcontroller.yaml").write_text("workerNumber: -3\n")
    ended = run(tmp_path, "rcfarm.cli.daemons.drop_in", "-v=2")
    assert ended.returncode == 1
    assert "frameworkcontroller.yaml" in ended.stderr
    assert "workerNumber" in ended.stderr


def test_the_images_start_as_their_names_say() -> None:
    """Each target of the Dockerfile runs the program of its name; the image of all roles has no default command."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    scripts = (ROOT / "pyproject.toml").read_text()
    for name in ("frameworkbarrier", "frameworkcontroller", "hivedscheduler", "training-operator"):
        assert re.search(rf'^FROM rcfarm AS {name}\nENTRYPOINT \["{name}"', text, re.MULTILINE)
        assert f'{name} = "rcfarm.cli.daemons.drop_in:{name.replace("-", "_")}"' in scripts
    assert "ln -s /opt/rcfarm/bin/training-operator /manager" in text
    assert 'CMD ["--help"]' not in text
    assert text.rstrip().endswith("FROM rcfarm")
    assert re.search(r"^WORKDIR /work$", text, re.MULTILINE)
    assert "COPY deploy/start.sh /work/start.sh" in text
