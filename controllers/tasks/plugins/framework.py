"""`framework`: a Framework, the gang of pods that `rcfarm jobs` (or frameworkcontroller) runs, submitted and followed.

The Framework retries its own tasks and attempts by its policies; the execution's retries begin with another Framework.
Its completion code is in the event's details. A failure with the attribute Permanent ends the execution, one with
Transient is of the system's kind, and any other uses a retry.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import msgspec

from controllers.framework.api.types import (
    EXECUTION_STOP,
    FRAMEWORKS,
    PERMANENT,
    TRANSIENT,
    FrameworkStatus,
    State,
    has_attribute,
    is_succeeded,
)
from controllers.framework.api.wire import BadFramework, decode_spec, decode_status, problems_of
from controllers.tasks.api.errors import BadConfig
from controllers.tasks.api.names import flyte_digest
from controllers.tasks.api.phase import (
    ExternalResource,
    Phase,
    PhaseInfo,
    TaskInfo,
    phase_info_failure,
    phase_info_initializing,
    phase_info_queued_with_task_info,
    phase_info_retryable_failure,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
)
from controllers.tasks.api.plugin import TaskExecutionContext, TaskExecutionMetadata
from controllers.tasks.patterns.kube import AbortBehavior, KubePlugin, kube_entry
from store.kube.api.objects import Object, Resource, key_of

PLUGIN_ID = "framework"
NAME_PREFIX = 32  # characters of the execution's name that stay readable
_NOT_STARTED = frozenset({State.CREATION_PENDING, State.CREATION_REQUESTED})


class FrameworkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task's own part. `framework`: `metadata` (labels, annotations) and `spec`, as in a Framework's manifest.

    `on_abort`: `delete` removes the Framework; `stop` sets its executionType, so that its history stays.
    """

    framework: dict[str, Any]
    on_abort: Literal["delete", "stop"] = "delete"


class FrameworkPlugin(KubePlugin):
    """Runs `framework` tasks."""

    id = PLUGIN_ID

    def build_identity_resource(self, metadata: TaskExecutionMetadata) -> Resource:
        """Return the kind of Frameworks."""
        return FRAMEWORKS

    def object_name(self, metadata: TaskExecutionMetadata) -> str:
        """Return a name of lower-case letters and digits alone, as Frameworks need it: readable, then a digest."""
        name = metadata.get_task_execution_id().get_generated_name()
        return re.sub(r"[^a-z0-9]", "", name)[:NAME_PREFIX] + flyte_digest(name, bits=128)

    async def build_resource(self, context: TaskExecutionContext) -> Object:
        """Return the Framework of the configuration. Raises `BadConfig`, which lists all problems."""
        config = await _config(context)
        check_framework(config.framework, self.object_name(context.task_execution_metadata))
        return copy.deepcopy(config.framework)

    async def get_task_phase(self, context: TaskExecutionContext, resource: Object) -> PhaseInfo:
        """Return the phase. Raises `BadFramework` for a status that can't be read."""
        attempt = context.task_execution_metadata.get_task_execution_id().get_id().retry_attempt
        return framework_phase(resource, self.clock(), attempt=attempt)

    async def on_abort(self, context: TaskExecutionContext, resource: Object) -> AbortBehavior:
        """Stop or delete the Framework, as configured."""
        if (await _config(context)).on_abort == "delete":
            return AbortBehavior()
        return AbortBehavior("patch", {"spec": {"executionType": EXECUTION_STOP}}, delete_on_error=True)


def check_framework(written: Mapping[str, Any], name: str) -> None:
    """Check the Framework of a task, which is going to have this name. Raises `BadConfig`, which lists all problems."""
    for field in written:
        if field not in ("apiVersion", "kind", "metadata", "spec"):
            raise BadConfig(f"config.framework.{field}: a Framework here has metadata and spec, and nothing else")
    if not isinstance(written.get("metadata") or {}, dict):
        raise BadConfig("config.framework.metadata: must be a mapping")
    try:
        spec = decode_spec(written.get("spec"))
    except BadFramework as error:
        raise BadConfig(f"config.framework.{error}") from error
    if problems := list(problems_of(name, spec)):
        raise BadConfig("config.framework." + "; ".join(map(str, problems)))


def framework_phase(framework: Object, now: float, *, attempt: int = 0) -> PhaseInfo:
    """Return what the Framework's status means. `now`: seconds since the epoch. Raises `BadFramework`."""
    status = decode_status(framework.get("status"))
    outcome = status.attempt_status.completion_status if status else None
    info = partial(_info, framework, status, attempt)
    if status is None:
        return phase_info_queued_with_task_info(0, "no operator has begun it yet", info(Phase.QUEUED))
    if status.state == State.COMPLETED and outcome is not None:
        if is_succeeded(outcome):
            return phase_info_success(info(Phase.SUCCESS))
        text = f"{outcome.phrase} ({outcome.code}): {outcome.diagnostics}".removesuffix(": ")
        if has_attribute(outcome, PERMANENT):
            return phase_info_failure(outcome.phrase, text, info(Phase.PERMANENT_FAILURE))
        is_transient = has_attribute(outcome, TRANSIENT)
        failure = phase_info_system_retryable_failure if is_transient else phase_info_retryable_failure
        return failure(outcome.phrase, text, info(Phase.RETRYABLE_FAILURE))
    if status.run_time is None and status.state in _NOT_STARTED:
        return phase_info_queued_with_task_info(0, f"its state is {status.state}", info(Phase.QUEUED))
    if status.run_time is None and status.state == State.PREPARING:
        return phase_info_initializing(
            datetime.fromtimestamp(now, UTC), 0, "its pods are being started", info(Phase.INITIALIZING)
        )
    return phase_info_running(0, info(Phase.RUNNING))


def _info(framework: Object, status: FrameworkStatus | None, attempt: int, phase: Phase) -> TaskInfo:
    """Return what an event shows: the Framework's state, its retries, its completion code, its tasks by state."""
    shown = ExternalResource(key_of(framework), retry_attempt=attempt, phase=phase)
    details: dict[str, Any] = {"framework": key_of(framework)}
    if status is not None:
        tasks: dict[str, int] = {}
        for role in status.roles:
            for task in role.tasks:
                tasks[task.state] = tasks.get(task.state, 0) + 1
        retried = status.retry_policy_status.total_retried_count
        details |= {"state": status.state, "framework_retries": retried, "tasks": tasks}
        if (outcome := status.attempt_status.completion_status) is not None:
            details |= {"code": outcome.code, "phrase": outcome.phrase, "diagnostics": outcome.diagnostics[:1000]}
    return TaskInfo(custom_info=details, external_resources=(shown,))


async def _config(context: TaskExecutionContext) -> FrameworkConfig:
    return (await context.task_reader.read()).config_as(FrameworkConfig)


ENTRY = kube_entry(FrameworkPlugin, PLUGIN_ID, (PLUGIN_ID,))
