"""Settings of the roles on Kubernetes: access to the cluster, elections, the operators of jobs and HiveD's extender.

The Framework operator's settings are frameworkcontroller's under descriptive names. frameworkcontroller's own file can
be used as it is; its values apply unless they are set here. The extender's stand beside HiveD's own file, which defines
the cells and the address to listen on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from controllers.framework.settings import OperatorSettings
from rcfarm.config import BadSettings
from store.decoding import MAX_FILE_VALUES, Undecodable, converted, load_yaml
from store.kube.leaderelection.election import check_timings
from store.schema.keys import is_dns_label, is_node_name
from store.tls import TlsFiles

if TYPE_CHECKING:
    from controllers.framework.config import FrameworkConfig
    from controllers.training.options import TrainingOptions

ALL = "all"
KINDS = ("framework", "pytorchjob", "tfjob")
OFF = "off"
DEFAULT_FILE = "./hivedscheduler.yaml"

Snapshot = Literal["framework-retry", "framework-deletion", "task-retry", "task-deletion", "pod-deletion"]


class Lease(NamedTuple):
    """The name of an election's Lease object."""

    namespace: str
    name: str


class ElectionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The election of a role. Durations in seconds. Each role has these settings in its own section."""

    lease: str
    """`NAME` or `NAMESPACE/NAME` of the Lease, or `off`; the default is the role's."""

    lease_duration: float = 15.0
    """Seconds without a renewal after which another replica may take over. Default: 15, as in Kubernetes itself."""

    renew_deadline: float = 10.0
    """Seconds since its last good renewal after which a leader stops its work. Default: 10."""

    retry_period: float = 2.0
    """Seconds between two renewals, and roughly between two checks of a standby. Default: 2."""

    def lease_in(self, namespace: str) -> Lease | None:
        """Return the Lease, in `namespace` if the setting names none, or None for `off`."""
        if self.lease == OFF:
            return None
        named, _, name = self.lease.rpartition("/")
        return Lease(named or namespace, name)

    def check_election(self, section: str) -> None:
        """Check these settings of a section. Raises `BadSettings`."""
        lease = self.lease_in("default")
        if lease and not (is_dns_label(lease.namespace) and is_node_name(lease.name)):
            raise BadSettings(f"{section}.lease: {self.lease!r} is not NAME, NAMESPACE/NAME or {OFF}")
        try:
            check_timings(self.lease_duration, self.renew_deadline, self.retry_period)
        except ValueError as error:
            names = ", ".join(f"{section}.{name}" for name in ("lease_duration", "renew_deadline", "retry_period"))
            raise BadSettings(f"{names}: {error}") from error


class KubeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access of `rcfarm jobs` and `rcfarm extender` to their cluster. Renewed tokens and certificates are reloaded. For
    the extender, `kubeApiServerAddress` and `kubeConfigFilePath` of HiveD's file apply unless they are set here.
    """

    kubeconfig: str = ""
    """Kubeconfig file, or several separated by `:`, as in `KUBECONFIG`. Default "": `KUBECONFIG`, else
    `~/.kube/config`, else the service account of the process's pod. A `KUBECONFIG` that names no file is ignored with a
    warning; a file named here must exist."""

    context: str = ""
    """Context of the kubeconfig. Default "": its current one."""

    server: str = ""
    """Address of the API server instead of the kubeconfig's; alone, it is used without credentials. Default "": the
    value of `KUBE_APISERVER_ADDRESS`, else none."""

    namespaces: tuple[str, ...] = (ALL,)
    """Namespaces whose Frameworks are run. Default: `all`, which needs rights on the whole cluster. The extender always
    watches all."""

    qps: float = 0.0
    """Maximum number of requests per second. Default: 0, no limit: the client backs off when the API server sheds
    load."""

    burst: int = 100
    """Number of requests allowed at once after a pause, if `qps` limits them. Default: 100."""

    call_timeout: float = 30.0
    """Time limit of one request, in seconds. Default: 30."""

    @property
    def watched(self) -> tuple[str, ...]:
        """The watched namespaces; empty for all of them."""
        return () if self.namespaces == (ALL,) else self.namespaces

    def checked(self) -> KubeSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        if not self.namespaces:
            raise BadSettings(f"kube.namespaces: name at least one, or {ALL}")
        for namespace in self.watched:
            if namespace == ALL or not is_dns_label(namespace):
                raise BadSettings(f"kube.namespaces: {namespace!r} is not a namespace; name namespaces, or only {ALL}")
        for field in ("qps", "burst"):
            if not 0 <= getattr(self, field) <= 10000:
                raise BadSettings(f"kube.{field}: {getattr(self, field):g} must be within 0 to 10000")
        if self.call_timeout < 1:
            raise BadSettings(f"kube.call_timeout: {self.call_timeout:g} s must be at least 1 s")
        return self


class JobsSettings(OperatorSettings, frozen=True, kw_only=True):
    """The operators of Frameworks and training jobs. Durations in seconds."""

    kinds: tuple[str, ...] = ()
    """Kinds of jobs to run: `framework`, `pytorchjob`, `tfjob`. Default: none is named: all that the API server serves,
    at any time. One that is named here and not served is an error that readiness shows until it is; only if
    `framework` is named does the operator create the Framework CRD, where it may."""

    mode: Literal["compatible", "native"] = "compatible"
    """`compatible`: frameworkcontroller's CRD and statuses, for clusters where its programs run. `native`: the status
    is a subresource, with conditions. Must match the installed CRD. Default: `compatible`."""

    lease: str = "rcfarm-jobs"
    """`NAME` or `NAMESPACE/NAME` of the Lease for leader election between replicas. Default: `rcfarm-jobs`, in the
    namespace of the pod or context. `off`: no election; then never run two replicas."""

    lease_duration: float = 15.0
    """Seconds without a renewal after which another replica may take over. Default: 15, as in Kubernetes itself."""

    renew_deadline: float = 10.0
    """Seconds since its last good renewal after which a leader stops its work. Default: 10."""

    retry_period: float = 2.0
    """Seconds between two renewals, and roughly between two checks of a standby. Default: 2."""

    snapshots: tuple[Snapshot, ...] = get_args(Snapshot)
    """Objects logged just before they are replaced or deleted. Default: all."""

    pod_failure_spec: tuple[dict[str, Any], ...] | None = None
    """Completion codes of failed pods, in the form of frameworkcontroller's `podFailureSpec`; the first entry that
    matches counts. Default `null`: rcfarm's entries, for pods ended by Kubernetes itself."""

    gang_scheduler: str = ""
    """How the pods of a training job become a gang: `volcano`, `disruption-budget`, or the name of a scheduler that has
    the gang plugin of scheduler-plugins. Default "": each pod is scheduled on its own. HiveD needs no setting: its
    gangs are named in annotations of pods, or of training jobs."""

    autoscalers: bool = True
    """Whether an elastic PyTorchJob with metrics gets a HorizontalPodAutoscaler, if the API server serves
    autoscaling/v2. Default: true."""

    init_container_image: str = "alpine:3.10"
    """Image of the init container in which PyTorch workers wait until their master's name has an address. `none`: they
    get no init container, and are created when the master's pod has an address. Default: the training-operator's."""

    init_container_template: str = "/etc/config/initContainer.yaml"
    """File with init containers to use instead, in the training-operator's form. Default: its path; without such a file
    rcfarm's own."""

    init_container_tries: int = 100
    """Lookups, two seconds apart, after which that init container fails. Default: 100."""

    cluster_domain: str = ""
    """The cluster's DNS domain, such as `cluster.local`, at the end of the addresses in `TF_CONFIG`. Default "": the
    value of `CUSTOM_CLUSTER_DOMAIN`, else none."""

    default_clean_pod_policy: Literal["All", "Running", "None"] = "None"
    """The pods that are deleted when a training job without a `cleanPodPolicy` has finished. Default: `None`, as with
    the training-operator: those that still run go on running."""

    legacy_labels: bool = False
    """Whether pods of training jobs also get the labels that kubeflow's operators set before 1.6, without prefix.
    Default: false."""

    disable_istio: bool = False
    """Whether pods of training jobs get `sidecar.istio.io/inject: "false"` if their template does not say otherwise: a
    sidecar that never ends keeps a pod from succeeding. Default: false."""

    worker_master: bool = False
    """Whether PyTorchJobs without a master and without an elastic policy get worker 0 as `MASTER_ADDR`. Default: false,
    as with the training-operator: their programs find each other by themselves."""

    force_delete_after: float | None = None
    """Seconds past its time of deletion after which a pod of a training job that still exists, because its node is
    lost, is deleted by force. Default `null`: never, as the pod may still run there."""

    framework_config: str = ""
    """A `frameworkcontroller.yaml`, whose values apply unless they are set elsewhere. Default "": none."""

    @property
    def election(self) -> ElectionSettings:
        """The election's part. (A struct can't inherit from two others.)"""
        return ElectionSettings(**{name: getattr(self, name) for name in ElectionSettings.__struct_fields__})

    def operator(self) -> FrameworkConfig:
        """Return the operator's settings in its own form. Raises `BadSettings`."""
        from controllers.framework.config import BadConfig, FrameworkConfig, shipped_config

        fields: dict[str, Any] = {theirs: getattr(self, ours) for theirs, ours in _IN_THE_FILE.items()}
        fields["nativeMode"] = self.mode == "native"
        fields["logObjectSnapshot"] = {
            kind: {flag: snapshot in self.snapshots for flag, snapshot in flags.items()}
            for kind, flags in _SNAPSHOTS.items()
        }
        if self.pod_failure_spec is None:
            fields["podFailureSpec"] = msgspec.to_builtins(shipped_config().pod_failure_spec)
        try:
            return converted(fields, FrameworkConfig).checked()
        except (BadConfig, Undecodable) as error:
            message = str(error)
            for theirs, ours in _IN_THE_FILE.items():
                message = message.replace(theirs, f"jobs.{ours}")
            raise BadSettings(message) from error

    def training(self, environ: Mapping[str, str]) -> TrainingOptions:
        """Return the choices for training jobs. Raises `BadSettings`."""
        from controllers.training.options import BadTemplate, InitContainers, TrainingOptions

        waiting = None
        if self.init_container_image != "none":
            template = Path(self.init_container_template)
            try:
                waiting = InitContainers.load(self.init_container_image, self.init_container_tries, template)
            except BadTemplate as error:
                raise BadSettings(f"jobs.init_container_template: {error}") from error
        return TrainingOptions(
            init_containers=waiting,
            legacy_labels=self.legacy_labels,
            disable_istio=self.disable_istio,
            default_clean_pod_policy=self.default_clean_pod_policy,
            cluster_domain=self.cluster_domain or environ.get("CUSTOM_CLUSTER_DOMAIN", ""),
            worker_master=self.worker_master,
            autoscalers=self.autoscalers,
        )

    def checked(self) -> JobsSettings:
        """Return these settings if the election's and the kinds are valid; `operator` checks the others. Raises
        `BadSettings`."""
        self.election.check_election("jobs")
        for kind in self.kinds:
            if kind not in KINDS:
                raise BadSettings(f"jobs.kinds: {kind!r} is not a kind; there are {', '.join(KINDS)}")
        if self.init_container_tries < 1:
            raise BadSettings(f"jobs.init_container_tries: {self.init_container_tries} must be at least 1")
        if self.force_delete_after is not None and not self.force_delete_after >= 0:
            raise BadSettings(f"jobs.force_delete_after: {self.force_delete_after:g} s must not be negative")
        return self


