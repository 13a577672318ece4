"""`rcfarm hived explain | simulate | snapshot`: the reports on an extender's state."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from controllers.extender.server import extender_app
from rcfarm.daemon.health_server import serving
from rcfarm.daemon.listener import Address
from scheduler.hived.errors import NotNow
from scheduler.hived.inspection.inspection import Inspected, Inspection
from scheduler.hived.inspection.snapshot import WaitingPod, take_snapshot
from tests.support.extender.web import ScriptedHandlers, web_client
from tests.support.hived.cluster import Cluster, Job
from tests.support.hived.design_cluster import played
from tests.support.programs import cli
from tests.support.programs.cli import Ran

WIDE = Job("wide", "VC1", 0, ((3, 16),))
SMALL = Job("small", "VC1", -1, ((1, 2),))


def run(*arguments: str) -> Ran:
    """Run `rcfarm hived …`."""
    return cli.run("hived", *arguments)


def waiting() -> list[WaitingPod]:
    return [WaitingPod(WIDE.pod("wide-0", 16), "Waiting", "no room yesterday")]


def config_of(cluster: Cluster) -> str:
    return yaml.safe_dump(cluster.config, sort_keys=False)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Save the state of a full cluster in which a pod of a wide gang waits. Return the file's path."""
    cluster = played(17)
    path = tmp_path / "state.json"
    path.write_bytes(b"".join(take_snapshot(cluster.algorithm, config_of(cluster), waiting()).pieces()))
    return str(path)


@pytest.fixture
def extender() -> Iterator[str]:
    """Return the URL of a web server that serves the same state."""
    cluster, found, loop = played(17), "", asyncio.new_event_loop()
    started, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        nonlocal found
        inspection = Inspection(Inspected(cluster.algorithm, config_of(cluster)), waiting)
        async with serving(extender_app(ScriptedHandlers(), inspection), Address("127.0.0.1", 0)) as where:
            found = f"http://{where}"
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(20)
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_a_waiting_pod_is_explained(saved: str) -> None:
    """The output has the verdict, then each chain with the reasons that exclude its cells, then hints."""
    ran = run("explain", "test/wide-0", "--snapshot", saved)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "test/wide-0: wait: no cells for it now, neither free nor preemptible"
    assert lines[1] == "  group wide of VC1, priority 0, needs 3x16 leaf cells"
    assert "Chain DGX2-V100-NODE, quota of VC1: 2 DGX2-V100-NODE" in lines
    assert any(line.startswith("Hint: as an opportunistic pod (priority -1) it would run now, on ") for line in lines)
    assert lines[-1] == "The last answer to kube-scheduler (Waiting): no room yesterday"


def test_an_explanation_as_json(saved: str) -> None:
    """The JSON output has the same explanation."""
    document = json.loads(run("explain", "test/wide-0", "--snapshot", saved, "--output", "json").out)
    assert (document["pod"], document["verdict"], len(document["chains"])) == ("test/wide-0", "wait", 3)


def test_a_pod_that_does_not_run_undisturbed(tmp_path: Path) -> None:
    """For a placed pod, the message says which group preempts it, or that its group has lost its quota."""
    cluster = played(10)
    path = tmp_path / "state.json"
    path.write_bytes(b"".join(take_snapshot(cluster.algorithm, config_of(cluster)).pieces()))
    pods = [pod["metadata"]["name"] for pod in cluster.groups["g5"].pods()]
    ran = run("explain", f"test/{pods[0]}", "--snapshot", str(path))
    assert (ran.code, ran.err.endswith("in affinity group g5, which is being preempted by g10\n")) == (1, True)
    cluster = played(19)
    path.write_bytes(b"".join(take_snapshot(cluster.algorithm, config_of(cluster)).pieces()))
    pod = cluster.groups["g18"].pods()[0]
    ran = run("explain", f"test/{pod['metadata']['name']}", "--snapshot", str(path))
    assert "in affinity group g18, which has lost its quota and runs on as an opportunistic one; if " in ran.err


def test_waiting_pods_of_the_same_name_are_named_first(saved: str) -> None:
    """A name without its namespace is listed first among thousands of waiting pods; the rest are counted."""
    document = json.loads(Path(saved).read_text())
    document["waiting"] = [
        {"pod": {"metadata": {"namespace": "a", "name": f"other-{number}"}}, "state": "Waiting"} for number in range(9)
    ] + document["waiting"]
    Path(saved).write_text(json.dumps(document))
    ran = run("explain", "wide-0", "--snapshot", saved)
    assert ran.err.endswith("these wait: test/wide-0, a/other-0, a/other-1, a/other-2, a/other-3 and 5 more\n")


