"""`rcfarm explain`: any name, on an embedded store."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import pytest
import yaml

from controllers.framework.api.types import FRAMEWORKS
from rcfarm.cli import explain
from rcfarm.cli.kit.command import AnyCli, Cli, KubeCli
from rcfarm.cli.kit.output import Format, Output
from rcfarm.operations.errors import BadInput
from scheduler.hived.inspection.snapshot import WaitingPod, take_snapshot
from store.kube.api.objects import key_of
from store.kube.memory.kube import MemoryKube
from store.kv import ops
from store.kv.protocol import SessionSpec, Unavailable
from store.schema.records import NO_SPACE, Health, Intent, NodeAlive, NodeSpec, Process, Reality, encode
from store.schema.tasks import TaskError, TaskOutcome, TaskState
from tests.support.framework.cluster import NAMESPACE, framework, role
from tests.support.hived.cluster import Job
from tests.support.hived.design_cluster import played
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
    assert ran.out.splitlines()[:3] == [
        "node n1 is cordoned: it takes no new pods, and has 1 pod",
        "  node_cordoned: it is cordoned (blocks)",
        "    → `rcfarm node uncordon n1`",
    ]
    assert "web exited with code 3" in ran.out


async def test_a_pod(fleet: CommandLine) -> None:
    ran = await fleet("explain", "pod/n1/hello")
    assert ran.out.splitlines()[:2] == [
        "pod n1/hello is crashing: of rc hello, its health is critical",
        "  crashing: web exited with code 3 (blocks)",
    ]
    assert "web: backoff, 5 restarts; exited with code 3" in ran.out


async def test_a_task(cli: CommandLine) -> None:
    await cli("apply", "-f", "-", "-y", stdin="task: once\nprocess: {command: [echo, hi]}\n")
    ran = await cli("explain", "once")
    assert ran.out.splitlines()[0].startswith("task once is waiting: type process; engine: none; created ")
    [reason] = (await cli("explain", "task/once", "-o", "json")).json["reasons"]
    assert (reason["code"], reason["blocking"], bool(reason["since"])) == ("EngineMissing", True, True)


@pytest.mark.parametrize(
    ("outcome", "state", "code"),
    [("failure", "failed", "task_failed"), ("timeout", "timed-out", "task_timed_out"), ("success", "succeeded", "")],
)
async def test_a_task_that_has_ended(cli: CommandLine, outcome: TaskOutcome, state: str, code: str) -> None:
    """An end without success is a reason; its record, which other programs read, stays as it is."""
    ended = TaskState(
        generation=1,
        step="done",
        outcome=outcome,
        ended_at=1e9,
        error=TaskError("ProcessFailed", "exit 4") if code else None,
    )
    await cli("apply", "-f", "-", "-y", stdin="task: once\nprocess: {command: [echo, hi]}\n")
    await cli.store.put(cli.keys.task_state("once"), encode(ended))
    found = (await cli("explain", "once", "-o", "json")).json
    assert (found["kind"], found["name"], found["state"]) == ("task", "once", state)
    assert [each["code"] for each in found["reasons"]] == ([code] if code else [])
    if code:
        assert (found["reasons"][0]["detail"], found["reasons"][0]["since"]) == (
            "ProcessFailed: exit 4",
            "2001-09-09T01:46:40Z",
        )


async def test_a_dead_node_and_one_that_can_not_be_read(fleet: CommandLine) -> None:
    await fleet.store.put(fleet.keys.node_spec("n2"), encode(NodeSpec(name="n2", evict=True)))
    await fleet.store.put(fleet.keys.node_spec("n3"), b"garbage")
    dead, damaged = [(await fleet("explain", name, "-o", "json")).json for name in ("n2", "n3")]
    assert (dead["state"], [each["code"] for each in dead["reasons"]]) == ("dead", ["node_dead", "node_evicting"])
    assert (damaged["state"], [each["code"] for each in damaged["reasons"]]) == ("unreadable", ["unreadable"])


async def test_a_full_disk_is_a_reason_of_the_node_and_the_pod(fleet: CommandLine) -> None:
    """By the health of an RC's pod; and by the report on a task's pod, which has no health."""
    text = f"artifact x: {NO_SPACE} of /var/lib: free some"
    entry = await fleet.store.get(fleet.keys.health("hello", "n1"))
    assert entry is not None
    assert entry.session is not None
    blocked = Health("critical", "", text, "2026-01-01T00:00:00Z", condition="blocked", cause=text)
    await fleet.store.txn([ops.lock(fleet.keys.health("hello", "n1"), encode(blocked), entry.session)])
    for name in ("pod/n1/hello", "n1"):
        found = (await fleet("explain", name, "-o", "json")).json
        assert found["reasons"][0]["code"] == "disk_full", name
        assert found["reasons"][0]["detail"] == text
    assert "\nn1    disk_full: artifact x" in (await fleet("status")).out
    findings = (await fleet("doctor", "-o", "json")).json
    assert [each["check"] for each in findings if "disk_full" in each["codes"]] == ["nodes"]
    await fleet.store.delete(fleet.keys.health("hello", "n1"))
    of_task = Reality(manifest="", rc="", state="failed", reason=text, task="once")
    await fleet.store.put(fleet.keys.task_pod("n1", "once-0"), encode(of_task))
    assert "\nn1    disk_full: artifact x" in (await fleet("status")).out


async def test_a_name_of_several_kinds(fleet: CommandLine) -> None:
    """Each is named as it must be written."""
    await fleet("apply", "-f", "-", "-y", stdin="task: hello\nprocess: {command: [echo, hi]}\n")
    ran = await fleet("explain", "hello")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "error: hello may be rc/hello or task/hello: name one with its kind, as in `rcfarm explain rc/hello`\n"
    )


async def test_a_server_that_is_away_stops_no_other(fleet: CommandLine, tmp_path: Path) -> None:
    """A cluster and an extender that do not answer are named, with why; the RC is explained all the same. Nor does a
    store that is away stop what runs elsewhere."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "c", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            }
        )
    )
    away = ("--kubeconfig", str(kubeconfig), "--extender", "http://127.0.0.1:1")
    ran = await fleet("explain", "hello", *away)
    assert (ran.code, ran.out.splitlines()[0]) == (0, "rc hello is unowned: 0 of 1 placed, 0 healthy")
    assert "not searched: framework: " in ran.err
    assert "not searched: gpu: --extender http://127.0.0.1:1: does not answer" in ran.err
    ran = await fleet("explain", "nope", *away)
    assert ran.code == 1
    assert ran.err.startswith("error: there is no rc, task or node named 'nope'; framework could not be searched: ")
    assert "; gpu could not be searched: --extender http://127.0.0.1:1: does not answer" in ran.err
    saved = tmp_path / "state.json"
    cluster = played(17)
    waiting = [WaitingPod(Job("wide", "VC1", 0, ((3, 16),)).pod("wide-0", 16), "Waiting", "no room yesterday")]
    config = yaml.safe_dump(cluster.config, sort_keys=False)
    saved.write_bytes(b"".join(take_snapshot(cluster.algorithm, config, waiting).pieces()))
    ran = await fleet("explain", "wide-0", "--snapshot", str(saved), "--store", "consul://127.0.0.1:1")
    assert ran.code == 0
    assert ran.out.splitlines()[:2] == [
        "gpu test/wide-0 is waiting: no cells for it now, neither free nor preemptible",
        "  gpu_waiting: no cells for it now, neither free nor preemptible (blocks)",
    ]
    assert "not searched: rc, task, node: " in ran.err
    assert ran.out.splitlines()[-1] == "The last answer to kube-scheduler (Waiting): no room yesterday"
    placed = next(slot.pod for group in cluster.groups.values() for slot in group.slots if slot.pod is not None)
    found = (await fleet("explain", f"gpu/{key_of(placed)}", "--snapshot", str(saved), "-o", "json")).json
    assert (found["state"], found["details"]["verdict"]) == ("placed", "placed")


