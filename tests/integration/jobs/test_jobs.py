"""`rcfarm jobs` as it is installed: real processes under the shipped manifests' rights, on a real API server.

The API server also enforces rights on finalizers of owners, as OpenShift's does.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.api.wire import CRD_NAME
from store.kube.api.errors import Invalid, NotFound, TooManyRequests
from store.kube.api.objects import PODS, SERVICES, Object, name_of
from store.kube.client.client import KubeClient
from tests.support.framework.cluster import framework, role
from tests.support.kube.control_plane import ControlPlane, until
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.shipped_manifests import FOLDERS, Variant, documents, manifest
from tests.support.programs.daemon import DaemonProcess, running

SYSTEM = "rcfarm-system"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/rcfarm-jobs"
SHORT = {"jobs.lease_duration": 3, "jobs.renew_deadline": 2, "jobs.retry_period": 0.4}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
EVICTION: Object = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": "whole-worker-0"}}
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
    "Role": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/roles",
    "RoleBinding": f"/apis/rbac.authorization.k8s.io/v1/namespaces/{SYSTEM}/rolebindings",
    "Deployment": f"/apis/apps/v1/namespaces/{SYSTEM}/deployments",
    "PodDisruptionBudget": f"/apis/policy/v1beta1/namespaces/{SYSTEM}/poddisruptionbudgets",
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of these tests' own: its CRD changes its mode."""
    flags = ["--enable-admission-plugins=OwnerReferencesPermissionEnforcement"]
    with ControlPlane(tmp_path_factory.mktemp("jobs"), apiserver_flags=flags) as plane:
        yield plane


def apply(plane: ControlPlane, obj: Object) -> None:
    """Apply as `kubectl apply --server-side` does. This API server has no policy/v1 disruption budgets."""
    if obj["kind"] == "PodDisruptionBudget":
        obj = obj | {"apiVersion": "policy/v1beta1"}
    path = f"{_PATHS[obj['kind']]}/{obj['metadata']['name']}?fieldManager=test&force=true"
    plane.request("PATCH", path, obj, content_type="application/apply-patch+yaml")


def install(plane: ControlPlane, variant: Variant) -> None:
    """Apply every object of a variant."""
    for name in ("namespace", "crd", "rbac", "deployment"):
        for obj in documents(FOLDERS["compatible"] / f"{name}.yaml"):
            apply(plane, manifest(variant, obj["kind"], obj["metadata"]["name"]))
    until(lambda: plane.exists("/apis/frameworkcontroller.microsoft.com/v1/frameworks"), "the CRD established")
    until(lambda: has_subresource(plane) == (variant == "native"), f"the CRD of {variant} mode served")
    plane.restart_controller_manager()  # so that its garbage collector knows the CRD


def has_subresource(plane: ControlPlane) -> bool:
    """Return whether the CRD that is served is that of native mode."""
    found = plane.request("GET", "/apis/frameworkcontroller.microsoft.com/v1")["resources"]
    return any(each["name"] == "frameworks/status" for each in found)


def start(stack: ExitStack, plane: ControlPlane, directory: Path, variant: Variant, **settings: Any) -> DaemonProcess:
    """Start a replica with the rights of the shipped service account."""
    directory.mkdir()
    token = plane.new_token(SYSTEM, "rcfarm-jobs")
    kubeconfig = plane.write_kubeconfig(directory / "kubeconfig", token=token)
    arguments = ["jobs", "--kubeconfig", str(kubeconfig), "--lease", f"{SYSTEM}/rcfarm-jobs", "--mode", variant]
    flags = [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]
    return stack.enter_context(running(directory, *arguments, *flags))


def leads(replica: DaemonProcess) -> bool:
    return 'leader_election_master_status{name="rcfarm-jobs"} 1.0' in replica.get("/metrics")[1]


