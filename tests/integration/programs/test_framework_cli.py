"""`rcfarm framework …` as it is installed, against a real API server and a running operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd
from controllers.framework.config import shipped_config
from controllers.framework.operator import FrameworkOperator
from store.kube.api.objects import Object
from store.kube.client.client import KubeClient
from store.kube.events import EventRecorder
from tests.support.framework.cluster import framework, role
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.logs import HollowLogs
from tests.support.programs.cli import Ran, run_process
from tests.support.programs.cluster import Commands

FOREVER: dict[str, str] = {}


class FrameworkCommands(Commands):
    """`await commands("list")` is `rcfarm framework list`."""

    async def add(self, *bodies: Object) -> None:
        await self.create(FRAMEWORKS, *bodies)

    async def anything(self, name: str, *options: str) -> Ran:
        """Run `rcfarm explain` on it, with no store."""
        options = options or ("-n", self.namespace)
        arguments = ("explain", name, "--lease", self.lease, "-o", "json", *options)
        env = {"HOME": "/", "KUBECONFIG": str(self.plane.kubeconfig), "RCFARM_STORE": "consul://127.0.0.1:1"}
        return await asyncio.to_thread(run_process, *arguments, env=env)

    async def reaches(self, name: str, state: str) -> Object:
        """Wait for the Framework's state, as it is stored."""
        return await self.until(FRAMEWORKS, name, lambda status: status.get("state") == state)

    @asynccontextmanager
    async def operating(self) -> AsyncIterator[None]:
        """Run the operator of Frameworks, with nodes."""
        recorder = EventRecorder(self.api, "test")
        operator = FrameworkOperator(self.api, shipped_config(), recorder, namespaces=[self.namespace])
        async with self.operator(recorder.run, operator.run):
            yield


@pytest.fixture
def installed(control_plane: ControlPlane) -> ControlPlane:
    """The shared control plane, with Frameworks."""
    control_plane.install(crd("compatible"))
    return control_plane


@pytest.fixture
def commands(installed: ControlPlane, kube: KubeClient, namespace: str) -> FrameworkCommands:
    return FrameworkCommands(installed, kube, namespace, "framework")


async def test_the_life_of_a_framework_on_the_command_line(commands: FrameworkCommands) -> None:
    """Started, listed, shown, scaled, stopped; each change is followed to its end, and there is a history."""
    async with commands.operating():
        await commands.add(framework("train", role("worker", 1, annotations=FOREVER), executionType="Create"))
        started = await commands.ours("start", "train")
        assert started.code == 0
        assert started.out.startswith("train is started: Attempt")
        await commands.reaches("train", "AttemptRunning")
        grown = await commands.ours("scale", "train", "worker=3", "--min-failed", "worker=2")
        assert (grown.code, grown.out) == (0, "train is scaled: AttemptRunning\n")
        spec = (await commands.api.get(FRAMEWORKS, "train", commands.namespace))["spec"]["taskRoles"][0]
        assert (spec["taskNumber"], spec["frameworkAttemptCompletionPolicy"]) == (3, {"minFailedTaskCount": 2})
        assert (await commands.ours("rescale", "train", "worker=1", "-o", "json")).json["tasks"] == 1

        listed, everywhere = await asyncio.gather(commands.ours("list", "-o", "json"), commands("list", "-A"))
        (info,) = listed.json
        assert (info["name"], info["state"], info["tasks"]) == ("train", "AttemptRunning", 1)
        assert any({commands.namespace, "train"} <= set(line.split()) for line in everywhere.out.splitlines())
        status = (await commands.ours("status", "train", "-o", "json")).json
        assert [(task["role"], task["index"]) for task in status["tasks"]] == [("worker", 0)]
        stopped = await commands.ours("stop", "train", "--yes")
        assert (stopped.code, stopped.out) == (0, "train is stopped: Completed\n")
        again = await commands.ours("stop", "train", "--yes")
        assert (again.code, again.out) == (0, "train has completed already: StopFrameworkRequested (-210)\n")
        late = await commands.ours("scale", "train", "worker=2")
        assert late.code == 1
        assert "has completed" in late.err
        reasons = {event["reason"] for event in (await commands.ours("history", "train", "-o", "json")).json}
        assert "FrameworkCompleted" in reasons

        kept = await commands.ours("delete", "train")
        assert (kept.code, "not confirmed" in kept.err) == (1, True)
        deleted = await commands.ours("delete", "train", "--yes")
        assert (deleted.code, deleted.out) == (0, "train is deleted\n")
        again = await commands.ours("delete", "train", "--yes")
        assert (again.code, "no framework train" in again.err) == (1, True)


