"""The files of a passed barrier, which containers read and source."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from controllers.framework.barrier.config import Identity
from controllers.framework.barrier.files import MAX_EXPORT, File, membership_digest, render, write_files
from controllers.framework.barrier.readiness import Look, decompressed, look_at, view_of
from store.kube.api.objects import Object
from tests.support.framework.gangs import compressed, gang, task


def look(framework: Object) -> Look:
    return look_at(view_of(framework), Identity())


def rendered(framework: Object, *, redact: bool = False) -> dict[str, File]:
    framework = decompressed(framework)
    return {file.path: file for file in render(framework, look(framework), redact=redact)}


def sourced(tmp_path: Path, framework: Object, script: str, **environ: str) -> str:
    """Return what `script` prints after it sourced the injector in a shell with only `environ`."""
    write_files(tmp_path, list(rendered(framework).values()))
    script = f"source {tmp_path}/injector.sh > /dev/null\n{script}"
    return subprocess.run(
        ["bash", "-c", script], env=environ, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_addresses_of_each_role(tmp_path: Path) -> None:
    """Addresses are ordered by index, joined by commas, with the ports that the caller set."""
    script = "env | grep -E '^FB_.*(IPS|ADDRESSES)=' | sort"
    assert sourced(
        tmp_path, gang(ps=1, worker=2), script, PATH=os.environ["PATH"], FB_PS_PORT="7", FB_WORKER_PORT="8"
    ).split() == [
        "FB_PS_ADDRESSES=10.1.2.1:7",
        "FB_PS_IPS=10.1.2.1",
        "FB_WORKER_ADDRESSES=10.1.6.1:8,10.1.6.2:8",
        "FB_WORKER_IPS=10.1.6.1,10.1.6.2",
    ]


def test_sourcing_again_with_other_ports(tmp_path: Path) -> None:
    """The second ports apply."""
    script = f"FB_PS_PORT=9; source {tmp_path}/injector.sh > /dev/null; echo $FB_PS_ADDRESSES"
    assert sourced(tmp_path, gang(ps=1), script, FB_PS_PORT="7") == "10.1.2.1:9"


def test_a_port_that_is_not_set(tmp_path: Path) -> None:
    """The address ends in a colon, as with frameworkcontroller's barrier, so the user sees what is missing."""
    assert sourced(tmp_path, gang(ps=1), "echo $FB_PS_ADDRESSES") == "10.1.2.1:"


def test_sourcing_prints_each_variable(tmp_path: Path) -> None:
    """Each variable is printed on standard output."""
    write_files(tmp_path, list(rendered(gang(ps=1)).values()))
    said = subprocess.run([tmp_path / "injector.sh"], capture_output=True, text=True, check=True).stdout
    assert "FB_PS_IPS=10.1.2.1\n" in said
    assert said.count("\n") == 5


def test_ipv6_addresses(tmp_path: Path) -> None:
    """IPv6 addresses are in brackets where a port follows, and only there."""
    framework = gang(ps=[task("ps", 0, ip="FD00:0::1")])
    assert sourced(tmp_path, framework, "echo $FB_PS_ADDRESSES $FB_PS_IPS", FB_PS_PORT="7") == "[fd00::1]:7 fd00::1"


def test_an_empty_gang(tmp_path: Path) -> None:
    """Without tasks, the variables are set and empty."""
    script = 'echo "<$FB_PS_IPS$FB_PS_ADDRESSES>" "${FB_PS_IPS+set}"'
    assert sourced(tmp_path, gang(ps=0), script) == "<> set"


def test_a_framework_without_a_status(tmp_path: Path) -> None:
    """The injector is a script that does nothing."""
    files = rendered({**gang(wanted={"ps": 0}), "status": None})
    assert files["./injector.sh"].content == b"#!/bin/bash\n"
    assert json.loads(files["./framework.json"].content)["status"] is None


def test_only_what_the_spec_wants(tmp_path: Path) -> None:
    """The files have no tasks beyond the spec's number, no roles that left the spec, and the status' order."""
    framework = gang(wanted={"ps": 1, "worker": 1}, worker=2, old=1, ps=1)
    names = "compgen -v | grep FB_.*_IPS | sort; echo $FB_WORKER_IPS"
    assert sourced(tmp_path, framework, names).split() == ["FB_PS_IPS", "FB_WORKER_IPS", "10.1.6.1"]
    content = rendered(framework)["./injector.sh"].content
    assert content.index(b"FB_WORKER_IPS") < content.index(b"FB_PS_IPS")