@asynccontextmanager
async def cluster(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """An administrator's client, and nodes that run pods."""
    async with (
        await KubeClient.connect(str(plane.kubeconfig)) as api,
        HollowKubelet(api, schedules=True).playing(nodes=2),
    ):
        yield api


async def until_status(api: KubeClient, name: str, holds: Callable[[Object], bool]) -> Object:
    """Wait for a Framework. Return its status."""
    async with asyncio.timeout(60):
        while True:
            status: Object = (await api.get(FRAMEWORKS, name, "default")).get("status") or {}
            if status and holds(status):
                return status
            await asyncio.sleep(0.05)


async def until_gone(api: KubeClient, name: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await api.get(FRAMEWORKS, name, "default")
            except NotFound:
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("variant", get_args(Variant))
async def test_two_replicas_under_the_shipped_rights(plane: ControlPlane, variant: Variant, tmp_path: Path) -> None:
    """All shipped objects apply cleanly. Both replicas get ready, one leads; it is killed while a Framework runs, the
    other leads within the lease and brings the Framework to its end and deletion. No request is ever forbidden. A stop
    releases the lease."""
    await asyncio.to_thread(install, plane, variant)
    with ExitStack() as stack:
        settings = SHORT | {"jobs.retain_completed": 2}
        replicas = [start(stack, plane, tmp_path / name, variant, **settings) for name in ("a", "b")]
        await asyncio.to_thread(until, lambda: any(map(leads, replicas)), "a leader")
        for replica in replicas:
            await asyncio.to_thread(replica.until_ready)
        leader = next(replica for replica in replicas if leads(replica))
        standby = next(replica for replica in replicas if replica is not leader)
        assert not leads(standby)
        assert {"[+] jobs lease", "[+] jobs framework pods"} <= set(leader.get("/readyz")[1].splitlines())

        async with cluster(plane) as api:
            plan = {"hollow/run-seconds": "4", "hollow/exit-code": "0"}
            await api.create(FRAMEWORKS, framework("train", role("worker", 2, annotations=plan)), "default")
            await until_status(api, "train", lambda status: status["state"] == "AttemptRunning")
            leader.kill()
            await asyncio.to_thread(standby.until, lambda: leads(standby), "leading")
            status = await until_status(api, "train", lambda status: status["state"] == "Completed")
            assert status["attemptStatus"]["completionStatus"]["code"] == 0
            assert status["attemptStatus"]["id"] == 0
            assert bool(status.get("conditions")) == (variant == "native")
            await until_gone(api, "train")

        assert not re.search(r'rest_client_requests_total\{code="40[13]"', standby.get("/metrics")[1])
        assert await asyncio.to_thread(standby.stop, signal.SIGTERM) == 0
    assert "holderIdentity" not in plane.request("GET", LEASE)["spec"]


async def test_native_mode_as_users_see_it(plane: ControlPlane, tmp_path: Path) -> None:
    """kubectl's table shows state and outcome, users can't write the status, and an invalid spec is rejected by the API
    server. Pods have a Service before they start, and no drain evicts them while their gang runs."""
    await asyncio.to_thread(install, plane, "native")
    with ExitStack() as stack:
        extras = {"jobs.headless_services": "true", "jobs.disruption_budgets": "true"}
        replica = start(stack, plane, tmp_path / "a", "native", **SHORT | extras)
        async with cluster(plane) as api:
            worker = role("worker", 2, annotations={})
            await api.create(FRAMEWORKS, framework("whole", worker), "default")
            status = await until_status(api, "whole", is_ready)
            service = await api.get(SERVICES, "whole-worker", "default")
            assert service["spec"]["clusterIP"] == "None"
            pod = await api.get(PODS, "whole-worker-0", "default")
            assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("whole-worker-0", "whole-worker")
            await asyncio.to_thread(until, lambda: budget_counts(plane, 2), "the budget in force")
            with pytest.raises(TooManyRequests, match="disruption budget"):
                await api.create(PODS, EVICTION, "default", name="whole-worker-0", subresource="eviction")
            await api.patch(FRAMEWORKS, "whole", "default", {"spec": {"taskRoles": [worker | {"taskNumber": 3}]}})
            await asyncio.to_thread(until, lambda: budget_counts(plane, 3), "the budget of the larger gang")

            written = await api.patch(FRAMEWORKS, "whole", "default", {"status": {"state": "Completed"}})
            assert written["status"]["state"] == status["state"]
            with pytest.raises(Invalid, match="taskNumber"):
                await api.create(FRAMEWORKS, framework("other", role("worker", -1)), "default")

            await api.patch(FRAMEWORKS, "whole", "default", {"spec": {"executionType": "Stop"}})
            await until_status(api, "whole", lambda status: status["state"] == "Completed")
            shown = await asyncio.to_thread(row, plane, "whole")
            assert {"Execution": "Stop", "State": "Completed", "Attempt": 0, "Code": -210}.items() <= shown.items()
            assert (await api.list(SERVICES, "default", label_selector="FC_FRAMEWORK_NAME=whole")).items == []
            await api.delete(FRAMEWORKS, "whole", "default")
        assert not re.search(r'rest_client_requests_total\{code="40[13]"', replica.get("/metrics")[1])
        assert await asyncio.to_thread(replica.stop, signal.SIGTERM) == 0


def is_ready(status: Object) -> bool:
    return any((each["type"], each["status"]) == ("Ready", "True") for each in status["conditions"])


def budget_counts(plane: ControlPlane, healthy: int) -> bool:
    """Return whether the disruption controller has seen the gang."""
    found = plane.request("GET", "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets/whole-attempt")
    status = found.get("status") or {}
    return bool((status.get("currentHealthy"), status.get("desiredHealthy")) == (healthy, healthy))


def row(plane: ControlPlane, name: str) -> dict[str, object]:
    """Return what `kubectl get framework NAME` shows, by column."""
    table = plane.request("GET", FRAMEWORKS.path("default", name), accept=TABLE)
    (found,) = table["rows"]
    return dict(zip((column["name"] for column in table["columnDefinitions"]), found["cells"], strict=True))


async def test_readiness_names_an_api_server_that_is_away(plane: ControlPlane, tmp_path: Path) -> None:
    """While the API server is down the leader is alive but not ready, and reports why; afterwards it continues."""
    await asyncio.to_thread(install, plane, "compatible")
    with ExitStack() as stack:
        settings = {"jobs.lease_duration": 90, "jobs.renew_deadline": 80, "jobs.retry_period": 0.4}
        replica = start(stack, plane, tmp_path / "a", "compatible", **settings)
        await asyncio.to_thread(replica.until, lambda: leads(replica), "leading")
        await asyncio.to_thread(replica.until_ready)
        await asyncio.to_thread(plane.apiserver.kill)
        reason = "[-] jobs lease: no answer from"
        await asyncio.to_thread(replica.until, lambda: reason in replica.get("/readyz")[1], "telling why")
        assert replica.get("/readyz")[0] == 503
        assert replica.get("/livez")[0] == 200
        await asyncio.to_thread(plane.apiserver.start)
        await asyncio.to_thread(replica.until_ready)
        async with cluster(plane) as api:
            await api.create(FRAMEWORKS, framework("after", role("worker", 1)), "default")
            await until_status(api, "after", lambda status: status["state"] == "Completed")
        assert await asyncio.to_thread(replica.stop) == 0


def test_a_crd_of_the_other_mode_is_named(plane: ControlPlane, tmp_path: Path) -> None:
    """An operator that does not fit the installed CRD runs nothing, is not ready, and says what to do."""
    install(plane, "native")
    with ExitStack() as stack:
        replica = start(stack, plane, tmp_path / "a", "compatible", **SHORT)
        replica.until(lambda: "is for native mode" in replica.get("/readyz")[1], "reporting the mode")
        assert replica.get("/readyz")[0] == 503
        assert replica.stop() == 0


@pytest.mark.parametrize("before", get_args(Variant))
async def test_a_crd_that_is_replaced_under_a_running_operator(
    plane: ControlPlane, tmp_path: Path, before: Variant
) -> None:
    """The operator notices at the first status that it can't store, reports it and creates no pod. It continues without
    a restart when its CRD is applied again; Frameworks created in between are run once, by an operator of the other
    mode."""
    after: Variant = "native" if before == "compatible" else "compatible"
    crds = {variant: manifest(variant, "CustomResourceDefinition", CRD_NAME) for variant in get_args(Variant)}
    await asyncio.to_thread(install, plane, before)
    with ExitStack() as stack:
        replica = await asyncio.to_thread(start, stack, plane, tmp_path / "a", before, **SHORT)
        await asyncio.to_thread(replica.until_ready)
        async with cluster(plane) as api, pods_created(api) as created:
            await asyncio.to_thread(apply, plane, crds[after])
            await asyncio.to_thread(until, lambda: has_subresource(plane) == (after == "native"), "the new CRD served")
            await api.create(FRAMEWORKS, framework("again", role("worker", 1)), "default")
            misfit = f"is for {after} mode, and this operator is set to {before} mode"
            await asyncio.to_thread(replica.until, lambda: misfit in replica.get("/readyz")[1], "reporting the CRD")
            assert replica.get("/readyz")[0] == 503
            await asyncio.to_thread(apply, plane, crds[before])
            await until_status(api, "again", lambda status: status["state"] == "Completed")
            await asyncio.to_thread(replica.until_ready)
            assert created == {"again-worker-0": 1}

            await asyncio.to_thread(apply, plane, crds[after])
            await asyncio.to_thread(replica.until, lambda: misfit in replica.get("/readyz")[1], "reporting the CRD")
            await api.create(FRAMEWORKS, framework("once", role("worker", 2)), "default")
            assert await asyncio.to_thread(replica.stop) == 0
            await asyncio.to_thread(install, plane, after)
            successor = await asyncio.to_thread(start, stack, plane, tmp_path / "b", after, **SHORT)
            status = await until_status(api, "once", lambda status: status["state"] == "Completed")
            assert status["attemptStatus"]["completionStatus"]["code"] == 0
            assert created == {"again-worker-0": 1, "once-worker-0": 1, "once-worker-1": 1}
            assert await asyncio.to_thread(successor.stop) == 0
            for name in ("again", "once"):
                await api.delete(FRAMEWORKS, name, "default")


@asynccontextmanager
async def pods_created(api: KubeClient) -> AsyncIterator[Counter[str]]:
    """Count the creations of each pod name in the meantime, as they happen."""
    created: Counter[str] = Counter()
    version = (await api.list(PODS, "default")).resource_version

    async def collect() -> None:
        async with api.watch(PODS, "default", resource_version=version, timeout=300) as events:
            async for event in events:
                if event.type == "ADDED":
                    created[name_of(event.object)] += 1

    async with asyncio.TaskGroup() as group:
        collecting = group.create_task(collect())
        yield created
        collecting.cancel()


@pytest.mark.parametrize("named", ["", "/nonexistent/kubeconfig"])
def test_without_a_cluster_it_says_what_is_missing(tmp_path: Path, named: str) -> None:
    """No kubeconfig, no pod: one line and exit code 1, preceded by a warning if KUBECONFIG names no file."""
    environ = {"HOME": str(tmp_path), "KUBECONFIG": named}
    with running(tmp_path / "a", "jobs", environ=environ) as replica:
        assert replica.wait(60) == 1
        *warnings, error = replica.log().splitlines()
        assert error.startswith("error: no Kubernetes API server is configured")
        assert ["KUBECONFIG names no existing file" in line for line in warnings] == ([True] if named else [])


def test_a_kubeconfig_variable_that_names_no_file_is_passed_over(plane: ControlPlane, tmp_path: Path) -> None:
    """The address in frameworkcontroller.yaml counts, as with frameworkcontroller."""
    config = tmp_path / "frameworkcontroller.yaml"
    config.write_text(f"kubeApiServerAddress: {plane.url}\n")
    environ = {"HOME": str(tmp_path), "KUBECONFIG": "/nonexistent/kubeconfig"}
    with running(tmp_path / "a", "jobs", "--framework-config", str(config), environ=environ) as replica:
        replica.until(lambda: plane.url in replica.get("/readyz")[1], "asking the API server")
        assert "KUBECONFIG names no existing file" in replica.log()
        assert replica.stop() == 0
