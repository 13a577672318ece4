"""Settings of the Framework operator, in the form of frameworkcontroller's `frameworkcontroller.yaml`.

The text under each field gives its unit, its default and the reason. An invalid file is refused at the start; the
message names the field and what to do.
"""

from __future__ import annotations

import difflib
from functools import cached_property
from importlib import resources
from pathlib import Path

import msgspec

from controllers.framework.config.failure_spec import BadFailureSpec, FailureSpec, PodFailure
from store.decoding import MAX_FILE_VALUES, Undecodable, converted, load_yaml, problem_of, without_nulls
from store.errors import RcfarmError

SHIPPED = "frameworkcontroller.yaml"


class BadConfig(RcfarmError, ValueError):
    """An invalid configuration; the message names the file, the field and what to do."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A part of the file. Unknown fields are refused, as they are probably misspelled."""


class FrameworkSnapshots(_Section, frozen=True, kw_only=True):
    on_framework_retry: bool = True
    on_framework_deletion: bool = True


class TaskSnapshots(_Section, frozen=True, kw_only=True):
    on_task_retry: bool = True
    on_task_deletion: bool = True


class PodSnapshots(_Section, frozen=True, kw_only=True):
    on_pod_deletion: bool = True


class SnapshotLog(_Section, frozen=True, kw_only=True, dict=True):
    """The objects that are logged just before they are replaced or deleted. Default: all."""

    framework: FrameworkSnapshots = FrameworkSnapshots()
    task: TaskSnapshots = TaskSnapshots()
    pod: PodSnapshots = PodSnapshots()

    def __contains__(self, trigger: str) -> bool:
        """Return whether snapshots of this trigger, such as `OnTaskRetry`, are logged."""
        return trigger in self._wanted

    @cached_property
    def _wanted(self) -> frozenset[str]:
        triggers = {
            "OnFrameworkRetry": self.framework.on_framework_retry,
            "OnFrameworkDeletion": self.framework.on_framework_deletion,
            "OnTaskRetry": self.task.on_task_retry,
            "OnTaskDeletion": self.task.on_task_deletion,
            "OnPodDeletion": self.pod.on_pod_deletion,
        }
        return frozenset(trigger for trigger, is_wanted in triggers.items() if is_wanted)


