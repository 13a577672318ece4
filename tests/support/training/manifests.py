"""Manifests of training jobs, as users of the original write them, and the pods that an operator builds for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controllers.jobs.control import build_pod
from controllers.training.kind import TrainingJobs
from controllers.training.pytorch import PYTORCH_JOBS
from controllers.training.tensorflow import TF_JOBS
from store.kube.api.objects import Object, Resource

Replicas = int | Mapping[str, Any] | None


def template(container: str, *, ports: Mapping[str, int] | None = None, **more: Any) -> Object:
    """Return a pod template with one container. `ports`: by name. `more`: other fields of the container."""
    listed = [{"name": name, "containerPort": number} for name, number in (ports or {}).items()]
    return {"spec": {"containers": [{"name": container, "image": "train:1", "ports": listed, **more}]}}


def _manifest(
    resource: Resource, field: str, container: str, replicas: Mapping[str, Replicas], name: str, spec: Object
) -> Object:
    """`replicas`: by type, a number, or fields that replace the defaults."""
    specs = {}
    for replica_type, wanted in replicas.items():
        fields: Object = {} if wanted is None else {"replicas": wanted} if isinstance(wanted, int) else dict(wanted)
        specs[replica_type] = {"template": template(container), **fields}
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}"},
        "spec": {field: specs, **spec},
    }


def pytorch_job(name: str = "m", /, *, spec: Object | None = None, **replicas: Replicas) -> Object:
    """Return a PyTorchJob: `pytorch_job(Master=1, Worker=2, spec={"nprocPerNode": "4"})`."""
    return _manifest(PYTORCH_JOBS, "pytorchReplicaSpecs", "pytorch", replicas, name, spec or {})


def tf_job(name: str = "tf", /, *, spec: Object | None = None, **replicas: Replicas) -> Object:
    """Return a TFJob: `tf_job(PS=1, Worker=2)`."""
    return _manifest(TF_JOBS, "tfReplicaSpecs", "tensorflow", replicas, name, spec or {})


def built_pod(operator: TrainingJobs, job: Object, replica_type: str, index: int = 0) -> Object:
    """Return the pod that the operator would create for one replica."""

    def amend(pod: Object) -> None:
        operator.set_cluster_spec(job, pod, replica_type, index)

    spec = operator.view(job).replica_specs[replica_type]
    pod, _ = build_pod(operator.jobs.identity(job), replica_type, index, spec, amendments=[amend])
    return pod


def environment(pod: Object, container: int = 0) -> list[tuple[str, str]]:
    """Return the variables of a container, in their order."""
    return [(entry["name"], entry["value"]) for entry in pod["spec"]["containers"][container].get("env") or ()]
