"""Training jobs on a real control plane: the original's definitions, the shipped rights, and jobs in a namespace."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from controllers.jobs.status import JobStatus, decode_status
from controllers.training.kind import TrainingJobs
from controllers.training.kinds import KINDS, definition
from controllers.training.spec import RUN_POLICY_FIELDS
from store.kube.api.errors import NotFound
from store.kube.api.objects import EVENTS, PODS, SERVICES, Object, Resource, name_of
from store.kube.client.client import KubeClient
from tests.support.jobs.replicas import until
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.kube.shipped_manifests import ROOT, documents
from tests.support.programs.daemon import DaemonProcess

SYSTEM = "rcfarm-system"
SHORT_LEASE = tuple(
    f"--set=jobs.{name}={seconds}"
    for name, seconds in (("lease_duration", 3), ("renew_deadline", 2), ("retry_period", 0.3))
)
END = 300.0  # seconds to the end of a job: a watch that the API server forgot is begun again after two minutes
FOLDER = ROOT / "deploy" / "kubernetes"
_EXAMPLES = ROOT / "examples" / "training"
_RESOURCES = {kind.resource.kind: kind.resource for kind in KINDS}
_FORBIDDEN = re.compile(r'^rest_client_requests_total\{code="40[13]".*$', re.MULTILINE)
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "ServiceAccount": f"/api/v1/namespaces/{SYSTEM}/serviceaccounts",
    "Role": f"{_RBAC}/namespaces/{SYSTEM}/roles",
    "RoleBinding": f"{_RBAC}/namespaces/{SYSTEM}/rolebindings",
}


def original_crd(kind: type[TrainingJobs]) -> Object:
    """Return a definition that keeps and drops what the original's does: each object has a list of its fields."""
    found = copy.deepcopy(definition(kind))
    (version,) = found["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    fields = schema["spec"]["properties"]
    fields[kind.replica_specs_field]["additionalProperties"]["properties"]["template"] = _TEMPLATE
    for misplaced in RUN_POLICY_FIELDS:
        del fields[misplaced]
    schema["status"] = _STATUS
    return found


def _of(**properties: Object) -> Object:
    return {"type": "object", "properties": properties}


def _list_of(items: Object) -> Object:
    return {"type": "array", "items": items}


_TEXT: Object = {"type": "string"}
_NUMBER: Object = {"type": "integer"}
_TEXTS: Object = {"type": "object", "additionalProperties": _TEXT}
_QUANTITIES: Object = {
    "type": "object",
    "additionalProperties": {"anyOf": [_NUMBER, _TEXT], "x-kubernetes-int-or-string": True},
}
_CONTAINERS = _list_of(
    _of(
        name=_TEXT,
        image=_TEXT,
        command=_list_of(_TEXT),
        args=_list_of(_TEXT),
        env=_list_of(_of(name=_TEXT, value=_TEXT)),
        ports=_list_of(_of(name=_TEXT, containerPort=_NUMBER)),
        resources=_of(limits=_QUANTITIES, requests=_QUANTITIES),
    )
)
_TEMPLATE = _of(
    metadata=_of(annotations=_TEXTS, finalizers=_list_of(_TEXT), labels=_TEXTS, name=_TEXT, namespace=_TEXT),
    spec=_of(
        containers=_CONTAINERS,
        initContainers=_CONTAINERS,
        nodeSelector=_TEXTS,
        priorityClassName=_TEXT,
        restartPolicy=_TEXT,
        schedulerName=_TEXT,
        terminationGracePeriodSeconds=_NUMBER,
    ),
)
_TIME: Object = {"type": "string", "format": "date-time"}
_CONDITION = _of(type=_TEXT, status=_TEXT, reason=_TEXT, message=_TEXT, lastUpdateTime=_TIME, lastTransitionTime=_TIME)
_REPLICAS = _of(
    active=_NUMBER,
    succeeded=_NUMBER,
    failed=_NUMBER,
    selector=_TEXT,
    labelSelector=_of(matchLabels=_TEXTS),
)
_STATUS = _of(
    conditions=_list_of(_CONDITION | {"required": ["status", "type"]}),
    replicaStatuses={"type": "object", "additionalProperties": _REPLICAS},
    startTime=_TIME,
    completionTime=_TIME,
    lastReconcileTime=_TIME,
)


def apply(plane: ControlPlane, obj: Object) -> None:
    """Apply as `kubectl apply --server-side` does, in the namespace of our installation."""
    path = f"{_PATHS[obj['kind']]}/{name_of(obj)}?fieldManager=test&force=true"
    plane.request("PATCH", path, obj, content_type="application/apply-patch+yaml")


def grant(plane: ControlPlane) -> None:
    """Create the shipped service account, with the rights for training jobs and the election."""
    apply(plane, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    shared = [obj for obj in documents(FOLDER / "rbac.yaml") if not obj["kind"].startswith("Cluster")]
    for obj in [*shared, *documents(FOLDER / "training" / "rbac.yaml")]:
        apply(plane, obj)


def refused(process: DaemonProcess) -> list[str]:
    """Return the series of requests for which a process had no right."""
    return _FORBIDDEN.findall(process.get("/metrics")[1])


def example(name: str, **played: Mapping[str, object]) -> Object:
    """Return a shipped example. `played`: what the hollow pods of a type do, without their prefix."""
    (job,) = documents(_EXAMPLES / f"{name}.yaml")
    return played_as(job, **played)


def played_as(job: Object, **played: Mapping[str, object]) -> Object:
    """Return the job with annotations that say what the hollow pods of each type do."""
    job = json.loads(json.dumps(job))  # types of an example share their parts
    (field,) = (name for name in job["spec"] if name.endswith("ReplicaSpecs"))
    for replica_type, does in played.items():
        template = job["spec"][field][replica_type]["template"]
        annotations = template.setdefault("metadata", {}).setdefault("annotations", {})
        annotations |= {f"hollow/{name.replace('_', '-')}": str(value) for name, value in does.items()}
    found: Object = job
    return found


class TrainingCluster:
    """A namespace with training jobs, and the nodes of its pods."""

    def __init__(self, api: KubeClient, namespace: str, kubelet: HollowKubelet) -> None:
        self.api, self.namespace, self.kubelet = api, namespace, kubelet

    async def create(self, job: Object) -> Object:
        job = job | {"metadata": {**job["metadata"], "namespace": self.namespace}}
        return await self.api.create(resource_of(job), job, self.namespace)

    async def get(self, job: Object) -> Object:
        return await self.api.get(resource_of(job), name_of(job), self.namespace)

    async def change(self, job: Object, **fields: Any) -> None:
        """Merge fields into the spec."""
        await self.api.patch(resource_of(job), name_of(job), self.namespace, {"spec": fields})

    async def delete(self, job: Object) -> None:
        """Delete the job, and wait until everything of it is gone."""
        await self.api.delete(resource_of(job), name_of(job), self.namespace, propagation="Foreground")
        await self.until_gone(job)

    async def status(self, job: Object) -> JobStatus:
        return decode_status((await self.get(job)).get("status"))

    async def until(self, job: Object, condition: str) -> JobStatus:
        """Wait until the condition is the newest and true, as kubectl's column State shows it. Return the status."""
        seen = JobStatus()

        async def is_newest() -> bool:
            nonlocal seen
            seen = await self.status(job)
            newest = seen.conditions[-1:]
            return [(each.type, each.status) for each in newest] == [(condition, "True")]

        try:
            await until(is_newest, condition, within=30.0, every=0.05)
        except AssertionError as error:
            shown = [(each.type, each.status, each.reason, each.message) for each in seen.conditions]
            phases = {name: pod["status"]["phase"] for name, pod in (await self.pods()).items()}
            raise AssertionError(f"{name_of(job)}: {error}; conditions: {shown}; pods: {phases}") from None
        return seen

    async def until_finished(self, job: Object) -> JobStatus:
        """Wait for the job's end, also while operators are killed. Return the status."""
        seen = JobStatus()

        async def has_finished() -> bool:
            nonlocal seen
            seen = await self.status(job)
            return seen.finished

        try:
            await until(has_finished, "finished", within=END, every=0.2)
        except AssertionError as error:
            phases = {name: pod["status"]["phase"] for name, pod in (await self.pods()).items() if name_of(job) in name}
            raise AssertionError(f"{name_of(job)}: {error}; {seen}; pods: {phases}") from None
        return seen

    async def until_gone(self, job: Object) -> None:
        async def is_gone() -> bool:
            try:
                await self.get(job)
            except NotFound:
                return True
            return False

        await until(is_gone, f"{name_of(job)} gone", within=30.0, every=0.05)

    async def pods(self) -> dict[str, Object]:
        return {name_of(pod): pod for pod in (await self.api.list(PODS, self.namespace)).items}

    async def until_pods(self, phase: str, *names: str) -> dict[str, Object]:
        """Wait until exactly these pods exist, all in the phase. Return them."""
        found: dict[str, Object] = {}

        async def are_there() -> bool:
            nonlocal found
            found = await self.pods()
            return found.keys() == set(names) and all(pod["status"]["phase"] == phase for pod in found.values())

        try:
            await until(are_there, f"{sorted(names)} {phase}", within=30.0, every=0.05)
        except AssertionError as error:
            phases = {name: pod["status"]["phase"] for name, pod in found.items()}
            raise AssertionError(f"{error}; the pods: {phases}") from None
        return found

    async def end(self, pod: str, *codes: int) -> None:
        """Make the containers of a pod end now, with one code for each of their starts."""
        ends = {"hollow/exit-code": ",".join(map(str, codes)), "hollow/run-seconds": "0"}
        await self.api.patch(PODS, pod, self.namespace, {"metadata": {"annotations": ends}})

    async def services(self) -> set[str]:
        return {name_of(service) for service in (await self.api.list(SERVICES, self.namespace)).items}

    async def reasons(self, job: Object) -> list[str]:
        """Return the reasons of the Events about the job."""
        selector = f"involvedObject.name={name_of(job)}"
        events = (await self.api.list(EVENTS, self.namespace, field_selector=selector)).items
        return [event["reason"] for event in events]


@asynccontextmanager
async def training_cluster(plane: ControlPlane, namespace: str, *, nodes: int = 2) -> AsyncIterator[TrainingCluster]:
    """Yield an administrator's view of a namespace whose pods run on hollow nodes."""
    async with (
        await KubeClient.connect(str(plane.kubeconfig)) as api,
        HollowKubelet(api, namespace=namespace, schedules=True).playing(nodes=nodes) as kubelet,
    ):
        yield TrainingCluster(api, namespace, kubelet)


def resource_of(job: Object) -> Resource:
    return _RESOURCES[job["kind"]]


def operator_arguments(plane: ControlPlane, directory: Path, *arguments: str) -> list[str]:
    """Return the arguments of `rcfarm jobs` with the rights of the shipped service account."""
    directory.mkdir(parents=True, exist_ok=True)
    kubeconfig = plane.write_kubeconfig(directory / "kubeconfig", token=plane.new_token(SYSTEM, "rcfarm-jobs"))
    return ["jobs", "--kubeconfig", str(kubeconfig), *arguments]
