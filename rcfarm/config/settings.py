"""Settings of the daemons: one class per topic, frozen, checked once at the start.

The text under each field gives its unit, its default and the reason; the settings reference is generated from it.
`rcfarm.config.sources.load` reads them from a TOML file, the environment and flags.

Some settings only make sense together (a session must outlive its check, a node must not count as lost sooner than its
session ends). `Settings.checked` holds these relations, and its messages name both sides.
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Literal

import msgspec

from rcfarm.config.agent import AgentSettings
from rcfarm.config.errors import BadSettings
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
    "WebSettings",
    "default_farm_name",
]

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


_POSITIVE = (
    "concurrent_reconciles", "concurrent_commits", "resync_interval", "handover_interval", "manifest_gc_interval",
    "quarantine_after",
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

    scheduler: str = "label"
    """`label`: every schedulable node that the selector matches. `pool`: also reserves capacity. Any other name refers
    to an installed entry point of the group `rcfarm.schedulers`. Default: `label`."""

    pool_strategy: Literal["spread", "pack"] = "spread"
    """Order in which the `pool` scheduler chooses nodes: the emptiest first, or the fullest that fits. Default:
    `spread`."""

    quarantine_after: int = 5
    """Failures of one RC in a row after which it is marked as quarantined, with the reason in its status; it is still
    retried, with a long back-off. Default: 5."""

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
        for field in _POSITIVE:
            _require(getattr(self, field) > 0, f"farm.{field}: {getattr(self, field):g} must be above zero")
        for field in ("audit_max_age", "audit_max_size"):
            _require(
                getattr(self, field) >= 0, f"farm.{field}: {getattr(self, field):g} must not be negative; 0: no bound"
            )
        _require(0.0 < self.watch_share <= 1.0, f"farm.watch_share: {self.watch_share:g} must be above 0 and at most 1")
        if self.scheduler not in SCHEDULERS and self.scheduler not in (known := scheduler_plugins()):
            raise BadSettings(
                f"farm.scheduler: {self.scheduler!r} is neither {' nor '.join(SCHEDULERS)}, nor an installed entry "
                f"point of the group {SCHEDULER_GROUP} ({', '.join(sorted(known)) or 'there is none'})"
            )
        _require(0.0 < self.brake_share <= 1.0, f"farm.brake_share: {self.brake_share:g} must be above 0 and at most 1")
        return self


class WebSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The listener for `/livez`, `/readyz` and `/metrics`."""

    listen: str = ""
    """`HOST:PORT`, `[IPV6]:PORT`, or `off`. Default "": 127.0.0.1 and the role's port: 9701 for a farm, 9702 for an
    agent, 9703 for `rcfarm jobs`, 9704 for `rcfarm extender`, 9700 for `rcfarm dev`."""

    token: str = ""
    """Secret that clients send as `Authorization: Bearer …`. Default "": none, which is only allowed on loopback.
    `/livez` never needs it. Prefer `token_file`; `--set` does not accept it, because every user can read command
    lines."""

    token_file: str = ""
    """File that holds the token. Default "": none."""

    def __repr__(self) -> str:
        token = "***" if self.token else ""  # settings appear in logs and tracebacks
        return f"WebSettings(listen={self.listen!r}, token={token!r}, token_file={self.token_file!r})"


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
