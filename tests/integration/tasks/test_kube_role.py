"""`rcfarm tasks` with a Kubernetes cluster: processes under exactly the shipped rights, on real servers."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import crd
from rcfarm.operations.task_file import load
from rcfarm.operations.tasks import Tasks
from store.consul.store import ConsulSettings, ConsulStore
from store.kube.api.objects import PODS, Object, name_of, uid_of
from store.kube.client.client import KubeClient
from store.schema.keys import Keys
from tests.support.consul.server import ConsulServer, opened
from tests.support.framework.cluster import role
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.faults.fault_proxy import FaultProxy, Way, fault_proxy
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.shipped_manifests import ROOT, documents, rights
from tests.support.programs.daemon import DaemonProcess, running
from tests.support.waiting import until

FOLDER = ROOT / "deploy" / "kubernetes-tasks"
SYSTEM = "rcfarm-system"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_TARGET = re.compile(r"/api(?:s/([^/]+))?/v1/namespaces/[^/]+/(\w+)(/[\w.-]+)?(\?.*watch=(?:1|true))?")


class Site:
    """A cluster with the shipped rights in one namespace, a Consul, and engines that reach the cluster by a proxy."""

    def __init__(
        self, plane: ControlPlane, proxy: FaultProxy, store: ConsulStore, namespace: str, directory: Path
    ) -> None:
        self.proxy, self.namespace, self.daemons = proxy, namespace, ExitStack()
        self.tasks = Tasks(store, Keys())
        self._plane, self._url, self._directory = plane, store.settings.place, directory

    def install(self) -> None:
        """Apply the shipped service account and rights; the binding is that of this test's namespace."""
        for path in ("namespace", "rbac", "namespaces"):
            for obj in documents(FOLDER / f"{path}.yaml"):
                kind, named = obj["kind"], {**obj["metadata"]}
                folder = {
                    "Namespace": "/api/v1/namespaces",
                    "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
                    "ClusterRole": f"{_RBAC}/clusterroles",
                    "RoleBinding": f"{_RBAC}/namespaces/{self.namespace}/rolebindings",
                }[kind]
                if kind == "RoleBinding":
                    named["namespace"] = self.namespace
                self._plane.request(
                    "PATCH",
                    f"{folder}/{named['name']}?fieldManager=test&force=true",
                    {**obj, "metadata": named},
                    content_type="application/apply-patch+yaml",
                )

    def engine(self, name: str) -> DaemonProcess:
        """Start an engine with the token of the shipped service account."""
        directory = self._directory / name
        directory.mkdir()
        token = self._plane.new_token(SYSTEM, "rcfarm-tasks")
        kubeconfig = self._plane.write_kubeconfig(directory / "kubeconfig", url=self.proxy.url, token=token)
        flags = [f"--set=kube.kubeconfig={kubeconfig}", "--set=tasks.kubernetes=true"]
        data = str(self._directory / "data")
        arguments = ["tasks", "--name", name, "--store", f"consul://{self._url}", "--data", data, *flags]
        daemon = self.daemons.enter_context(running(directory, *arguments))
        daemon.until_ready()
        return daemon

    async def submit(self, *tasks: dict[str, Any]) -> None:
        text = yaml.safe_dump_all([{**each, "namespace": self.namespace} for each in tasks])
        for document in load("test", text.encode()).tasks:
            await self.tasks.submit(document.spec)

    async def states(self) -> dict[str, str]:
        return {view.id: view.word async for page in self.tasks.pages() for view in page}

    async def until_states(self, **wanted: str) -> None:
        async def reached() -> bool:
            return await self.states() == wanted

        await until(reached, str(wanted))


@pytest.fixture
async def site(
    control_plane: ControlPlane, kube: KubeClient, namespace: str, consul_server: ConsulServer, tmp_path: Path
) -> AsyncIterator[Site]:
    control_plane.install(crd())
    async with (
        fault_proxy(control_plane.url, ca=control_plane.ca) as proxy,
        opened(ConsulSettings.from_env(consul_server.url, environ={})) as store,
        HollowKubelet(kube, namespace=namespace, schedules=True).playing(1),
    ):
        found = Site(control_plane, proxy, store, namespace, tmp_path)
        found.install()
        try:
            yield found
        finally:
            await asyncio.to_thread(found.daemons.close)


