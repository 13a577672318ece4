"""A small operator, TrainJobs, and the jobs, pods and services that its tests are about."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self

from controllers.jobs.api import (
    GroupVersionKind,
)
from controllers.jobs.operator import JobOperator
from store.kube.api.errors import KubeError
from store.kube.api.objects import EVENTS, PODS, SERVICES, Object, Resource, name_of, owner_reference
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import Informer
from store.kube.memory.kube import Call, MemoryKube
from tests.support.waiting import loop_time, until

TRAIN_JOBS = Resource("example.dev", "v1", "trainjobs", "TrainJob")
OPERATOR, JOB, TYPE, INDEX = (
    f"example.dev/{name}" for name in ("operator-name", "job-name", "replica-type", "replica-index")
)
START = datetime(2024, 5, 1, 12, 0, 0, tzinfo=UTC)


KIND = GroupVersionKind(TRAIN_JOBS.group, TRAIN_JOBS.version, TRAIN_JOBS.kind)


def loop_clock() -> datetime:
    """Return the time of day, on the loop's virtual clock."""
    return START + timedelta(seconds=loop_time())


class TrainJobs(JobOperator):
    """Passes the names of all workers to each pod."""

    resource = TRAIN_JOBS

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        workers = job["spec"]["replicaSpecs"].get("Worker", {}).get("replicas", 1)
        hosts = ",".join(f"{name_of(job)}-worker-{number}" for number in range(workers))
        for container in pod["spec"]["containers"]:
            container.setdefault("env", []).append({"name": "WORKERS", "value": hosts})


class RecordedEvent(NamedTuple):
    severity: str
    reason: str
    message: str
    about: str


class EventLog:
    """A recorder that keeps its events."""

    def __init__(self) -> None:
        self.events: list[RecordedEvent] = []

    def event(self, obj: Object, event_type: str, reason: str, message: str, *, api_version: str, kind: str) -> None:
        self.events.append(RecordedEvent(event_type, reason, message, f"{api_version} {kind} {name_of(obj)}"))

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]


class Tally:
    """Job metrics that keep every record, in words."""

    def __init__(self) -> None:
        self.figures: list[str] = []
        self.lags: list[float] = []

    def child(self, job_kind: str, verb: str, kind: str, namespace: str, *, ok: bool) -> None:
        self.figures.append(f"{verb} {kind} {'ok' if ok else 'failed'}")

    def pod_failed(self, job_kind: str, namespace: str) -> None:
        self.figures.append("pod failed")

    def job(self, job_kind: str, outcome: str, namespace: str) -> None:
        self.figures.append(f"{job_kind} {outcome}")

    def reconciled(self, job_kind: str, result: str, seconds: float) -> None:
        self.figures.append(f"reconciled {result}")

    def acted(self, job_kind: str, lag: float) -> None:
        self.lags.append(lag)


def train_job_definition() -> Object:
    """Return the CustomResourceDefinition of TrainJobs, for a real API server."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": TRAIN_JOBS.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{TRAIN_JOBS.plural}.{TRAIN_JOBS.group}"},
        "spec": {
            "group": TRAIN_JOBS.group,
            "scope": "Namespaced",
            "names": {"plural": TRAIN_JOBS.plural, "singular": "trainjob", "kind": TRAIN_JOBS.kind},
            "versions": [version],
        },
    }


def template(**spec: Any) -> Object:
    """Return a pod template with one container and one port."""
    container = {"name": "main", "image": "trainer:1", "ports": [{"name": "rpc", "containerPort": 2222}]}
    return {"spec": {"containers": [container], **spec}}


def train_job(
    name: str = "train",
    namespace: str = "default",
    *,
    restart_policy: str = "Never",
    policy: Object | None = None,
    annotations: dict[str, str] | None = None,
    **replicas: int,
) -> Object:
    """Return a job with this many replicas of each type: `train_job(Worker=4, PS=2)`. `annotations`: of its pods."""
    specs = {
        replica_type: {
            "replicas": count,
            "restartPolicy": restart_policy,
            "template": {"metadata": {"annotations": annotations or {}}, **template()},
        }
        for replica_type, count in replicas.items()
    }
    return {
        "apiVersion": TRAIN_JOBS.api_version,
        "kind": TRAIN_JOBS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicaSpecs": specs, "runPolicy": policy or {}},
    }


def job_labels(name: str = "train", **more: str) -> dict[str, str]:
    """Return the labels that select all objects of one job; with `type` and `index`, those of one replica."""
    keys = {"type": TYPE, "index": INDEX}
    return {OPERATOR: "trainjob-controller", JOB: name, **{keys[key]: value for key, value in more.items()}}


def reference_to(job: Object) -> Object:
    """Return the owner reference that makes the job the controller of an object."""
    return owner_reference(job, api_version=TRAIN_JOBS.api_version, kind=TRAIN_JOBS.kind)


def memory_kube(**options: Any) -> MemoryKube:
    """Return an API server in memory that knows TrainJobs, on the loop's clock."""
    api = MemoryKube(clock=lambda: loop_clock().timestamp(), rng=random.Random(7), **options)
    api.register(TRAIN_JOBS, has_status=True)
    return api