async def test_a_framework(capsys: pytest.CaptureFixture[str]) -> None:
    """Its reasons and those of its tasks, which are folded, with codes; also by its plain name."""
    api = MemoryKube()
    await api.create(FRAMEWORKS, framework("train", role("worker", 3)), NAMESPACE)
    cluster = KubeCli(api, NAMESPACE, Output(Format.json))  # type: ignore[arg-type]

    def no_store() -> AbstractAsyncContextManager[Cli]:
        raise Unavailable("no store here")

    on = AnyCli(cluster.out, no_store, lambda: nullcontext(cluster))
    for name in ("train", f"framework/{NAMESPACE}/train", "framework/train"):
        await explain.explain(on, name, lease="off")
        said = capsys.readouterr()
        found = json.loads(said.out)
        assert (found["kind"], found["name"], found["state"]) == ("framework", f"{NAMESPACE}/train", "Unknown")
        assert [each["code"] for each in found["reasons"]] == ["not_taken_up"]
        assert ("not searched: rc, task, node: no store here" in said.err) == ("/" not in name)
    with pytest.raises(BadInput, match="no framework nope"):
        await explain.explain(on, "framework/nope", lease="off")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nope", "there is no rc, task or node named 'nope'; not searched, because not configured: framework, gpu"),
        ("rc/nope", "there is no rc nope"),
        ("task/nope", "there is no task nope"),
        ("frob/x", "'frob' is no kind that can be explained; those are rc, task, node, pod, framework, gpu"),
        ("job/x", "`rcfarm job explain x` explains it"),
        ("framework/x", "no Kubernetes API server is configured"),
        ("gpu/x", "does not answer"),
        ("pod/n1", "a pod is named by its node and its id"),
        ("pod/n1/other", "node n1 has no pod other; it has hello"),
        ("pod/n9/other", "there is no node n9"),
        ("", "'' names nothing"),
        ("rc/", "'rc/' names nothing"),
        ("a//b", "'a' is no kind"),
    ],
)
async def test_mistakes_are_named(fleet: CommandLine, name: str, complaint: str) -> None:
    ran = await fleet("explain", name, HOME="/nowhere", KUBECONFIG="")
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert complaint in ran.err