def pod_task(name: str, **plan: str) -> dict[str, Any]:
    annotations = {f"hollow/{key.replace('_', '-')}": value for key, value in plan.items()}
    spec = {"containers": [{"name": "main", "image": "example.org/work:1"}]}
    return {"task": name, "pod": {"pod": {"metadata": {"annotations": annotations}, "spec": spec}}}


def framework_task(name: str, **fields: Any) -> dict[str, Any]:
    spec = {"executionType": "Start", "taskRoles": [role("worker", 1)]}
    return {"task": name, "framework": {"framework": {"spec": spec}, **fields}}


async def test_every_shipped_right_is_needed_and_no_other(site: Site, kube: KubeClient) -> None:
    """Pods and Frameworks that succeed, are aborted, and are stopped; nothing is forbidden."""
    await asyncio.to_thread(site.engine, "engine-a")
    await site.submit(
        pod_task("works", exit_code="0", run_seconds="0.3"),
        pod_task("stays"),
        framework_task("stops", on_abort="stop"),
        framework_task("goes"),
    )

    async def created() -> bool:
        found = [len((await kube.list(kind, site.namespace)).items) for kind in (PODS, FRAMEWORKS)]
        return found == [2, 2]

    await until(created, "the objects")
    for name in ("stays", "stops", "goes"):
        await site.tasks.abort(name)
    await site.until_states(works="succeeded", stays="aborted", stops="aborted", goes="aborted")

    [granted] = [obj for obj in documents(FOLDER / "rbac.yaml") if obj["kind"] == "ClusterRole"]
    used = {right for seen in site.proxy.seen if (right := _right(seen.method, seen.path))}
    assert used == rights(granted)
    assert [name_of(each) for each in (await kube.list(PODS, site.namespace)).items] == ["works-n0-0"]
    [kept] = (await kube.list(FRAMEWORKS, site.namespace)).items
    assert kept["spec"]["executionType"] == "Stop"


def _right(method: str, path: str) -> tuple[str, str, str] | None:
    """Return the (group, resource, verb) of a request, None for one that needs no right of ours."""
    found = _TARGET.match(path)
    if found is None:
        return None
    verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method)
    return found[1] or "", found[2], verb or ("watch" if found[4] else "get" if found[3] else "list")


async def test_a_stopped_engine_that_wakes_creates_no_second_object(site: Site, kube: KubeClient) -> None:
    """An engine is stopped while its creations are on their way. Another one takes over: it creates the object of one
    task itself, and the other task is aborted before it has one. Then the late creations arrive."""
    arrive = asyncio.Event()

    async def hold(way: Way) -> Any:
        await arrive.wait()
        return await way.pass_on()

    stopped = await asyncio.to_thread(site.engine, "engine-a")
    site.proxy.add(hold, method="POST", path="/pods", times=2)
    site.proxy.add(hold, method="POST", path="/frameworks", times=2)
    await site.submit(
        pod_task("works", exit_code="0", run_seconds="2"), pod_task("ends"), framework_task("runs"),
        framework_task("stops"),
    )  # fmt: skip

    async def on_their_way() -> bool:
        return site.proxy.count("POST", "/(pods|frameworks)") == 4

    await until(on_their_way, "the creations sent")
    stopped.pause()
    for name in ("ends", "stops"):
        await site.tasks.abort(name)
    await asyncio.to_thread(site.engine, "engine-b")

    async def objects() -> dict[str, str]:
        kinds = [await kube.list(kind, site.namespace) for kind in (PODS, FRAMEWORKS)]
        return {name_of(each)[:5]: uid_of(each) for page in kinds for each in page.items}

    async def taken_over() -> bool:
        states = await site.states()
        return (states["ends"], states["stops"]) == ("aborted", "aborted") and len(await objects()) == 2

    await until(taken_over, "the other engine has created and aborted")
    before = await objects()
    arrive.set()

    async def arrived() -> bool:
        return site.proxy.count("DELETE", "/(pods|frameworks)/") >= 2

    await until(arrived, "the late objects are deleted")
    stopped.resume()
    await until(partial(_equals, objects, before), "only the objects of the tasks that go on")
    await site.tasks.abort("runs")
    await site.until_states(works="succeeded", ends="aborted", runs="aborted", stops="aborted")
    assert (await objects()) == {name: uid for name, uid in before.items() if name == "works"}
    assert await asyncio.to_thread(stopped.stop, signal.SIGTERM) == 0


async def _equals(read: Any, wanted: Object) -> bool:
    return bool(await read() == wanted)
