"""`rcfarm dev`: a whole fleet in one process, for one machine.

An embedded store in a directory, its Consul API on loopback, a farm, a task engine, and a few nodes, each with its own
agent. The pods are real processes that outlive this one: the next start adopts them, `rcfarm dev --down` stops them.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rcfarm.agent.survivors import Survivor, stop_survivors, survivors
from rcfarm.config.agent import DEFAULT_SOURCES
from rcfarm.config.settings import Settings, TasksSettings
from rcfarm.daemon import daemon
from rcfarm.daemon.daemon import Component
from rcfarm.daemon.logging import configure
from rcfarm.daemon.readiness import PORTS
from rcfarm.daemon.visible import visible
from rcfarm.operations import rc_apply
from rcfarm.operations.errors import BadInput, NoSuchRC
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
from store.open import DECISION_LOG, STORE_FILE, TOKEN_FILE, dev_directory, read_endpoint
from store.schema.keys import Keys
from store.schema.records import RCStatus, decode

TRY = "rcfarm status · rcfarm rc status hello · rcfarm rc scale hello 1"
NODES = "nodes"  # the folder of the nodes' state directories
MOST_SHOWN = 10  # pods that are listed one by one


def run_dev(settings: Settings, *, directory: Path, nodes: int = 3, documents: Sequence[RCDocument] = ()) -> int:
    """Run until a signal. Return the exit code. RCs in `documents` that do not exist are created.

    Raises `AlreadyOpen` when another process uses the directory.
    """
    configure(settings.log.level, settings.log.format)
    settings = _in_directory(settings, directory)

    async def main() -> int:
        store = EmbeddedStore(directory / STORE_FILE)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        registry = new_registry(VERSION)
        try:
            keys = await ensure_meta(store, Keys(settings.store.root))
            async with served(store) as address:
                tokens = directory / TOKEN_FILE
                console.print(f"[bold]rcfarm dev[/]: a farm, an engine and {nodes} nodes, with an embedded store")
                console.print(f"  state        {directory}", markup=False)
                console.print(f"  Consul API   http://{address}, for `consul kv get -recurse rcfarm/`, with")
                console.print(f"    export CONSUL_HTTP_ADDR={address}")
                console.print(f"    export CONSUL_HTTP_TOKEN_FILE={shlex.quote(str(tokens))}", markup=False)
                if directory != dev_directory():  # where commands look that are given no store
                    console.print(f"  commands     need RCFARM_STORE=embedded:{directory}")
                console.print(f"  try          {TRY}")
                start = _command(directory)
                console.print(f"  stop         Ctrl-C; the pods keep running until `{start} --down`")
                rcs = ReplicationControllers(store, keys, actor="rcfarm dev")
                for document in documents:
                    try:
                        await rcs.read(document.rc_id)  # it may have been changed since, and is left as it is
                    except NoSuchRC:
                        await rc_apply.carry_out(rcs, await rc_apply.plan(rcs, document))
                farm = FarmRole(settings, store, registry)
                metrics = AgentMetrics()
                registry.register(metrics)
                engine = TasksRole(settings, store, registry, farm.metrics.workqueue)
                roles = [farm.component(), engine.component()]
                for node in (f"node-{number}" for number in range(1, nodes + 1)):
                    agent = msgspec.structs.replace(
                        settings.agent,
                        node=node,
                        state_dir=directory / NODES / node,
                        address=settings.agent.address or "127.0.0.1",
                        default_user=settings.agent.default_user or str(os.geteuid()),
                    )
                    roles.append(AgentRole(settings, store, registry, agent, metrics).component())
                news = Component(name="news", run=status_printer(store, keys, console).run)
                code = await run_components(
                    settings, PORTS["dev"], registry, [roles, [news]], store=f"embedded:{directory}"
                )
            if running := survivors(directory / NODES):
                for line in _listed("keeps running", running):
                    console.print(line, markup=False)
                keep = "1 pod keeps" if len(running) == 1 else f"{len(running)} pods keep"
                console.print(f"{keep} running: `{start}` adopts them, `{start} --down` stops them", markup=False)
            return code
        finally:
            await store.close()

    return daemon.run(main)


def stop_dev(directory: Path) -> int:
    """Stop the pods that an earlier `rcfarm dev` has left running. Return the exit code.

    Raises `BadInput` while an `rcfarm dev` runs, and `StateError` when an agent does.
    """
    start, endpoint = _command(directory), read_endpoint(directory)
    if endpoint is not None and endpoint.is_served:
        raise BadInput(
            f"`{start}` runs (pid {endpoint.pid}), and would start its pods again: end it first, with Ctrl-C or "
            f"`kill {endpoint.pid}`, then run `{start} --down` again; nothing was stopped"
        )
    stopped = asyncio.run(stop_survivors(directory / NODES))
    if not stopped:
        print(f"no pod of `{start}` runs (looked in {directory})")
        return 0
    for line in _listed("stopped", stopped):
        print(line)
    count = f"{len(stopped)} pod{'s' if len(stopped) > 1 else ''}"
    print(f"{count} stopped: `{start}` starts them again, with the data in {directory};")
    print(f"to remove all of it: rm -r {shlex.quote(str(directory))}")
    return 0


def _command(directory: Path) -> str:
    """Return the command that runs the fleet of the directory."""
    return "rcfarm dev" if directory == dev_directory() else f"rcfarm dev --directory {shlex.quote(str(directory))}"


def _listed(what: str, pods: Sequence[Survivor]) -> list[str]:
    """Return a line for each pod, with its processes; at most `MOST_SHOWN`."""
    more = [f"{what}: {len(pods) - MOST_SHOWN} more pods"] if len(pods) > MOST_SHOWN else []
    return [f"{what}: {pod}" for pod in pods[:MOST_SHOWN]] + more


def _in_directory(settings: Settings, directory: Path) -> Settings:
    """Return the settings with the farm's decision log and the data of tasks in the directory, and with this machine's
    files for the agents, unless they name other places."""
    farm, tasks, agent = settings.farm, settings.tasks, settings.agent
    if farm.decision_log is None:
        farm = msgspec.structs.replace(farm, decision_log=(directory / DECISION_LOG).absolute())
    if tasks.data == TasksSettings().data:
        tasks = msgspec.structs.replace(tasks, data=str(directory / "tasks"))
    if agent.artifact_sources == DEFAULT_SOURCES:  # who applies manifests here can read these files anyway
        sources = (*DEFAULT_SOURCES, "file:///")
        agent = msgspec.structs.replace(agent, artifact_sources=sources, secret_files=("/",))
    return msgspec.structs.replace(settings, farm=farm, tasks=tasks, agent=agent)


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
