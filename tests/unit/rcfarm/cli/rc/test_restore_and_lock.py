"""`rcfarm rc restore`, and `rcfarm rc lock | unlock`: without a farm, so that each record is the test's own."""

from __future__ import annotations

import json

import msgspec
import pytest

from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.manifest import digest
from store.schema.records import DeletedRC, Mutation, RCSpec, encode
from tests.support.programs.cli import CommandLine

MANIFEST = b'{"id":"web","launchables":{"main":{"command":["serve"]}}}'
LABELS = {"pod_id": "web", "team": "shop"}
SPEC = RCSpec(
    id="web", manifest=digest(MANIFEST), replicas_desired=3, rc_labels=LABELS, deleting=True, generation=9, revision=4
)
ALICE, BOB = {"USER": "alice", "LOGNAME": "alice"}, {"USER": "bob", "LOGNAME": "bob"}


async def deleted(cli: CommandLine, spec: RCSpec = SPEC, *, at: str = "2026-01-01T00:00:00Z", until: str = "") -> None:
    """Keep the RC as its owner does when it removes it."""
    record = DeletedRC(spec=spec, manifest=digest(MANIFEST), farm="farm-1", deleted_at=at, until=until)
    await cli.store.put(cli.keys.manifest(digest(MANIFEST)), MANIFEST)
    await cli.store.put(cli.keys.deleted_rc(spec.id), encode(record))


async def everything(cli: CommandLine) -> dict[str, int]:
    """Return every key with its version."""
    return {entry.key: entry.modify_index for entry in (await cli.store.list(f"{cli.keys.root}/")).entries}


async def test_a_deleted_rc_comes_back_as_it_was(cli: CommandLine) -> None:
    """Spec and labels are those before the deletion, the manifest is the one that its pods ran, and its life begins
    again. The record is used up; the audit log says who did it."""
    await deleted(cli)

    ran = await cli("rc", "restore", "web", "--detach", **ALICE)

    assert (ran.code, ran.out, ran.err) == (0, "rc web restored\n", "")
    spec = await cli.rcs.get("web")
    wanted = msgspec.structs.replace(SPEC, manifest=digest(MANIFEST), deleting=False, generation=1, revision=1)
    assert msgspec.structs.replace(spec, revised_by="", revised_at="") == wanted
    assert await cli.store.get(cli.keys.deleted_rc("web")) is None
    (event,) = await cli.rcs.history("web")
    assert event.event_type == "REPLICATION_CONTROLLER_RESTORED"
    assert event.actor.startswith("alice@")
    assert event.event_details["replicas_desired"] == 3


async def test_a_manifest_that_was_not_rolled_out_does_not_come_back(cli: CommandLine) -> None:
    """The RC has the one of before, and the operator reads which one is left out."""
    await deleted(cli, msgspec.structs.replace(SPEC, manifest="9" * 64))

    ran = await cli("rc", "restore", "web", "--detach")

    assert (ran.code, ran.out) == (0, "rc web restored\n")
    said = f"rc web comes back with manifest {digest(MANIFEST)[:12]}; the rollout of 999999999999 was not done when it"
    assert said in ran.err
    assert (await cli.rcs.get("web")).manifest == digest(MANIFEST)


async def test_a_disabled_rc_comes_back_disabled_and_is_not_waited_for(cli: CommandLine) -> None:
    await deleted(cli, msgspec.structs.replace(SPEC, disabled=True))

    ran = await cli("rc", "restore", "web")

    assert (ran.code, ran.out) == (0, "rc web restored\n")
    assert (await cli.rcs.get("web")).disabled


