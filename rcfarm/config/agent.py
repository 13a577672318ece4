"""Settings of a node agent, and what it finds out about its machine where they leave that open."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from rcfarm.config import BadSettings
from store.schema.keys import BadLabel, check_labels, is_node_name
from store.schema.records import Capacity, Labels

MiB = 1024 * 1024
DEFAULT_SOURCES = ("https://", "http://")


def default_state_dir() -> Path:
    """`/var/lib/rcfarm/agent` for root, otherwise `rcfarm/agent` under `$XDG_STATE_HOME` (`~/.local/state`)."""
    if os.geteuid() == 0:
        return Path("/var/lib/rcfarm/agent")
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "rcfarm" / "agent"


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node agent. Durations in seconds, sizes in bytes."""

    node: str = msgspec.field(default_factory=lambda: socket.gethostname().lower())
    """Name of the node in the store; a DNS-1123 subdomain. Default: the host name. Two agents must never share one."""

    state_dir: Path = msgspec.field(default_factory=default_state_dir)
    """Directory for the agent's records, artifacts and logs. Default: `/var/lib/rcfarm/agent` for root, else under
    `~/.local/state`. It must survive a restart of the agent: without it running processes can't be adopted."""

    address: str = ""
    """Address of the node's services: the value of `RCFARM_ADDRESS`, the target of health checks and the answer of
    discovery. Default "": the source address of this machine's default route, or 127.0.0.1 without one."""

    labels: Labels = {}
    """Labels of the node, merged into those it has. A label that an operator changed in the store stays so until its
    value here changes, too. Default: none."""

    cpu: int | None = None
    """Capacity in millicores. Default: detected, 1000 for each CPU that the agent may run on."""

    memory: int | None = None
    """Capacity in bytes. Default: detected, the machine's or the control group's memory, whichever is less."""

    devices: dict[str, int] = {}
    """Capacity in devices by kind, such as `gpu: 8`. Default: none; nothing is detected."""

    stop_pods_on_exit: bool = False
    """Whether stopping the agent stops its pods. Default: false, so that an upgrade of the agent does not affect
    pods."""

    cgroups: bool = True
    """Whether pods get control groups, which hold them to their limits and end all of their processes. Default: true;
    where the agent can't write any, it uses rlimits, and `rcfarm doctor` says why. False: never."""

    stop_orphans: bool = False
    """Whether pods are stopped whose intents vanished together with the node's record, because the store was emptied or
    replaced. Default: false: an accident in the store must not stop a fleet. Set it for one start of the agent, to stop
    such pods on purpose."""

    default_user: str = ""
    """The user, by name or number, of processes whose launchable names none. Default "": `nobody` when the agent runs
    as root, so that nothing runs as root by omission; otherwise the agent's own user. It is always allowed."""

    allowed_users: tuple[str, ...] = ("*",)
    """Users, by name or number, that a launchable may name besides `default_user`. `*` stands for every user but root,
    who is allowed only by name. Default: `*`. A client that may write manifests can act as any of them: list only those
    that pods need. Do not list users whose groups are equivalent to root, such as `docker`."""

    service_prefix: str = ""
    """Prefix of the names of all services that the agent registers in Consul, such as `pods-`. Default "": the name is
    the manifest's `id`, so a Consul policy has to list the names that an agent may register."""

    install_retry: float = 1.0
    """Seconds until a failed installation is retried; doubles up to `install_retry_cap`. Default: 1."""

    install_retry_cap: float = 60.0
    """Longest time between two attempts to install, in seconds. Default: 60."""

    restart_backoff: float = 0.2
    """Seconds until a process that ended is restarted; doubles up to `restart_backoff_cap`. Default: 0.2, because most
    crashes do not repeat."""

    restart_backoff_cap: float = 60.0
    """Longest time between two starts of one process, in seconds. Default: 60."""

    restart_reset: float = 30.0
    """Seconds after which a running process counts as healthy, so that its back-off is reset. Default: 30."""

    artifact_limit: int = 2048 * MiB
    """Largest artifact, in bytes, as downloaded and, separately, as unpacked. Default: 2 GiB, to bound the disk space
    that one bad manifest can take."""

    artifact_timeout: float = 900.0
    """Longest download of an artifact, in seconds. Default: 900. One that stops sending for 30 s fails earlier."""

    artifact_sources: tuple[str, ...] = DEFAULT_SOURCES
    """Allowed sources of artifacts, as URLs: an artifact's URL must have the scheme, the host and port if there is one,
    and the leading directories of one of them. Redirections are checked as well. Default: `https://` and `http://`, any
    server. `file:///srv/artifacts/` allows files below that directory; nothing is read from this machine's disks unless
    it is listed, because the agent may read more than the authors of manifests. `rcfarm dev` allows `file:///`."""

    secret_files: tuple[str, ...] = ("/etc/rcfarm/secrets/",)
    """Directories below which a pod's `env_from` may name files. Default: `/etc/rcfarm/secrets/`. A client that may
    write manifests can have the content of any file there that has lines of NAME=value. `rcfarm dev` allows all."""

    secrets_token_file: str = ""
    """File with the Consul token for the secrets of pods, at `<root>-secrets/<key>`. Default "": the agent's own token,
    which needs the policy that `rcfarm secret policy` prints."""

    unpack_timeout: float = 300.0
    """Seconds of processor time that unpacking an artifact may take; it may last three times as long on a busy machine.
    Default: 300. It runs in a separate process with at most 512 MiB of memory."""

    artifact_keep: float = 86400.0
    """Seconds for which an unused artifact stays cached. Default: one day, so that reverting is quick."""

    log_size: int = 16 * MiB
    """Size in bytes at which a log file is rotated. Default: 16 MiB. However fast a process writes, within about a
    second its older output is reduced to the last `log_size` times `log_files` bytes."""

    log_files: int = 4
    """How many rotated files are kept per launchable. Default: 4."""

    log_keep: float = 7 * 86400.0
    """Seconds for which the logs of a pod that is gone are kept. Default: one week."""

    log_interval: float = 1.0
    """Seconds between two checks of the sizes of the log files. Default: 1. After a check that found a file too large
    the next one follows within 0.1 s."""

    listen: str = ""
    """Where the agent serves the logs of its pods and runs commands in them, for `rcfarm rc logs` and `rc exec`:
    `HOST:PORT`, `[IPV6]:PORT` or `off`. Default "": a free port of 127.0.0.1, for commands on this machine. Any other
    host needs TLS, and a token or the certificates of clients. The address stands in the node's record."""

    listen_cert_file: str = ""
    """The certificate of that listener, with its chain; PEM. It must name the node (`DNS:node-1`), or commands refuse
    it. It is reloaded when it changes. Default "": plain HTTP, on loopback only."""

    listen_key_file: str = ""
    """The key of that certificate; PEM. Default ""."""

    listen_client_ca_file: str = ""
    """Certificate authority, PEM: the listener requires from every client a certificate issued by it. Default "": none
    is required."""

    listen_token_file: str = ""
    """File with the token that a client needs to read logs. Default "": on loopback `listener.token` in the state
    directory, which the agent creates, readable for its user alone (0600); beyond loopback none, and then
    `listen_client_ca_file` is required."""

    exec: Literal["on", "off", ""] = ""
    """Whether `rcfarm rc exec` may run commands in this node's pods. Default "": on for a listener on loopback, off
    beyond. Each command is written to the audit log first, so the agent's token must be allowed to write there."""

    exec_token_file: str = ""
    """File with the token that a client needs to run commands; it allows to read logs, too. Required beyond loopback
    while `exec` is on, and then another than that for logs. Default "": the token for logs."""

    port_range: tuple[int, int] = (20000, 32000)
    """First and last port that the agent gives to a pod that asks for port 0. Default: 20000 to 32000, below the range
    from which Linux takes the ports of outgoing connections."""

    flap_burst: int = 16
    """Changes of one pod's health that are published at once, as they happen. Default: 16."""

    flap_interval: float = 15.0
    """Seconds after which a further change may be published once `flap_burst` are used up; until then a pod that keeps
    changing is `unknown`. Default: 15."""

    discovery_interval: float = 60.0
    """Seconds between two comparisons of the services registered at the local Consul agent with the desired ones.
    Default: 60."""

    session_ttl: float = 10.0
    """The session's time to live, in seconds; Consul allows nothing below 10. Default: 10."""

    session_check_ttl: float | None = 3.0
    """The shorter lease kept by a check on the Consul agent, in seconds. Default: 3."""

    def checked(self) -> AgentSettings:
        """Return these settings if they are valid. Raises `BadSettings`."""
        if not is_node_name(self.node):
            raise BadSettings(f"agent.node: {self.node!r} is not a DNS name (lower-case letters, digits, '-' and '.')")
        try:
            check_labels(self.labels)
        except BadLabel as error:
            raise BadSettings(f"agent.labels: {error}") from error
        for directory in self.secret_files:
            if not directory.startswith("/"):
                raise BadSettings(f"agent.secret_files: {directory!r} is not an absolute path")
        for source in self.artifact_sources:
            if problem := _problem_of_source(source):
                raise BadSettings(f"agent.artifact_sources: {source!r}: {problem}")
        if re.fullmatch(r"([a-z0-9][a-z0-9-]*)?", self.service_prefix) is None or len(self.service_prefix) > 32:
            raise BadSettings(
                f"agent.service_prefix: {self.service_prefix!r} must be at most 32 lower-case letters, digits and '-', "
                "and begin with no '-'"
            )
        for field in ("cpu", "memory"):
            if (getattr(self, field) or 0) < 0:
                raise BadSettings(f"agent.{field}: must not be negative")
        for field in _POSITIVE_OF_AGENT:
            if getattr(self, field) <= 0:
                raise BadSettings(f"agent.{field}: must be above zero")
        if bool(self.listen_cert_file) != bool(self.listen_key_file):
            raise BadSettings("agent.listen_cert_file and agent.listen_key_file: set both, or none for plain HTTP")
        if self.listen_client_ca_file and not self.listen_cert_file:
            raise BadSettings("agent.listen_client_ca_file: needs agent.listen_cert_file and agent.listen_key_file")
        low, high = self.port_range
        if not 1 <= low <= high <= 65535:
            raise BadSettings(f"agent.port_range: {low} to {high} is not a range of ports within 1 to 65535")
        return self

    def capacity(self) -> Capacity:
        """Return the node's capacity: the values set here, else the detected ones."""
        return Capacity(
            cpu=1000 * len(os.sched_getaffinity(0)) if self.cpu is None else self.cpu,
            memory=detected_memory() if self.memory is None else self.memory,
            devices=dict(self.devices),
        )


