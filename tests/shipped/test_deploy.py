"""The shipped files for running rcfarm are accepted by the programs that read them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from rcfarm.agent.cgroups import LEAF
from rcfarm.config.sources import variables
from rcfarm.daemon.daemon import HEARTBEAT_INTERVAL, START_EXTENSION

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SYSTEMD = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(not SYSTEMD, reason="systemd-analyze is not there; install systemd")
MOST_EXPOSED = {
    "rcfarm-farm.service": 20,
    "rcfarm-tasks.service": 20,
    "rcfarm-agent.service": 55,
}  # tenths; the agent's pods need more


def compose_command() -> list[str] | None:
    """Return the compose program: docker's plugin, or docker-compose."""
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def systemd_version() -> int:
    """Return the major version of systemd."""
    shown = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\d+", shown)[0])


def installed(unit: Path, directory: Path) -> Path:
    """Return a copy of the unit whose program exists on this machine, so that only the unit itself is judged."""
    text = unit.read_text()
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert program is not None
    if systemd_version() < 254:  # it warns of what it does not know yet
        text = text.replace(f"DelegateSubgroup={LEAF}\n", "")
    copy = directory / unit.name
    copy.write_text(text.replace(program[1], "/bin/true"))
    return copy


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` reports nothing."""
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", installed(unit, tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in result.stderr.splitlines() if unit.name in line or str(tmp_path) in line]
    assert (result.returncode, complaints) == (0, [])


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_unit_is_hardened(unit: Path, tmp_path: Path) -> None:
    """`systemd-analyze security` rates its exposure no higher than documented."""
    limit = MOST_EXPOSED[unit.name]
    result = subprocess.run(
        [
            "systemd-analyze",
            "security",
            "--offline=true",
            f"--threshold={limit}",
            "--no-pager",
            installed(unit, tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout.splitlines()[-1:] + result.stderr.splitlines()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_unit_fits_the_daemon(unit: Path) -> None:
    """Readiness and watchdog are used, it is always restarted, and the stop limit is longer than our own drain.

    The start limit is above the heartbeat that extends it, so a start may wait for Consul but not hang.
    """
    settings = dict(line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"[A-Z]\w+=", line))
    assert settings["Type"] == "notify"
    assert settings["Restart"] == "always"
    assert HEARTBEAT_INTERVAL * 2 < int(settings["TimeoutStartSec"].removesuffix("s")) <= START_EXTENSION
    assert settings["TimeoutStartFailureMode"] == "abort", "a start that hangs must leave its stacks in the journal"
    assert settings["NoNewPrivileges"] == "yes"
    assert int(settings["WatchdogSec"].removesuffix("s")) >= 15
    assert int(settings["TimeoutStopSec"].removesuffix("s")) > 20
    if "agent" in unit.name:
        assert settings["KillMode"] == "process", "stopping the agent must not stop its pods"
        assert (settings["Delegate"], settings["DelegateSubgroup"]) == ("yes", LEAF), "pods have groups beside it"
        assert "ProtectControlGroups" not in settings
        assert settings["OOMPolicy"] == "continue", "a pod out of memory must not stop the agent"
        assert settings["TasksMax"].endswith("%"), "a pod's fork bomb must not be the machine's"


def test_compose_accepts_the_file() -> None:
    """`docker compose config` reads it: servers, two farms, two engines, agents, each with a health check."""
    command = compose_command()
    if command is None:
        pytest.skip("neither `docker compose` nor docker-compose is there; install the package docker-compose")
    result = subprocess.run(
        [*command, "--file", ROOT / "compose.yaml", "config"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    services = yaml.safe_load(result.stdout)["services"]
    ours = {"farm-a", "farm-b", "engine-a", "engine-b", "agent-1", "agent-2", "agent-3"}
    assert services.keys() == {"consul-1", "consul-2", "consul-3", *ours}
    assert all("healthcheck" in service for service in services.values())
    assert {tuple(services[name]["healthcheck"]["test"]) for name in ours} == {("CMD", "rcfarm", "ready")}
    assert [name for name in services if "build" in services[name]] == ["farm-a"], "one image, built once"
    assert {services[name]["image"] for name in ours} == {"rcfarm"}


def test_the_settings_used_there_exist() -> None:
    """Every RCFARM_ variable in the shipped files exists."""
    for path in (ROOT / "compose.yaml", ROOT / "deploy" / "Dockerfile", *UNITS):
        assert set(re.findall(r"\bRCFARM_[A-Z_]+", path.read_text())) <= variables().keys(), path.name


def test_the_image_is_built_from_what_is_there() -> None:
    """Each file that the Dockerfile copies exists and is not ignored, and the image does not run as root."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    allowed = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source for line in lines if line.startswith("COPY ") and "--from" not in line for source in line.split()[1:-1]
    ]
    assert {"pyproject.toml", "rcfarm", "controllers", "scheduler", "store"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in allowed
    assert "USER 10001:10001" in lines
    assert not [line for line in lines if line.startswith("VOLUME")], "each container would leave a volume behind"


def test_every_package_ships_its_types() -> None:
    """mypy checks a user's imports from each package instead of skipping them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [name for name in packages if not (ROOT / name / "py.typed").is_file()] == []


def test_nothing_shipped_names_another_machine() -> None:
    """No registry host, no path of a developer's machine."""
    for path in [*UNITS, ROOT / "compose.yaml", *(ROOT / "deploy").rglob("Dockerfile*")]:
        text = path.read_text()
        assert not re.search(r"https?://(?!127\.0\.0\.1)", text), path.name
        assert str(Path.home()) + os.sep not in text
