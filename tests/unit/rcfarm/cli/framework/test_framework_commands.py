"""`rcfarm framework …` on an in-memory API server: output and writes."""

from __future__ import annotations

import json

import pytest

from controllers.framework.api.types import FRAMEWORKS
from rcfarm.cli.framework import change, explain, show
from rcfarm.cli.kit import jobs
from rcfarm.cli.kit.command import KubeCli
from rcfarm.cli.kit.options import UsageProblem, parse_pairs
from rcfarm.cli.kit.output import Format, Output
from rcfarm.operations.errors import BadInput
from rcfarm.reports.jobs import JobReason
from store.kube.api.errors import Forbidden
from store.kube.api.objects import EVENTS, Object, uid_of
from store.kube.memory.kube import MemoryKube
from tests.support.framework.cluster import NAMESPACE, framework, role


def on(api: MemoryKube, form: Format = Format.table) -> KubeCli:
    """Return a command's context whose client is the in-memory API."""
    return KubeCli(api, NAMESPACE, Output(form))  # type: ignore[arg-type]


@pytest.fixture
def api() -> MemoryKube:
    return MemoryKube()


async def test_a_framework_that_can_not_be_read_is_listed_with_the_reason(
    api: MemoryKube, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is listed as unreadable, beside its neighbours."""
    await api.create(FRAMEWORKS, framework("fine", role("worker", 2)), NAMESPACE)
    await api.create(FRAMEWORKS, framework("odd", role("worker", 1)) | {"status": {"state": 3}}, NAMESPACE)
    await show.list_(on(api))
    fine, odd = capsys.readouterr().out.splitlines()[1:]
    assert fine.split()[:3] == ["fine", "Unknown", "2"]
    assert odd.split()[:2] == ["odd", "unreadable"]
    assert "status." in odd
    with pytest.raises(BadInput, match=r"framework default/odd: status\..*apply it again"):
        await show.status(on(api), "odd")


async def test_long_lists_are_read_in_pages(
    api: MemoryKube, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list contains every Framework of every page."""
    monkeypatch.setattr(jobs, "PAGE", 2)
    for name in ("a", "b", "c", "d", "e"):
        await api.create(FRAMEWORKS, framework(name), NAMESPACE)
    await show.list_(on(api, Format.json))
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["a", "b", "c", "d", "e"]


async def test_a_missing_crd_is_distinguished_from_a_missing_framework() -> None:
    """Without the CRD, the advice is to apply it, not to look in another namespace."""
    bare = MemoryKube(unserved=[FRAMEWORKS])
    for looking in (show.list_(on(bare)), show.get(on(bare), "some")):
        with pytest.raises(BadInput, match="has no CRD for Frameworks: apply deploy/kubernetes/crd"):
            await looking


@pytest.mark.parametrize(("written", "code"), [("Create", 0), ("Start", 0), ("Stop", None)])
async def test_start_is_for_those_that_wait_for_it(api: MemoryKube, written: str, code: int | None) -> None:
    """A running Framework stays as it is; a stopped one is not started again."""
    await api.create(FRAMEWORKS, framework("train", role("worker", 1), executionType=written), NAMESPACE)
    if code is None:
        with pytest.raises(BadInput, match="create it again under a new name"):
            await change.start(on(api), "train", detach=True)
    else:
        assert await change.start(on(api), "train", detach=True) == code
        assert (await api.get(FRAMEWORKS, "train", NAMESPACE))["spec"]["executionType"] == "Start"


async def test_rescale_keeps_concurrent_changes(api: MemoryKube) -> None:
    """A role keeps the rest of its policy; if the roles were reordered, no wrong role is changed."""
    policy = {"minSucceededTaskCount": 1}
    obj = framework("train", role("chief", 1), role("worker", 3, policy=policy))
    await api.create(FRAMEWORKS, obj, NAMESPACE)
    code = await change.scale(on(api), "train", ["worker=5"], ["worker=2"], detach=True)
    chief, worker = (await api.get(FRAMEWORKS, "train", NAMESPACE))["spec"]["taskRoles"]
    assert code == 0
    assert (chief["taskNumber"], worker["taskNumber"]) == (1, 5)
    assert worker["frameworkAttemptCompletionPolicy"] == {"minSucceededTaskCount": 1, "minFailedTaskCount": 2}

    await api.patch(FRAMEWORKS, "train", NAMESPACE, {"spec": {"taskRoles": [worker, chief]}})
    stale = change._rescaling("train", obj, {"worker": 7}, {})
    with pytest.raises(Exception, match="test"):
        await api.patch(FRAMEWORKS, "train", NAMESPACE, stale, patch_type="json")


async def test_history_is_of_this_framework_and_its_pods(api: MemoryKube, capsys: pytest.CaptureFixture[str]) -> None:
    """Events of an earlier Framework of the name, or of one with a longer name, are left out; the rest are in order."""
    obj = await api.create(FRAMEWORKS, framework("train", role("worker", 1)), NAMESPACE)
    created = obj["metadata"]["creationTimestamp"]
    later = created.replace("Z", ".500000Z")
    await api.create(EVENTS, event("third", "Pod", "train-worker-0", "x", later), NAMESPACE)
    await api.create(EVENTS, event("first", "Framework", "train", uid_of(obj), created), NAMESPACE)
    await api.create(EVENTS, event("namesake", "Framework", "train", "old", created), NAMESPACE)
    await api.create(EVENTS, event("old", "Pod", "train-worker-0", "y", "2001-01-01T00:00:00Z"), NAMESPACE)
    await api.create(EVENTS, event("other", "Pod", "trainer-worker-0", "z", later), NAMESPACE)
    await explain.history(on(api, Format.json), "train")
    assert [each["reason"] for each in json.loads(capsys.readouterr().out)] == ["first", "third"]


def event(reason: str, kind: str, name: str, uid: str, at: str) -> Object:
    about = {"kind": kind, "name": name, "uid": uid}
    return {
        "metadata": {"name": f"{name}.{reason}"},
        "type": "Normal",
        "reason": reason,
        "message": reason,
        "lastTimestamp": at,
        "involvedObject": about,
    }


async def test_explain_goes_without_what_it_may_not_read(
    api: MemoryKube, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is explained, and standard error names what could not be read."""
    await api.create(FRAMEWORKS, framework("mine", role("worker", 1)), NAMESPACE)

    async def refuse(*_: object, **__: object) -> None:
        raise Forbidden("not you", status=403)

    monkeypatch.setattr(api, "list", refuse)
    await explain.explain(on(api), "mine")
    said = capsys.readouterr()
    assert "no operator has taken it up" in said.out
    assert said.err.count("not known: ") == 3


def test_tasks_of_a_role_with_the_same_reason_share_a_row() -> None:
    """A thousand tasks of a role with one reason are one line; other roles and other reasons have their own."""
    reasons = [
        JobReason(subject=subject, state="AttemptPreparing", reason=reason)
        for subject, reason in [
            ("framework", "full"), ("chief-0", "full"), ("worker-0", "full"), ("worker-1", "full"),
            ("worker-2", "held"), ("worker-3", "full"),
        ]
    ]  # fmt: skip
    assert [(subject, first.reason) for subject, first in jobs.grouped(reasons)] == [
        ("framework", "full"), ("chief-0", "full"), ("worker-0 … 1 (2)", "full"), ("worker-2", "held"),
        ("worker-3", "full"),
    ]  # fmt: skip


def test_pairs_name_the_expected_form() -> None:
    """The error for a missing equals sign shows the expected form."""
    with pytest.raises(UsageProblem, match="write ROLE=N"):
        parse_pairs("--min-failed", ["worker"], form="ROLE=N")
