"""Pod manifests: what to run. Identity is the SHA-256 of the manifest's exact bytes.

A manifest is YAML or JSON. `parse` reads JSON first (microseconds) and falls back to YAML (milliseconds), because a
farm reads thousands of them at its start. YAML is bounded in values, aliases written out (see `store.decoding`), so
that no manifest blocks a farm's loop.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import msgspec

from store.decoding import NotJson, Undecodable, converted, from_json, load_yaml
from store.errors import RcfarmError
from store.schema.keys import is_dns_label
from store.schema.records import MAX_QUANTITY, Capacity, Count, Quantity
from store.schema.secrets import is_secret_key

MAX_MANIFEST_BYTES = 256 * 1024  # leaves room in a 512 KiB transaction for base64 and the other operations

MAX_URL = 4096
MIN_CPU = 10  # millicores: a quota of 1 ms in each 100 ms, the kernel's least
MIN_BARE_CPU = 100  # millicores: a smaller whole number was meant as a number of CPUs
MIN_MEMORY = 1024 * 1024  # bytes
_HOST = re.compile(r"[^\s/\\?#@%<>^|\[\]]+")  # IPv6 addresses come without brackets


class BadManifest(RcfarmError, ValueError):
    """A manifest that can't be used; the message names the field and what to do."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """People write manifests: an unknown field is taken for a typo and refused."""


class Artifact(_Strict, frozen=True, kw_only=True):
    """A tar archive, which is unpacked, or a single file."""

    url: str
    """`https://`, `http://` or `file:///`, as far as the node allows it."""

    sha256: str
    """The digest of the content, in lower-case hex."""


class Resources(_Strict, frozen=True, kw_only=True):
    """What a launchable may use: its whole tree of processes in `cpu`, `memory` and `pids`, each process in `nofile`,
    `nproc` and `core`. Schedulers reserve `cpu`, `memory` and `devices`. What is left out, or 0, has no limit."""

    cpu: Quantity | float | str = 0
    """Processor time, as Kubernetes writes it: `500m` is half of one CPU. A whole number counts millicores."""

    memory: Quantity | str = 0
    """Memory, as Kubernetes writes it: `512Mi`. A whole number counts bytes."""

    pids: Quantity | None = None
    """Processes and threads."""

    devices: dict[str, Count] = {}
    """How many devices of each kind schedulers reserve."""

    nofile: Quantity | None = None
    """The rlimit of open files."""

    nproc: Quantity | None = None
    """The rlimit of processes of its user."""

    core: Quantity | None = None
    """The rlimit of core dumps, in bytes."""

    @property
    def millicores(self) -> int:
        """`cpu` as a number. Raises ValueError for what is no quantity."""
        return self.cpu if isinstance(self.cpu, int) else _amount(self.cpu, 1000)

    @property
    def memory_bytes(self) -> int:
        """`memory` as a number. Raises ValueError for what is no quantity."""
        return self.memory if isinstance(self.memory, int) else _amount(self.memory)


def _amount(text: str | float, units: int = 1) -> int:
    """Return a quantity in `1 / units`, rounded up. Raises ValueError."""
    from store.quantity import parse_quantity  # most manifests need none

    amount = parse_quantity(text) * units
    if not 0 <= amount <= MAX_QUANTITY:
        raise ValueError(f"{text!r} is out of range")
    return math.ceil(amount)


class EnvFrom(_Strict, frozen=True, kw_only=True):
    """Where variables stand that must not stand in a manifest: exactly one of both."""

    file: str = ""
    """A file of the node with lines of NAME=value, below a directory of `agent.secret_files`."""

    consul: str = ""
    """The name of a secret in Consul, as `rcfarm secret set` stores it."""


class Launchable(_Strict, frozen=True, kw_only=True):
    """One process of a pod."""

    command: list[str]
    """The program and its arguments; no shell is involved. `${RCFARM_…}` is replaced."""

    env: dict[str, str] = {}
    """Further environment variables; they override all others. `${RCFARM_…}` is replaced."""

    env_from: EnvFrom | list[EnvFrom] = []
    """Where secrets stand."""

    cwd: str = ""
    """The working directory, relative to the artifact, or without one to `RCFARM_DIR`. `${RCFARM_…}` is replaced."""

    artifact: Artifact | None = None
    """What is fetched before the start."""

    user: str = ""
    """The user, by name or number, if the node allows it. Default: the node's `agent.default_user`."""

    restart: Literal["always", "on-failure", "never"] = "always"
    """When it is started again after its end: `on-failure` is until it exits with 0. Default: `always`."""

    stop_signal: str = "SIGTERM"
    """What is sent to its process group to stop it. Default: `SIGTERM`."""

    stop_timeout: float = 10.0
    """Seconds after `stop_signal` until it is killed. Default: 10."""

    resources: Resources = Resources()
    """What it may use, and what schedulers reserve for it."""

    @property
    def secrets(self) -> list[EnvFrom]:
        """`env_from`, as a list."""
        return [self.env_from] if isinstance(self.env_from, EnvFrom) else self.env_from


