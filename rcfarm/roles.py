"""What every role is made of: its store, its listener, its place in a daemon.

A role starts even when its store does not answer: it serves its listener, says what it waits for, and goes on as soon
as the store is there. A role on an embedded store serves that store's Consul API as well, so that other processes
(agents, the CLI, Consul's own programs) can work on it.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version

import structlog
from prometheus_client import CollectorRegistry

from rcfarm import daemon
from rcfarm.config import Settings
from rcfarm.daemon import Component, Daemon
from rcfarm.layout import ensure_meta
from rcfarm.logging import configure
from rcfarm.metrics import new_registry
from rcfarm.sdnotify import Notifier
from rcfarm.web import Condition, listener, serving, web_app
from store.consul import ConsulStore
from store.embedded import EmbeddedStore
from store.endpoint import TOKEN_FILE, Endpoint, former_port, remove_endpoint, store_token, write_endpoint
from store.keys import Keys
from store.kv import Denied, Store, Unavailable
from store.open import open_store

log = structlog.get_logger(__name__)

VERSION = version("rcfarm")
STORE_RETRY = 1.0  # seconds between attempts to reach a store at the start


class Role(ABC):
    """Something that a daemon runs on a store. Before the store answers it is not ready, and says so."""

    name = ""

    def __init__(self, settings: Settings, store: Store, registry: CollectorRegistry) -> None:
        self.settings, self.store, self.registry = settings, store, registry
        self._waiting = "the store has not been asked yet"

    def component(self) -> Component:
        return Component(name=self.name, run=self.run, conditions=self.conditions, stalled=self.stalled)

    async def run(self) -> None:
        """Agree with the store on its layout, then work until cancelled."""
        keys = await self._agree()
        self._waiting = ""
        await self.work(keys)

    @abstractmethod
    async def work(self, keys: Keys) -> None:
        """Do what the role is for, until cancelled."""

    def conditions(self) -> list[Condition]:
        return [Condition("store", False, self._waiting)] if self._waiting else self.working_conditions()

    def working_conditions(self) -> list[Condition]:
        return []

    def stalled(self) -> str:
        return ""

    async def _agree(self) -> Keys:
        """The layout that the store's `meta` names; waits for a store that is away."""
        while True:
            try:
                return await ensure_meta(self.store, Keys(self.settings.store.root))
            except (Unavailable, Denied) as error:
                if str(error) != self._waiting:
                    what = "refuses what is needed" if isinstance(error, Denied) else "does not answer"
                    log.warning(f"The store {what}; waiting for it", role=self.name, error=str(error))
                self._waiting = str(error)
            await asyncio.sleep(STORE_RETRY)


def run_role(settings: Settings, port: int, make: Callable[[Store, CollectorRegistry], Role]) -> int:
    """Run one role as a daemon, on the store of the settings, until a signal; answers the exit code."""
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        registry = new_registry(VERSION)
        async with opened(settings) as store:
            role = make(store, registry)
            return await run_components(settings, port, registry, [[role.component()]], store=_name(store))

    return daemon.run(main)


async def run_components(
    settings: Settings, port: int, registry: CollectorRegistry, groups: list[list[Component]], *, store: str
) -> int:
    """Run the components under a listener and the service manager's eyes; returns the exit code.

    `store`: what the log calls the store, or the API server, that they work on.
    """
    address, token = listener(settings.web, port)
    bound = asyncio.Event()

    async def listen() -> None:
        async with AsyncExitStack() as stack:
            if address is not None:
                app = web_app(running.health(), registry, token=token)
                where = await stack.enter_async_context(serving(app, address))
                log.info("Listening for /livez, /readyz and /metrics", address=where)
            bound.set()
            await asyncio.Event().wait()

    async def listening() -> None:
        await bound.wait()

    first = Component(name="listener", run=listen, started=listening)
    about = {"version": VERSION, "store": store}
    running = Daemon([[first], *groups], notifier=Notifier.from_environment(os.environ), about=about)
    return await running.run()


def _name(store: Store) -> str:
    """Return the store as `--store` would name it."""
    if isinstance(store, ConsulStore):
        return f"{'consuls' if store.settings.url.startswith('https:') else 'consul'}://{store.settings.place}"
    return f"embedded:{store.path.parent}" if isinstance(store, EmbeddedStore) and store.path else "memory:"


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Store]:
    """The store of the settings, closed at the end; one of our own in a directory is served to other processes."""
    store = open_store(settings.store.url or None, max_connections=settings.store.max_connections)
    try:
        if isinstance(store, EmbeddedStore) and store.path:
            async with served(store):
                yield store
        else:
            yield store
    finally:
        await store.close()


@asynccontextmanager
async def served(store: EmbeddedStore) -> AsyncIterator[str]:
    """Serve the Consul API of a store in a directory on loopback, where it was served before if possible, and say so in
    the directory; yields `HOST:PORT`."""
    from store.consul_api import serve_consul_api  # a role on Consul starts without it

    assert store.path is not None, "a store in memory is nobody else's"
    directory = store.path.parent
    token = store_token(directory)
    async with AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(serve_consul_api(store, port=former_port(directory), token=token))
        except OSError as error:
            log.warning("The store's former address is taken; give the new one to its users", error=str(error))
            address = await stack.enter_async_context(serve_consul_api(store, token=token))
        log.info(
            "Serving the Consul API of the embedded store", address=address, token_file=str(directory / TOKEN_FILE)
        )
        write_endpoint(directory, Endpoint(f"consul://{address}", os.getpid()))
        stack.callback(remove_endpoint, directory)
        yield address
