"""The barrier's verdict: a gang is complete, incomplete or lost, and which pods may join it; and the files of a passed
barrier, which containers read and source.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.barrier.gang import (
    MAX_EXPORT,
    AttemptInstance,
    BadView,
    File,
    Identity,
    Look,
    decompressed,
    look_at,
    membership_digest,
    render,
    view_of,
    write_files,
)
from store.kube.api.objects import Object
from tests.support.framework.gangs import CONFIG_MAP_UID, compressed, gang, pod_uid, task

UNKNOWN = Identity()
WORKER_1 = Identity(
    framework_uid="f-uid",
    framework_attempt=AttemptInstance(0, CONFIG_MAP_UID),
    task_role="worker",
    task_index=1,
    task_attempt=AttemptInstance(0, pod_uid("worker", 1)),
)


def look(framework: Object, identity: Identity = UNKNOWN) -> Look:
    return look_at(view_of(decompressed(framework)), identity)


def workers(**changes: Any) -> Object:
    """Return two workers, the second one with changes."""
    return gang(worker=[task("worker", 0), task("worker", 1, **changes)])


def with_uid(framework: Object, uid: str = "f-uid") -> Object:
    framework["metadata"]["uid"] = uid
    return framework


def test_a_whole_gang() -> None:
    """Every task has an address."""
    seen = look(gang(ps=1, worker=2))
    assert seen.is_whole
    assert (seen.ready, seen.total) == (3, 3)
    assert [(role.name, [member.ip for member in role.members]) for role in seen.roles] == [
        ("ps", ["10.1.2.1"]),
        ("worker", ["10.1.6.1", "10.1.6.2"]),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ip": None}, "no address yet"),
        ({"ip": ""}, "no address yet"),
        ({"deletionPending": True}, "being scaled away"),
        ({"state": "AttemptDeletionRequested"}, "ending"),
        ({"state": "AttemptDeletionPending", "outcome": "Failed"}, "failed, may be tried again"),
    ],
)
def test_missing_tasks(changes: dict[str, Any], reason: str) -> None:
    """A task may be missing though it has an address; the reason is named."""
    seen = look(workers(**changes))
    assert not seen.is_whole
    assert seen.missing == (f"worker-1 ({reason})",)
    assert (seen.ready, seen.total, seen.lost) == (1, 2, "")


def test_a_task_that_succeeded_was_there() -> None:
    """It has passed already: a gang of short tasks must not wait for those that are done."""
    assert look(workers(state="Completed", outcome="Succeeded")).is_whole


def test_a_task_that_failed_finally() -> None:
    """No other task replaces it in this attempt, so the gang is lost, unless the task is only scaled away."""
    assert look(workers(state="Completed", outcome="Failed")).lost == "worker-1 failed and is not tried again"
    assert not look(workers(state="Completed", outcome="Failed", deletionPending=True)).lost


def test_an_attempt_that_ends() -> None:
    """The gang is lost when the Framework's attempt has ended, or the Framework is being deleted."""
    ending = gang(worker=2)
    ending["status"]["attemptStatus"]["completionStatus"] = {"code": 1, "type": {"name": "Failed"}}
    assert look(ending).lost == "the Framework's attempt is ending"
    delayed = gang(worker=2)
    delayed["status"]["state"] = "AttemptCompleted"
    assert look(delayed).lost == "the Framework's attempt is ending"
    deleted = gang(worker=2)
    deleted["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert look(deleted).lost == "the Framework is being deleted"


def test_a_gang_grows_and_shrinks() -> None:
    """The current spec counts."""
    assert look(gang(wanted={"worker": 3}, worker=2)).missing == ("worker-2 (not created yet)",)
    shrunk = look(gang(wanted={"worker": 2}, worker=[*(task("worker", n) for n in range(2)), task("worker", 2, ip="")]))
    assert shrunk.is_whole
    assert len(shrunk.roles[0].members) == 2


def test_roles_that_only_one_side_has() -> None:
    """A role that left the spec does not count; a new one is waited for."""
    removed = look(gang(wanted={"worker": 1}, old=[task("old", 0, ip="")], worker=1))
    assert removed.is_whole
    assert [role.name for role in removed.roles] == ["worker"]
    assert look(gang(wanted={"worker": 1, "new": 1}, worker=1)).missing == ("new-0 (not created yet)",)


def test_the_order_of_roles_is_the_statuss() -> None:
    """Roles are in the order of the status."""
    seen = look(gang(wanted={"ps": 1, "worker": 1}, worker=1, ps=1))
    assert [role.name for role in seen.roles] == ["worker", "ps"]


@pytest.mark.parametrize("status", [None, {}, {"attemptStatus": None}, {"attemptStatus": {"taskRoleStatuses": None}}])
def test_a_status_that_is_not_there_yet(status: Object | None) -> None:
    """Every task is missing; a gang without tasks is complete at once."""
    framework = {**gang(worker=1), "status": status}
    assert look(framework).missing == ("worker-0 (not created yet)",)
    assert look({**gang(wanted={"worker": 0}), "status": status}).is_whole


def test_compressed_statuses() -> None:
    """They are read where the raw list is null, and ignored where it is present."""
    assert look(compressed(gang(worker=2))).total == look(gang(worker=2)).ready == 2
    both = compressed(gang(worker=2), raw=b"nonsense")
    both["status"]["attemptStatus"]["taskRoleStatuses"] = []
    assert look(both).missing


@pytest.mark.parametrize(
    ("framework", "message"),
    [
        (compressed(gang(worker=1), raw=b"nonsense"), "taskRoleStatusesCompressed: not valid gzip"),
        (gang(worker=[task("worker", 0, ip="$(reboot)")]), "the address of worker-0: .* does not appear to be"),
        (gang(worker=[task("worker", 0, ip="fe80::1%$(reboot)")]), "is valid only on its own node"),
        (gang(wanted={"a;reboot": 1}), "the role name 'a;reboot' is not valid"),
        ({**gang(), "spec": {"taskRoles": [{"name": "worker", "taskNumber": "2"}]}}, "Expected `int"),
    ],
)
def test_invalid_states_are_refused(framework: Object, message: str) -> None:
    """An invalid state is an error, and no shell command in it reaches the files."""
    with pytest.raises(BadView, match=message):
        look(framework)


def test_the_pods_own_identity() -> None:
    """A pod of this Framework, attempt and task joins."""
    assert look(with_uid(workers()), WORKER_1).is_whole


def test_another_framework_of_the_name() -> None:
    """The pod's Framework was deleted, and its name is used again."""
    assert "another Framework has the name" in look(with_uid(workers(), "new"), WORKER_1).foreign


@pytest.mark.parametrize(
    ("shown", "is_foreign"),
    [
        ({"id": 1, "instanceUID": "1_x"}, True),
        ({"id": 1, "instanceUID": None}, True),
        ({"id": 0, "instanceUID": "0_other"}, True),
        ({"id": 0, "instanceUID": None}, False),
    ],
)
def test_another_attempt_of_the_framework(shown: Object, is_foreign: bool) -> None:
    """A pod of an earlier attempt is refused; a pod whose attempt is not recorded yet waits."""
    framework = with_uid(workers())
    framework["status"]["attemptStatus"] |= shown
    seen = look(framework, WORKER_1)
    assert bool(seen.foreign) == is_foreign
    assert is_foreign or seen.missing == ("this pod (its Framework attempt is not recorded yet)",)
    assert not seen.is_whole


@pytest.mark.parametrize(
    ("changes", "is_foreign"),
    [
        ({"attempt": 1, "uid": "new"}, True),
        ({"attempt": 1, "uid": None}, True),
        ({"uid": "new"}, True),
        ({"uid": None}, False),
    ],
)
def test_another_pod_of_the_task(changes: dict[str, Any], is_foreign: bool) -> None:
    """A replaced pod is refused, though the gang may be complete without it; one that is not recorded yet waits,
    because its outcome would be lost.
    """
    seen = look(with_uid(workers(**changes)), WORKER_1)
    assert bool(seen.foreign) == is_foreign
    assert is_foreign or seen.missing[-1] == "this pod (its UID is not recorded yet)"
    assert not seen.is_whole


def test_a_pod_that_is_scaled_away() -> None:
    """It does not start its work, though the rest of the gang is complete."""
    framework = with_uid(
        gang(wanted={"worker": 1}, worker=[task("worker", 0), task("worker", 1, deletionPending=True)])
    )
    assert look(framework, WORKER_1).missing == ("this pod (it is being scaled away)",)
    assert look(framework).is_whole


def test_a_pod_with_few_variables() -> None:
    """Unset variables are not checked."""
    assert look(workers(uid=None), Identity(task_attempt=AttemptInstance(0, "x"))).is_whole


def rendered(framework: Object, *, redact: bool = False) -> dict[str, File]:
    framework = decompressed(framework)
    return {file.path: file for file in render(framework, look(framework), redact=redact)}


def sourced(tmp_path: Path, framework: Object, script: str, **environ: str) -> str:
    """Return what `script` prints after it sourced the injector in a shell with only `environ`."""
    write_files(tmp_path, list(rendered(framework).values()))
    script = f"source ./injector.sh > /dev/null\n{script}"
    return subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
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


@pytest.mark.parametrize(
    ("framework", "script", "ports", "printed"),
    [
        (
            gang(ps=1),
            "FB_PS_PORT=9; source ./injector.sh > /dev/null; echo $FB_PS_ADDRESSES",
            {"FB_PS_PORT": "7"},
            "10.1.2.1:9",  # the second ports apply
        ),
        (gang(ps=1), "echo $FB_PS_ADDRESSES", {}, "10.1.2.1:"),  # so the user sees it
        (
            gang(ps=[task("ps", 0, ip="FD00:0::1")]),
            "echo $FB_PS_ADDRESSES $FB_PS_IPS",
            {"FB_PS_PORT": "7"},
            "[fd00::1]:7 fd00::1",  # in brackets only where a port follows
        ),
        (gang(ps=0), 'echo "<$FB_PS_IPS$FB_PS_ADDRESSES>" "${FB_PS_IPS+set}"', {}, "<> set"),
    ],
    ids=["sourced again with other ports", "no port", "IPv6", "an empty gang"],
)
def test_what_a_script_reads(
    tmp_path: Path, framework: Object, script: str, ports: dict[str, str], printed: str
) -> None:
    """The variables of one role, as a script that sourced the injector sees them."""
    assert sourced(tmp_path, framework, script, **ports) == printed


def test_sourcing_prints_each_variable(tmp_path: Path) -> None:
    """Each variable is printed on standard output."""
    write_files(tmp_path, list(rendered(gang(ps=1)).values()))
    said = subprocess.run([tmp_path / "injector.sh"], capture_output=True, text=True, check=True).stdout
    assert "FB_PS_IPS=10.1.2.1\n" in said
    assert said.count("\n") == 5


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
    assert membership["roles"][0] == {"name": "ps", "members": [{"index": 0, "ip": "10.1.2.1", "podUID": "ps-0-uid"}]}
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