async def test_the_deleted_rcs_are_listed(cli: CommandLine) -> None:
    """The latest deletion first; an unreadable record is named and hides no other."""
    await deleted(cli, until="2999-01-01T00:00:00Z")
    await deleted(cli, msgspec.structs.replace(SPEC, id="api"), at="2026-02-01T00:00:00Z")
    await cli.store.put(cli.keys.deleted_rc("bad"), b"{")

    listed, names = await cli("rc", "restore", "--list"), await cli("rc", "restore", "--list", "-o", "name")
    as_json = await cli("rc", "restore", "--list", "-o", "json")

    rows = [line.split() for line in listed.out.splitlines()]
    assert [row[0] for row in rows] == ["RC", "api", "web"]
    assert rows[1][-1] == "never"
    assert "unreadable: fleet/deleted/bad: " in listed.err
    assert names.out == "api\nweb\n"
    assert [(each["id"], each["pod_id"], each["until"]) for each in as_json.json] == [
        ("api", "web", ""),
        ("web", "web", "2999-01-01T00:00:00Z"),
    ]


async def test_nothing_is_kept_yet(cli: CommandLine) -> None:
    ran = await cli("rc", "restore", "--list")
    assert (ran.code, ran.out, ran.err) == (0, "", "no deleted RC is kept\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["web"], "rc web exists, so there is nothing to restore; `rcfarm rc status web` shows it"),
        (["other"], "no deleted rc other is kept; `rcfarm rc restore --list` shows those that can be restored"),
        (["Not/an-id"], "no deleted rc Not/an-id is kept"),
        ([], "give the id of a deleted RC, or --list"),
        (["web", "--list"], "give the id of a deleted RC, or --list"),
        (["bad"], "fleet/deleted/bad: "),
        (["lost"], "manifest 111111111111 is not in the store"),
    ],
)
async def test_a_restore_that_is_refused_changes_nothing(cli: CommandLine, arguments: list[str], problem: str) -> None:
    """One line that names the RC, and what to do; the record stays."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=1)
    await deleted(cli)
    await cli.store.put(cli.keys.deleted_rc("bad"), b"{")
    lost = DeletedRC(spec=msgspec.structs.replace(SPEC, id="lost"), manifest="1" * 64, farm="farm-1", deleted_at="")
    await cli.store.put(cli.keys.deleted_rc("lost"), encode(lost))
    before = await everything(cli)

    ran = await cli("rc", "restore", *arguments, "--detach")

    assert ran.code == 1
    assert ran.err.startswith(f"error: {problem}"), ran.err
    assert ran.err.count("\n") == 1
    assert await everything(cli) == before


async def test_a_locked_rc_refuses_changes_by_name(cli: CommandLine) -> None:
    """Each verb that edits is refused, also for the person who locked it, with the holder, the reason and the command
    that unlocks. Status and explain show the lock; JSON has it."""
    await cli.rcs.create(MANIFEST, rc_id="web", replicas=1, disabled=True)
    locked = await cli("rc", "lock", "web", "--reason", "incident  42", **ALICE)
    assert (locked.code, locked.out) == (0, "rc web locked; `rcfarm rc unlock web` removes the lock\n")
    before = await everything(cli)

    for verb in (
        ["scale", "web", "2"],
        ["enable", "web"],
        ["delete", "web", "--yes"],
        ["restart", "web"],
        ["edit", "web"],
        ["lock", "web", "--reason", "me, too"],
    ):
        for who in (ALICE, BOB):
            ran = await cli("rc", *verb, EDITOR="true", **who)
            assert ran.code == 1, verb
            assert ran.err.splitlines()[-1].startswith("error: rc web is locked by alice@"), ran.err
            assert ran.err.endswith("(incident 42); `rcfarm rc unlock web` removes the lock\n")
    assert await everything(cli) == before
    status, explained = await cli("rc", "status", "web"), await cli("rc", "explain", "web")
    assert "locked by alice@" in status.out
    assert "`rcfarm rc unlock web` removes the lock" in status.out
    assert "locked: alice@" in explained.out
    assert (await cli("rc", "list", "-o", "json")).json[0]["lock"]["reason"] == "incident 42"


async def test_unlocking_is_recorded(cli: CommandLine) -> None:
    """The holder is not asked; another person is. Both are in the history."""
    await cli.rcs.create(MANIFEST, rc_id="web")
    await cli("rc", "lock", "web", "--reason", "mine", **ALICE)

    asked = await cli("rc", "unlock", "web", **BOB)
    assert (asked.code, asked.out) == (1, "")
    assert "error: not confirmed: standard input is not a terminal; give --yes" in asked.err
    sure = await cli("rc", "unlock", "web", "--yes", "-o", "json", **BOB)
    assert sure.json["locked"] is False
    assert sure.json["holder"].startswith("alice@")
    await cli("rc", "lock", "web", "--reason", "again", **ALICE)
    assert (await cli("rc", "unlock", "web", **ALICE)).code == 0

    assert (await cli("rc", "scale", "web", "0", "--detach")).code == 0
    events = [event.event_type.rpartition("_")[2] for event in await cli.rcs.history("web")]
    assert events == ["CREATED", "LOCKED", "UNLOCKED", "LOCKED", "UNLOCKED"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["lock", "nope", "--reason", "x"], "there is no rc nope; `rcfarm rc list` shows those that exist"),
        (["lock", "web", "--reason", "  "], "--reason: 0 characters; say why, in 1 to 500 characters"),
        (["lock", "web", "--reason", "x" * 501], "--reason: 501 characters; say why, in 1 to 500 characters"),
        (["lock", "going", "--reason", "x"], "rc going is being deleted and can't be locked"),
        (["lock", "busy", "--reason", "x"], "rc busy is being changed by farm-1 (moves a pod)"),
        (["unlock", "nope"], "there is no rc nope; `rcfarm rc list` shows those that exist"),
        (["unlock", "web"], "rc web is not locked; `rcfarm rc lock web --reason TEXT` locks it"),
        (["unlock", "busy"], "rc busy is locked by a process, farm-1 (moves a pod): the lock is removed when"),
    ],
)
async def test_bad_input_changes_no_lock(cli: CommandLine, arguments: list[str], problem: str) -> None:
    """One clear line, and nothing is written. A process's lock and a person's exclude each other."""
    for rc_id in ("web", "going", "busy"):
        await cli.rcs.create(MANIFEST, rc_id=rc_id)
    await cli.rcs.delete("going")
    session = (await cli.store.create_session(SessionSpec("farm-1", ttl=86400, check_ttl=None))).id
    mutation = encode(Mutation("farm-1", "moves a pod", ""))
    await cli.store.txn([ops.lock(cli.keys.mutation("busy"), mutation, session)])
    before = await everything(cli)

    ran = await cli("rc", *arguments)

    assert ran.code == 1
    assert ran.err.startswith(f"error: {problem}"), ran.err
    assert await everything(cli) == before


async def test_a_lock_that_can_not_be_read_still_locks(cli: CommandLine) -> None:
    """And it can be removed."""
    await cli.rcs.create(MANIFEST, rc_id="web")
    await cli.store.put(cli.keys.lock("web"), b"\xff")

    refused = await cli("rc", "scale", "web", "2")
    assert "is locked by a person whose record can't be read (fleet/rcs/" in refused.err
    assert (await cli("rc", "status", "web")).code == 0
    assert (await cli("rc", "unlock", "web", "--yes")).code == 0
    assert (await cli("rc", "scale", "web", "2", "--detach")).code == 0


async def test_an_error_is_a_document_for_a_program(cli: CommandLine) -> None:
    """With `-o json`, standard error has one JSON object, with the object, the exit code, and the field of a bad
    value."""
    missing = await cli("rc", "status", "nope", "-o", "json")
    assert (missing.code, missing.out) == (1, "")
    text = "there is no rc nope; `rcfarm rc list` shows those that exist"
    assert json.loads(missing.err) == {"error": {"object": "rc nope", "message": text, "exit_code": 1}}

    await cli.rcs.create(MANIFEST, rc_id="web")
    bad = json.loads((await cli("rc", "scale", "web", "-3", "-o", "json")).err)["error"]
    assert (bad["object"], bad["field"], bad["exit_code"]) == ("rc web", "replicas", 1)
    as_yaml = await cli("rc", "status", "nope", "-o", "yaml")
    assert as_yaml.err == f"error: {text}\n"