_POSITIVE_OF_AGENT = (
    "install_retry", "install_retry_cap", "restart_backoff", "restart_backoff_cap", "restart_reset", "artifact_limit",
    "artifact_timeout", "unpack_timeout", "log_size", "log_files", "log_interval", "flap_burst", "flap_interval",
    "discovery_interval",
)  # fmt: skip


def _problem_of_source(source: str) -> str:
    """Return why the text is not a valid URL prefix, or ""."""
    try:
        parts = urlsplit(source)
        _ = parts.port
    except ValueError:
        return "not a URL"
    if parts.scheme not in ("http", "https", "file") or not source.startswith(f"{parts.scheme}://"):
        return "must begin with https://, http:// or file:///"
    if parts.query or parts.fragment or "@" in parts.netloc:
        return "only scheme, host and path are compared: leave out user, query and fragment"
    if parts.scheme == "file" and (parts.netloc or not parts.path):
        return "write file:/// and an absolute path"
    if not parts.netloc and parts.path and parts.scheme != "file":
        return "a path without a host"
    return ""


def detected_memory(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the memory of this machine, or of its control group (version 2) if that is less, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(cgroup.read_text()))
    except (OSError, ValueError):  # no such group, or "max"
        return total


def detected_address() -> str:
    """Return the source address towards the default route (nothing is sent), or 127.0.0.1 without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): routed like any other, but unused
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
