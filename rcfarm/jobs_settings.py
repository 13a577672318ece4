"""Settings of roles on Kubernetes: how the cluster is reached, and what the Framework operator does there.

The operator's own settings are those of frameworkcontroller under names that say what they do. Its file can be read as
it is, for those who come from there: what it says counts unless it is set here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from rcfarm.agent.settings import BadSettings
from store.decoding import MAX_FILE_VALUES, load_yaml
from store.keys import is_dns_label
from store.kube.lease import check_timings

if TYPE_CHECKING:
    from controllers.framework.config import FrameworkConfig

ALL = "all"
OFF = "off"

Snapshot = Literal["framework-retry", "framework-deletion", "task-retry", "task-deletion", "pod-deletion"]


class KubeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How `rcfarm jobs` and `rcfarm extender` reach their cluster. Tokens and certificates are read again when they are
    renewed. For the extender, what HiveD's file says about `kubeApiServerAddress` and `kubeConfigFilePath` counts
    where these settings are silent.
    """

    kubeconfig: str = ""
    """File that says how, or several with `:` between, as in `KUBECONFIG`. Default "": `KUBECONFIG`, else
    `~/.kube/config`, else the service account of the pod that this runs in. A `KUBECONFIG` that names no file is passed
    over with a warning; a file that is named here must exist."""

    context: str = ""
    """Context of the kubeconfig. Default "": its current one."""

    server: str = ""
    """Address of the API server instead of the kubeconfig's; alone, it is used without credentials. Default "": what
    `KUBE_APISERVER_ADDRESS` says, else none."""

    namespaces: tuple[str, ...] = (ALL,)
    """Namespaces whose Frameworks are run. Default: `all`, which needs rights on the whole cluster. The extender always
    looks at all."""

    qps: float = 0.0
    """Requests per second, above which ours wait. Default: 0, no limit of our own: an API server that sheds load is
    obeyed."""

    burst: int = 100
    """Requests at once after a pause, where `qps` limits them. Default: 100."""

    call_timeout: float = 30.0
    """Seconds that one request may take. Default: 30."""

    @property
    def watched(self) -> tuple[str, ...]:
        """The namespaces, none for all of them."""
        return () if self.namespaces == (ALL,) else self.namespaces

    def checked(self) -> KubeSettings:
        """These settings, if they make sense. Raises `BadSettings`."""
        if not self.namespaces:
            raise BadSettings(f"kube.namespaces: name at least one, or {ALL}")
        for namespace in self.watched:
            if namespace == ALL or not is_dns_label(namespace):
                raise BadSettings(
                    f"kube.namespaces: {namespace!r} is not a namespace; name those that are meant, or only {ALL}"
                )
        for field in ("qps", "burst"):
            if not 0 <= getattr(self, field) <= 10000:
                raise BadSettings(f"kube.{field}: {getattr(self, field):g} must be within 0 to 10000")
        if self.call_timeout < 1:
            raise BadSettings(f"kube.call_timeout: {self.call_timeout:g} s must be at least 1 s")
        return self


class Lease(NamedTuple):
    """The Lease object that the election is about."""

    namespace: str
    name: str


class JobsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Framework operator. Durations in seconds."""

    mode: Literal["compatible", "native"] = "compatible"
    """`compatible`: the CRD and the statuses are frameworkcontroller's, for clusters where its programs run. `native`:
    the status is a subresource, with conditions. Must fit the CRD that is installed. Default: `compatible`."""

    lease: str = "rcfarm-jobs"
    """`NAME` or `NAMESPACE/NAME` of the Lease under which one of several replicas works. Default: `rcfarm-jobs`, in the
    namespace of the pod or context. `off`: no election; then never run two."""

    lease_duration: float = 15.0
    """Seconds after which another may take over from a leader that is silent. Default: 15, as in Kubernetes itself."""

    renew_deadline: float = 10.0
    """Seconds since its last good renewal after which a leader stops its work. Default: 10."""

    retry_period: float = 2.0
    """Seconds between two renewals, and about as many between two looks of a standby. Default: 2."""

    workers: int = 200
    """Frameworks worked on at once. Default: 200: a worker mostly waits for the API server."""

    cache_timeout: int = 300
    """Seconds within which an object that was created must be seen, else its attempt fails; at least 60. Default:
    300."""

    retain_completed: int = 2592000
    """Seconds for which a completed Framework is kept. Default: 2592000, 30 days."""

    conflict_delay_min: int = 60
    """Least seconds before a Framework is retried that failed because it got only some of its resources. Default:
    60."""

    conflict_delay_max: int = 900
    """Most seconds before that; the delay is random, so that gangs that starve each other part. Default: 900."""

    compress_large_status: bool = False
    """Whether statuses near the size that etcd refuses are compressed. Default: false: not all readers know how."""

    default_completion_policy: bool = False
    """Whether a task role without a completion policy fails the attempt with its first failed task. Default: false: as
    with frameworkcontroller, a Framework whose tasks all failed counts as succeeded then."""

    headless_services: bool = False
    """Whether each task role gets a headless Service, `FRAMEWORK-ROLE`, which gives its pods names in DNS; only in
    native mode. Names of Services begin with a letter and have at most 63 characters: a role without such a name gets
    none. Default: false: the barrier tells addresses without it."""

    disruption_budgets: bool = False
    """Whether the pods of each attempt get a PodDisruptionBudget, so that no drain takes a gang apart; only in native
    mode. Default: false: a node that runs a Framework can't be drained then before the attempt ends."""

    snapshots: tuple[Snapshot, ...] = (
        "framework-retry",
        "framework-deletion",
        "task-retry",
        "task-deletion",
        "pod-deletion",
    )
    """What is written to the log as it was just before it is replaced or vanishes. Default: all."""

    pod_failure_spec: tuple[dict[str, Any], ...] | None = None
    """Completion codes of failed pods, in the form of frameworkcontroller's `podFailureSpec`; the first entry that
    matches counts. Default `null`: the entries that come with rcfarm, for what Kubernetes itself does to pods."""

    framework_config: str = ""
    """A `frameworkcontroller.yaml`. What it says counts unless it is set elsewhere. Default "": none."""

    def operator(self) -> FrameworkConfig:
        """The operator's settings in its own form. Raises `BadSettings`."""
        from controllers.framework.config import BadConfig, FrameworkConfig, shipped_config

        fields: dict[str, Any] = {theirs: getattr(self, ours) for theirs, ours in _OURS.items()}
        fields["nativeMode"] = self.mode == "native"
        fields["logObjectSnapshot"] = {
            kind: {flag: snapshot in self.snapshots for flag, snapshot in flags.items()}
            for kind, flags in _SNAPSHOTS.items()
        }
        if self.pod_failure_spec is None:
            fields["podFailureSpec"] = msgspec.to_builtins(shipped_config({}).pod_failure_spec)
        try:
            return msgspec.convert(fields, FrameworkConfig).checked()
        except (BadConfig, msgspec.ValidationError) as error:
            raise BadSettings(_in_our_words(str(error))) from error

    def checked(self) -> JobsSettings:
        """These settings, if the election's make sense; the operator's are looked at where it is. Raises
        `BadSettings`."""
        check_lease("jobs", self.lease, self.lease_duration, self.renew_deadline, self.retry_period)
        return self


