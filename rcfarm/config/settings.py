"""Settings of the daemons: one class per topic, frozen, checked once at the start.

The text under each field gives its unit, its default and the reason; the settings reference is generated from it.
`rcfarm.config.sources.load` reads them from a TOML file, the environment and flags.

Some settings only make sense together (a session must outlive its check, a node must not count as lost sooner than its
session ends). `Settings.checked` holds these relations, and its messages name both sides.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from rcfarm.config import BadSettings
from rcfarm.config.agent import AgentSettings, default_state_dir
from rcfarm.config.kube import ExtenderSettings, JobsSettings, KubeSettings
from store.schema.keys import is_dns_label
from store.schema.selectors import BadSelector, Selector

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "AgentSettings",
    "BadSettings",
    "ExtenderSettings",
    "FarmSettings",
    "JobsSettings",
    "KubeSettings",
    "LogSettings",
    "SessionSettings",
    "Settings",
    "StoreSettings",
    "TasksSettings",
    "WebSettings",
    "default_farm_name",
]

MiB = 1024 * 1024
CONSUL_TTL = (10.0, 86400.0)  # seconds: what Consul accepts as a session's TTL
CONSUL_LOCK_DELAY = 60.0  # seconds: the longest that Consul accepts
CONSUL_CONNECTIONS = 200  # per client address: Consul's default limits.http_max_conns_per_client
FARM_WATCHES = 40  # connections that the views of a farm may hold: one per shard, and those of nodes, farms, brake


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadSettings(message)


def default_farm_name() -> str:
    """Return the first label of this machine's host name, made a DNS-1123 label."""
    label = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower().partition(".")[0])[:63].strip("-")
    return label or "farm"


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store. Credentials and TLS files come from Consul's own `CONSUL_HTTP_*` variables."""

    url: str = ""
    """`consul://HOST:PORT`, `consuls://HOST:PORT` (TLS), `embedded:DIR` or `memory:`. Default "": the value of
    `CONSUL_HTTP_ADDR`, else the `rcfarm dev` that runs on this machine."""

    root: str = "rcfarm"
    """First part of every key. Default: `rcfarm`. Two installations can share one Consul under different roots."""

    max_connections: int = 64
    """Maximum number of connections of this process to the store. Default: 64, because Consul allows 200 per client
    address, and a machine may run a farm, an agent and operators' commands at the same time."""

    def checked(self) -> StoreSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        _require(
            re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", self.root) is not None,
            f"store.root: {self.root!r} is not a key prefix: letters, digits, '.', '_', '-', with '/' between",
        )
        _require(
            0 < self.max_connections < CONSUL_CONNECTIONS,
            f"store.max_connections: {self.max_connections} must be between 1 and {CONSUL_CONNECTIONS - 1}: "
            f"Consul refuses more than {CONSUL_CONNECTIONS} from one client",
        )
        return self


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lease under which a farm holds its locks. It determines how fast the RCs of a crashed farm are taken over."""

    ttl: float = 10.0
    """The session's time to live, in seconds. Default: 10, the least that Consul accepts."""

    check_ttl: float | None = 3.0
    """A shorter lease, in seconds, kept by a check on the Consul agent: the locks of a crashed farm are released after
    this time; `ttl` is the backstop. Default: 3. `null`: no check. Without permission for the check, only `ttl`
    applies."""

    lock_delay: float = 0.0
    """Seconds for which Consul refuses a lock after its session was lost. Default: 0: every write is fenced, so no
    delay is needed."""

    def checked(self) -> SessionSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        least, most = CONSUL_TTL
        _require(
            least <= self.ttl <= most,
            f"session.ttl: {self.ttl:g} s must be between {least:g} and {most:g} s, as Consul requires",
        )
        check_ttl = self.check_ttl
        _require(
            check_ttl is None or 1.0 <= check_ttl < self.ttl,
            f"session.check_ttl: {check_ttl} s must be at least 1 s, so that a short pause does not "
            f"delay its renewals beyond it, and below session.ttl ({self.ttl:g} s), its backstop; null turns it off",
        )
        _require(
            0.0 <= self.lock_delay <= CONSUL_LOCK_DELAY,
            f"session.lock_delay: {self.lock_delay:g} s must be between 0 and {CONSUL_LOCK_DELAY:g} s",
        )
        return self


