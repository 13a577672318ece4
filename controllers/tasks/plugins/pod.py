"""`pod`: one pod in the Kubernetes cluster per attempt.

`pod_phase` is the pure decision. It reads a pod as Flyte's `flytek8s` does, with two differences: what the cluster does
to a pod (eviction, preemption, a node that shuts down) is a failure of the system's kind, and the end of the primary
container is the end of the attempt, whatever the other containers do. They are stopped when the attempt is finalized.

A pod that can't start is waited for: the image, volumes or a missing secret may come. After `GRACE` seconds without
readiness the attempt fails, and the pod is removed.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from controllers.framework.api.types import container_statuses, ended_on_its_own, parse_time, pod_completion, terminated
from controllers.jobs.replicas import judge
from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.phase import (
    ExternalResource,
    Phase,
    PhaseInfo,
    ReasonInfo,
    TaskInfo,
    TaskLog,
    phase_info_failed,
    phase_info_failure_with_cleanup,
    phase_info_initializing,
    phase_info_queued_with_task_info,
    phase_info_retryable_failure,
    phase_info_retryable_failure_with_cleanup,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
    phase_info_system_retryable_failure_with_cleanup,
)
from controllers.tasks.api.plugin import TaskExecutionContext, TaskExecutionMetadata
from controllers.tasks.io.files import FileOutputReader
from controllers.tasks.patterns.kube import KubeDefaults, KubePlugin, kube_entry
from controllers.tasks.patterns.kube_quota import pod_demand
from controllers.tasks.template import Parameters, render
from store.kube.api.objects import (
    PODS,
    Object,
    PodPhase,
    Resource,
    annotations_of,
    has_ended,
    is_deleting,
    key_of,
    name_of,
    namespace_of,
    phase_of,
    uid_of,
)

PLUGIN_ID = "pod"
Info = Callable[..., TaskInfo]

GRACE = 180.0  # seconds that an image or a container may be impossible to get
STOP_WAIT = 15.0  # seconds for which one call of `abort` waits for the node
FIRST_LOOK = 0.1  # seconds until its first look
LOST_AFTER = 60.0  # seconds after the end of the grace period until a node that does not confirm it is taken for lost
SIGKILL = 137  # exit code
PRIMARY = "rcfarm/primary-container"  # annotation: the container whose end is the attempt's
INTERRUPTED = "Interrupted"
_OOM = "OOMKilled"
_STARTING = frozenset({"", "ContainerCreating", "PodInitializing", "ErrImagePull", "CrashLoopBackOff"})
_NO_IMAGE = frozenset({"ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
_NO_CONTAINER = frozenset({"CreateContainerError", "CreateContainerConfigError", "RunContainerError"})
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_LOG_FIELD = re.compile(r"\{\{\s*\.?(\w+)\s*\}\}")


class PodStillRuns(TaskError):
    """The node has not stopped the pod yet; the call is repeated."""


class PodConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's own part. `pod`: `metadata` (labels, annotations) and `spec`, as in a pod's manifest; commands,
    arguments and values of the environment are templates. `primary`: the container whose end is the attempt's; by
    default the first."""

    pod: dict[str, Any]
    primary: str = ""


@dataclass(frozen=True)
class LogTemplate:
    """A link to the logs of each container. `uri` may contain `{{ .podName }}`, `.podUid`, `.namespace`,
    `.containerName`, `.containerId`, `.nodeName` and `.startTime` (seconds since the epoch)."""

    name: str
    uri: str


