"""`rcfarm dev`: a whole fleet in one process, for one machine.

An embedded store in a directory, its Consul API on loopback, a farm, and a few nodes, each with an agent of its own.
What runs on the nodes are real processes that outlive this one: started again, it adopts them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from rich.console import Console

from rcfarm import daemon, rc_apply
from rcfarm.agent.settings import DEFAULT_SOURCES
from rcfarm.agent_probe import AgentMetrics
from rcfarm.agent_role import AgentRole
from rcfarm.config import Settings
from rcfarm.daemon import Component
from rcfarm.farm_role import FarmRole
from rcfarm.layout import ensure_meta
from rcfarm.logging import configure
from rcfarm.metrics import new_registry
from rcfarm.pod_health import state_word
from rcfarm.rc_errors import NoSuchRC
from rcfarm.rc_file import RCDocument
from rcfarm.rc_store import ReplicationControllers
from rcfarm.role_ports import PORTS
from rcfarm.roles import VERSION, run_components, served
from rcfarm.visible import visible
from store.embedded import EmbeddedStore
from store.endpoint import TOKEN_FILE
from store.keys import Keys
from store.kv import Store
from store.open import STORE_FILE
from store.records import RCStatus, decode
from store.view import Change, TreeView


def run_dev(settings: Settings, *, directory: Path, nodes: int = 3, documents: Sequence[RCDocument] = ()) -> int:
    """Run until a signal; answers the exit code. Of `documents`, the RCs that do not exist yet are created.

    Raises `AlreadyOpen` when another process has the directory.
    """
    configure(settings.log.level, settings.log.format)
    return daemon.run(lambda: _dev(settings, directory, nodes, documents))


async def _dev(settings: Settings, directory: Path, nodes: int, documents: Sequence[RCDocument]) -> int:
    store = EmbeddedStore(directory / STORE_FILE)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    registry = new_registry(VERSION)
    try:
        keys = await ensure_meta(store, Keys(settings.store.root))
        async with served(store) as address:
            _welcome(console, address, directory, nodes)
            await _create(ReplicationControllers(store, keys, actor="rcfarm dev"), documents)
            farm = FarmRole(settings, store, registry)
            metrics = AgentMetrics()
            registry.register(metrics)
            agents = [_agent(settings, store, registry, metrics, directory, number) for number in range(1, nodes + 1)]
            news = Component(name="news", run=_News(store, keys, console).view.run)
            roles = [farm.component(), *(agent.component() for agent in agents)]
            return await run_components(
                settings, PORTS["dev"], registry, [roles, [news]], store=f"embedded:{directory}"
            )
    finally:
        await store.close()


def _agent(
    settings: Settings, store: Store, registry: CollectorRegistry, metrics: AgentMetrics, directory: Path, number: int
) -> AgentRole:
    """The agent of a local node, beside whatever the settings say of agents."""
    node = f"node-{number}"
    agent = settings.agent
    if agent.artifact_sources == DEFAULT_SOURCES:  # the user who applies manifests here may read the same files
        agent = msgspec.structs.replace(agent, artifact_sources=(*DEFAULT_SOURCES, "file:///"))
    agent = msgspec.structs.replace(
        agent,
        node=node,
        state_dir=directory / "nodes" / node,
        address=agent.address or "127.0.0.1",
        default_user=agent.default_user or str(os.geteuid()),
    )
    return AgentRole(settings, store, registry, agent, metrics)


async def _create(rcs: ReplicationControllers, documents: Sequence[RCDocument]) -> None:
    """Create the RCs that do not exist; one that does was perhaps changed since, and is left as it is."""
    for document in documents:
        try:
            await rcs.read(document.rc_id)
        except NoSuchRC:
            await rc_apply.carry_out(rcs, await rc_apply.plan(rcs, document))


def _welcome(console: Console, address: str, directory: Path, nodes: int) -> None:
    console.print(f"[bold]rcfarm dev[/]: a farm and {nodes} nodes, with an embedded store in {directory}")
    console.print(f"  Consul API   http://{address}, for `consul kv get -recurse` and the like with")
    console.print(f"               CONSUL_HTTP_ADDR={address} CONSUL_HTTP_TOKEN_FILE={directory / TOKEN_FILE}")
    console.print("  try          rcfarm rc list · rcfarm rc status hello · rcfarm rc scale hello 1 · rcfarm status")
    console.print("  stop         Ctrl-C; what runs on the nodes goes on, and the next start adopts it")


class _News:
    """Prints a line whenever an RC's status says something new."""

    def __init__(self, store: Store, keys: Keys, console: Console) -> None:
        self._console = console
        self._prefix = len(keys.rcs)
        self.view: TreeView[RCStatus | None] = TreeView(
            store, keys.rcs, self._decode, on_change=self._print, name="news"
        )

    def _decode(self, key: str, value: bytes) -> RCStatus | None:
        return decode(RCStatus, key, value) if key.endswith("/status") else None

    def _print(self, changes: list[Change[RCStatus | None]]) -> None:
        for key, _, new in changes:
            rc_id = key[self._prefix :].split("/")[1]
            if key.endswith("/spec") and new is None:
                self._say(f"{rc_id:<16} gone")
            elif new is not None and (status := new.value) is not None:
                reasons = "; ".join(reason.message for reason in status.reasons)
                counts = f"{status.placed}/{status.desired} placed, {status.healthy} healthy"
                self._say(f"{rc_id:<16} {state_word(status)}: {counts}{'; ' + reasons if reasons else ''}")

    def _say(self, text: str) -> None:
        self._console.print(visible(text), markup=False)
