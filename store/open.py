"""Opening a store by its URL, as every role and every command takes it with `--store`.

    consul://HOST:PORT    a Consul agent; consuls:// with TLS (token and certificates from CONSUL_*)
    embedded:DIR          the store in DIR; while a running rcfarm has it open, through the API of that process
    memory:               a store of this process alone, which ends with the process

Without a URL: RCFARM_STORE, else the Consul of CONSUL_HTTP_ADDR, else the `rcfarm dev` that runs on this machine.

The process that serves the Consul API over an embedded store writes `endpoint.json` (mode 0600, in one step) into the
store's directory once it listens, and removes it when it stops. Other processes on the machine that want the same store
find it there, instead of the locked file.

Two files beside it stay when the process stops, because the programs that use their contents (agents above all) do not
read them again: the port, on which the store is served again after a restart, and the token that the API requires. The
token is random, of one store, and readable by the store's user alone (mode 0600), who can read the store anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from store.decoding import Undecodable, from_json, json_decoder
from store.kv.protocol import Invalid, Store, Unavailable

if TYPE_CHECKING:  # a command imports the one kind of store that it opens: Consul's client takes 100 ms
    from store.consul.client import ConsulSettings
    from store.consul.store import ConsulStore

_TOKEN_VARIABLES = ("CONSUL_HTTP_TOKEN", "CONSUL_HTTP_TOKEN_FILE")
STORE_FILE = "store.db"
DECISION_LOG = "decisions"  # the folder of the farm's decision log
ENDPOINT_FILE = "endpoint.json"
PORT_FILE = "endpoint.port"
TOKEN_FILE = "endpoint.token"
_TOKEN_BYTES = 24
_FORMS = "consul://HOST:PORT, consuls://HOST:PORT (TLS), embedded:DIR or memory:"


def open_store(
    url: str | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    max_connections: int | None = None,
    create: bool = True,
) -> Store:
    """Return the store that `url`, or else the environment, names. Call it in the event loop that will use the store.

    `max_connections`: of this process to a store in another process; None leaves the default.
    `create`: make a directory without a store an empty store, instead of raising `Unavailable`.
    Raises `Invalid` for an invalid URL, `Unavailable` when there is no store, `AlreadyOpen` for a directory that a
    process uses without serving it. Only the first call notices a Consul that does not answer.
    """
    url = url or environ.get("RCFARM_STORE")
    if not url and environ.get("CONSUL_HTTP_ADDR"):
        return _open_at(None, environ, max_connections)
    if not url:
        directory = dev_directory(environ)
        endpoint = read_endpoint(directory)
        if endpoint is None or not endpoint.is_served:
            raise Unavailable(
                f"no store: `rcfarm dev` does not run on this machine (looked in {directory}); start it, or name a "
                f"store with --store or RCFARM_STORE ({_FORMS})"
            )
        return _open_endpoint(directory, endpoint, environ, max_connections)
    scheme, _, rest = url.partition(":")
    if scheme in ("consul", "consuls"):
        return _open_at(url, environ, max_connections)
    if url == "memory:":
        from store.embedded.store import EmbeddedStore

        return EmbeddedStore()
    if scheme != "embedded":
        raise Invalid(f"store {url!r}: expected {_FORMS}")
    if not rest:
        raise Invalid(f"store {url!r}: name the directory, as in embedded:/var/lib/rcfarm")
    from store.embedded.sqlite import AlreadyOpen
    from store.embedded.store import EmbeddedStore

    directory = Path(rest).expanduser()
    if not create and _is_without_store(directory):
        raise Unavailable(
            f"there is no store in {directory.absolute()}; check the path, or start a farm, which creates it: "
            f"`rcfarm farm --store {url}`"
        )
    try:
        return EmbeddedStore(directory / STORE_FILE)
    except AlreadyOpen as in_use:
        endpoint = read_endpoint(directory)
        if endpoint is None or endpoint.pid != in_use.pid:
            raise
        return _open_endpoint(directory, endpoint, environ, max_connections)


def _open_at(url: str | None, environ: Mapping[str, str], max_connections: int | None) -> ConsulStore:
    """Return the Consul store at an address. The token of a local `rcfarm dev` is found, too."""
    from store.consul.client import ConsulSettings

    settings = ConsulSettings.from_env(url, environ=environ)
    if not settings.token_source:
        directory = dev_directory(environ)
        with contextlib.suppress(Unavailable):
            endpoint = read_endpoint(directory)
            if endpoint and ConsulSettings.from_env(endpoint.url, environ={}).place == settings.place:
                environ = {**environ, "CONSUL_HTTP_TOKEN_FILE": str(directory / TOKEN_FILE)}
                settings = ConsulSettings.from_env(url, environ=environ)
    return _open_consul(settings, max_connections)


def _open_consul(settings: ConsulSettings, max_connections: int | None) -> ConsulStore:
    from store.consul.store import ConsulStore

    if max_connections is not None:
        watches = max(1, max_connections * settings.max_watches // settings.max_connections)
        settings = dataclasses.replace(settings, max_connections=max_connections, max_watches=watches)
    return ConsulStore(settings)


def _is_without_store(directory: Path) -> bool:
    """Return whether the directory does not exist or holds no store. An unreadable one may hold a store."""
    try:
        return not {STORE_FILE, f"{STORE_FILE}.lock"} & set(os.listdir(directory))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _open_endpoint(
    directory: Path, endpoint: Endpoint, environ: Mapping[str, str], max_connections: int | None
) -> Store:
    from store.consul.client import ConsulSettings

    # Of the variables for a Consul agent, only a token can apply to this store, too.
    tokens = {name: environ[name] for name in _TOKEN_VARIABLES if name in environ}
    if os.access(directory / TOKEN_FILE, os.R_OK):
        tokens = {"CONSUL_HTTP_TOKEN_FILE": str(directory / TOKEN_FILE)}
    return _open_consul(ConsulSettings.from_env(endpoint.url, environ=tokens), max_connections)


class Endpoint(msgspec.Struct, frozen=True):
    """`url` as `--store` takes it (`consul://HOST:PORT`); `pid` of the process that serves it."""

    url: str
    pid: int

    @property
    def is_served(self) -> bool:
        """Return whether the process still exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def dev_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the default state directory of `rcfarm dev`.

    A user without a home, as a service of systemd's may be, has it below `/`, where there is none.
    """
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state").removeprefix("~")
    return Path(state) / "rcfarm" / "dev"


def write_endpoint(directory: Path, endpoint: Endpoint) -> None:
    """Publish the address at which the store of `directory` is served. Raises `Unavailable`."""
    path = directory / ENDPOINT_FILE
    temporary = path.with_suffix(f".{endpoint.pid}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(endpoint))
        temporary.replace(path)
        (directory / PORT_FILE).write_text(endpoint.url.rpartition(":")[2])
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise Unavailable(f"{path} can't be written: {error.strerror}") from error


def store_token(directory: Path) -> str:
    """Return the token of the store in `directory`; the first call creates it. Raises `Unavailable`."""
    path = directory / TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
        path.chmod(0o600, follow_symlinks=True)
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unavailable(f"the store's token can't be read or written: {error}") from error
    if not token:
        raise Unavailable(f"{path} is empty; remove it, so that a new token is made")
    return token


def former_port(directory: Path) -> int:
    """Return the port on which the store of `directory` was last served; 0 when there is none, or it is unknown."""
    try:
        port = int((directory / PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 65536 else 0


def read_endpoint(directory: Path) -> Endpoint | None:
    """Return the endpoint in `directory`, or None. Raises `Unavailable` for a file that can't be read."""
    path = directory / ENDPOINT_FILE
    try:
        return from_json(json_decoder(Endpoint), path.read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None
    except (OSError, Undecodable) as error:
        raise Unavailable(f"{path} can't be read: {error}") from error


def remove_endpoint(directory: Path) -> None:
    """Remove the endpoint of a store that is no longer served; no error when the file is gone."""
    (directory / ENDPOINT_FILE).unlink(missing_ok=True)
