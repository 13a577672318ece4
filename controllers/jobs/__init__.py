"""The JobController library: operator and reconciler, controller, decision, executor."""

from controllers.jobs.api import (
    Backoff,
    BadSpec,
    ControllerInterface,
    Decision,
    GroupVersion,
    GroupVersionKind,
    HookFailed,
    JobError,
    JobView,
    ReplicaSpec,
    RunPolicy,
    SchedulingPolicy,
    SuccessRule,
    Wording,
    gen_general_name,
)
from controllers.jobs.controller import JobController, JobControllerConfiguration
from controllers.jobs.decision import decide
from controllers.jobs.gang import DisruptionBudget, GangKind, GangSize, SchedulerPluginsPodGroup, VolcanoPodGroup
from controllers.jobs.operator import JobOperator, JobReconciler
from controllers.jobs.status import Condition, JobStatus

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
    "SuccessRule",
    "VolcanoPodGroup",
    "Wording",
    "decide",
    "gen_general_name",
]