async def test_the_logs_of_its_tasks(commands: FrameworkCommands, tmp_path: Path) -> None:
    """Each line begins with its task; one task can be chosen, and a wrong one is named."""
    logs = HollowLogs()
    async with commands.operating():
        nodes = [f"{commands.namespace}-{number}" for number in range(2)]
        async with logs.serving(commands.api, tmp_path, *nodes):
            await commands.add(framework("train", role("worker", 2, annotations=FOREVER)))
            await commands.reaches("train", "AttemptRunning")
            tasks = (await commands.ours("status", "train", "-o", "json")).json["tasks"]
            for task in tasks:
                await logs.write(task["pod"], f"step of {task['index']}")
            both = await commands.ours("logs", "train")
            one = await commands.ours("logs", "train", "-t", "worker-1", "-o", "json")
            wrong = await commands.ours("logs", "train", "-t", "worker-2")
            await logs.end(*(task["pod"] for task in tasks))
    assert both.out.splitlines() == ["worker-0 | step of 0", "worker-1 | step of 1"]
    assert [line["text"] for line in one.json] == ["step of 1"]
    assert (wrong.code, "has no task worker-2; it has worker-0, worker-1" in wrong.err) == (1, True)


async def test_explain_on_a_real_cluster(commands: FrameworkCommands) -> None:
    """A quota is named with its Framework; a pod's reason comes from the API server itself."""
    quota: Object = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    commands.plane.request("POST", f"/api/v1/namespaces/{commands.namespace}/resourcequotas", quota)
    refused = role("worker", 1)
    refused["task"]["pod"]["spec"]["containers"][0]["image"] = ""
    async with commands.operating():
        await commands.add(framework("bad", refused), framework("many", role("worker", 3, annotations=FOREVER)))
        async with asyncio.timeout(60):
            while "exceeded quota: few" not in (await commands.ours("explain", "many")).out:
                await asyncio.sleep(0.2)
        await commands.reaches("bad", "Completed")
        said = (await commands.ours("explain", "bad", "-o", "json")).json
        assert any(
            each["subject"] == "worker-0" and "spec.containers[0].image: Required value" in each["reason"]
            for each in said
        )
        for name in (f"framework/{commands.namespace}/many", "many"):
            found = (await commands.anything(name)).json
            assert (found["kind"], found["name"]) == ("framework", f"{commands.namespace}/many")
            codes = [each["code"] for each in found["reasons"]]
            assert codes[0] == "creation_blocked"
            assert set(codes) <= {"creation_blocked", "pod_awaited"}
        reasons = (await commands.anything("framework/bad")).json["reasons"]
        named = {(each["about"], each["code"]) for each in reasons}
        assert named - {("", "warned")} == {("", "job_ended"), ("worker-0", "task_attempt_failed")}


async def test_without_an_operator_nothing_is_waited_for_in_vain(commands: FrameworkCommands) -> None:
    """A change that no operator carries out ends with exit code 2 in time, and explain reports that there is no leader;
    an expired Lease does not count."""
    await commands.add(framework("alone", role("worker", 1, annotations=FOREVER)))
    late = await commands.ours("scale", "alone", "worker=2", "--timeout", "0.5")
    assert late.code == 2
    assert f"rcfarm framework explain alone -n {commands.namespace}" in late.err
    assert (await commands.ours("scale", "alone", "worker=3", "--detach")).code == 0
    assert "no operator leads: there is no such Lease" in (await commands.ours("explain", "alone")).out
    async with commands.operating():
        await commands.reaches("alone", "AttemptRunning")
        assert "leads" not in (await commands.ours("explain", "alone")).out
    assert "has no holder" in (await commands.ours("explain", "alone")).out


