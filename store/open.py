"""Opening a store by its URL, as every role and every command takes it with `--store`.

    consul://HOST:PORT    a Consul agent; consuls:// with TLS (token and certificates from CONSUL_*)
    embedded:DIR          the store in DIR; while a running rcfarm has it open, through the API of that process
    memory:               a store of this process alone, which ends with the process

Without a URL: RCFARM_STORE, else the Consul of CONSUL_HTTP_ADDR, else the `rcfarm dev` that runs on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from store.consul.settings import ConsulSettings
from store.consul.store import ConsulStore
from store.embedded.endpoint import TOKEN_FILE, Endpoint, dev_directory, read_endpoint
from store.embedded.sqlite import AlreadyOpen
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Invalid, Store, Unavailable

_TOKEN_VARIABLES = ("CONSUL_HTTP_TOKEN", "CONSUL_HTTP_TOKEN_FILE")
STORE_FILE = "store.db"
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
    if url:
        return _open(url, environ, max_connections, create)
    if environ.get("CONSUL_HTTP_ADDR"):
        return _open_at(None, environ, max_connections)
    return _open_dev(dev_directory(environ), environ, max_connections)


def _open(url: str, environ: Mapping[str, str], max_connections: int | None, create: bool) -> Store:
    scheme, _, rest = url.partition(":")
    if scheme in ("consul", "consuls"):
        return _open_at(url, environ, max_connections)
    if scheme == "embedded":
        if not rest:
            raise Invalid(f"store {url!r}: name the directory, as in embedded:/var/lib/rcfarm")
        directory = Path(rest).expanduser()
        if not create and _is_without_store(directory):
            raise Unavailable(
                f"there is no store in {directory.absolute()}; check the path, or start a farm, which creates it: "
                f"`rcfarm farm --store {url}`"
            )
        return _open_directory(directory, environ, max_connections)
    if url == "memory:":
        return EmbeddedStore()
    raise Invalid(f"store {url!r}: expected {_FORMS}")


def _open_at(url: str | None, environ: Mapping[str, str], max_connections: int | None) -> ConsulStore:
    """Return the Consul store at an address. The token of a local `rcfarm dev` is found, too."""
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
    if max_connections is not None:
        watches = max(1, max_connections * settings.max_watches // settings.max_connections)
        settings = dataclasses.replace(settings, max_connections=max_connections, max_watches=watches)
    return ConsulStore(settings)


def _open_directory(directory: Path, environ: Mapping[str, str], max_connections: int | None) -> Store:
    try:
        return EmbeddedStore(directory / STORE_FILE)
    except AlreadyOpen as in_use:
        endpoint = read_endpoint(directory)
        if endpoint is None or endpoint.pid != in_use.pid:
            raise
        return _open_endpoint(directory, endpoint, environ, max_connections)


def _is_without_store(directory: Path) -> bool:
    """Return whether the directory does not exist or holds no store. An unreadable one may hold a store."""
    try:
        return not {STORE_FILE, f"{STORE_FILE}.lock"} & set(os.listdir(directory))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _open_dev(directory: Path, environ: Mapping[str, str], max_connections: int | None) -> Store:
    endpoint = read_endpoint(directory)
    if endpoint is None or not endpoint.is_served:
        raise Unavailable(
            f"no store: `rcfarm dev` does not run on this machine (looked in {directory}); start it, or name a store "
            f"with --store or RCFARM_STORE ({_FORMS})"
        )
    return _open_endpoint(directory, endpoint, environ, max_connections)


def _open_endpoint(
    directory: Path, endpoint: Endpoint, environ: Mapping[str, str], max_connections: int | None
) -> Store:
    # Of the variables for a Consul agent, only a token can apply to this store, too.
    tokens = {name: environ[name] for name in _TOKEN_VARIABLES if name in environ}
    if os.access(directory / TOKEN_FILE, os.R_OK):
        tokens = {"CONSUL_HTTP_TOKEN_FILE": str(directory / TOKEN_FILE)}
    return _open_consul(ConsulSettings.from_env(endpoint.url, environ=tokens), max_connections)
