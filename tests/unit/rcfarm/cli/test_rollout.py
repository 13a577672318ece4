"""`rcfarm rollout` on an embedded store, where the test plays the RC's owner: requests that come too late, and
records that can't be read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.records import Handover, Owner, Reason, Rollout, RolloutRequest, decode, encode
from tests.support.programs.cli import CommandLine, Ran

FILE = "id: web\nreplicas: 2\nmanifest: {id: web, launchables: {main: {command: [serve]}}}\n"
HELLO = "id: hello\nreplicas: 2\nmanifest: {id: hello, launchables: {web: {command: [serve]}}}\n"
CHANGED = FILE.replace("serve", "serve-better")


@pytest.fixture
async def rolling(cli: CommandLine) -> Rollout:
    """An owned RC whose second revision is at its canary."""
    for file in (FILE, CHANGED):
        assert (await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=file)).code == 0
    session = (await cli.store.create_session(SessionSpec("farm", ttl=86400, check_ttl=None))).id
    await cli.store.txn([ops.lock(cli.keys.owner("web"), encode(Owner("farm-a", "")), session)])
    spec = await cli.rcs.get("web")
    record = Rollout(revision=2, manifest=spec.manifest, state="canary", since="", started="", progressed="")
    await cli.store.put(cli.keys.rollout("web"), encode(record))
    return record


async def asked(cli: CommandLine, verb: str, answer: Callable[[RolloutRequest], Awaitable[object]]) -> Ran:
    """Run the verb, and `answer` its request as the owner."""
    command = asyncio.create_task(cli("rollout", verb, "web", "--revision", "2"))
    key, index = cli.keys.rollout_request("web"), 0
    while (entry := await cli.store.get(key)) is None:
        assert not command.done(), command.result()
        index = (await cli.store.watch(cli.keys.rc("web"), index, 10.0)).index
    await answer(decode(RolloutRequest, entry.key, entry.value))
    return await command


async def record(cli: CommandLine, rollout: Rollout, **fields: object) -> None:
    await cli.store.put(cli.keys.rollout("web"), encode(msgspec.structs.replace(rollout, **fields)))


async def test_another_revision_is_meant(cli: CommandLine, rolling: Rollout) -> None:
    """Refused, and nothing is written."""
    for verb in ("pause", "resume", "promote", "abort"):
        refused = await cli("rollout", verb, "web", "--revision", "1")
        assert (refused.code, refused.out) == (1, "")
        assert f"error: rc web: nothing to {verb}: its present revision is 2, not 1" in refused.err
    assert await cli.store.get(cli.keys.rollout_request("web")) is None
    assert (await cli("rollout", "pause", "web", "--revision", "0")).code != 0


async def test_obeyed(cli: CommandLine, rolling: Rollout) -> None:
    """The request names the rollout that there is, and its owner does what it asks for."""
    paused = await asked(cli, "pause", lambda made: record(cli, rolling, request=made.id, state="paused"))
    assert (paused.code, paused.err) == (0, "")


async def test_the_rollout_ended_at_the_same_time(cli: CommandLine, rolling: Rollout) -> None:
    """The owner had decided that already when the request was written: exit 2, and what the rollout has become."""
    done = await asked(cli, "abort", lambda made: record(cli, rolling, state="done"))
    assert (done.code, done.err) == (2, "rc web: the abort was asked for, but the rollout was done before\n")


async def test_the_rollout_failed_at_the_same_time(cli: CommandLine, rolling: Rollout) -> None:
    failed = {"state": "reverted", "reason": Reason("rollout_failed", "node-1: exit 3"), "stable": "m", "revision": 2}
    late = await asked(cli, "pause", lambda made: record(cli, rolling, request=made.id, **failed))
    assert (late.code, late.err) == (2, "rc web: the pause was asked for, but the rollout is reverted\n")


@pytest.mark.parametrize("verb", ["pause", "promote", "abort"])
async def test_another_revision_is_applied_at_the_same_time(cli: CommandLine, rolling: Rollout, verb: str) -> None:
    """The owner begins its rollout, and notes that the request was about another one."""

    async def begin_another(made: RolloutRequest) -> None:
        spec = await cli.rcs.restart("web")
        await record(cli, rolling, revision=3, manifest=spec.manifest, state="canary", request=made.id)

    late = await asked(cli, verb, begin_another)
    assert late.code == 2
    assert f"the {verb} was asked for, but revision 3 was applied, and its rollout takes the place" in late.err


@pytest.mark.parametrize("name", ["rollout", "rollout-request", "revisions/1", "handover"])
async def test_a_record_that_cannot_be_read_is_named(cli: CommandLine, name: str) -> None:
    """It is not taken for a rollout that its owner has not begun."""
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=HELLO)
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=HELLO.replace("serve", "serve-better"))
    key = cli.keys.rc("hello") + name
    await cli.store.put(key, b"garbage")
    ran = await cli("rollout", "status", "hello")
    assert ran.code == 0
    assert f"  unreadable: {key}: not a valid " in ran.out
    word = "unreadable" if name == "rollout" else "pending" if name != "revisions/1" else "done"
    assert ran.out.splitlines()[0] == f"hello  revision 2  {word}"
    assert ("its owner has not begun it yet" in ran.out) == (word == "pending")
    assert "current, " + word in (await cli("rollout", "history", "hello")).out


async def test_an_abort_names_the_record_that_cannot_be_read(cli: CommandLine) -> None:
    """`nothing to abort` would be wrong: the hand-over goes on."""
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=HELLO)
    record = Handover(old="hello", new="other", desired=2, minimum=1, state="running")
    await cli.store.put(cli.keys.handover("hello"), encode(record)[:-5])
    ran = await cli("rollout", "abort", "hello")
    assert (ran.code, ran.out) == (1, "")
    assert f"error: {cli.keys.handover('hello')}: not a valid Handover" in ran.err
