"""Training jobs whose pods are moved by hand, for tests of decisions; the cluster takes every action at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controllers.jobs.api import JobView
from controllers.jobs.status import JobStatus, status_patch
from controllers.training import PyTorchJobs, TFJobs
from controllers.training.kind import TrainingJobs
from store.kube.api.objects import Object
from store.kube.api.patches import apply_merge_patch
from store.kube.memory.kube import MemoryKube
from tests.support.jobs.decisions import (
    INDEX,
    TYPE,
    Cluster,
    pod,
)
from tests.support.training.manifests import pytorch_job, tf_job

FIELDS = {"active", "succeeded", "failed", "selector", "labelSelector"}
RUNS, DONE, FAILED, WAITS = "Running", "Succeeded", "Failed", "Pending"


def view(kind: type[TrainingJobs], job: Object) -> JobView:
    """Return the kind's view of a job, whose pods carry the labels of the tests."""
    return replace(kind(MemoryKube()).view(job), type_label=TYPE, index_label=INDEX)


def pytorch(*, spec: Object | None = None, **replicas: Any) -> JobView:
    return view(PyTorchJobs, pytorch_job(spec=spec, **replicas))


def tensorflow(*, spec: Object | None = None, **replicas: Any) -> JobView:
    return view(TFJobs, tf_job(spec=spec, **replicas))


def policy(name: str, replicas: int = 1) -> Object:
    return {"replicas": replicas, "restartPolicy": name}


def running(job: JobView) -> Cluster:
    """Return a job all of whose pods run, after the decision that says so."""
    cluster = Cluster(job)
    cluster.settle()
    cluster.run(RUNS)
    cluster.settle()
    return cluster


def set_pod(cluster: Cluster, kind: str, index: int, phase: str, **fields: Any) -> None:
    """Move the pod of a replica to a phase."""
    name = f"train-{kind.lower()}-{index}"
    uid = cluster.pods[name]["metadata"]["uid"]
    cluster.pods[name] = pod(kind, index, phase, uid=uid, **fields)


def order(status: JobStatus) -> list[str]:
    return [condition.type for condition in status.conditions]


def message(status: JobStatus, kind: Any) -> str:
    condition = status.condition(kind)
    assert condition is not None
    assert condition.status == "True"
    return condition.message


def stored(status: JobStatus) -> Object:
    """Return the status as an API server with the original's definition stores it: unknown fields are gone."""
    written = apply_merge_patch({}, status_patch(JobStatus(), status, pruned=True))
    known = {"conditions", "replicaStatuses", "startTime", "completionTime", "lastReconcileTime"}
    assert written.keys() <= known
    assert all(entry.keys() <= FIELDS for entry in written["replicaStatuses"].values())
    return dict(written)