class Writes:
    """Records the writes to a MemoryKube, in order, without Events. `fail` decides their fate."""

    def __init__(self, api: MemoryKube) -> None:
        self.calls: list[Call] = []
        self.fail: Callable[[Call], Exception | None] = lambda call: None
        api.before_call = self._before

    def _before(self, call: Call) -> None:
        if call.verb in ("create", "patch", "delete") and call.resource.kind != "Event":
            self.calls.append(call)
        if error := self.fail(call):
            raise error

    def of(self, verb: str, resource: Resource, subresource: str = "") -> list[str]:
        """Return the names in the calls of this kind."""
        return [
            call.name
            for call in self.calls
            if (call.verb, call.resource, call.subresource) == (verb, resource, subresource)
        ]


class Stored:
    """A job in an API server in memory, with the writes, Events and figures about it."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        self.api, self.job = api, job
        self.recorder, self.tally, self.writes = EventLog(), Tally(), Writes(api)

    @classmethod
    async def create(cls) -> Self:
        api = memory_kube()
        return cls(api, await create(api, train_job()))


def operate(api: KubeApi, kind: type[JobOperator] = TrainJobs, **options: Any) -> Any:
    """Return the operator on the loop's clock."""
    return kind(api, clock=loop_clock, timer=loop_time, rng=random.Random(1), **options)


@asynccontextmanager
async def running(operator: JobOperator) -> AsyncIterator[None]:
    """Run the operator for the duration of the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(operator.run())
        try:
            yield
        finally:
            task.cancel()


@asynccontextmanager
async def running_informer(informer: Informer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Run the informer until it has synced. The yielded function waits until it has seen all writes so far."""

    async def settle() -> None:
        await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(informer.run())
        try:
            await informer.synced()
            yield settle
        finally:
            task.cancel()


async def children(api: KubeApi, resource: Resource, namespace: str = "default") -> dict[str, Object]:
    """Return pods or services by name."""
    return {name_of(obj): obj for obj in (await api.list(resource, namespace)).items}


async def set_phase(
    api: KubeApi, name: str, phase: str, *, code: int | None = None, namespace: str = "default", **status: Any
) -> None:
    """Write the status of a pod as its kubelet does. `code`: how its container ended."""
    state = {} if code is None else {"terminated": {"exitCode": code}}
    image = {"image": "trainer:1", "imageID": "", "ready": phase == "Running"}
    containers = [{"name": "main", "restartCount": 0, "state": state, **image}]
    patch = {"status": {"phase": phase, "containerStatuses": containers, **status}}
    await api.patch(PODS, name, namespace, patch, subresource="status")


def conditions(job: Object) -> dict[str, str]:
    """Return the job's conditions: type to status."""
    return {entry["type"]: entry["status"] for entry in (job.get("status") or {}).get("conditions") or ()}


async def all_created(
    api: KubeApi, pods: int, services: int | None = None, namespace: str = "default"
) -> dict[str, Object]:
    """Wait for this number of pods, and as many services. Return the pods."""

    async def complete() -> tuple[dict[str, Object]] | None:
        found, named = await children(api, PODS, namespace), await children(api, SERVICES, namespace)
        return (found,) if len(found) == pods and len(named) == (pods if services is None else services) else None

    (found,) = await until(complete)
    return dict(found)


async def create(api: MemoryKube, job: Object) -> Object:
    return await api.create(TRAIN_JOBS, job, "default")


async def created(api: MemoryKube, job: Object, pods: int) -> dict[str, Object]:
    """Create the job, and wait for its pods and as many services. Return the pods."""
    await create(api, job)
    return await all_created(api, pods)


async def read(api: KubeApi, name: str = "train", namespace: str = "default") -> Object:
    return await api.get(TRAIN_JOBS, name, namespace)


async def condition(
    api: KubeApi, kind: str, name: str = "train", *, namespace: str = "default", within: float = 60.0
) -> Object:
    """Wait for a condition that is true."""

    async def found() -> Object | None:
        entries = ((await read(api, name, namespace)).get("status") or {}).get("conditions") or []
        return next((entry for entry in entries if entry["type"] == kind and entry["status"] == "True"), None)

    entry: Object = await until(found, within=within)
    return entry


async def reasons(api: MemoryKube) -> list[str]:
    return [event["reason"] for event in (await api.list(EVENTS, "default")).items]


def fails(verb: str, kind: str, error: KubeError, *, times: int = 10**6, name: str = "") -> Any:
    """Return a fate that makes this number of calls of this sort fail."""
    left = times

    def fate(call: Call) -> Exception | None:
        nonlocal left
        if (call.verb, call.resource.kind) != (verb, kind) or name not in ("", call.name) or left == 0:
            return None
        left -= 1
        return error

    return fate
