"""The JobController library: operator, controller, reconciler, executor."""

from controllers.jobs.api.errors import HookFailed, JobError
from controllers.jobs.api.names import ControllerInterface, GroupVersion, GroupVersionKind, gen_general_name
from controllers.jobs.api.types import (
    Backoff,
    BadSpec,
    Condition,
    Decision,
    JobStatus,
    JobView,
    ReplicaSpec,
    RunPolicy,
    SchedulingPolicy,
)
from controllers.jobs.controller import JobController, JobControllerConfiguration
from controllers.jobs.decision import decide
from controllers.jobs.gang import DisruptionBudget, GangKind, GangSize, SchedulerPluginsPodGroup, VolcanoPodGroup
from controllers.jobs.operator import JobOperator
from controllers.jobs.reconciler import JobReconciler

__all__ = [
    "Backoff",
    "BadSpec",
    "Condition",
    "ControllerInterface",
    "Decision",
    "DisruptionBudget",
    "GangKind",
    "GangSize",
    "GroupVersion",
    "GroupVersionKind",
    "HookFailed",
    "JobController",
    "JobControllerConfiguration",
    "JobError",
    "JobOperator",
    "JobReconciler",
    "JobStatus",
    "JobView",
    "ReplicaSpec",
    "RunPolicy",
    "SchedulerPluginsPodGroup",
    "SchedulingPolicy",
    "VolcanoPodGroup",
    "decide",
    "gen_general_name",
]