def test_a_list_that_no_program_could_be_given(tmp_path: Path) -> None:
    """A variable beyond the kernel's limit would keep every program from starting, so it is not exported; the host
    files are complete.
    """
    framework = gang(worker=9000, ps=1)
    script = "env | grep -c FB_PS_IPS; env | grep -c FB_WORKER_ADDRESSES; echo ${#FB_WORKER_ADDRESSES}"
    exported, too_long, length = sourced(
        tmp_path, framework, script, PATH=os.environ["PATH"], FB_WORKER_PORT="65535"
    ).split()
    assert (exported, too_long) == ("1", "0")
    assert int(length) > MAX_EXPORT
    assert len((tmp_path / "hostfile.worker").read_text().splitlines()) == 9000


def test_host_files_and_membership() -> None:
    """Host files have one address per line; the members are in JSON, with their pods and the digest."""
    framework = gang(ps=1, worker=2)
    framework["metadata"] |= {"uid": "f-uid", "namespace": "ns"}
    files = rendered(framework)
    assert files["./hostfile.worker"].content == b"10.1.6.1\n10.1.6.2\n"
    membership = json.loads(files["./membership.json"].content)
    assert membership["framework"] == {"namespace": "ns", "name": "gang", "uid": "f-uid"}
    assert membership["attemptInstanceUID"] == "0_cm-uid"
    assert membership["roles"][0] == {
        "name": "ps",
        "members": [{"index": 0, "ip": "10.1.2.1", "podUID": "ps-0-uid"}],
    }
    assert f'FB_MEMBERSHIP_DIGEST="{membership["digest"]}"'.encode() in files["./injector.sh"].content


def test_the_digest_is_of_the_members() -> None:
    """It does not depend on the order of roles, and changes when a single pod does."""
    digest = membership_digest(look(gang(ps=1, worker=2)).roles)
    assert membership_digest(look(gang(worker=2, ps=1)).roles) == digest
    replaced = gang(ps=1, worker=[task("worker", 0), task("worker", 1, attempt=1, uid="new")])
    assert membership_digest(look(replaced).roles) != digest


def test_the_framework_as_json() -> None:
    """The file is one line without apiVersion and kind, decompressed, with all of the spec's fields, also unknown
    fields of pods.
    """
    framework = gang(ps=1)
    framework["spec"]["taskRoles"][0]["task"]["pod"]["spec"]["schedulingGates"] = [{"name": "x"}]
    roles = framework["status"]["attemptStatus"]["taskRoleStatuses"]
    content = rendered(compressed(framework))["./framework.json"].content
    assert b"\n" not in content
    shown = json.loads(content)
    assert list(shown) == ["metadata", "spec", "status"]
    assert shown["spec"]["retryPolicy"] == {"fancyRetryPolicy": False, "maxRetryCount": 0}
    role = shown["spec"]["taskRoles"][0]
    assert role["frameworkAttemptCompletionPolicy"] == {"minFailedTaskCount": 0, "minSucceededTaskCount": 0}
    assert role["task"]["pod"]["spec"]["schedulingGates"] == [{"name": "x"}]
    assert shown["status"]["attemptStatus"]["taskRoleStatuses"] == roles
    assert "taskRoleStatusesCompressed" not in shown["status"]["attemptStatus"]


def test_redaction() -> None:
    """Pod templates and annotations are left out."""
    assert b"secret" in rendered(gang(ps=1))["./framework.json"].content
    redacted = rendered(gang(ps=1), redact=True)
    assert not [file.path for file in redacted.values() if b"secret" in file.content]


def test_modes_and_replacement(tmp_path: Path) -> None:
    """Files are readable by all and the script executable by all, whatever the umask; older files are replaced, and no
    other file is left.
    """
    (tmp_path / "injector.sh").write_text("old")
    umask = os.umask(0o077)
    try:
        write_files(tmp_path, list(rendered(gang(ps=1)).values()))
    finally:
        os.umask(umask)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == {
        "framework.json": "0o644",
        "membership.json": "0o644",
        "hostfile.ps": "0o644",
        "injector.sh": "0o755",
    }


def test_no_half_written_file(tmp_path: Path) -> None:
    """A failure leaves earlier files complete and later ones missing, so the injector, which is last, shows that all
    are there. No temporary file stays.
    """
    (tmp_path / "taken").mkdir()
    files = [File("good", b"x"), File("taken", b"x")]
    with pytest.raises(OSError, match="directory"):
        write_files(tmp_path, [*files, File("later", b"x")])
    assert {path.name for path in tmp_path.iterdir()} == {"good", "taken"}
    (tmp_path / "good").unlink()
    with pytest.raises(TypeError):
        write_files(tmp_path, [File("good", b"x"), File("bad", None)])  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"taken"}
