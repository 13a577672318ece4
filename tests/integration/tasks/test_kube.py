"""`pod` and `framework` tasks on a real control plane, with hollow kubelets, and with `rcfarm jobs` as a process."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd
from controllers.tasks.plugins.framework import FrameworkPlugin
from controllers.tasks.plugins.pod import PodPlugin
from store.kube.api.errors import NotFound
from store.kube.api.objects import PODS, Object, Resource, name_of, phase_of
from store.kube.client.client import KubeClient
from tests.support import require
from tests.support.framework.cluster import role
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.programs.daemon import running
from tests.support.tasks.kube import Stage
from tests.support.waiting import until

QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")


@pytest.fixture
async def kubelet(kube: KubeClient, namespace: str) -> AsyncIterator[HollowKubelet]:
    async with HollowKubelet(kube, namespace=namespace, schedules=True).playing(1) as kubelet:
        yield kubelet


@pytest.fixture
async def stage(kube: KubeClient, namespace: str, kubelet: HollowKubelet) -> AsyncIterator[Stage[KubeClient]]:
    async with Stage(PodPlugin(), kube, namespace=namespace, virtual=False).playing() as stage:
        yield stage


def pod(*, cpu: str = "1", **annotations: str) -> dict[str, Any]:
    """Return the configuration of a task whose pod behaves as the annotations say."""
    container = {"name": "main", "image": "example.org/work:1", "resources": {"requests": {"cpu": cpu}}}
    plan = {f"hollow/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return {"pod": {"metadata": {"annotations": plan}, "spec": {"containers": [container]}}}


async def gone(stage: Stage[KubeClient], resource: Resource, name: str) -> None:
    async def is_gone() -> bool:
        try:
            await stage.api.get(resource, name, stage.namespace)
        except NotFound:
            return True
        return False

    await until(is_gone, f"{name} gone")


async def limit(stage: Stage[KubeClient], cpu: str) -> None:
    """Limit the processors of the namespace, and wait until the limit is in force."""
    body = {"metadata": {"name": "team"}, "spec": {"hard": {"requests.cpu": cpu}}}
    try:
        await stage.api.patch(QUOTAS, "team", stage.namespace, {"spec": body["spec"]})
    except NotFound:
        await stage.api.create(QUOTAS, body, stage.namespace)

    async def is_counted() -> bool:
        status = (await stage.api.get(QUOTAS, "team", stage.namespace)).get("status") or {}
        return bool((status.get("hard") or {}).get("requests.cpu") == cpu and status.get("used"))

    await until(is_counted, "the quota in force")


async def test_a_pod_runs_to_success(stage: Stage[KubeClient]) -> None:
    await stage.start(config=pod(exit_code="0", run_seconds="0.2"))
    state = await stage.until_done("job")

    assert state.outcome == "success"
    phases = await stage.phases("job")
    assert (phases[0], phases[-1]) == ("Queued", "Success")
    assert phase_of(await stage.object()) == "Succeeded"
    last = await stage.last_event()
    assert require(last.info)["custom_info"]["exit_codes"] == {"main": 0}


async def test_a_pod_that_fails_is_tried_again_under_another_name(stage: Stage[KubeClient]) -> None:
    await stage.start(config=pod(exit_code="3"), retries=1)
    state = await stage.until_done("job")

    assert (state.outcome, state.attempt) == ("failure", 1)
    names = {name_of(pod): phase_of(pod) for pod in await stage.objects()}
    assert names == {"job-n0-1": "Failed"}  # the abort of the first attempt has deleted its pod


async def test_an_aborted_task_deletes_its_pod(stage: Stage[KubeClient]) -> None:
    await stage.start(config=pod())
    made: Object = await stage.object()
    await stage.until_phase("Running")
    await stage.abort("job")
    await stage.until_done("job")

    assert (await stage.phases("job"))[-1] == "Aborted"
    await gone(stage, PODS, name_of(made))


async def test_a_pod_that_a_quota_refuses_is_created_when_there_is_room(stage: Stage[KubeClient]) -> None:
    """The refusals of a real API server are understood: one that can pass later waits, one that can't fails."""
    await limit(stage, "2")
    await stage.start("first", pod(cpu="1500m"))
    await stage.until_phase("Running", "first")
    await stage.start("large", pod(cpu="1", exit_code="0"))
    await stage.start("impossible", pod(cpu="2001m"))

    refused = await stage.until_done("impossible")
    assert require(refused.error).code == "ResourceRequestsExceedLimits"
    waiting = await stage.until_phase("WaitingForResources", "large")
    assert "exceeded quota: team" in waiting.reason
    await stage.start("small", pod(cpu="100m", exit_code="0"))
    assert (await stage.until_done("small")).outcome == "success"
    await stage.abort("first")
    assert (await stage.until_done("large")).outcome == "success"


async def test_a_framework_is_followed_to_its_end(
    control_plane: ControlPlane, kube: KubeClient, namespace: str, kubelet: HollowKubelet, tmp_path: Path
) -> None:
    """The real operator runs both: one succeeds, and one ends with the exit code of its task."""
    control_plane.install(crd())
    stage = Stage(FrameworkPlugin(), kube, FRAMEWORKS, namespace=namespace, virtual=False)
    wrong = role("worker", 1, annotations={"hollow/exit-code": "7"}, policy={"minFailedTaskCount": 1})
    right = role("worker", 2, annotations={"hollow/exit-code": "0", "hollow/run-seconds": "0.5"})
    flags = ("--set=jobs.lease=off", "--set=jobs.conflict_delay_min=1", "--set=jobs.conflict_delay_max=2")
    with running(tmp_path / "jobs", "jobs", "--kubeconfig", str(control_plane.kubeconfig), "-n", namespace, *flags):
        async with stage.playing():
            await stage.start("right", {"framework": {"spec": {"executionType": "Start", "taskRoles": [right]}}})
            await stage.start("wrong", {"framework": {"spec": {"executionType": "Start", "taskRoles": [wrong]}}})
            succeeded, failed = await stage.until_done("right"), await stage.until_done("wrong")

    assert (succeeded.outcome, failed.outcome) == ("success", "failure")
    last = await stage.last_event("right")
    assert last.info is not None
    assert (last.info["custom_info"]["state"], last.info["custom_info"]["code"]) == ("Completed", 0)
    assert "ContainerUnrecognizedFailed (7)" in require(failed.error).message
    await stage.api.delete(FRAMEWORKS, last.info["custom_info"]["framework"].partition("/")[2], namespace)


async def test_a_framework_is_stopped_by_an_abort(
    control_plane: ControlPlane, kube: KubeClient, namespace: str
) -> None:
    control_plane.install(crd())
    stage = Stage(FrameworkPlugin(), kube, FRAMEWORKS, namespace=namespace, virtual=False)
    name = f"job-{secrets.token_hex(2)}"
    spec = {"executionType": "Start", "taskRoles": [role("worker", 1)]}
    async with stage.playing():
        await stage.start(name, {"framework": {"spec": spec}, "on_abort": "stop"})
        made = await stage.object()
        await stage.abort(name)
        await stage.until_done(name)

    assert (await kube.get(FRAMEWORKS, name_of(made), namespace))["spec"]["executionType"] == "Stop"