def test_the_state_of_a_running_extender(extender: str, saved: str, tmp_path: Path) -> None:
    """`snapshot` prints the state and the other commands read it directly, with the same result."""
    ran = run("snapshot", "--extender", extender)
    assert ran.code == 0
    file = tmp_path / "fetched.json"
    file.write_text(ran.out)
    assert json.loads(ran.out) == json.loads(Path(saved).read_text())
    directly = run("explain", "test/wide-0", "--extender", extender)
    assert directly.out == run("explain", "test/wide-0", "--snapshot", str(file)).out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("explain wide-0 SAVED", "the extender knows no pod default/wide-0: .*these wait: test/wide-0"),
        ("explain test/pod-12 SAVED", r"pod test/pod-12 has its place: it is on 0\.0\.3\.2: .* in affinity group g12"),
        (
            "explain x --extender http://127.0.0.1:1",
            "--extender http://127.0.0.1:1: does not answer: Connection refused; say where .*give a saved --snapshot",
        ),
        ("explain x --extender localhost:9096", "--extender 'localhost:9096': is not a URL; write it like http://"),
        ("explain x --extender=", "--extender '': is not a URL"),
        ("explain x --extender http://", "--extender 'http://': is not a URL"),
        ("explain x --extender http://hived:99999", "--extender 'http://hived:99999': is not a URL"),
        (
            "explain x --snapshot pyproject.toml",
            "--snapshot pyproject.toml: this is not a snapshot of rcfarm extender: ",
        ),
        ("simulate SAVED", "nothing to simulate: give --pod, --lose or --add\n$"),
        ("simulate --pod gone.yaml SAVED", "--pod gone.yaml: there is no such file\n$"),
    ],
)
def test_a_mistake_is_one_error(saved: str, line: str, message: str) -> None:
    """The error names the waiting pods or the pod's place, or the option and what was given, and what to do."""
    ran = run(*line.replace("SAVED", f"--snapshot {saved}").split())
    assert (ran.code, ran.out) == (1, "")
    assert re.match(f"error: {message}", ran.err), ran.err


async def test_an_extender_that_is_not_ready() -> None:
    """The error quotes the extender and says that only the leader answers."""
    async with web_client() as client:
        ran = await asyncio.to_thread(run, "snapshot", "--extender", client.url)
        assert (
            ran.err
            == f"error: --extender {client.url}: answers 400: hivedscheduler: User Error: snapshot does not exist\n"
        )
        client.inspection.problem = NotNow("not all nodes are known yet")
        ran = await asyncio.to_thread(run, "snapshot", "--extender", client.url)
    message = "answers 503: hivedscheduler: Not Now: not all nodes are known yet; of several under one --lease only "
    assert (ran.code, message in ran.err) == (1, True)


def test_an_address_without_a_state(extender: str) -> None:
    """The error for another server, such as the daemon's own listener, says which address to give."""
    ran = run("snapshot", "--extender", f"{extender}/elsewhere")
    assert (ran.code, "give the address that HiveD's file has as webServerAddress" in ran.err) == (1, True)


def test_a_waiting_pod_that_would_fit_is_simulated(saved: str) -> None:
    """A waiting pod of the snapshot can be simulated like a pod of a file: here it fits once nodes are added."""
    quota = ["--add", "3-DGX2-V100-NODE=0.0.9.0,0.0.9.1,0.0.9.2"]
    waiting = WaitingPod(Job("wide", "VC1", -1, ((3, 16),)).pod("wide-0", 16), "Waiting")
    document = json.loads(Path(saved).read_text()) | {"waiting": msgspec.to_builtins([waiting])}
    Path(saved).write_text(json.dumps(document))
    ran = run("simulate", "--pod", "test/wide-0", *quota, "--snapshot", saved)
    assert (ran.code, ran.out.splitlines()[0]) == (0, "test/wide-0: bind: it fits; the next filter call binds it")


def test_a_pod_of_a_file_is_simulated(saved: str, tmp_path: Path) -> None:
    """The output names the pod's place; for a pod that would wait, the exit code is 2."""
    file = tmp_path / "pods.yaml"
    pod = {"kind": "Pod", **SMALL.pod("small-0", 2)}
    file.write_text(yaml.safe_dump(pod))
    ran = run("simulate", "--pod", str(file), "--snapshot", saved)
    assert ran.code == 0
    assert ran.out.startswith("test/small-0: bind: it fits; the next filter call binds it\n")
    both = run("simulate", "--pod", str(file), "--pod", "test/wide-0", "--snapshot", saved)
    assert (both.code, "test/wide-0: wait: " in both.out) == (2, True)


def test_pods_of_a_list_are_simulated(saved: str, tmp_path: Path) -> None:
    """Each object of a `List` is simulated, as kubectl would apply it."""
    file = tmp_path / "pods.yaml"
    pods = [{"kind": "Pod", **SMALL.pod(f"small-{number}", 2)} for number in range(2)]
    file.write_text(yaml.safe_dump({"kind": "List", "items": pods}))
    ran = run("simulate", "--pod", str(file), "--snapshot", saved)
    assert [line.partition(":")[0] for line in ran.out.splitlines() if line.startswith("test/")] == [
        "test/small-0",
        "test/small-1",
    ]


def test_lost_nodes_are_simulated(saved: str) -> None:
    """The output names the groups on the lost nodes, and the quotas that can no longer be served."""
    ran = run("simulate", "--lose", "0.0.3.2", "--snapshot", saved)
    assert ran.out.splitlines() == [
        "1 group on 0.0.3.2:",
        "  g12 of VC1, priority 1: test/pod-12 on 0.0.3.2",
        "the unused quota of all virtual clusters can still be served",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: Deployment", "document 1 is not a Pod, but a Deployment\n"),
        ("{kind: List, items: [3]}", "document 1 is not a Pod\n"),
        ("kind: Pod", "document 1 has no metadata.name"),
        ("{", "not valid YAML: line 2, column 1: "),
        (" ", "the file is empty"),
    ],
)
def test_a_file_that_is_not_of_pods(saved: str, tmp_path: Path, content: str, message: str) -> None:
    """The error names the file and the document."""
    file = tmp_path / "pods.yaml"
    file.write_text(content)
    ran = run("simulate", "--pod", str(file), "--snapshot", saved)
    assert (ran.code, str(file) in ran.err, message in ran.err) == (1, True, True)