class PodPlugin(KubePlugin):
    """Runs `pod` tasks. `logs`: the operator's links."""

    id = PLUGIN_ID

    def __init__(self, defaults: KubeDefaults | None = None, *, logs: Sequence[LogTemplate] = ()) -> None:
        super().__init__(defaults)
        self._logs = tuple(logs)

    def build_identity_resource(self, metadata: TaskExecutionMetadata) -> Resource:
        """Return the kind of pods."""
        return PODS

    async def build_resource(self, context: TaskExecutionContext) -> Object:
        """Return the pod of the configuration, rendered, with the execution's environment and resources."""
        task = await context.task_reader.read()
        config, metadata = task.config_as(PodConfig), context.task_execution_metadata
        pod = copy.deepcopy(config.pod)
        containers, main = checked_containers(pod, config.primary)
        spec = pod["spec"]
        spec.setdefault("restartPolicy", "Never")
        environment = metadata.get_environment_variables()
        named = {variable.get("name") for variable in main.get("env") or ()}
        added = [{"name": name, "value": value} for name, value in environment.items() if name not in named]
        main["env"] = [*added, *(main.get("env") or ())]
        resources = {**task.resources, **metadata.get_overrides().get_resources()}
        for kind in ("requests", "limits"):
            if amounts := resources.get(kind):
                wanted = main.setdefault("resources", {})
                wanted[kind] = {**(wanted.get(kind) or {}), **amounts}
        if account := metadata.get_k8s_service_account():
            spec.setdefault("serviceAccountName", account)
        parameters = Parameters.of(context)
        for container in [*_containers(spec, "initContainers"), *containers]:
            for field in ("command", "args"):
                if container.get(field):
                    container[field] = await render([str(text) for text in container[field]], parameters)
            for variable in container.get("env") or ():
                if "value" in variable:
                    [variable["value"]] = await render([str(variable["value"])], parameters)
        described = pod.get("metadata") or {}
        annotations = {**(described.get("annotations") or {}), PRIMARY: main["name"]}
        return {"metadata": {**described, "annotations": annotations}, "spec": spec}

    async def get_task_phase(self, context: TaskExecutionContext, resource: Object) -> PhaseInfo:
        """Return the phase; an error that the work has written is more than the pod's. Raises `DataError`."""
        attempt = context.task_execution_metadata.get_task_execution_id().get_id().retry_attempt
        decided = pod_phase(resource, self.clock(), attempt=attempt, logs=self._logs)
        if decided.phase.is_failure() and has_ended(resource) and not is_deleting(resource):
            reader = FileOutputReader(context.data_store, context.output_writer)
            if await reader.is_error():
                written = await reader.read_error()
                phase = Phase.RETRYABLE_FAILURE if written.is_recoverable else Phase.PERMANENT_FAILURE
                return phase_info_failed(phase, written.error, decided.info)
        return decided

    async def abort(self, context: TaskExecutionContext) -> None:
        """Delete the pod, and wait until its node has stopped it. Raises `PodStillRuns`, `KubeError`."""
        await super().abort(context)
        pause, until = FIRST_LOOK, self.monotonic() + STOP_WAIT
        while (pod := await self.own_object(context)) is not None:
            due, node = pod["metadata"].get("deletionTimestamp"), (pod.get("spec") or {}).get("nodeName")
            if not due or not node or has_ended(pod) or self.clock() >= parse_time(due).timestamp() + LOST_AFTER:
                return  # no node has to stop it, or it does not confirm the end for so long that it counts as lost
            if self.monotonic() >= until:
                raise PodStillRuns(f"pod {key_of(pod)} is deleted, and node {node} has not stopped it yet")
            await asyncio.sleep(pause)
            pause = min(2 * pause, STOP_WAIT / 8)

    def still_runs(self, resource: Object) -> bool:
        """Return true for a pod with containers that run beside the primary one, or that never started."""
        return not has_ended(resource)


