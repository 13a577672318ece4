"""`rcfarm dev`: a whole fleet in one process, for one machine.

An embedded store in a directory, its Consul API on loopback, a farm, a task engine, and a few nodes, each with its own
agent. The pods are real processes that outlive this one: the next start adopts them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rcfarm.config.settings import DEFAULT_SOURCES, Settings, TasksSettings
from rcfarm.daemon import daemon
from rcfarm.daemon.daemon import Component
from rcfarm.daemon.logging import configure
from rcfarm.daemon.readiness import PORTS
from rcfarm.daemon.visible import visible
from rcfarm.operations import rc_apply
from rcfarm.operations.errors import NoSuchRC
from rcfarm.operations.fleet import ensure_meta
from rcfarm.operations.rc_apply import RCDocument
from rcfarm.operations.rc_snapshot import state_word
from rcfarm.operations.rcs import ReplicationControllers
from rcfarm.roles.agent import AgentMetrics, AgentRole
from rcfarm.roles.base import VERSION, run_components, served
from rcfarm.roles.farm import FarmRole
from rcfarm.roles.tasks import TasksRole
from rcfarm.telemetry.prometheus import new_registry
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Store
from store.kv.view import Change, TreeView
from store.open import DECISION_LOG, STORE_FILE, TOKEN_FILE, dev_directory
from store.schema.keys import Keys
from store.schema.records import RCStatus, decode

TRY = "rcfarm rc list · rcfarm rc status hello · rcfarm rc scale hello 1 · rcfarm status"


def run_dev(settings: Settings, *, directory: Path, nodes: int = 3, documents: Sequence[RCDocument] = ()) -> int:
    """Run until a signal. Return the exit code. RCs in `documents` that do not exist are created.

    Raises `AlreadyOpen` when another process uses the directory.
    """
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        store = EmbeddedStore(directory / STORE_FILE)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        registry = new_registry(VERSION)
        try:
            keys = await ensure_meta(store, Keys(settings.store.root))
            async with served(store) as address:
                tokens = directory / TOKEN_FILE
                console.print(
                    f"[bold]rcfarm dev[/]: a farm, an engine and {nodes} nodes, with an embedded store in {directory}"
                )
                console.print(f"  Consul API   http://{address}, for `consul kv get -recurse` and the like with")
                console.print(f"               CONSUL_HTTP_ADDR={address} CONSUL_HTTP_TOKEN_FILE={tokens}")
                if directory != dev_directory():  # where commands look that are given no store
                    console.print(f"  commands     need RCFARM_STORE=embedded:{directory}")
                console.print(f"  try          {TRY}")
                console.print("  stop         Ctrl-C; the pods keep running, and the next start adopts them")
                rcs = ReplicationControllers(store, keys, actor="rcfarm dev")
                for document in documents:
                    try:
                        await rcs.read(document.rc_id)  # it may have been changed since, and is left as it is
                    except NoSuchRC:
                        await rc_apply.carry_out(rcs, await rc_apply.plan(rcs, document))
                farm = FarmRole(_with_log(settings, directory), store, registry)
                metrics = AgentMetrics()
                registry.register(metrics)
                local = settings.agent
                if local.artifact_sources == DEFAULT_SOURCES:  # who applies manifests here can read these files anyway
                    local = msgspec.structs.replace(
                        local, artifact_sources=(*DEFAULT_SOURCES, "file:///"), secret_files=("/",)
                    )
                engine = TasksRole(_with_data(settings, directory), store, registry, farm.metrics.workqueue)
                roles = [farm.component(), engine.component()]
                for node in (f"node-{number}" for number in range(1, nodes + 1)):
                    agent = msgspec.structs.replace(
                        local,
                        node=node,
                        state_dir=directory / "nodes" / node,
                        address=local.address or "127.0.0.1",
                        default_user=local.default_user or str(os.geteuid()),
                    )
                    roles.append(AgentRole(settings, store, registry, agent, metrics).component())
                news = Component(name="news", run=status_printer(store, keys, console).run)
                return await run_components(
                    settings, PORTS["dev"], registry, [roles, [news]], store=f"embedded:{directory}"
                )
        finally:
            await store.close()

    return daemon.run(main)


def _with_log(settings: Settings, directory: Path) -> Settings:
    """Return the settings with the farm's decision log in the directory, unless they name another place."""
    if settings.farm.decision_log is not None:
        return settings
    return msgspec.structs.replace(
        settings, farm=msgspec.structs.replace(settings.farm, decision_log=(directory / DECISION_LOG).absolute())
    )


def _with_data(settings: Settings, directory: Path) -> Settings:
    """Return the settings with the data of tasks in the directory, unless they name another place."""
    if settings.tasks.data != TasksSettings().data:
        return settings
    return msgspec.structs.replace(
        settings, tasks=msgspec.structs.replace(settings.tasks, data=str(directory / "tasks"))
    )


def status_printer(store: Store, keys: Keys, console: Console) -> TreeView[RCStatus | None]:
    """Return a view that prints a line whenever what the line shows of an RC's status changes.

    One answer of a watch often holds several writes, such as those of a pod that fails and passes again.
    """
    shown: dict[str, str] = {}

    def changed(changes: list[Change[RCStatus | None]]) -> None:
        for key, _, new, _ in changes:
            rc_id, leaf, _ = keys.split_rc(key)
            if leaf == "spec" and new is None:
                news = "gone"
            elif new is not None and (status := new.value) is not None:
                reasons = "; ".join(reason.message for reason in status.reasons)
                counts = f"{status.placed}/{status.desired} placed, {status.healthy} healthy"
                news = f"{state_word(status)}: {counts}{'; ' + reasons if reasons else ''}"
            else:
                continue
            if shown.get(rc_id) != news:
                shown[rc_id] = news
                console.print(visible(f"{rc_id:<16} {news}"), markup=False)

    return TreeView(
        store,
        keys.rcs,
        lambda key, value: decode(RCStatus, key, value) if key.endswith("/status") else None,
        on_change=changed,
        name="news",
    )