class HttpCheck(_Strict, frozen=True, kw_only=True):
    """Passing on any answer of 200 to 299; redirections are not followed."""

    path: str = "/"
    """Of the GET. Default: `/`."""

    port: str | int = "http"
    """A name from `ports`, or a number. Default: `http`."""


class TcpCheck(_Strict, frozen=True, kw_only=True):
    """Passing when a connection opens."""

    port: str | int
    """A name from `ports`, or a number."""


class ExecCheck(_Strict, frozen=True, kw_only=True):
    """Passing on exit code 0, warning on 1, critical on anything else: Consul's convention."""

    command: list[str]
    """It runs in the directory, with the environment and as the user of the first launchable."""


class HealthCheck(_Strict, frozen=True, kw_only=True):
    """At most one of `http`, `tcp` and `exec`; with none of them, a running pod is passing."""

    http: HttpCheck | None = None
    """A GET."""

    tcp: TcpCheck | None = None
    """A connection."""

    exec: ExecCheck | None = None
    """A command."""

    interval: float = 2.0
    """Seconds between two probes. Default: 2."""

    timeout: float = 5.0
    """Seconds that a probe may take. Default: 5."""


class Manifest(_Strict, frozen=True, kw_only=True):
    """A pod."""

    id: str
    """The pod id, a DNS label: there is at most one such pod on a node."""

    launchables: dict[str, Launchable]
    """The processes by name, a DNS label; at least one."""

    config: dict[str, Any] = {}
    """Any value; each process finds it as JSON in the file `RCFARM_CONFIG`."""

    ports: dict[str, int] = {}
    """Numbers of ports by name. 0: the agent chooses a free port, the same again at later starts if possible. A process
    finds it as `RCFARM_PORT_<NAME>`."""

    health: HealthCheck = HealthCheck()
    """How the pod is checked."""

    restarted_at: str = ""
    """Set by `rcfarm rollout restart`, so that the same pod is another manifest."""

    def requested(self) -> Capacity:
        """Return the pod's resource request: the sum over its launchables."""
        devices: dict[str, int] = {}
        for launchable in self.launchables.values():
            for kind, count in launchable.resources.devices.items():
                devices[kind] = devices.get(kind, 0) + count
        return Capacity(
            cpu=sum(launchable.resources.millicores for launchable in self.launchables.values()),
            memory=sum(launchable.resources.memory_bytes for launchable in self.launchables.values()),
            devices=devices,
        )


def digest(raw: bytes) -> str:
    """Return the manifest's identity: the lower-case hex SHA-256 of its exact bytes."""
    return hashlib.sha256(raw).hexdigest()


_decoder = msgspec.json.Decoder(Manifest)