class FrameworkConfig(_Section, frozen=True, kw_only=True, dict=True):
    """Durations in seconds."""

    kube_api_server_address: str | None = None
    """Address of the API server. Default: `$KUBE_APISERVER_ADDRESS`, else the kubeconfig's."""

    kube_config_file_path: str | None = None
    """The kubeconfig. Default: `$KUBECONFIG` if that file exists, else `~/.kube/config` if it exists. With neither a
    kubeconfig nor an address, the service account of the operator's pod is used."""

    kube_client_qps: float = 80
    """Requests per second to the API server, above 0 and up to 10000. Default: 80."""

    kube_client_burst: int = 120
    """Requests at once beyond that rate, up to 10000. Default: 120."""

    worker_number: int = 200
    """Frameworks synced at once. Default: 200: a worker mostly waits for the API server."""

    large_framework_compression: bool = False
    """Whether statuses that may be too large for etcd are compressed. Default: false: old readers can't read them."""

    crd_established_check_interval_sec: int = 1
    """At least 1. Accepted for existing files, but unused; rcfarm checks each second whether Frameworks are served.
    Default: 1."""

    crd_established_check_timeout_sec: int = 60
    """At least 10. Accepted for existing files, but unused; rcfarm waits, not ready, until Frameworks are served.
    Default: 60."""

    object_local_cache_creation_timeout_sec: int = 300
    """Seconds within which a created object must appear in the cache, else it is deleted and its attempt has failed;
    at least 60. Default: 300."""

    framework_completed_retain_sec: int = 2592000
    """Seconds for which a completed Framework is kept. Default: 30 days."""

    framework_min_retry_delay_sec_for_transient_conflict_failed: int = 60
    """Least delay before a Framework is retried that failed to get its resources. Default: 60."""

    framework_max_retry_delay_sec_for_transient_conflict_failed: int = 900
    """Longest such delay; the actual one is random. Default: 900, so that gangs that starved each other spread out."""

    log_object_snapshot: SnapshotLog = SnapshotLog()
    """The snapshots that are logged as a history."""

    pod_failure_spec: tuple[PodFailure, ...] = ()
    """Completion codes of failed pods, beyond the predefined ones. Default: none; the file shipped with rcfarm has
    entries for the failures that Kubernetes itself causes."""

    native_mode: bool = False
    """Whether the status is a subresource, with conditions also while there is no problem. Must match the installed
    CRD. Default: false, as in frameworkcontroller."""

    headless_services: bool = False
    """Whether each task role gets a headless Service, in native mode. Default: false."""

    disruption_budgets: bool = False
    """Whether each attempt gets a PodDisruptionBudget, in native mode. Default: false."""

    default_completion_policy: bool = False
    """Whether a role without a completion policy fails the attempt with its first failed task. Default: false: as in
    frameworkcontroller, a Framework whose tasks all failed then counts as succeeded."""

    @cached_property
    def failures(self) -> FailureSpec:
        """The compiled `pod_failure_spec`. Raises `BadFailureSpec`."""
        return FailureSpec(self.pod_failure_spec)

    @property
    def conflict_delay(self) -> tuple[int, int]:
        return (
            self.framework_min_retry_delay_sec_for_transient_conflict_failed,
            self.framework_max_retry_delay_sec_for_transient_conflict_failed,
        )

    def checked(self) -> FrameworkConfig:
        """Validate and return these settings. Raises `BadConfig`."""
        for field, is_good, wanted in self._limits():
            if not is_good:
                raise BadConfig(f"{field}: must be {wanted}")
        try:
            _ = self.failures
        except BadFailureSpec as error:
            raise BadConfig(str(error)) from error
        return self

    def _limits(self) -> tuple[tuple[str, bool, str], ...]:
        least, most = self.conflict_delay
        least_name = "frameworkMinRetryDelaySecForTransientConflictFailed"
        return (
            ("kubeClientQps", 0 < self.kube_client_qps <= 10000, "above 0 and at most 10000"),
            ("kubeClientBurst", 0 <= self.kube_client_burst <= 10000, "within 0 to 10000"),
            ("workerNumber", self.worker_number > 0, "above 0"),
            ("crdEstablishedCheckIntervalSec", self.crd_established_check_interval_sec >= 1, "at least 1"),
            ("crdEstablishedCheckTimeoutSec", self.crd_established_check_timeout_sec >= 10, "at least 10"),
            ("objectLocalCacheCreationTimeoutSec", self.object_local_cache_creation_timeout_sec >= 60, "at least 60"),
            ("headlessServices", self.native_mode or not self.headless_services, "false in compatible mode"),
            ("disruptionBudgets", self.native_mode or not self.disruption_budgets, "false in compatible mode"),
            (least_name, least >= 0, "at least 0"),
            ("frameworkMaxRetryDelaySecForTransientConflictFailed", most >= least, f"at least {least_name} ({least})"),
        )


def read_config(path: Path) -> FrameworkConfig:
    """Read the settings from a file, which must exist and may be empty. Raises `BadConfig`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: can't be read: {error}") from error
    try:
        return parse_config(text)
    except BadConfig as error:
        raise BadConfig(f"{path}: {error}") from error


def shipped_config() -> FrameworkConfig:
    """Return the settings shipped with rcfarm."""
    return parse_config(resources.files(__package__).joinpath(SHIPPED).read_text(encoding="utf-8"))


def parse_config(text: str) -> FrameworkConfig:
    """Parse and validate settings in YAML. Raises `BadConfig`."""
    try:
        fields = load_yaml(text, max_values=MAX_FILE_VALUES)
    except Undecodable as error:
        raise BadConfig(str(error)) from error
    try:
        return converted(without_nulls({} if fields is None else fields), FrameworkConfig).checked()
    except Undecodable as error:
        raise BadConfig(_explained(error)) from error


def _explained(error: Exception) -> str:
    problem = problem_of(error)
    what = problem.what
    if problem.unknown:
        close = difflib.get_close_matches(problem.field, FrameworkConfig.__struct_encode_fields__, n=1)
        what += f"; did you mean {close[0]}?" if close else ""
    return f"{problem.field}: {what}" if problem.field else what
