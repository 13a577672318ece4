"""The environment, user and limits of a process."""

from __future__ import annotations

import json
import os
import pwd
import resource
from pathlib import Path
from typing import Any

import pytest

from rcfarm.agent.errors import InstallFailed
from rcfarm.agent.pods.running import (
    PodContext,
    Users,
    check_directory,
    check_program,
    config_file,
    expand,
    launch_spec,
    prepare_files,
)
from rcfarm.agent.process import Credentials, LaunchSpec
from rcfarm.agent.state import LaunchPaths, StateDir
from store.schema.manifest import from_mapping, parse

NOBODY = pwd.getpwnam("nobody")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as another user")


def paths(tmp_path: Path) -> LaunchPaths:
    return StateDir(tmp_path).paths("web", "main")


OWN = Users(default=str(os.geteuid()))


def context(artifact: Path | None = None, users: Users = OWN, **launchable: Any) -> PodContext:
    fields = {"id": "web", "launchables": {"main": {"command": ["run"], **launchable}}, "ports": {"http-api": 8080}}
    manifest = from_mapping(fields)
    return PodContext(
        node="node-1",
        address="10.0.0.1",
        rc="rc-1",
        task="",
        pod_id="web",
        manifest_id="m1",
        manifest=manifest,
        ports=manifest.ports,
        artifacts={"main": artifact} if artifact else {},
        users=users,
    )


def spec(tmp_path: Path, artifact: Path | None = None, users: Users = OWN, **launchable: Any) -> LaunchSpec:
    return launch_spec(context(artifact, users, **launchable), "main", paths(tmp_path), {})


def test_variables_are_expanded_where_they_are_promised(tmp_path: Path) -> None:
    """`${RCFARM_…}` in command, env and cwd; other variables are the program's own business."""
    found = spec(
        tmp_path,
        command=["serve", "--listen=${RCFARM_ADDRESS}:${RCFARM_PORT_HTTP_API}", "$HOME", "${HOME}"],
        env={"WHERE": "${RCFARM_NODE}/${RCFARM_POD_ID}"},
        cwd="${RCFARM_RC}",
    )
    assert found.argv == ["serve", "--listen=10.0.0.1:8080", "$HOME", "${HOME}"]
    assert found.env["WHERE"] == "node-1/web"
    assert found.cwd == paths(tmp_path).directory / "rc-1"


@pytest.mark.parametrize("field", [{"command": ["${RCFARM_PROT}"]}, {"env": {"A": "${RCFARM_PROT}"}}])
def test_an_unknown_variable_is_an_error(tmp_path: Path, field: dict[str, Any]) -> None:
    """A mistyped variable names its field and what there is, and never becomes an empty word."""
    with pytest.raises(
        InstallFailed, match=r"launchables.main.\w+(.A)?: \$\{RCFARM_PROT\} is not defined; .*RCFARM_RC"
    ):
        spec(tmp_path, **field)


def test_only_a_few_variables_are_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and settings of the agent stay with the agent; the manifest's own variables win over everything."""
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "secret")
    monkeypatch.setenv("RCFARM_STORE", "consul://secret")
    monkeypatch.setenv("TZ", "UTC")
    found = spec(tmp_path, env={"HOME": "/elsewhere"})
    assert "secret" not in str(found.env)
    assert found.env["TZ"] == "UTC"
    assert found.env["HOME"] == "/elsewhere"


def test_an_artifact_is_where_the_process_starts(tmp_path: Path) -> None:
    """With an artifact, relative commands and directories are those in it."""
    artifact = tmp_path / "artifact"
    (artifact / "bin").mkdir(parents=True)
    program = artifact / "bin" / "run"
    program.write_text("#!/bin/sh\n")
    found = spec(tmp_path, artifact, command=["./run"], cwd="bin")
    assert found.cwd == artifact / "bin"
    assert found.env["RCFARM_ARTIFACT"] == str(artifact)
    with pytest.raises(InstallFailed, match=r"launchables.main.command: './run' is not an executable file in .*/bin"):
        check_program(found, "launchables.main")
    program.chmod(0o755)
    check_program(found, "launchables.main")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """A program that is not on the PATH and a missing directory are reported before anything is started."""
    found = spec(tmp_path, command=["no-such-program"], cwd="nowhere")
    with pytest.raises(InstallFailed, match="'no-such-program' is not an executable file on the PATH"):
        check_program(found, "launchables.main")
    with pytest.raises(InstallFailed, match=r"launchables.main.cwd: .*/nowhere is not a directory"):
        check_directory(found, "launchables.main")


def test_resources_become_limits(tmp_path: Path) -> None:
    """`memory` bounds the address space; limits that are not given are not touched."""
    found = spec(tmp_path, resources={"cpu": 500, "memory": 1 << 30, "nofile": 64, "core": 0})
    assert found.limits == {resource.RLIMIT_AS: 1 << 30, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0}
    assert spec(tmp_path).limits == {}