def lease_in(lease: str, namespace: str) -> Lease | None:
    """The Lease of a setting, in `namespace` if it names none; None when there is no election."""
    if lease == OFF:
        return None
    named, _, name = lease.rpartition("/")
    return Lease(named or namespace, name)


def check_lease(section: str, lease: str, duration: float, renew_deadline: float, retry_period: float) -> None:
    """Raise `BadSettings` unless the settings of an election make sense. Seconds."""
    found = lease_in(lease, "default")
    if found and not (is_dns_label(found.namespace) and is_dns_label(found.name)):
        raise BadSettings(f"{section}.lease: {lease!r} is not NAME, NAMESPACE/NAME or {OFF}")
    try:
        check_timings(duration, renew_deadline, retry_period)
    except ValueError as error:
        names = ", ".join(f"{section}.{name}" for name in ("lease_duration", "renew_deadline", "retry_period"))
        raise BadSettings(f"{names}: {error}") from error


_OURS = {  # by frameworkcontroller's name
    "workerNumber": "workers",
    "largeFrameworkCompression": "compress_large_status",
    "objectLocalCacheCreationTimeoutSec": "cache_timeout",
    "frameworkCompletedRetainSec": "retain_completed",
    "frameworkMinRetryDelaySecForTransientConflictFailed": "conflict_delay_min",
    "frameworkMaxRetryDelaySecForTransientConflictFailed": "conflict_delay_max",
    "defaultCompletionPolicy": "default_completion_policy",
    "podFailureSpec": "pod_failure_spec",
    "headlessServices": "headless_services",
    "disruptionBudgets": "disruption_budgets",
}
_OURS_OF_THE_CLUSTER = {
    "kubeApiServerAddress": "server",
    "kubeConfigFilePath": "kubeconfig",
    "kubeClientQps": "qps",
    "kubeClientBurst": "burst",
}
_SNAPSHOTS: dict[str, dict[str, Snapshot]] = {
    "framework": {"onFrameworkRetry": "framework-retry", "onFrameworkDeletion": "framework-deletion"},
    "task": {"onTaskRetry": "task-retry", "onTaskDeletion": "task-deletion"},
    "pod": {"onPodDeletion": "pod-deletion"},
}


def _in_our_words(message: str) -> str:
    for theirs, ours in _OURS.items():
        message = message.replace(theirs, f"jobs.{ours}")
    return message


def migrated(path: Path) -> Iterator[tuple[str, str, Any]]:
    """What a `frameworkcontroller.yaml` says, as (section, field, value) of our settings. Raises `BadSettings`.

    Its file decides alone about `podFailureSpec`: without any, there are no entries, as there. How long its start
    waits for the CRD has no counterpart: ours waits for as long as it takes.
    """
    from controllers.framework.config import BadConfig, read_config

    try:
        config = msgspec.to_builtins(read_config(path, environ={}))
    except BadConfig as error:
        raise BadSettings(str(error)) from error
    said = load_yaml(path.read_text(encoding="utf-8"), max_values=MAX_FILE_VALUES) or {}
    written = {name for name, value in said.items() if value is not None}
    yield "jobs", "pod_failure_spec", config["podFailureSpec"]
    if "nativeMode" in written:
        yield "jobs", "mode", "native" if config["nativeMode"] else "compatible"
    for section, names in (("jobs", _OURS), ("kube", _OURS_OF_THE_CLUSTER)):
        for theirs in names.keys() & written:
            yield section, names[theirs], config[theirs]
    if "logObjectSnapshot" in written:
        yield "jobs", "snapshots", _snapshots(config["logObjectSnapshot"])


def _snapshots(log: dict[str, dict[str, bool]]) -> list[Snapshot]:
    return [snapshot for kind, flags in _SNAPSHOTS.items() for flag, snapshot in flags.items() if log[kind][flag]]