async def test_what_get_shows_can_be_applied_again(commands: FrameworkCommands) -> None:
    """The file has no field that only the server may set; as JSON it is the stored object."""
    import yaml

    await commands.add(framework("copy", role("worker", 1), executionType="Create"))
    shown = yaml.safe_load((await commands.ours("get", "copy")).out)
    assert set(shown) == {"apiVersion", "kind", "metadata", "spec"}
    assert shown["metadata"] == {"name": "copy", "namespace": commands.namespace}
    shown["metadata"]["name"] = "copied"
    await commands.add(shown)
    assert (await commands.ours("get", "copied", "-o", "json")).json["spec"] == shown["spec"]


async def test_names_complete(commands: FrameworkCommands) -> None:
    """Shell completion offers the Frameworks of the namespace, and nothing when the cluster is unreachable."""
    await commands.add(*(framework(name, executionType="Create") for name in ("train", "tree", "other")))
    line = f"rcfarm framework status -n {commands.namespace} tr"
    environ = {
        "_RCFARM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "KUBECONFIG": str(commands.plane.kubeconfig),
    }
    offered = await asyncio.to_thread(run_process, env=environ)
    assert offered.out.split() == ["train", "tree"]
    nothing = await asyncio.to_thread(run_process, env=environ | {"KUBECONFIG": "/nowhere"})
    assert (nothing.out.strip(), nothing.err) == ("", "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["status", "nix"], "no framework nix in namespace"),
        (["scale", "some", "worker"], "write ROLE=N"),
        (["scale", "some", "worker=two"], "'two' is not a whole number"),
        (["scale", "some", "worker=-1"], "must be within 0 to 10000"),
        (["scale", "some", "wrker=1"], "no task role wrker; it has worker"),
        (["scale", "some", "worker=1", "--min-failed", "worker=-2"], "--min-failed worker=-2: must be within -1"),
        (["list", "--context", "nowhere"], "has no context nowhere, but test"),
        (["list", "--kubeconfig", "/nowhere/config"], "no kubeconfig file /nowhere/config"),
        (["stop", "some"], "--yes"),
    ],
)
async def test_mistakes_are_one_clear_line(commands: FrameworkCommands, arguments: list[str], text: str) -> None:
    """Exit code 1, nothing on standard output, no traceback."""
    await commands.add(framework("some", role("worker", 1), executionType="Create"))
    ran = await commands.ours(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert text in ran.err
    assert "Traceback" not in ran.err


async def test_clusters_that_do_not_answer_are_named(commands: FrameworkCommands, tmp_path: Path) -> None:
    """No kubeconfig, an unreachable server, an unknown token: the error says what to do or names the server."""
    assert "no Kubernetes API server is configured" in (await commands("list", KUBECONFIG="", HOME=str(tmp_path))).err
    away = commands.plane.write_kubeconfig(tmp_path / "away", url="https://127.0.0.1:1")
    assert "no answer from https://127.0.0.1:1" in (await commands("list", "--kubeconfig", str(away))).err
    stranger = commands.plane.write_kubeconfig(tmp_path / "stranger", token="wrong")
    ran = await commands("list", "--kubeconfig", str(stranger))
    assert ran.code == 1
    assert "does not accept these credentials: log in again" in ran.err


async def test_rights_that_are_missing_cost_only_what_they_hide(commands: FrameworkCommands, tmp_path: Path) -> None:
    """With read access to Frameworks alone, `explain` works and lists what it could not read; a change is refused."""
    rules: list[dict[str, Any]] = [
        {"apiGroups": [FRAMEWORKS.group], "resources": ["frameworks"], "verbs": ["get", "list"]}
    ]
    token = await asyncio.to_thread(commands.plane.create_user, rules, namespace=commands.namespace)
    kubeconfig = str(commands.plane.write_kubeconfig(tmp_path / "reader", token=token))
    await commands.add(framework("mine", role("worker", 1), executionType="Create"))
    explained = await commands.ours("explain", "mine", "--kubeconfig", kubeconfig)
    assert explained.code == 0
    assert "no operator has taken it up" in explained.out
    assert "not known: whether an operator leads" in explained.err
    stop = await commands.ours("stop", "mine", "--yes", "--kubeconfig", kubeconfig)
    assert stop.code == 1
    assert "forbidden" in stop.err
    assert "forbidden" in (await commands("list", "-A", "--kubeconfig", kubeconfig)).err
