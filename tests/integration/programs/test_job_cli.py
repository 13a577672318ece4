"""`rcfarm job …` as it is installed, against a real API server and running operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controllers.training.kinds import KINDS, definition
from controllers.training.options import TrainingOptions
from controllers.training.pytorch import AUTOSCALERS, PYTORCH_JOBS
from controllers.training.tensorflow import TF_JOBS
from store.kube.api.objects import Object
from store.kube.client.client import KubeClient
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.logs import HollowLogs
from tests.support.programs.cluster import Commands
from tests.support.training.manifests import pytorch_job, tf_job


class JobCommands(Commands):
    """`await commands("list")` is `rcfarm job list`."""

    async def reaches(self, name: str, condition: str) -> Object:
        """Wait until a condition of the PyTorchJob is true."""

        def reached(status: Object) -> bool:
            conditions = status.get("conditions") or ()
            return any(each["type"] == condition and each["status"] == "True" for each in conditions)

        return await self.until(PYTORCH_JOBS, name, reached)

    @asynccontextmanager
    async def operating(self) -> AsyncIterator[None]:
        """Run the operators of all kinds, with nodes."""
        options = TrainingOptions(autoscalers=await self.api.served(AUTOSCALERS))
        async with self.operator(*(kind(self.api, namespace=self.namespace, options=options).run for kind in KINDS)):
            yield


@pytest.fixture
def commands(control_plane: ControlPlane, kube: KubeClient, namespace: str) -> JobCommands:
    control_plane.install(*map(definition, KINDS))
    return JobCommands(control_plane, kube, namespace, "job")


async def test_the_life_of_a_training_job_on_the_command_line(commands: JobCommands) -> None:
    """Listed, shown, scaled, suspended, resumed and deleted; each change is followed to its end."""
    async with commands.operating():
        await commands.create(PYTORCH_JOBS, pytorch_job("mnist", Master=1, Worker=2))
        await commands.reaches("mnist", "Running")
        (info,) = (await commands.ours("list", "-o", "json")).json
        assert (info["name"], info["kind"], info["state"], info["replicas"]) == ("mnist", "PyTorchJob", "Running", 3)
        scaled = await commands.ours("scale", "mnist", "worker=3")
        assert scaled.code == 0
        assert scaled.out == f"PyTorchJob {commands.namespace}/mnist is Running, 4 of 4 active\n"
        assert "is not elastic" in scaled.err
        status = (await commands.ours("status", "mnist", "-o", "json")).json
        assert [each["replica"] for each in status["replicas"]] == ["master-0", "worker-0", "worker-1", "worker-2"]
        suspended = await commands.ours("suspend", "mnist")
        assert (suspended.code, "is Suspended, 0 of 4 active" in suspended.out) == (0, True)
        assert "it is suspended" in (await commands.ours("explain", "mnist")).out
        resumed = await commands.ours("resume", "pytorchjob/mnist")
        assert (resumed.code, "is Running" in resumed.out) == (0, True)
        reasons = {event["reason"] for event in (await commands.ours("history", "mnist", "-o", "json")).json}
        assert "SuccessfulCreatePod" in reasons
        assert {"Suspended", "Resumed"} <= {reason.removeprefix("PyTorchJob").removeprefix("Job") for reason in reasons}
        deleted = await commands.ours("delete", "mnist", "--yes")
        assert (deleted.code, deleted.out) == (0, f"PyTorchJob {commands.namespace}/mnist is deleted\n")


async def test_explain_names_the_obstacle_of_each_replica(commands: JobCommands) -> None:
    """A quota, a spec that can't be used, and a missing operator are each named with what they hold up."""
    await commands.create(TF_JOBS, tf_job("alone", Worker=2))
    await commands.create(PYTORCH_JOBS, pytorch_job("bad", Master=2))
    assert "no operator leads: there is no such Lease" in (await commands.ours("explain", "alone")).out
    quota: Object = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    commands.plane.request("POST", f"/api/v1/namespaces/{commands.namespace}/resourcequotas", quota)
    async with commands.operating():
        async with asyncio.timeout(60):
            while "exceeded quota: few" not in (await commands.ours("explain", "alone")).out:
                await asyncio.sleep(0.2)
        said = (await commands.ours("explain", "bad", "-o", "json")).json
        assert any("Master.replicas" in each["reason"] for each in said)
        assert {each["name"]: each["problems"] != [] for each in (await commands.ours("list", "-o", "json")).json} == {
            "alone": False,
            "bad": True,
        }