SCHEDULERS = ("label", "pool")
SCHEDULER_GROUP = "rcfarm.schedulers"


def scheduler_plugins() -> dict[str, EntryPoint]:
    """Return the installed schedulers by name."""
    from importlib.metadata import entry_points  # reads every installed package

    return {point.name: point for point in entry_points(group=SCHEDULER_GROUP)}


_POSITIVE_OF_FARM = (
    "concurrent_reconciles", "concurrent_commits", "resync_interval", "handover_interval", "manifest_gc_interval",
    "quarantine_after", "decision_log_max_age",
)  # fmt: skip


class FarmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One farm. Durations in seconds."""

    name: str = msgspec.field(default_factory=default_farm_name)
    """Name of the farm, a DNS-1123 label. Default: the host name. Farms of one installation need different names."""

    selector: str = ""
    """Selector of the RCs that this farm claims, by their labels, in the Kubernetes grammar. Default "": all. Farms
    with the same selector share the work."""

    concurrent_reconciles: int = 128
    """RCs reconciled at once. Default: 128: a reconcile mostly waits for its commit, and RCs that commit at the same
    time share transactions."""

    concurrent_commits: int = 12
    """Transactions in flight at once. Default: 12: more do not raise Consul's rate, they only lengthen the wait."""

    claim_grace: float = 10.0
    """Seconds for which a free RC is left to its shard's preferred farm; then any farm of the group may claim it.
    Default: 10, well above the session's lease, so that it only matters when the preferred farm is stuck."""

    node_lost_after: float = 60.0
    """Seconds without a live agent after which a node's pods may be moved elsewhere. Default: 60: a restart of an agent
    or a short network failure moves no pods."""

    resync_interval: float = 300.0
    """Seconds after which an RC is reconciled without a change, jittered. Default: 300; changes are seen at once."""

    watch_share: float = 0.2
    """Part of one core, above 0 and up to 1, that this farm may spend on refreshing its views; faster changes are read
    together. Default: 0.2. A lower value saves work here and in the store, but sees bursts later."""

    brake_share: float = 0.5
    """Part of the known RCs, above 0 and up to 1, that may vanish at once before the farm engages the brake. Default:
    0.5."""

    handover_interval: float = 0.1
    """Seconds between the starts of two hand-overs of shards to another farm. Default: 0.1: a farm that joins gets its
    share within seconds, without a burst of requests to the store."""

    manifest_gc_interval: float = 60.0
    """Seconds between two searches for manifests that nothing refers to. Default: 60."""

    audit_max_age: float = 7776000.0
    """Seconds for which events are kept in the audit log; 0: for ever. Default: 7776000 (90 days). A single farm
    removes older events."""

    audit_max_size: int = 268435456
    """Maximum size of the audit log in the store, in bytes; 0: no limit. Default: 268435456 (256 MiB): about a million
    events, for which Consul needs several times the memory. The oldest events beyond it are removed."""

    deleted_rcs_max_age: float = 604800.0
    """Seconds for which a deleted RC can be restored with `rcfarm rc restore`; 0: for ever. Default: 604800 (7 days).
    A single farm removes what is older."""

    deleted_rcs_max_count: int = 1000
    """Number of deleted RCs that are kept; 0: no limit. Default: 1000. The oldest ones beyond it are removed."""

    decision_log: Path | None = None
    """Folder of this farm alone for its decision log: what it decided for each RC, and why, for `rcfarm replay`.
    Default: `null`: decisions are not logged. `rcfarm dev` logs them into its own directory."""

    decision_log_max_age: float = 1209600.0
    """Seconds for which decisions are kept. Default: 1209600 (14 days). They are removed by the eighth of the log."""

    decision_log_max_size: int = 134217728
    """Maximum size of the decision log, in bytes. Default: 134217728 (128 MiB): more than half a million decisions. The
    oldest ones beyond it are removed, by the eighth of the log."""

    scheduler: str = "label"
    """`label`: every schedulable node that the selector matches. `pool`: also reserves capacity. Any other name refers
    to an installed entry point of the group `rcfarm.schedulers`. Default: `label`."""

    pool_strategy: Literal["spread", "pack"] = "spread"
    """Order in which the `pool` scheduler chooses nodes: the emptiest first, or the fullest that fits. Default:
    `spread`."""

    quarantine_after: int = 5
    """Failures of one RC in a row after which it is marked as quarantined, with the reason in its status; it is still
    retried, with a long back-off. Default: 5."""

    analysis_commands: dict[str, tuple[str, ...]] = {}
    """The commands that analyses of rollouts may name, each as a list of its program and arguments, under
    `[farm.analysis_commands]`: `smoke = ["/usr/local/bin/smoke-test", "--quick"]`. They run as the farm's user, without
    a shell and without the farm's environment. Default: none. All farms with one selector need the same."""

    analysis_hosts: tuple[str, ...] = ()
    """The places that analyses may call, as `HOST` or `HOST:PORT`; `*` stands for any text of a host, as in
    `*.example.com`. Default: none named, which means any: the authors of RC files can then have the farm send GETs
    wherever it can reach."""

    notify_url: str = ""
    """Where incidents are sent: a URL with `https://`, or `http://` to this machine. Default "": nowhere. PagerDuty:
    `https://events.pagerduty.com/v2/enqueue`. All farms of one installation need the same `notify_…` settings."""

    notify_format: Literal["pagerduty", "json"] = "pagerduty"
    """`pagerduty`: events of PagerDuty's Events API v2. `json`: one JSON object per event, by POST. Default:
    `pagerduty`."""

    notify_key_file: Path | None = None
    """File with PagerDuty's routing key, or, for `json`, with a token that is sent as `Authorization: Bearer`. Read
    again for each event. Default: `null`: no token; `pagerduty` needs the key."""

    notify_ca_file: Path | None = None
    """File with the certificates, as PEM, of the authorities that may have signed the receiver's. Default: `null`: the
    system's."""

    notify_name: str = ""
    """Name of this installation in incidents; their keys begin with it. Default "": the root of the store's keys.
    Installations that send to the same receiver need different names."""

    notify_after: float = 60.0
    """Seconds for which an RC must fail before it is an incident. Default: 60: a crash that heals notifies nobody."""

    def checked(self) -> FarmSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        _require(
            is_dns_label(self.name),
            f"farm.name: {self.name!r} is not a DNS label (at most 63 of a-z, 0-9 and '-', not at either end)",
        )
        try:
            Selector.parse(self.selector)
        except BadSelector as error:
            raise BadSettings(f"farm.selector: {error}") from error
        for field in _POSITIVE_OF_FARM:
            _require(getattr(self, field) > 0, f"farm.{field}: {getattr(self, field):g} must be above zero")
        for field in ("audit_max_age", "audit_max_size", "deleted_rcs_max_age", "deleted_rcs_max_count"):
            _require(
                getattr(self, field) >= 0, f"farm.{field}: {getattr(self, field):g} must not be negative; 0: no bound"
            )
        _require(0.0 < self.watch_share <= 1.0, f"farm.watch_share: {self.watch_share:g} must be above 0 and at most 1")
        _require(
            self.decision_log_max_size >= MiB,
            f"farm.decision_log_max_size: {self.decision_log_max_size} must be at least {MiB} bytes; "
            "farm.decision_log: null turns the log off",
        )
        _require(
            self.decision_log is None or self.decision_log.is_absolute(),
            f"farm.decision_log: {str(self.decision_log)!r} must be the absolute path of a folder; null turns it off",
        )
        if self.scheduler not in SCHEDULERS and self.scheduler not in (known := scheduler_plugins()):
            raise BadSettings(
                f"farm.scheduler: {self.scheduler!r} is neither {' nor '.join(SCHEDULERS)}, nor an installed entry "
                f"point of the group {SCHEDULER_GROUP} ({', '.join(sorted(known)) or 'there is none'})"
            )
        _require(0.0 < self.brake_share <= 1.0, f"farm.brake_share: {self.brake_share:g} must be above 0 and at most 1")
        for name, argv in self.analysis_commands.items():
            _require(
                is_dns_label(name),
                f"farm.analysis_commands: {name!r} is not a DNS label (at most 63 of a-z, 0-9 and '-' inside)",
            )
            _require(
                bool(argv) and argv[0].startswith("/") and not any("\0" in text for text in argv),
                f"farm.analysis_commands: {name} must begin with the absolute path of a program",
            )
        for pattern in self.analysis_hosts:
            found = re.fullmatch(r"(?:[A-Za-z0-9*._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?", pattern)
            _require(
                found is not None and (found[1] is None or 0 < int(found[1]) < 65536),
                f"farm.analysis_hosts: {pattern!r} is not HOST or HOST:PORT, without scheme and path",
            )
        self._check_notifier()
        return self

    def _check_notifier(self) -> None:
        for field in ("notify_key_file", "notify_ca_file"):
            path: Path | None = getattr(self, field)
            _require(
                path is None or path.is_absolute(),
                f"farm.{field}: {str(path)!r} must be the absolute path of a file",
            )
        _require(self.notify_after >= 0, f"farm.notify_after: {self.notify_after:g} must not be negative")
        if not self.notify_url:
            return
        try:
            url = urlsplit(self.notify_url)
            host, _ = url.hostname or "", url.port
        except ValueError as error:
            raise BadSettings(f"farm.notify_url: {self.notify_url!r} is no URL: {error}") from error
        is_here = host in ("localhost", "127.0.0.1", "::1")
        _require(
            bool(host) and (url.scheme == "https" or (url.scheme == "http" and is_here)),
            f"farm.notify_url: {self.notify_url!r} must begin with https://, or with http:// and this machine's own "
            "address: the key would be readable on the way",
        )
        _require(
            "@" not in url.netloc and not url.fragment,
            "farm.notify_url: leave out user, password and fragment; a secret belongs into farm.notify_key_file",
        )
        _require(
            self.notify_format != "pagerduty" or self.notify_key_file is not None,
            "farm.notify_key_file: is missing; PagerDuty needs the routing key of the service, in a file",
        )


class TasksSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task engine. Durations in seconds, sizes in bytes. The plugin `process` takes its scheduler from the section
    `farm`."""

    name: str = msgspec.field(default_factory=default_farm_name)
    """Name of the engine, a DNS-1123 label. Default: the host name. Engines of one installation need different
    names."""

    selector: str = ""
    """Selector of the executions that this engine claims, by their labels. Default "": all. Engines with the same
    selector share the work."""

    concurrency: int = 32
    """Plugin calls in flight at once, for each plugin. Default: 32: a plugin that hangs delays no other."""

    call_timeout: float = 60.0
    """Time limit of one call of a plugin. Default: 60, above the 15 s for which an abort waits for an agent."""

    concurrent_commits: int = 12
    """Transactions in flight at once. Default: 12: more do not raise Consul's rate, they only lengthen the wait."""

    claim_grace: float = 10.0
    """Seconds for which a free execution is left to its shard's preferred engine. Default: 10, as the farm's."""

    handover_interval: float = 0.1
    """Seconds between the starts of two hand-overs of shards to another engine. Default: 0.1, as the farm's."""

    watch_share: float = 0.2
    """Part of one core, above 0 and up to 1, that this engine may spend on refreshing its views. Default: 0.2."""

    enabled: tuple[str, ...] = ()
    """Ids of the plugins to load. Default: none named, which means all that are installed."""

    defaults: dict[str, str] = {}
    """The plugin's id by type of task, where several plugins handle a type. Default: none."""

    data: str = msgspec.field(default_factory=lambda: str(default_state_dir().with_name("tasks")))
    """Where inputs, outputs and cached results are kept: a directory, `memory:`, `s3://…`, `gs://…`, `az://…` or
    `https://…`. Default: `/var/lib/rcfarm/tasks` for root, else under `~/.local/state`. Several engines need a place
    that all of them reach."""

    max_dataset_size: int = 10 * MiB
    """Largest single input or output that the engine reads, in bytes. Default: 10 MiB."""

    retention_age: float = 604800.0
    """Seconds for which an ended execution is kept, with its events and its data; 0: for ever. Default: 604800 (one
    week)."""

    retention_count: int = 10000
    """How many ended executions are kept, the newest; 0: no limit. Default: 10000."""

    retention_per_type: int = 0
    """How many ended executions of one type of task in one project are kept, the newest; 0: no limit. Default: 0."""

    secrets_dir: str = ""
    """Directory with a file for each secret that plugins may read. Default "": none."""

    secrets_prefix: str = "RCFARM_SECRET_"
    """Beginning of the names of environment variables that hold secrets for plugins. Default: `RCFARM_SECRET_`. Not
    empty: plugins must not read the rest of the environment."""

    secrets_token_file: str = ""
    """File with the Consul token for secrets in the store, at `<root>-secrets/<key>`. It may read that prefix and
    nothing else. Default "": secrets are not looked up in the store."""

    log_events: bool = True
    """Whether each event of an execution is logged. Default: true."""

    webhooks: tuple[str, ...] = ()
    """URLs to which each event is posted as JSON, at least once. Default: none."""

    webhook_token_file: str = ""
    """File with a token that is sent to the webhooks as `Authorization: Bearer …`. Default "": none."""

    kubernetes: bool = False
    """Whether the plugins `pod` and `framework` use the cluster that the section `kube` names. Default: false; their
    executions then fail with the reason."""

    http_remotes: dict[str, Any] = {}
    """The job APIs that the plugin `http` may call, by name, as tables: `[tasks.http_remotes.NAME]`. Default: none."""

    push_listen: str = ""
    """`HOST:PORT` or `[IPV6]:PORT` of a listener on which remote systems report that a job of the plugin `http` has
    changed. Default "": none. It needs `push_url` and `push_secret`."""

    push_url: str = ""
    """URL under which remote systems reach `push_listen` of this engine; its path is the listener's. Default "": no
    pushes."""

    push_secret: str = ""
    """Key of the secret that the token in each push address is made of; every request needs one. Default "": no
    pushes."""

    def checked(self) -> TasksSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        _require(
            is_dns_label(self.name),
            f"tasks.name: {self.name!r} is not a DNS label (at most 63 of a-z, 0-9 and '-', not at either end)",
        )
        try:
            Selector.parse(self.selector)
        except BadSelector as error:
            raise BadSettings(f"tasks.selector: {error}") from error
        for field in ("concurrency", "concurrent_commits", "call_timeout", "handover_interval", "max_dataset_size"):
            _require(getattr(self, field) > 0, f"tasks.{field}: {getattr(self, field):g} must be above zero")
        _require(
            0.0 < self.watch_share <= 1.0, f"tasks.watch_share: {self.watch_share:g} must be above 0 and at most 1"
        )
        for field in ("retention_age", "retention_count", "retention_per_type"):
            _require(getattr(self, field) >= 0, f"tasks.{field}: {getattr(self, field):g} must not be negative")
        for url in self.webhooks:
            _require(url.startswith(("http://", "https://")), f"tasks.webhooks: {url!r} is not an http(s) URL")
        _require(
            self.secrets_prefix != "", "tasks.secrets_prefix: must not be empty: plugins would read every variable"
        )
        push = {self.push_listen != "", self.push_url != "", self.push_secret != ""}
        _require(
            len(push) == 1, "tasks.push_listen, tasks.push_url and tasks.push_secret belong together: set all or none"
        )
        _require(
            not self.push_url or (self.push_url.startswith(("http://", "https://")) and "?" not in self.push_url),
            f"tasks.push_url: {self.push_url!r} is not an http(s) URL without a query",
        )
        return self


class WebSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The listener for `/livez` (also `/healthz`), `/readyz` and `/metrics`."""

    listen: str = ""
    """`HOST:PORT`, `[IPV6]:PORT`, or `off`. Default "": 127.0.0.1 and the role's port: 9701 for a farm, 9702 for an
    agent, 9703 for `rcfarm jobs`, 9704 for `rcfarm extender`, 9705 for `rcfarm tasks`, 9700 for `rcfarm dev`."""

    metrics_listen: str = ""
    """`HOST:PORT` of one more listener, which serves `/metrics` alone, to everyone: for a Prometheus that sends no
    token. Metrics name namespaces, kinds and resources. Default "": none."""

    token: str = ""
    """Secret that clients send as `Authorization: Bearer …`. Default "": none, which is only allowed on loopback.
    `/livez` never needs it. Prefer `token_file`; `--set` does not accept it, because every user can read command
    lines."""

    token_file: str = ""
    """File that holds the token. Default "": none."""

    def __repr__(self) -> str:
        token = "***" if self.token else ""  # settings appear in logs and tracebacks
        return (
            f"WebSettings(listen={self.listen!r}, metrics_listen={self.metrics_listen!r}, token={token!r}, "
            f"token_file={self.token_file!r})"
        )


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe event that is logged. Default: `info`."""

    format: Literal["auto", "json", "console"] = "auto"
    """`json`: one object per line. `console`: for people. Default `auto`: console on a terminal, otherwise JSON."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a daemon."""

    store: StoreSettings = StoreSettings()
    session: SessionSettings = SessionSettings()
    farm: FarmSettings = msgspec.field(default_factory=FarmSettings)
    agent: AgentSettings = msgspec.field(default_factory=AgentSettings)
    tasks: TasksSettings = msgspec.field(default_factory=TasksSettings)
    kube: KubeSettings = KubeSettings()
    jobs: JobsSettings = JobsSettings()
    extender: ExtenderSettings = ExtenderSettings()
    web: WebSettings = WebSettings()
    log: LogSettings = LogSettings()

    def checked(self) -> Settings:
        """Return these settings if they are valid, alone and together. Raises `BadSettings`."""
        self.store.checked()
        self.session.checked()
        self.farm.checked()
        self.agent.checked()
        self.tasks.checked()
        self.kube.checked()
        self.jobs.checked()
        self.extender.checked()
        farm, session, store, agent = self.farm, self.session, self.store, self.agent
        lease = session.check_ttl or session.ttl
        _require(
            farm.claim_grace >= lease,
            f"farm.claim_grace: {farm.claim_grace:g} s must not be below the session's lease ({lease:g} s): another "
            "farm must not claim the RCs of a preferred farm that still renews its session",
        )
        _require(
            self.tasks.claim_grace >= lease,
            f"tasks.claim_grace: {self.tasks.claim_grace:g} s must not be below the session's lease ({lease:g} s): "
            "another engine must not claim the executions of a preferred engine that still renews its session",
        )
        _require(
            farm.node_lost_after > agent.session_ttl,
            f"farm.node_lost_after: {farm.node_lost_after:g} s must be above agent.session_ttl ({agent.session_ttl:g} "
            "s): a node is not lost before its agent's session has ended",
        )
        needed = farm.concurrent_commits + FARM_WATCHES
        _require(
            needed <= store.max_connections,
            f"farm.concurrent_commits: {farm.concurrent_commits} transactions at once and {FARM_WATCHES} watches need "
            f"{needed} connections, above store.max_connections ({store.max_connections}); lower one or raise the "
            "other",
        )
        return self
