"""`rcfarm rollout` on an embedded store without a farm; the tests write the owner's records."""

from __future__ import annotations

import pytest

from store.schema.records import Handover, encode
from tests.support.programs.cli import CommandLine

FILE = "id: hello\nreplicas: 2\nmanifest: {id: hello, launchables: {web: {command: [serve]}}}\n"


@pytest.mark.parametrize("name", ["rollout", "rollout-request", "revisions/1", "handover"])
async def test_a_record_that_cannot_be_read_is_named(cli: CommandLine, name: str) -> None:
    """It is not taken for a rollout that its owner has not begun."""
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE)
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE.replace("serve", "serve-better"))
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
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE)
    record = Handover(old="hello", new="other", desired=2, minimum=1, state="running")
    await cli.store.put(cli.keys.handover("hello"), encode(record)[:-5])
    ran = await cli("rollout", "abort", "hello")
    assert (ran.code, ran.out) == (1, "")
    assert f"error: {cli.keys.handover('hello')}: not a valid Handover" in ran.err