_IN_THE_FILE = {"podFailureSpec": "pod_failure_spec"} | dict(  # our names by frameworkcontroller's
    zip(OperatorSettings.__struct_encode_fields__, OperatorSettings.__struct_fields__, strict=True)
)
_CLUSTER_ALIASES = {
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


def from_framework_config(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the values of a `frameworkcontroller.yaml`, as (section, field, value) of our settings. Raises
    `BadSettings`.

    `podFailureSpec` comes from the file alone, as in frameworkcontroller: an absent key means no entries, not the
    defaults. Its time limit for the CRD at the start has no counterpart: our operator waits without a limit.
    """
    from controllers.framework.config import BadConfig, read_config

    try:
        config = msgspec.to_builtins(read_config(path))
    except BadConfig as error:
        raise BadSettings(str(error)) from error
    document = load_yaml(path.read_text(encoding="utf-8"), max_values=MAX_FILE_VALUES) or {}
    written = {name for name, value in document.items() if value is not None}
    yield "jobs", "pod_failure_spec", config["podFailureSpec"]
    if "nativeMode" in written:
        yield "jobs", "mode", "native" if config["nativeMode"] else "compatible"
    for section, names in (("jobs", _IN_THE_FILE), ("kube", _CLUSTER_ALIASES)):
        for theirs in names.keys() & written:
            yield section, names[theirs], config[theirs]
    if "logObjectSnapshot" in written:
        log = config["logObjectSnapshot"]
        kinds = _SNAPSHOTS.items()
        logged = [snapshot for kind, flags in kinds for flag, snapshot in flags.items() if log[kind][flag]]
        yield "jobs", "snapshots", logged


class ExtenderSettings(ElectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HiveD scheduler extender: settings that HiveD's own file does not have. Durations in seconds.

    `rcfarm extender --config` names HiveD's file; the file with these settings is given as `--settings FILE`.
    """

    config: str = ""
    """HiveD's configuration file. Default "": the value of `CONFIG`, else `./hivedscheduler.yaml`, as for HiveD."""

    reload_interval: float = 2.0
    """Seconds between two checks of that file; a change counts when two checks have found the same. Default: 2."""

    evict_victims: Literal["auto", "always", "never"] = "auto"
    """Whether the extender itself evicts the victims of a preemption. `auto`: only for kube-schedulers that turn out
    not to call the extender's preempt verb, as several releases don't. Default: `auto`."""

    node_cache_capable: bool = True
    """The value of `nodeCacheCapable` for this extender in kube-scheduler's configuration. False: kube-scheduler sends
    whole nodes; bodies of up to 64 MiB are accepted, two at once, instead of 1 MiB, eight at once. Default: true.
    """

    tls_cert_file: str = ""
    """The certificate, with its chain, of the listener for kube-scheduler and inspection; PEM. It is reloaded when it
    changes. Default "": plain HTTP, as HiveD."""

    tls_key_file: str = ""
    """The key of that certificate; PEM. Default ""."""

    client_ca_file: str = ""
    """Certificate authority, PEM: that listener requires from every client a certificate issued by it. kube-scheduler's
    extender `tlsConfig` has `certFile`, `keyFile` and `caFile`. Default "": none is required."""

    lease: str = OFF
    """`NAME` or `NAMESPACE/NAME` of the Lease under which one of several replicas answers; only that one is ready.
    Default: `off`, no election: then never run two replicas, as both would allocate the same cells."""

    def file(self, environ: Mapping[str, str]) -> Path:
        """Return the path of HiveD's file."""
        return Path(self.config or environ.get("CONFIG") or DEFAULT_FILE).expanduser()

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files, or None for plain HTTP."""
        if not self.tls_cert_file:
            return None
        ca = Path(self.client_ca_file) if self.client_ca_file else None
        return TlsFiles(Path(self.tls_cert_file), Path(self.tls_key_file), ca)

    def checked(self) -> ExtenderSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        if not 0.1 <= self.reload_interval <= 3600:
            raise BadSettings(f"extender.reload_interval: {self.reload_interval:g} s must be within 0.1 to 3600 s")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise BadSettings("extender.tls_cert_file and extender.tls_key_file: set both, or none for plain HTTP")
        if self.client_ca_file and not self.tls_cert_file:
            raise BadSettings("extender.client_ca_file: needs extender.tls_cert_file and extender.tls_key_file as well")
        self.check_election("extender")
        return self
