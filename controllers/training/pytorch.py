"""PyTorchJob: a master and workers, or workers alone that find each other by an elastic rendezvous."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from controllers.jobs.api import BadSpec, JobView, ReplicaSpec, decode, gen_general_name
from controllers.training import environment, kind
from controllers.training.barrier import seconds_of
from controllers.training.environment import MASTER, NAMED_PROCESSES, WORKER, PyTorchSpec, elastic_bounds, variables
from controllers.training.kind import GROUP, VERSION, Latest, TrainingJobs
from controllers.training.options import TrainingOptions
from controllers.training.spec import append_init_containers, append_variables, number_field, text_field
from store.kube.api.objects import Object, Resource, name_of
from store.kube.api.protocol import KubeApi

WORDING = replace(kind.WORDING, failed="{kind} {name} is failed because {count} {type} replica(s) failed. {why}")
WORDING_WITH_MASTER = replace(
    WORDING, running="{kind} {name} is running.", succeeded="{kind} {name} is successfully completed."
)

AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
PYTORCH_JOBS = Resource(GROUP, VERSION, "pytorchjobs", "PyTorchJob")


class PyTorchJobs(TrainingJobs):
    """Runs PyTorchJobs."""

    resource = PYTORCH_JOBS
    framework = "pytorch"
    replica_specs_field = "pytorchReplicaSpecs"
    default_container = environment.CONTAINER
    default_port = environment.PORT
    default_restart_policy = "OnFailure"
    chief_types = (MASTER,)
    replica_types = (MASTER, WORKER)
    scaled_type = WORKER
    success_rule = "AllWorkers"
    reports_selectors = True
    wording = WORDING
    companion: Resource | None = AUTOSCALERS
    spec_fields: ClassVar[Mapping[str, Object]] = {
        "nprocPerNode": text_field("Processes of each pod: auto, cpu, gpu or a number."),
        "elasticPolicy": {
            "type": "object",
            "description": "Workers may come and go while the job runs.",
            "properties": {
                "maxReplicas": number_field("The most workers."),
                "maxRestarts": number_field("Restarts of the worker group."),
                "metrics": {
                    "type": "array",
                    "description": "Metrics of autoscaling/v2, by which an autoscaler sets the number of workers.",
                    "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
                "minReplicas": number_field("The fewest workers."),
                "nProcPerNode": number_field("Deprecated: nprocPerNode."),
                "rdzvBackend": text_field("c10d (the default), etcd or etcd-v2."),
                "rdzvConf": {
                    "type": "array",
                    "description": "Settings of the rendezvous.",
                    "items": {
                        "type": "object",
                        "properties": {"key": {"type": "string"}, "value": {"type": "string"}},
                    },
                },
                "rdzvHost": text_field("The rendezvous's host; by default worker 0."),
                "rdzvId": text_field("Identity of the rendezvous."),
                "rdzvPort": number_field("The rendezvous's port."),
                "standalone": {"type": "boolean", "description": "A rendezvous within each pod."},
            },
        },
    }

    def __init__(self, api: KubeApi, *, options: TrainingOptions | None = None, **parameters: Any) -> None:
        self._spec, self._waiting = Latest(spec_of), Latest(self._wait_for_master)
        if options is not None and not options.autoscalers:
            self.companion = None
        super().__init__(api, options=options, **parameters)

    def view(self, job: Object) -> JobView:
        """Return the job. Under an elastic policy any worker's success is the job's, and the number may change. Without
        init containers and gang, workers are created once their master has an address. Raises `BadSpec`.
        """
        view, elastic = super().view(job), self._spec(job).elastic_policy is not None
        has_master = MASTER in view.replica_specs
        waits = has_master and self.options.init_containers is None and not self.jobs.config.enable_gang_scheduling
        return replace(
            view,
            wording=WORDING_WITH_MASTER if has_master else WORDING,
            success_rule="AnyWorker" if elastic else self.success_rule,
            fixed_size=not elastic,
            create_after={WORKER: MASTER} if waits else {},
        )

    def companion_body(self, job: Object, view: JobView) -> Object | None:
        """Return the autoscaler that sets the number of workers; None if the job asks for none."""
        policy = self._spec(job).elastic_policy
        if policy is None or policy.metrics is None:
            return None
        least, largest = elastic_bounds(policy, view.replica_specs[WORKER].replicas)
        target = {"apiVersion": PYTORCH_JOBS.api_version, "kind": PYTORCH_JOBS.kind, "name": name_of(job)}
        bounds = {"minReplicas": least, "maxReplicas": largest}
        metrics = {"metrics": policy.metrics} if policy.metrics else {}  # an empty list means the server's default
        return {"spec": {"scaleTargetRef": target, **bounds, **metrics}}

    def check(self, job: Object, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
        return [*super().check(job, replicas), *check_pytorch(self._spec(job), replicas)]

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Append the variables to every container, and the containers that wait for the master to those of workers,
        unless a barrier waits for all."""
        super().set_cluster_spec(job, pod, replica_type, index)
        replicas, spec = self.replicas(job), self._spec(job)
        worker_master = self.options.worker_master
        found = variables(name_of(job), replicas, spec, replica_type, index, worker_master=worker_master)
        for container in pod["spec"]["containers"]:
            append_variables(container, found)
        if replica_type != MASTER and MASTER in replicas and seconds_of(job) is None:
            append_init_containers(pod, self._waiting(job))

    def _wait_for_master(self, job: Object) -> list[Object]:
        """Return the init containers of the job's workers, the same for all."""
        containers = self.options.init_containers
        return [] if containers is None else containers.render(gen_general_name(name_of(job), MASTER, 0))


def spec_of(job: Object) -> PyTorchSpec:
    """Return the fields of the spec beside replicas and run policy. Raises `BadSpec`."""
    return decode(job["spec"], PyTorchSpec, "spec")


def check_pytorch(spec: PyTorchSpec, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
    """Return warnings about a job's own fields. `replicas`: with defaults, by type. Raises `BadSpec`."""
    warnings, policy = [], spec.elastic_policy
    if MASTER in replicas and replicas[MASTER].replicas != 1:
        count = replicas[MASTER].replicas
        raise BadSpec(f"spec.pytorchReplicaSpecs.Master.replicas: a PyTorchJob has one master, not {count}")
    if spec.nproc_per_node not in (None, *NAMED_PROCESSES) and (spec.processes or 0) < 1:
        known = ", ".join(NAMED_PROCESSES)
        warnings.append(f"spec.nprocPerNode: {spec.nproc_per_node!r} is neither a positive number nor one of {known}")
    if policy is None:
        return warnings
    if WORKER not in replicas:
        raise BadSpec("spec.elasticPolicy: only workers are elastic; add spec.pytorchReplicaSpecs.Worker")
    if policy.n_proc_per_node is not None:
        if spec.nproc_per_node is not None:
            raise BadSpec("spec.elasticPolicy.nProcPerNode: spec.nprocPerNode is given, too; keep that one")
        warnings.append("spec.elasticPolicy.nProcPerNode is deprecated: use spec.nprocPerNode")
    workers = replicas[WORKER].replicas
    least, largest = elastic_bounds(policy, workers)
    if least > largest:
        warnings.append(f"spec.elasticPolicy.minReplicas: {least} is more than maxReplicas, {largest}")
    if workers > largest:
        warnings.append(f"spec.elasticPolicy.maxReplicas: {largest} is less than the {workers} workers of the spec")
    return warnings
