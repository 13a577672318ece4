"""Settings of the daemons: one class per topic, frozen, checked once at the start.

The text under each field gives its unit, its default and why it is so; the settings reference is generated from it.
`rcfarm.config_sources.load` reads them from a TOML file, the environment and flags.

Some settings only make sense together (a session must outlive its check, a node must not count as lost sooner than its
session ends). `Settings.checked` holds these relations, and its messages name both sides.
"""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Literal

import msgspec

from rcfarm.agent.settings import AgentSettings, BadSettings
from rcfarm.extender_settings import ExtenderSettings
from rcfarm.jobs_settings import JobsSettings, KubeSettings
from store.keys import is_dns_label
from store.selectors import BadSelector, Selector

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


def default_farm_name() -> str:
    """The first label of this machine's host name, made a DNS-1123 label."""
    label = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower().partition(".")[0])[:63].strip("-")
    return label or "farm"


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where truth lives. Credentials and TLS files come from Consul's own `CONSUL_HTTP_*` variables."""

    url: str = ""
    """`consul://HOST:PORT`, `consuls://HOST:PORT` (TLS), `embedded:DIR` or `memory:`. Default "": what
    `CONSUL_HTTP_ADDR` says, else the `rcfarm dev` that runs on this machine."""

    root: str = "rcfarm"
    """First part of every key. Default: `rcfarm`. Two installations can share one Consul under different roots."""

    max_connections: int = 64
    """Most connections that this process opens to the store. Default: 64, because Consul allows 200 per client address
    and drops readers beyond, and a machine may run a farm, an agent and operators' commands side by side."""


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lease under which a farm holds its locks. It decides how fast the RCs of a crashed farm are taken over."""

    ttl: float = 10.0
    """The session's time to live, in seconds. Default: 10, the least that Consul accepts."""

    check_ttl: float | None = 3.0
    """A shorter lease, in seconds, kept by a check on the Consul agent: a crashed farm is freed after this time, while
    `ttl` stays as a backstop. Default: 3. `null`: no check. Without permission for the check, `ttl` alone counts."""

    lock_delay: float = 0.0
    """Seconds for which Consul keeps a lock closed after its session was lost. Default: 0: every write is fenced, so
    there is nothing to wait for."""


SCHEDULERS = ("label", "pool")
SCHEDULER_GROUP = "rcfarm.schedulers"


def scheduler_plugins() -> dict[str, EntryPoint]:
    """Return the installed schedulers by name."""
    from importlib.metadata import entry_points  # reads every installed package

    return {point.name: point for point in entry_points(group=SCHEDULER_GROUP)}


class FarmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One farm. Durations in seconds."""

    name: str = msgspec.field(default_factory=default_farm_name)
    """Name of the farm, a DNS-1123 label. Default: the host name. Farms of one installation need different names."""

    selector: str = ""
    """Which RCs this farm takes, by their labels, in the Kubernetes grammar. Default "": all. Farms of equal selector
    share the work."""

    concurrent_reconciles: int = 128
    """RCs worked on at once. Default: 128: most of that time is spent waiting for a commit, and RCs that commit at the
    same time share transactions."""

    concurrent_commits: int = 12
    """Transactions on their way at once. Default: 12: more does not raise Consul's rate, it only lengthens the wait."""

    claim_grace: float = 10.0
    """Seconds for which a free RC is left to the farm that its shard prefers; then any farm of the group may take it.
    Default: 10, well above the session's lease, so that it only counts when the preferred farm is stuck."""

    node_lost_after: float = 60.0
    """Seconds without a live agent after which a node's pods may be moved elsewhere. Default: 60: a restart of an agent
    or a short network failure moves nothing."""

    resync_interval: float = 300.0
    """Seconds after which an RC is looked at though nothing changed, jittered. Default: 300; changes themselves are
    seen at once."""

    watch_share: float = 0.2
    """Part of one core, above 0 and up to 1, that this farm may spend on reading again what it watches; changes that
    come faster are read together. Default: 0.2. Less saves work here and in the store, and sees bursts later."""

    brake_share: float = 0.5
    """Part of the known RCs, above 0 and up to 1, that may vanish at once before the farm holds. Default: 0.5."""

    handover_interval: float = 0.1
    """Seconds between the beginnings of two hand-overs of shards to another farm. Default: 0.1: a farm that joins has
    its share within seconds, and the store is not asked for all of it at once."""

    manifest_gc_interval: float = 60.0
    """Seconds between two searches for manifests that nothing refers to. Default: 60."""

    audit_max_age: float = 7776000.0
    """Seconds for which events are kept in the audit log; 0: for ever. Default: 7776000 (90 days). One farm of all
    removes what is older."""

    audit_max_size: int = 268435456
    """Bytes that the audit log may take in the store; 0: any number. Default: 268435456 (256 MiB): a million events or
    so, for which Consul needs several times the memory. The oldest events beyond it are removed."""

    scheduler: str = "label"
    """`label`: every schedulable node that the selector matches. `pool`: also reserves capacity. Any other name is that
    of an installed entry point of the group `rcfarm.schedulers`. Default: `label`."""

    pool_strategy: Literal["spread", "pack"] = "spread"
    """Order in which the `pool` scheduler takes nodes: the emptiest first, or the fullest that fits. Default:
    `spread`."""

    quarantine_after: int = 5
    """Failures of one RC in a row after which it is marked as quarantined, with the reason in its status; it is still
    tried again, with long back-off. Default: 5."""


class WebSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The listener for `/livez`, `/readyz` and `/metrics`."""

    listen: str = ""
    """`HOST:PORT`, `[IPV6]:PORT`, or `off`. Default "": 127.0.0.1 and the role's port: 9701 for a farm, 9702 for an
    agent, 9703 for `rcfarm jobs`, 9704 for `rcfarm extender`, 9700 for `rcfarm dev`."""

    token: str = ""
    """Secret that callers send as `Authorization: Bearer …`. Default "": none, which is only accepted on loopback.
    `/livez` never needs it. Prefer `token_file`; `--set` does not take it, for every user can read command lines."""

    token_file: str = ""
    """File that holds the token. Default "": none."""

    def __repr__(self) -> str:
        token = "***" if self.token else ""  # settings end up in logs and tracebacks
        return f"WebSettings(listen={self.listen!r}, token={token!r}, token_file={self.token_file!r})"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe event that is logged. Default: `info`."""

    format: Literal["auto", "json", "console"] = "auto"
    """`json`: one object per line. `console`: for people. Default `auto`: console on a terminal, otherwise JSON."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a daemon can be told."""

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
        """These settings, if they make sense, alone and together. Raises `BadSettings`."""
        _check_store(self.store)
        _check_session(self.session)
        _check_farm(self.farm)
        self.agent.checked()
        self.kube.checked()
        self.jobs.checked()
        self.extender.checked()
        _check_relations(self)
        return self


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise BadSettings(message)


def _check_store(store: StoreSettings) -> None:
    _require(
        re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", store.root) is not None,
        f"store.root: {store.root!r} is not a key prefix: letters, digits, '.', '_', '-', with '/' between",
    )
    _require(
        0 < store.max_connections < CONSUL_CONNECTIONS,
        f"store.max_connections: {store.max_connections} must be between 1 and {CONSUL_CONNECTIONS - 1}: "
        f"Consul refuses more than {CONSUL_CONNECTIONS} from one client",
    )


def _check_session(session: SessionSettings) -> None:
    least, most = CONSUL_TTL
    _require(
        least <= session.ttl <= most,
        f"session.ttl: {session.ttl:g} s must be between {least:g} and {most:g} s, as Consul requires",
    )
    check_ttl = session.check_ttl
    _require(
        check_ttl is None or 1.0 <= check_ttl < session.ttl,
        f"session.check_ttl: {check_ttl} s must be at least 1 s, so that a renewal each third of it is not lost to a "
        f"pause, and below session.ttl ({session.ttl:g} s), which is its backstop; null turns it off",
    )
    _require(
        0.0 <= session.lock_delay <= CONSUL_LOCK_DELAY,
        f"session.lock_delay: {session.lock_delay:g} s must be between 0 and {CONSUL_LOCK_DELAY:g} s",
    )


_POSITIVE = (
    "concurrent_reconciles", "concurrent_commits", "resync_interval", "handover_interval", "manifest_gc_interval",
    "quarantine_after",
)  # fmt: skip


def _check_farm(farm: FarmSettings) -> None:
    _require(
        is_dns_label(farm.name),
        f"farm.name: {farm.name!r} is not a DNS label (at most 63 of a-z, 0-9 and '-', not at either end)",
    )
    try:
        Selector.parse(farm.selector)
    except BadSelector as error:
        raise BadSettings(f"farm.selector: {error}") from error
    for field in _POSITIVE:
        _require(getattr(farm, field) > 0, f"farm.{field}: {getattr(farm, field):g} must be above zero")
    for field in ("audit_max_age", "audit_max_size"):
        _require(getattr(farm, field) >= 0, f"farm.{field}: {getattr(farm, field):g} must not be negative; 0: no bound")
    _require(0.0 < farm.watch_share <= 1.0, f"farm.watch_share: {farm.watch_share:g} must be above 0 and at most 1")
    if farm.scheduler not in SCHEDULERS and farm.scheduler not in (known := scheduler_plugins()):
        raise BadSettings(
            f"farm.scheduler: {farm.scheduler!r} is neither {' nor '.join(SCHEDULERS)}, nor an installed entry point "
            f"of the group {SCHEDULER_GROUP} ({', '.join(sorted(known)) or 'there is none'})"
        )
    _require(0.0 < farm.brake_share <= 1.0, f"farm.brake_share: {farm.brake_share:g} must be above 0 and at most 1")


def _check_relations(settings: Settings) -> None:
    farm, session, store, agent = settings.farm, settings.session, settings.store, settings.agent
    lease = session.check_ttl or session.ttl
    _require(
        farm.claim_grace >= lease,
        f"farm.claim_grace: {farm.claim_grace:g} s must not be below the session's lease ({lease:g} s): a preferred "
        "farm that renews its session must not lose its RCs to another meanwhile",
    )
    _require(
        farm.node_lost_after > agent.session_ttl,
        f"farm.node_lost_after: {farm.node_lost_after:g} s must be above agent.session_ttl ({agent.session_ttl:g} s): "
        "a node is not lost before its agent's session has ended",
    )
    needed = farm.concurrent_commits + FARM_WATCHES
    _require(
        needed <= store.max_connections,
        f"farm.concurrent_commits: {farm.concurrent_commits} transactions at once and {FARM_WATCHES} watches need "
        f"{needed} connections, above store.max_connections ({store.max_connections}); lower one or raise the other",
    )