async def test_logs_follow_each_replica_over_broken_streams(commands: JobCommands, tmp_path: Path) -> None:
    """Nothing is lost, shown twice or reordered within a replica, and the command ends with the job."""
    logs = HollowLogs()
    ends = {"hollow/run-seconds": "4", "hollow/exit-code": "0"}
    async with commands.operating():
        nodes = [f"{commands.namespace}-{number}" for number in range(2)]
        async with logs.serving(commands.api, tmp_path, *nodes):
            job = pytorch_job("mnist", Master=1, Worker=1)
            for spec in job["spec"]["pytorchReplicaSpecs"].values():
                spec["template"]["metadata"] = {"annotations": ends}
            await commands.create(PYTORCH_JOBS, job)
            pods = ("mnist-master-0", "mnist-worker-0")
            for pod in pods:
                await logs.write(pod, "first")
            await commands.reaches("mnist", "Running")
            logs.broken = 2
            following = asyncio.create_task(commands.ours("logs", "mnist", "-f"))
            for number in range(20):
                for pod in pods:
                    await logs.write(pod, f"line {number}")
                await asyncio.sleep(0.05)
            await commands.reaches("mnist", "Succeeded")
            await logs.end(*pods)
            ran = await following
            assert ran.code == 0
            wanted = ["first", *(f"line {number}" for number in range(20))]
            for replica in ("master-0", "worker-0"):
                shown = [line.partition(" | ")[2] for line in ran.out.splitlines() if line.startswith(replica)]
                assert shown == wanted
            last = await commands.ours("logs", "mnist", "-r", "worker-0", "--tail", "2")
            assert last.out.splitlines() == ["line 18", "line 19"]
            (line,) = (await commands.ours("logs", "mnist", "-r", "master-0", "--tail", "1", "-o", "json")).json
            assert (line["replica"], line["text"]) == ("master-0", "line 19")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["status", "nix"], "no training job nix in namespace"),
        (["status", "tfjob/some"], "no TFJob some in namespace"),
        (["status", "podjob/some"], "'podjob' is no kind of training job in this cluster; it has pytorchjob, tfjob"),
        (["status", "both"], "write pytorchjob/both or tfjob/both"),
        (["scale", "some", "worker"], "write TYPE=N"),
        (["scale", "some", "worker=two"], "'two' is not a whole number"),
        (["scale", "some", "ps=1"], "has no replicas of type ps; it has Master, Worker"),
        (["scale", "some", "master=2"], "can't be scaled so: spec.pytorchReplicaSpecs.Master.replicas"),
        (["logs", "some", "-r", "ps-0"], "has no replica ps-0; it has master-0, worker-0"),
        (["logs", "some", "-f", "-p"], "give one of them"),
        (["delete", "some"], "--yes"),
    ],
)
async def test_mistakes_are_one_clear_line(commands: JobCommands, arguments: list[str], text: str) -> None:
    """Exit code 1, nothing on standard output, no traceback, nothing changed."""
    await commands.create(PYTORCH_JOBS, pytorch_job("some", Master=1, Worker=1), pytorch_job("both", Master=1))
    await commands.create(TF_JOBS, tf_job("both", Worker=1))
    ran = await commands.ours(*arguments)
    assert (ran.code, ran.out) == (1, "")
    assert text in ran.err
    assert "Traceback" not in ran.err


async def test_a_user_with_rights_for_one_kind_sees_its_jobs(commands: JobCommands, tmp_path: Path) -> None:
    """What may not be read is named, and keeps nothing else from being shown."""
    await commands.create(PYTORCH_JOBS, pytorch_job("mine", Master=1))
    rules = [
        {"apiGroups": ["kubeflow.org"], "resources": ["pytorchjobs"], "verbs": ["get", "list"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    token = commands.plane.create_user(rules, namespace=commands.namespace)
    kubeconfig = str(commands.plane.write_kubeconfig(tmp_path / "kubeconfig", token=token))
    at = ("-n", commands.namespace)
    listed = await commands("list", *at, KUBECONFIG=kubeconfig)
    assert (listed.code, "mine" in listed.out) == (0, True)
    assert "TFJobs are not shown: " in listed.err
    assert "PyTorchJob" in (await commands("status", "mine", *at, KUBECONFIG=kubeconfig)).out
    other = await commands("status", "other", *at, KUBECONFIG=kubeconfig)
    assert (other.code, 'cannot get resource "tfjobs"' in other.err) == (1, True)


@pytest.mark.parametrize(
    "arguments", [["get"], ["status"], ["explain"], ["history"], ["logs"], ["suspend", "--detach"]]
)
async def test_a_job_without_a_spec_is_no_riddle(commands: JobCommands, arguments: list[str]) -> None:
    """The definitions accept it."""
    head = {"apiVersion": PYTORCH_JOBS.api_version, "kind": PYTORCH_JOBS.kind}
    await commands.create(PYTORCH_JOBS, {**head, "metadata": {"name": "empty"}})
    command, *options = arguments
    ran = await commands.ours(command, "empty", *options)
    assert "Traceback" not in ran.err
    assert ran.code == (1 if command in ("status", "logs", "suspend") else 0)


async def test_types_are_scaled_as_the_operator_spells_them(commands: JobCommands) -> None:
    """The original accepts any case; the command follows the change to its end."""
    await commands.create(TF_JOBS, tf_job("tf", worker=1, ps=1))
    async with commands.operating():
        scaled = await commands.ours("scale", "tf", "Worker=2", "--timeout", "30")
        assert (scaled.code, scaled.out) == (0, f"TFJob {commands.namespace}/tf is Running, 3 of 3 active\n")
