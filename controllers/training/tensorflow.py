"""TFJob: a chief, workers, parameter servers and an evaluator, which know each other by `TF_CONFIG`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from controllers.jobs.api import BadSpec, JobView, ReplicaSpec, decode
from controllers.training import kind, tf_config
from controllers.training.kind import GROUP, VERSION, Latest, TrainingJobs
from controllers.training.spec import append_variables, text_field
from controllers.training.tf_config import CHIEF, EVALUATOR, MASTER, PS, VARIABLE, WORKER, Cluster
from store.kube.api.objects import Object, Resource, name_of, namespace_of
from store.kube.api.protocol import KubeApi

WORDING = replace(kind.WORDING, restarting="job {name} is restarting because {type} replica(s) failed.")

TF_JOBS = Resource(GROUP, VERSION, "tfjobs", "TFJob")


class TFSpec(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields of a TFJob's spec beside replicas, run policy and success policy."""

    enable_dynamic_worker: bool | None = None


class TFJobs(TrainingJobs):
    """Runs TFJobs."""

    resource = TF_JOBS
    framework = "tensorflow"
    replica_specs_field = "tfReplicaSpecs"
    default_container = tf_config.CONTAINER
    default_port = tf_config.PORT
    chief_types = (CHIEF, MASTER)
    replica_types = (CHIEF, MASTER, PS, WORKER, EVALUATOR)
    other_types = True
    wording = WORDING
    spec_fields: ClassVar[Mapping[str, Object]] = {
        "enableDynamicWorker": {
            "type": "boolean",
            "description": "Workers may come and go: each knows itself and the parameter servers only.",
        },
        "successPolicy": text_field("Without a chief: worker 0 decides by default; AllWorkers: all of them."),
    }

    def __init__(self, api: KubeApi, **parameters: Any) -> None:
        self._spec = Latest(spec_of)
        self._cluster = Latest(
            lambda job: Cluster(name_of(job), namespace_of(job), self.replicas(job), self.options.cluster_domain)
        )
        super().__init__(api, **parameters)

    def view(self, job: Object) -> JobView:
        """Return the job. Dynamic workers may fail, and their number may change. Raises `BadSpec`."""
        view, dynamic = super().view(job), bool(self._spec(job).enable_dynamic_worker)
        ignored = (*view.ignored_types, WORKER) if dynamic else view.ignored_types
        return replace(view, fixed_size=not dynamic, ignored_types=ignored)

    def check(self, job: Object, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
        if CHIEF in replicas and MASTER in replicas:
            raise BadSpec("spec.tfReplicaSpecs.Master: Chief is given, too, and means the same; keep one of them")
        return super().check(job, replicas)

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Append `TF_CONFIG` to the container that trains, unless the job has only one replica."""
        super().set_cluster_spec(job, pod, replica_type, index)
        cluster = self._cluster(job)
        if cluster.is_distributed:
            form = cluster.sparse if self._spec(job).enable_dynamic_worker else cluster.dense
            trains = next(each for each in pod["spec"]["containers"] if each.get("name") == self.default_container)
            append_variables(trains, {VARIABLE: form(replica_type, index)})


def spec_of(job: Object) -> TFSpec:
    """Return the fields of the spec beside replicas, run policy and success policy. Raises `BadSpec`."""
    return decode(job["spec"], TFSpec, "spec")
