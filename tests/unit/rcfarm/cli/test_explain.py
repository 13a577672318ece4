"""`rcfarm explain`: any name, on an embedded store."""

from __future__ import annotations

import pytest

from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.records import Health, Intent, NodeAlive, NodeSpec, Process, Reality, encode
from tests.support.programs.cli import CommandLine

FILE = "id: hello\nreplicas: 1\nmanifest: {id: hello, launchables: {web: {command: [serve]}}}\n"


@pytest.fixture
async def fleet(cli: CommandLine) -> CommandLine:
    """A cordoned node with a pod that crashes, of an RC that no farm owns."""
    session = (await cli.store.create_session(SessionSpec("agent", ttl=86400, check_ttl=None))).id
    await cli("rc", "apply", "-f", "-", "-y", "-d", stdin=FILE)
    manifest = (await cli.rcs.get("hello")).manifest
    crashing = Health("critical", manifest, condition="crashing", cause="web exited with code 3", restarts=5)
    reality = Reality(
        manifest=manifest,
        rc="hello",
        state="running",
        launchables={"web": Process(state="backoff", restarts=5, reason="exited with code 3")},
    )
    await cli.store.txn(
        [
            ops.put(cli.keys.node_spec("n1"), encode(NodeSpec(name="n1", schedulable=False))),
            ops.lock(cli.keys.node_alive("n1"), encode(NodeAlive("n1", "2026-01-01T00:00:00Z")), session),
            ops.put(cli.keys.intent("n1", "hello"), encode(Intent(manifest=manifest, rc="hello", shard="00"))),
            ops.put(cli.keys.reality("n1", "hello"), encode(reality)),
            ops.lock(cli.keys.health("hello", "n1"), encode(crashing), session),
        ]
    )
    return cli


@pytest.mark.parametrize("name", ["hello", "rc/hello"])
async def test_an_rc(fleet: CommandLine, name: str) -> None:
    ran = await fleet("explain", name)
    assert (ran.code, ran.out.splitlines()[0]) == (0, "rc hello is unowned: 0 of 1 placed, 0 healthy")


@pytest.mark.parametrize("name", ["n1", "node/n1"])
async def test_a_node_with_its_pods(fleet: CommandLine, name: str) -> None:
    ran = await fleet("explain", name)
    assert ran.out.splitlines()[0] == "node n1 takes no new pods: it is cordoned; uncordon it to use it again"
    assert "web exited with code 3" in ran.out


async def test_a_pod(fleet: CommandLine) -> None:
    ran = await fleet("explain", "pod/n1/hello")
    assert ran.out.splitlines()[0] == "pod hello of rc hello on n1 is crashing, its health critical"
    assert "web: backoff, 5 restarts; exited with code 3" in ran.out


async def test_a_task(cli: CommandLine) -> None:
    await cli("apply", "-f", "-", "-y", stdin="task: once\nprocess: {command: [echo, hi]}\n")
    ran = await cli("explain", "once")
    assert ran.code == 0, ran.err
    assert "once" in ran.out


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nope", "there is no rc, task or node nope"),
        ("rc/nope", "there is no rc nope"),
        ("frob/x", "'frob' is no kind that can be explained; those are rc, task, node, pod"),
        ("framework/x", "`rcfarm framework explain x` explains it"),
        ("pod/n1", "a pod is named by its node and its id"),
        ("pod/n1/other", "node n1 has no pod other; it has hello"),
        ("", "there is no rc, task or node"),
        ("a//b", "'a' is no kind"),
    ],
)
async def test_mistakes_are_named(fleet: CommandLine, name: str, complaint: str) -> None:
    ran = await fleet("explain", name)
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert complaint in ran.err