def checked_containers(pod: Mapping[str, Any], primary: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the containers of a task's pod, and the primary one. Raises `BadConfig`; the API server checks what is not
    checked here."""
    spec, described = pod.get("spec"), pod.get("metadata") or {}
    for name in pod:
        if name not in ("metadata", "spec"):
            raise BadConfig(
                f"config.pod.{name}: a pod here has metadata and spec, as in a pod's manifest, nothing else"
            )
    if not isinstance(spec, dict):
        raise BadConfig("config.pod.spec: must be a mapping with containers")
    if not isinstance(described, dict):
        raise BadConfig("config.pod.metadata: must be a mapping")
    for name in ("labels", "annotations"):
        if not isinstance(described.get(name) or {}, dict):
            raise BadConfig(f"config.pod.metadata.{name}: must be a mapping")
    containers = _containers(spec, "containers")
    if not containers:
        raise BadConfig("config.pod.spec.containers: name at least one container")
    _containers(spec, "initContainers")
    if spec.get("restartPolicy", "Never") not in ("Never", "OnFailure"):
        raise BadConfig("config.pod.spec.restartPolicy: use Never or OnFailure; a pod that always runs never ends")
    wanted = primary or containers[0]["name"]
    main = next((each for each in containers if each["name"] == wanted), None)
    if main is None:
        raise BadConfig(f"config.primary: the pod has no container {wanted!r}")
    try:
        pod_demand(dict(pod))
    except ValueError as error:
        raise BadConfig(f"config.pod.spec: resources: {error}") from error
    return containers, main


def pod_phase(pod: Object, now: float, *, attempt: int = 0, logs: Sequence[LogTemplate] = ()) -> PhaseInfo:
    """Return what the pod's state means for its attempt. `now`: seconds since the epoch."""
    phase, info = phase_of(pod), partial(_info, pod, attempt, logs)
    spec, statuses = pod.get("spec") or {}, (pod.get("status") or {}).get("containerStatuses") or ()
    primary = annotations_of(pod).get(PRIMARY) or (spec.get("containers") or [{}])[0].get("name")
    main = next((each for each in statuses if each.get("name") == primary), None)
    end = terminated(main) if main else None
    if phase == PodPhase.SUCCEEDED or (end is not None and not end.get("exitCode")):
        for container in pod_completion(pod).containers:
            if container.reason == _OOM:  # the program may have lost a child and gone on
                text = f"container {container.name} ran out of memory"
                return phase_info_retryable_failure(_OOM, text, info(Phase.RETRYABLE_FAILURE))
        return phase_info_success(info(Phase.SUCCESS))
    if is_deleting(pod) and not ended_on_its_own(pod):
        text = "another client deleted the pod before it had ended"
        return phase_info_system_retryable_failure("UnexpectedObjectDeletion", text, info(Phase.RETRYABLE_FAILURE))
    starts_again = spec.get("restartPolicy") == "OnFailure"
    if phase == PodPhase.FAILED or (end is not None and not starts_again):
        return _failed(pod, info)
    if phase == PodPhase.RUNNING:
        return phase_info_running(0, info(Phase.RUNNING))
    if phase == PodPhase.PENDING:
        return _pending(pod, now, info)
    text = "the pod's state is unknown: its node does not answer"
    return phase_info_running(0, info(Phase.RUNNING, text))


def _failed(pod: Object, info: Info) -> PhaseInfo:
    """Return why the pod, or its primary container, failed."""
    summary, failed = pod_completion(pod), info(Phase.RETRYABLE_FAILURE)
    ends = [each for each in summary.containers if each.code or each.signal]
    lines = [summary.message or summary.reason or "the pod failed"]
    for each in ends:
        text = f"container {each.name} ended with exit code {each.code}"
        lines.append(": ".join(part for part in (text, each.reason, each.message) if part))
    message = "\n".join(lines)
    if any(each.reason == _OOM for each in summary.containers):
        return phase_info_retryable_failure(_OOM, message, failed)
    if judge(pod, "Never") == "disrupted":
        return phase_info_system_retryable_failure(INTERRUPTED, message, failed)
    if any(each.code == SIGKILL for each in ends):
        return phase_info_retryable_failure(INTERRUPTED, message, failed)
    if not ends and not summary.reason:
        text = f"{message}, and no container reported why: its node may have gone"
        return phase_info_system_retryable_failure("UnknownError", text, failed)
    code = summary.reason or next((each.reason for each in ends if each.reason not in ("", "Error")), "")
    return phase_info_retryable_failure(code or "NonZeroExit", message, failed)


def _pending(pod: Object, now: float, info: Info) -> PhaseInfo:
    """Return what a pod that has not started waits for, or why that is in vain."""
    status = pod.get("status") or {}
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        text = f"not scheduled: {scheduled.get('message') or scheduled.get('reason') or 'no reason given'}"
        return phase_info_queued_with_task_info(0, text, info(Phase.QUEUED))
    if not container_statuses(pod):
        text = "scheduled, and its node has not begun" if scheduled else "not scheduled yet"
        return phase_info_queued_with_task_info(0, text, info(Phase.QUEUED))
    waits = [  # init containers first
        (str(each.get("name")), str(waiting.get("reason") or ""), str(waiting.get("message") or ""))
        for each in container_statuses(pod)
        if (waiting := (each.get("state") or {}).get("waiting")) is not None
    ]
    ready = conditions.get("Ready") or {}
    since = ready.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    is_late = now - (parse_time(since).timestamp() if since else 0.0) > GRACE
    for name, reason, message in waits:
        text = f"container {name}: {reason}" + (f": {message}" if message else "")
        if reason in _STARTING:
            continue
        failed = info(Phase.RETRYABLE_FAILURE)
        if reason in _NEVER:
            return phase_info_failure_with_cleanup(reason, text, info(Phase.PERMANENT_FAILURE))
        if reason in _NO_IMAGE:
            if is_late:
                return phase_info_retryable_failure_with_cleanup(reason, text, failed)
        elif reason in _NO_CONTAINER:
            if is_late:
                return phase_info_failure_with_cleanup(reason, text, info(Phase.PERMANENT_FAILURE))
        else:
            return phase_info_system_retryable_failure_with_cleanup(reason, text, failed)
    text = "; ".join(f"container {name}: {reason or 'waiting'}" for name, reason, _ in waits) or "starting"
    return phase_info_initializing(datetime.fromtimestamp(now, UTC), 0, text, info(Phase.INITIALIZING))


def _info(pod: Object, attempt: int, logs: Sequence[LogTemplate], phase: Phase, *reasons: str) -> TaskInfo:
    """Return what an event shows of the pod: its node, its containers and links to their logs."""
    node, status = str((pod.get("spec") or {}).get("nodeName") or ""), pod.get("status") or {}
    started = status.get("startTime")
    links = []
    for template in logs if node else ():
        for container in status.get("containerStatuses") or ():
            values = {
                "podname": name_of(pod),
                "poduid": uid_of(pod),
                "namespace": namespace_of(pod),
                "containername": str(container.get("name") or ""),
                "containerid": str(container.get("containerID") or "").rpartition("/")[2],
                "nodename": node,
                "starttime": str(int(parse_time(started).timestamp())) if started else "",
            }
            uri = _LOG_FIELD.sub(lambda found: values.get(found[1].lower(), found[0]), template.uri)  # noqa: B023
            links.append(TaskLog(uri, f"{template.name} ({container.get('name')})"))
    shown = ExternalResource(key_of(pod), logs=tuple(links), retry_attempt=attempt, phase=phase)
    codes = {each["name"]: ended.get("exitCode") for each in container_statuses(pod) if (ended := terminated(each))}
    details = {"pod": key_of(pod), "uid": uid_of(pod), "node": node, "exit_codes": codes}
    extra = tuple(ReasonInfo(reason) for reason in reasons)
    return TaskInfo(tuple(links), custom_info=details, external_resources=(shown,), additional_reasons=extra)


def _containers(spec: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the containers in a field of the pod's spec. Raises `BadConfig`."""
    found, at = spec.get(field) or [], f"config.pod.spec.{field}"
    if not isinstance(found, list):
        raise BadConfig(f"{at}: must be a list of containers")
    for number, each in enumerate(found):
        if not isinstance(each, dict):
            raise BadConfig(f"{at}.{number}: must be a mapping: a container")
        if not isinstance(each.get("name"), str) or not each["name"]:
            raise BadConfig(f"{at}.{number}.name: give the container a name")
        for listed in ("command", "args", "env"):
            if not isinstance(each.get(listed) or [], list):
                raise BadConfig(f"{at}.{number}.{listed}: must be a list")
        for variable in each.get("env") or ():
            if not isinstance(variable, dict):
                raise BadConfig(f"{at}.{number}.env: must be a list of name and value")
        resources = each.get("resources") or {}
        if not isinstance(resources, dict):
            raise BadConfig(f"{at}.{number}.resources: must be a mapping")
        for kind, amounts in resources.items():
            if kind in ("requests", "limits") and not isinstance(amounts or {}, dict):
                raise BadConfig(f"{at}.{number}.resources.{kind}: must be a mapping")
    return found


ENTRY = kube_entry(PodPlugin, PLUGIN_ID, (PLUGIN_ID,))