def test_an_unknown_user_is_named(tmp_path: Path) -> None:
    """A user that this machine does not have is an error of the manifest's field."""
    with pytest.raises(InstallFailed, match=r"launchables.main.user: this machine has no user 'no-such-user'"):
        spec(tmp_path, user="no-such-user")


def test_another_user_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is not root says so instead of starting a process as itself."""
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(InstallFailed, match="the agent runs as uid 12345 and can't start processes as 'nobody'"):
        spec(tmp_path, user="nobody")


@root_only
@pytest.mark.parametrize("user", ["nobody", str(NOBODY.pw_uid)])
def test_files_belong_to_the_user(tmp_path: Path, user: str) -> None:
    """A process of another user gets its uid, gid and home, a directory of its own, and may read its config file."""
    found = spec(tmp_path, user=user)
    assert found.credentials is not None
    assert found.credentials[:2] == (NOBODY.pw_uid, NOBODY.pw_gid)
    assert found.env["HOME"] == NOBODY.pw_dir
    prepare_files(context(user=user).manifest, found.credentials, paths(tmp_path))
    for path in (paths(tmp_path).directory, paths(tmp_path).config):
        assert path.stat().st_uid == NOBODY.pw_uid
        assert path.stat().st_mode & 0o077 == 0


@root_only
def test_a_user_can_not_misuse_the_agents_writes(tmp_path: Path) -> None:
    """Files that the agent writes as root are not in the directory that belongs to the process's user."""
    where = paths(tmp_path)
    assert where.directory not in (*where.config.parents, *where.log.parents, *where.check_output.parents)


def test_the_config_file_is_json(tmp_path: Path) -> None:
    """`config` arrives as the manifest has it."""
    fields = {"id": "web", "launchables": {"main": {"command": ["run"]}}, "config": {"a": [1, {"b": None}]}}
    prepare_files(from_mapping(fields), None, paths(tmp_path))
    assert json.loads(paths(tmp_path).config.read_text()) == {"a": [1, {"b": None}]}


def test_a_config_that_is_no_json_is_named() -> None:
    """YAML allows a key that is nothing; the field is named instead of the file being left out."""
    manifest = parse(b"id: web\nlaunchables: {main: {command: [run]}}\nconfig: {a: {~: b}}\n")
    with pytest.raises(InstallFailed, match="config: can't be written as JSON"):
        config_file(manifest)


def test_expansion_is_not_repeated() -> None:
    """A value that looks like a variable is not expanded again."""
    assert expand("${RCFARM_A}", {"RCFARM_A": "${RCFARM_B}", "RCFARM_B": "b"}, "x") == "${RCFARM_B}"


@root_only
def test_supplementary_groups_are_those_of_the_user(tmp_path: Path) -> None:
    """The agent's own groups are not inherited."""
    found = spec(tmp_path, user="nobody").credentials
    assert found == Credentials(NOBODY.pw_uid, NOBODY.pw_gid, tuple(os.getgrouplist("nobody", NOBODY.pw_gid)))


@root_only
@pytest.mark.parametrize(
    ("users", "user", "uid"),
    [
        (Users(), "", NOBODY.pw_uid),
        (Users(), "daemon", pwd.getpwnam("daemon").pw_uid),
        (Users(default="daemon", allowed=()), "", pwd.getpwnam("daemon").pw_uid),
        (Users(default="daemon", allowed=()), "daemon", pwd.getpwnam("daemon").pw_uid),
        (Users(default="root", allowed=()), "", None),
        (Users(allowed=("root",)), "0", None),
        (Users(allowed=("0",)), "root", None),
        (Users(allowed=("daemon",)), str(pwd.getpwnam("daemon").pw_uid), pwd.getpwnam("daemon").pw_uid),
    ],
)
def test_the_node_decides_who_runs(tmp_path: Path, users: Users, user: str, uid: int | None) -> None:
    """The default user, and those that the node allows by name, number or `*`; root (no credentials) only by name."""
    credentials = spec(tmp_path, users=users, user=user).credentials
    assert (credentials.uid if credentials else None) == uid


@root_only
@pytest.mark.parametrize(
    ("users", "user"),
    [(Users(), "root"), (Users(), "0"), (Users(allowed=()), "nobody"), (Users("nobody", ("daemon",)), "root")],
)
def test_other_users_are_refused(tmp_path: Path, users: Users, user: str) -> None:
    """A user that is not allowed is a clear error of the manifest's field that names the node's setting."""
    with pytest.raises(InstallFailed, match=r"launchables.main.user: .* run as '\w+': add it to agent.allowed_users"):
        spec(tmp_path, users=users, user=user)


def test_an_agent_that_is_not_root_runs_its_own_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root there is one user to run as, and no setting is needed for it."""
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY.pw_uid)
    for user in ("", "nobody", str(NOBODY.pw_uid)):
        assert spec(tmp_path, users=Users(allowed=()), user=user).credentials is None
