"""The barrier's verdict: a gang is complete, incomplete or lost, and which pods may join it."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.framework.barrier.config import AttemptInstance, Identity
from controllers.framework.barrier.readiness import BadView, Look, decompressed, look_at, view_of
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