def parse(raw: bytes) -> Manifest:
    """Read a manifest from YAML or JSON bytes. Raises `BadManifest`."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BadManifest(
            f"the manifest has {len(raw)} bytes; the limit is {MAX_MANIFEST_BYTES}: move files to an artifact"
        )
    try:
        return checked(from_json(_decoder, raw))
    except NotJson:
        pass
    except Undecodable as error:
        raise BadManifest(str(error)) from error
    try:
        return from_mapping(load_yaml(raw))
    except Undecodable as error:
        raise BadManifest(str(error)) from error


def from_mapping(fields: object) -> Manifest:
    """Build a manifest from already decoded YAML. Raises `BadManifest`."""
    try:
        return checked(converted(fields, Manifest))
    except Undecodable as error:
        raise BadManifest(str(error)) from error


def checked(manifest: Manifest, *, as_written: bool = False) -> Manifest:
    """Return the manifest if its fields are valid and consistent. Raises `BadManifest`.

    `as_written`: it comes from a person, so what is valid but hardly intended is refused, too. Stored ones may have it.
    """
    import signal

    if not is_dns_label(manifest.id):
        raise BadManifest(f"id: {manifest.id!r} is not a DNS label (lower-case letters, digits and '-', at most 63)")
    if not manifest.launchables:
        raise BadManifest("launchables: at least one is needed")
    for name, launchable in manifest.launchables.items():
        at = f"launchables.{name}"
        if not is_dns_label(name):
            raise BadManifest(f"{at}: the name is not a DNS label")
        if not launchable.command:
            raise BadManifest(f"{at}.command: must name a program")
        if not 0 <= launchable.stop_timeout < math.inf:  # YAML has .nan and .inf
            raise BadManifest(f"{at}.stop_timeout: must be a number of seconds, and not negative")
        if launchable.stop_signal not in signal.Signals.__members__:
            raise BadManifest(f"{at}.stop_signal: {launchable.stop_signal!r} is not a signal; use SIGTERM, SIGINT, …")
        for number, source in enumerate(launchable.secrets):
            if problem := problem_of_source(source):
                raise BadManifest(f"{at}.env_from[{number}]: {problem}")
        artifact = launchable.artifact
        if artifact and (problem := problem_of_url(artifact.url)):
            raise BadManifest(f"{at}.artifact.url: {problem}")
        if artifact and not (len(artifact.sha256) == 64 and all(c in "0123456789abcdef" for c in artifact.sha256)):
            raise BadManifest(f"{at}.artifact.sha256: must be 64 lower-case hex digits")
        _check_resources(launchable.resources, f"{at}.resources", as_written)
    for name, port in manifest.ports.items():
        if not 0 <= port <= 65535:
            raise BadManifest(
                f"ports.{name}: {port} is not a port; use 1 to 65535, or 0 for one that the agent chooses"
            )
    health = manifest.health
    kinds = [kind for kind in ("http", "tcp", "exec") if getattr(health, kind) is not None]
    if len(kinds) > 1:
        raise BadManifest(f"health: only one of http, tcp, exec may be given, not {' and '.join(kinds)}")
    if not (0 < health.interval < math.inf and 0 < health.timeout < math.inf):
        raise BadManifest("health: interval and timeout must be numbers of seconds above zero")
    for check in (health.http, health.tcp):
        if check and isinstance(check.port, str) and check.port not in manifest.ports:
            raise BadManifest(
                f"health: port {check.port!r} is not one of ports ({', '.join(manifest.ports) or 'none'})"
            )
    return manifest


def problem_of_source(source: EnvFrom) -> str:
    """Return why nothing can be read from there, or ""."""
    if bool(source.file) == bool(source.consul):
        return "give `file`, the path of a file on the node, or `consul`, the key of a secret"
    if source.file and not (source.file.startswith("/") and source.file.isprintable() and len(source.file) < MAX_URL):
        return "file: not an absolute path"
    if source.consul and not is_secret_key(source.consul):
        return "consul: not the key of a secret, which has 1 to 128 ASCII letters, digits, '_', '.' and '-'"
    return ""


def _check_resources(wanted: Resources, at: str, as_written: bool) -> None:
    """Raise `BadManifest` for quantities that can't be read, and, `as_written`, for those in the wrong unit."""
    field = "cpu"
    try:
        cpu, field = wanted.millicores, "memory"
        memory = wanted.memory_bytes
    except ValueError as error:
        raise BadManifest(f"{at}.{field}: {error}") from error
    if not as_written:
        return
    if wanted.cpu and isinstance(wanted.cpu, int) and cpu < MIN_BARE_CPU:
        other = f", or {cpu}m" if cpu >= MIN_CPU else ""
        raise BadManifest(f"{at}.cpu: a whole number counts millicores: write {cpu}000m for {cpu} CPUs{other}")
    if wanted.cpu and cpu < MIN_CPU:
        raise BadManifest(f"{at}.cpu: {wanted.cpu} is too little: at least {MIN_CPU}m can be enforced")
    if wanted.memory and memory < MIN_MEMORY:
        raise BadManifest(f"{at}.memory: {wanted.memory} is too little for a process: write it like 512Mi")
    if wanted.pids == 0:
        raise BadManifest(f"{at}.pids: a launchable needs at least 1; leave it out for no limit")


def problem_of_variable(name: str) -> str:
    """Return why no process can have an environment variable of this name, or ""."""
    if name and "=" not in name and "\0" not in name:
        return ""
    return f"{name!r} can't name a variable: a name is not empty, and has neither '=' nor a NUL character"


def problem_of_url(url: str) -> str:
    """Return why nothing can be fetched from `url`, or "". The text does not quote the URL, which may hold secrets."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "not a URL: its host or port can't be read"
    path = unquote(parts.path)
    if len(url) > MAX_URL or not url.isprintable() or " " in url or not path.isprintable():
        return f"not a URL: over {MAX_URL} characters, or it holds spaces (write %20), NUL or control characters"
    if parts.scheme in ("http", "https"):
        host = parts.hostname or ""
        if port == 0 or not _HOST.fullmatch(host):
            return f"no host to ask: write {parts.scheme}://HOST/PATH"
        return ""
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or path.endswith("/"):
            return "not a file of this machine: write file:///PATH, with an absolute path"
        return ""
    return "nothing can be fetched from there: use an https://, http:// or file:/// URL"
