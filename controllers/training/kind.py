"""The base class of the kinds of `kubeflow.org/v1`: the names, labels, defaults and checks that all of them share.

Pods, services and selectors carry the training-operator's labels, so that its clients, and jobs that began under it,
need no change. A kind names its replica types, its container and its port, says what else makes a job invalid
(`check`), and writes into each pod what it must know about the others (`set_cluster_spec`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from controllers.jobs.api import (
    FIRST_SIGNAL,
    BadSpec,
    JobView,
    ReplicaSpec,
    Wording,
    decode_replica_specs,
)
from controllers.jobs.operator import JobOperator
from controllers.jobs.status import decode_status
from controllers.training.barrier import ANNOTATION, barrier_container, check_barrier, seconds_of
from controllers.training.options import InitContainers, TrainingOptions
from controllers.training.spec import (
    CONTROLLER,
    MAX_REPLICAS,
    Port,
    append_init_containers,
    check_name,
    misplaced_fields,
    shortened_names,
    with_defaults,
)
from store.kube.api.objects import Object, labels_of, name_of
from store.kube.api.protocol import KubeApi

GROUP, VERSION = "kubeflow.org", "v1"
LABEL_PREFIX = "training.kubeflow.org"

WORDING = Wording(
    reason="{kind}{condition}",
    created="{kind} {name} is created.",
    running="{kind} {namespace}/{name} is running.",
    pending="",
    restarting="{kind} {name} is restarting because {count} {type} replica(s) failed.",
    suspended="{kind} {name} is suspended.",
    resumed="{kind} {name} is resumed.",
    succeeded="{kind} {namespace}/{name} successfully completed.",
    failed="{kind} {namespace}/{name} has failed because {count} {type} replica(s) failed. {why}",
    backoff="Job {name} has failed because it has reached the specified backoff limit: {why}",
    deadline="Job {name} has failed because it was active longer than specified deadline: {why}",
    backoff_reason="",
    deadline_reason="",
    invalid_reason="{kind}FailedValidation",
    exited="Pod: {namespace}.{pod} exited with code {code}",
    silent=("Created", "Running"),
)

_LEGACY_LABELS = ("job-name", "replica-type", "replica-index", "job-role")
_ISTIO = "sidecar.istio.io/inject"

_T = TypeVar("_T")


class Latest(Generic[_T]):
    """What a function reads from a job, kept for the last job: the pods of one job are built one after the other."""

    def __init__(self, read: Callable[[Object], _T]) -> None:
        self._read = read
        self._last: tuple[Object, _T] | None = None

    def __call__(self, job: Object) -> _T:
        if self._last is None or self._last[0] is not job:
            self._last = job, self._read(job)
        return self._last[1]


class TrainingJobs(JobOperator):
    """Runs the jobs of one kind. `options`: the operator's choices for all jobs.

    `framework`: the kind's value of the label `framework` in metrics. `replica_types`: in the order in which they are
    created. `other_types`: whether a job may have other types, which get pods, too. `default_port`: the port in the
    default container under which replicas are found. `scaled_type`: the type whose replicas the scale subresource sets;
    "" without one. `spec_fields`: the schemas of the spec's fields besides the replica specs and `runPolicy`.
    """

    framework: ClassVar[str]
    replica_types: ClassVar[tuple[str, ...]]
    other_types: ClassVar[bool] = False
    default_port: ClassVar[Port]
    scaled_type: ClassVar[str] = ""
    spec_fields: ClassVar[Mapping[str, Object]] = {}
    leaders_only = True
    status_is_pruned = True
    wording = WORDING

    def __init__(self, api: KubeApi, *, options: TrainingOptions | None = None, **parameters: Any) -> None:
        self.options = options or TrainingOptions()
        self.replicas: Callable[[Object], Mapping[str, ReplicaSpec]] = Latest(
            lambda job: decode_replica_specs(
                self.with_defaults(job)["spec"][self.replica_specs_field],
                f"spec.{self.replica_specs_field}",
                restart_policy=self.default_restart_policy,
            )
        )
        image = (self.options.init_containers or InitContainers()).image
        self._barrier = Latest(
            lambda job: barrier_container(job, self.replicas(job), decode_status(job.get("status")), image)
        )
        super().__init__(api, **parameters)

    def view(self, job: Object) -> JobView:
        """Return the job with the kind's defaults, and warnings about its spec. Raises `BadSpec`."""
        check_name(job)
        view = super().view(self.with_defaults(job))
        warnings = [*misplaced_fields(job["spec"]), *self.check(job, view.replica_specs)]
        return replace(view, warnings=warnings, ignored_types=self._others(view.replica_specs))

    def with_defaults(self, job: Object) -> Object:
        """Return a copy of the job with the kind's defaults; the spec itself stays as it is. Raises `BadSpec`."""
        return with_defaults(
            job,
            self.replica_specs_field,
            types=self.replica_types,
            container=self.default_container,
            port=self.default_port,
            clean_pod_policy=self.options.default_clean_pod_policy,
        )

    def manages(self, job: Object) -> bool:
        """Return false for a job that names another controller, such as Kueue's MultiKueue."""
        policy = (job.get("spec") or {}).get("runPolicy")
        return not isinstance(policy, dict) or policy.get("managedBy") in (None, CONTROLLER)

    def is_retryable(self, code: int | None) -> bool:
        return code is None or code >= FIRST_SIGNAL

    def check(self, job: Object, replicas: Mapping[str, ReplicaSpec]) -> list[str]:
        """Return warnings about what is allowed, but can hardly be meant. `replicas`: with defaults, by type.

        Raises `BadSpec`, naming the field, for what the kind refuses.
        """
        path, known = f"spec.{self.replica_specs_field}", ", ".join(self.replica_types)
        if seconds_of(job) is not None and self.options.init_containers is None:
            problem = "the operator has no image for init containers (jobs.init_container_image is none)"
            raise BadSpec(f"metadata.annotations[{ANNOTATION}]: {problem}")
        total = sum(spec.replicas for spec in replicas.values())
        if total > MAX_REPLICAS:
            raise BadSpec(f"{path}: {total} replicas are more than the {MAX_REPLICAS} that a job may have")
        others = self._others(replicas)
        if others and not self.other_types:
            raise BadSpec(f"{path}.{others[0]}: a {self.resource.kind} has no such type; its types are {known}")
        return [
            *(f"{path}.{other}: not one of {known}; its pods don't decide about the job's end" for other in others),
            *(f"{path}.{warning}" for warning in check_barrier(job, replicas)),
            *shortened_names(name_of(job), replicas),
        ]

    def set_cluster_spec(self, job: Object, pod: Object, replica_type: str, index: int) -> None:
        """Mark the master's pod, by which clients find the log that matters, and apply the operator's choices."""
        metadata = pod["metadata"]
        labels = metadata["labels"]
        replicas = self.replicas(job)
        chiefs = [name for name in self.chief_types if name in replicas and replicas[name].replicas > 0]
        if replica_type in chiefs or (not chiefs and (replica_type, index) == (self.worker_type, 0)):
            labels[f"{LABEL_PREFIX}/job-role"] = "master"
        if self.options.legacy_labels:
            ours = {name: labels.get(f"{LABEL_PREFIX}/{name}") for name in _LEGACY_LABELS}
            labels |= {"group-name": GROUP} | {name: value for name, value in ours.items() if value is not None}
        if seconds_of(job) is not None:
            append_init_containers(pod, [self._barrier(job)])
        if self.options.disable_istio and _ISTIO not in labels_of(pod):
            metadata["annotations"].setdefault(_ISTIO, "false")

    def _others(self, replicas: Mapping[str, ReplicaSpec]) -> tuple[str, ...]:
        return tuple(replica_type for replica_type in replicas if replica_type not in self.replica_types)

    def get_group_name_label_key(self) -> str:
        return f"{LABEL_PREFIX}/operator-name"

    def get_job_name_label_key(self) -> str:
        return f"{LABEL_PREFIX}/job-name"

    def get_replica_type_label_key(self) -> str:
        return f"{LABEL_PREFIX}/replica-type"

    def get_replica_index_label_key(self) -> str:
        return f"{LABEL_PREFIX}/replica-index"
