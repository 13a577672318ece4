"""The parts of every role: its store, its listener, its place in a daemon.

A role starts even when its store does not answer: it serves its listener, reports what it waits for, and continues as
soon as the store answers. A role on an embedded store serves that store's Consul API as well, so that other processes
(agents, the CLI, Consul's own programs) can use it.

What some daemons do without is imported where it is used, so that they start sooner: HTTP servers, embedded stores.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from rcfarm.config import token_in
from rcfarm.config.settings import BadSettings, Settings
from rcfarm.daemon import daemon
from rcfarm.daemon.daemon import Component, Daemon, Notifier
from rcfarm.daemon.health import Condition, Health
from rcfarm.daemon.listener import listener, parse_address
from rcfarm.daemon.logging import configure
from rcfarm.operations.fleet import ensure_meta
from rcfarm.telemetry.prometheus import new_registry
from store.consul.store import ConsulStore
from store.kv.protocol import Denied, Store, Unavailable
from store.open import TOKEN_FILE, Endpoint, former_port, open_store, remove_endpoint, store_token, write_endpoint
from store.schema.keys import Keys

if TYPE_CHECKING:
    from store.embedded.store import EmbeddedStore

log = structlog.get_logger(__name__)

VERSION = version("rcfarm")
STORE_RETRY = 1.0  # seconds between attempts to reach a store at the start
SECRET_CONNECTIONS = 4  # of the client that reads secrets


class Role(ABC):
    """A part of a daemon that works on a store. It is not ready before the store answers."""

    name = ""

    def __init__(self, settings: Settings, store: Store, registry: CollectorRegistry) -> None:
        self.settings, self.store, self.registry = settings, store, registry
        self._waiting = "the store has not answered yet"
        self.health: Health | None = None  # once it works

    def component(self) -> Component:
        return Component(name=self.name, run=self.run, conditions=self.conditions, stalled=self.stalled)

    async def run(self) -> None:
        """Agree with the store on its layout, then work until cancelled."""
        keys = await self.layout_keys()
        self._waiting = ""
        await self.work(keys)

    @abstractmethod
    async def work(self, keys: Keys) -> None:
        """Do the role's work, until cancelled."""

    def conditions(self) -> Sequence[Condition]:
        if self._waiting:
            return [Condition("store", False, self._waiting)]
        return self.health.conditions() if self.health else ()

    def stalled(self) -> str:
        return self.health.stalled() if self.health else ""

    async def layout_keys(self) -> Keys:
        """Return the store's layout, waiting while the store is unavailable."""
        while True:
            try:
                return await ensure_meta(self.store, Keys(self.settings.store.root))
            except (Unavailable, Denied) as error:
                if str(error) != self._waiting:
                    what = "denies access" if isinstance(error, Denied) else "does not answer"
                    log.warning(f"The store {what}; waiting for it", role=self.name, error=str(error))
                self._waiting = str(error)
            await asyncio.sleep(STORE_RETRY)


def run_role(settings: Settings, port: int, make: Callable[[Store, CollectorRegistry], Role]) -> int:
    """Run one role as a daemon, on the store of the settings, until a signal. Return the exit code."""
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        registry = new_registry(VERSION)
        async with opened(settings) as store:
            role, url = make(store, registry), "memory:"
            if isinstance(store, ConsulStore):
                url = f"{'consuls' if store.settings.url.startswith('https:') else 'consul'}://{store.settings.place}"
            elif (embedded := _in_directory(store)) is not None and embedded.path:
                url = f"embedded:{embedded.path.parent}"
            return await run_components(settings, port, registry, [[role.component()]], store=url)

    return daemon.run(main)


async def run_components(
    settings: Settings, port: int, registry: CollectorRegistry, groups: list[list[Component]], *, store: str
) -> int:
    """Run the components with a listener and service manager notifications. Return the exit code.

    `store`: the name of their store, or API server, in the log.
    """
    address, token = listener(settings.web, port)
    plain = settings.web.metrics_listen
    for_metrics = parse_address(plain, port, "web.metrics_listen") if plain else None
    bound = asyncio.Event()

    async def listen() -> None:
        async with AsyncExitStack() as stack:
            if address is not None or for_metrics is not None:
                from rcfarm.daemon.health_server import metrics_app, serving, web_app
            if address is not None:
                app = web_app(Health(running.stalled, running.conditions), registry, token=token)
                where = await stack.enter_async_context(serving(app, address))
                log.info("Listening for /livez, /readyz and /metrics", address=where)
            if for_metrics is not None:
                app = metrics_app(registry)
                where = await stack.enter_async_context(serving(app, for_metrics, setting="web.metrics_listen"))
                log.info("Listening for /metrics, without a token", address=where)
            bound.set()
            await asyncio.Event().wait()

    first = Component(name="listener", run=listen, started=bound.wait)
    about = {"version": VERSION, "store": store}
    running = Daemon([[first], *groups], notifier=Notifier.from_environment(os.environ), about=about)
    return await running.run()


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Store]:
    """Yield the store of the settings, closed at the end; an embedded one in a directory is served to other
    processes."""
    store = open_store(settings.store.url or None, max_connections=settings.store.max_connections)
    try:
        if (embedded := _in_directory(store)) is not None:
            async with served(embedded):
                yield store
        else:
            yield store
    finally:
        await store.close()


def _in_directory(store: Store) -> EmbeddedStore | None:
    """Return the store if it is an embedded one in a directory, else None."""
    if isinstance(store, ConsulStore):
        return None
    from store.embedded.store import EmbeddedStore

    return store if isinstance(store, EmbeddedStore) and store.path else None


@asynccontextmanager
async def served(store: EmbeddedStore) -> AsyncIterator[str]:
    """Serve the Consul API of a store in a directory on loopback, on its previous port if possible, and write the
    endpoint into the directory. Yield `HOST:PORT`."""
    from store.embedded.consul_api.app import serve_consul_api  # a role on Consul starts without it

    assert store.path is not None, "a store in memory can't be served"
    directory = store.path.parent
    token = store_token(directory)
    async with AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(serve_consul_api(store, port=former_port(directory), token=token))
        except OSError as error:
            log.warning("The previous store address is in use; clients must switch to the new one", error=str(error))
            address = await stack.enter_async_context(serve_consul_api(store, token=token))
        log.info(
            "Serving the Consul API of the embedded store", address=address, token_file=str(directory / TOKEN_FILE)
        )
        write_endpoint(directory, Endpoint(f"consul://{address}", os.getpid()))
        stack.callback(remove_endpoint, directory)
        yield address


def secret_store_of(store: Store, setting: str, token_file: str) -> Store | None:
    """Return the store from which secrets are read, with the token in the file that a setting names; None if it names
    none. Close it. Raises `BadSettings`."""
    if not token_file:
        return None
    if not isinstance(store, ConsulStore):
        raise BadSettings(f"{setting}: needs a store in Consul; an embedded one has no access control")
    return ConsulStore(
        dataclasses.replace(
            store.settings,
            token=token_in(setting, token_file),
            token_source=f"{setting} ({token_file})",
            token_file=Path(token_file),
            max_connections=SECRET_CONNECTIONS,
            max_watches=1,
        )
    )
