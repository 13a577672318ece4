"""The node agent: turns the intents of one node into running processes, and tells what became of them.

The model: a view of `intent/<node>/` and what is on disk decide which pods there are; each has a worker of its own
(`rcfarm.agent.pod`), so a slow or failing pod delays no other. This module starts and ends them, hands them their
newest orders, and owns what they share: session, registration, artifact cache, ports, discovery, logs.

At the start, the pods on disk are adopted before anything is read from the store, and kept as they are until it
answers. Orders are only given from a synced view, once the node is registered. When the tree was replaced (the node's
spec was created anew), the view is read again, consistently, before anything is concluded from it.

Stopping the agent ends its session at once, so that its node counts as not live, and leaves the processes alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import aiohttp
import structlog

from rcfarm.agent import plan
from rcfarm.agent.artifacts import Artifacts
from rcfarm.agent.discovery import discovery_for
from rcfarm.agent.downloads import Downloads
from rcfarm.agent.errors import NO_SPACE, StateError
from rcfarm.agent.installer import Installer
from rcfarm.agent.logs import LogKeeper
from rcfarm.agent.pod import PodWorker
from rcfarm.agent.ports import Ports
from rcfarm.agent.probes import Prober
from rcfarm.agent.registration import Registration
from rcfarm.agent.running import Tools
from rcfarm.agent.settings import AgentSettings, detected_address
from rcfarm.agent.state import StateDir
from store import ops
from store.history import Belief, HistoryWatch
from store.keys import LAYOUT, Keys, is_dns_label
from store.kv import MAX_TXN_OPS, SessionSpec, Store, StoreError
from store.records import BadRecord, Intent, NodeAlive, Reality, decode, utc_now
from store.session import SessionKeeper
from store.view import TreeView

log = structlog.get_logger(__name__)

_CRASH_PAUSE = 5.0  # seconds until the worker of a pod is begun anew after an error in it
_HOUSEKEEPING = 3600.0
_LOCK_PATIENCE = 1.0
_RENEW_RETRY = 1.0
_LOOK = 3.0  # seconds between two comparisons of what was written with what the store has
_RESYNC = 60.0  # seconds after which orders are given again though no change was seen


class Agent:
    """The agent of one node. `version` is shown in the store; `rng` spreads retries."""

    def __init__(
        self, store: Store, keys: Keys, settings: AgentSettings, *, version: str = "", rng: random.Random | None = None
    ) -> None:
        self._settings = settings.checked()
        self._store, self._keys = store, keys
        self._rng = rng or random.Random()
        self._log = log.bind(node=settings.node)
        self._address = settings.address or detected_address()
        self._state = StateDir(settings.state_dir)
        spec = SessionSpec(f"rcfarm-agent-{settings.node}", settings.session_ttl, settings.session_check_ttl)
        self.keeper = SessionKeeper(store, spec)
        alive = NodeAlive(
            agent=f"{socket.gethostname()}:{os.getpid()}",
            since=utc_now(),
            address=self._address,
            version=version,
            layout=LAYOUT,
        )
        self._changed = asyncio.Event()
        self._newly_registered = False
        self.registration = Registration(
            store, keys, settings, self._state, self.keeper, alive, self._note_registration
        )
        intents = keys.node_intents(settings.node)
        self.view: TreeView[Intent] = TreeView(
            store,
            intents,
            partial(decode_intent, intents),
            on_change=lambda changes: self._changed.set(),
            on_bad=lambda bad: self._changed.set(),
            name="intents of the node",
        )
        self._history = HistoryWatch(
            store,
            keys,
            lambda: (self.view, self.registration.view),
            beliefs=self._beliefs,
            on_rewritten=self._note_registration,
            interval=_LOOK,
            rng=self._rng,
        )
        self._tree = ""
        self._realities: dict[str, str] = {}
        self._workers: dict[str, PodWorker] = {}
        self.worker_failures = 0
        self._logs = LogKeeper(
            self._state.logs, size=settings.log_size, files=settings.log_files, keep=settings.log_keep
        )

    @property
    def problem(self) -> str:
        """Why the agent can't do its work now, or ""."""
        if self.registration.session is None:
            return self.registration.problem or "the session is lost; waiting for the store"
        return "" if self.view.is_synced else "the node's intents are not read yet"

    def pods(self) -> dict[str, str]:
        """What each pod of this node is doing."""
        return {pod_id: worker.state for pod_id, worker in self._workers.items()}

    @property
    def workers(self) -> Mapping[str, PodWorker]:
        """The worker of each pod of this node, for metrics."""
        return self._workers

    @property
    def full_disk(self) -> str:
        """What a pod reports of a disk without space, or ""."""
        return next((worker.reason for worker in self._workers.values() if NO_SPACE in worker.reason), "")

    async def run(self) -> None:
        """Work until cancelled. Raises `StateError` when the state directory can't be used."""
        await self._open_state()
        try:
            async with self._tools() as tools, asyncio.TaskGroup() as shared:
                supporting = [
                    shared.create_task(work)
                    for work in (
                        self.keeper.run(),
                        self.registration.run(),
                        self.view.run(),
                        self._history.run(),
                        tools.discovery.run(),
                        self._logs.run(self._settings.log_interval),
                        self._state.trash.run(),
                    )
                ]
                try:
                    await self._work(tools)
                finally:
                    for task in supporting:
                        task.cancel()
        finally:
            self._state.close()

    async def _open_state(self) -> None:
        """Take the state directory. A child that a killed agent had just forked may hold its lock for a moment yet."""
        deadline = asyncio.get_running_loop().time() + _LOCK_PATIENCE
        while True:
            try:
                self._state.open()
            except StateError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_LOCK_PATIENCE / 20)
            else:
                return

    async def _work(self, tools: Tools) -> None:
        async with asyncio.TaskGroup() as pods:
            self._state.discard_remains()
            for pod_id in self._state.load_pods():
                self._begin(pods, tools, pod_id)
            pods.create_task(self._keep_house(tools))
            await self.view.synced()
            while True:
                self._changed.clear()
                if self._newly_registered:
                    await self._renew()
                if self._tree:
                    self._give_orders(pods, tools)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RESYNC):
                        await self._changed.wait()

    def _beliefs(self) -> Iterator[Belief]:
        for worker in self._workers.values():
            yield from worker.beliefs()

    def _note_registration(self) -> None:
        self._newly_registered = True
        self._changed.set()

    def _give_orders(self, pods: asyncio.TaskGroup, tools: Tools) -> None:
        """Tell every pod what the view says."""
        for pod_id, order in self._orders().items():
            if pod_id not in self._workers:
                self._begin(pods, tools, pod_id)
            self._workers[pod_id].want(order, rc=self._realities.get(pod_id, ""))

    def _orders(self) -> dict[str, plan.Order]:
        prefix = len(self.view.prefix)
        intents = {
            key[prefix:]: plan.Wanted(record.value, record.modify_index, self._tree)
            for key, record in self.view.records.items()
            if key not in self.view.bad
        }
        unreadable = {
            key[prefix:]: f"its intent can't be understood: {bad.reason}"
            for key, bad in self.view.bad.items()
            if is_dns_label(key[prefix:])
        }
        return plan.orders(intents, unreadable, self._workers, self._realities)

    async def _renew(self) -> None:
        """A new session is held: read what may have been missed, and have everything written again."""
        tree = self.registration.tree
        try:
            if self._tree != tree:
                await self.view.refresh()
            self._realities = await self._read_realities()
            await self._remove_strange_health()
        except StoreError as error:
            self._log.warning("The store can't be read after registering; trying again", error=str(error))
            await asyncio.sleep(_RENEW_RETRY)
            self._changed.set()
            return
        self._newly_registered, self._tree = False, tree
        for worker in self._workers.values():
            worker.renew()

    async def _read_realities(self) -> dict[str, str]:
        """The pods that the store says are here, with the RC of each."""
        prefix = self._keys.node_realities(self._settings.node)
        found: dict[str, str] = {}
        for entry in (await self._store.list(prefix, consistent=True)).entries:
            try:
                found[entry.key[len(prefix) :]] = decode(Reality, entry.key, entry.value).rc
            except BadRecord as error:
                self._log.error("A record of this node can't be understood; it will be written anew", reason=str(error))
                found[entry.key[len(prefix) :]] = ""
        return {pod_id: rc for pod_id, rc in found.items() if is_dns_label(pod_id)}

    async def _remove_strange_health(self) -> None:
        """Remove health on record that belongs to no pod of this node: a store that was restored may have brought it
        back, and no worker knows of it. A worker whose pod has no intent removes its own."""
        keys, node = self._keys, self._settings.node
        found = (await self._store.txn([ops.get_tree(prefix) for prefix in keys.node_healths(node)])).entries
        rcs = {record.value.rc for record in self.view.records.values()} | {w.rc for w in self._workers.values()}
        known = {keys.health(rc, node) for rc in rcs if rc}
        removing = [ops.delete_cas(entry.key, entry.modify_index) for entry in found if entry.key not in known]
        session = self.registration.session
        if session is None or not removing:  # without a session there is a registration to come, and then this again
            return
        self._log.warning("Removing health that belongs to no pod of this node", keys=[op.key for op in removing])
        fence = ops.check_session(keys.node_alive(node), session)
        for start in range(0, len(removing), MAX_TXN_OPS - 1):
            await self._store.txn([fence, *removing[start : start + MAX_TXN_OPS - 1]])

    def _begin(self, pods: asyncio.TaskGroup, tools: Tools, pod_id: str) -> None:
        self._workers[pod_id] = PodWorker(tools, pod_id, self._rng)
        pods.create_task(self._tend(tools, pod_id))

    async def _tend(self, tools: Tools, pod_id: str) -> None:
        """Run the worker of a pod until the pod is gone; after an error in it, begin anew from what is on disk."""
        while True:
            try:
                await self._workers[pod_id].run()
            except Exception as error:  # a fault in one pod's worker must not touch its neighbours
                self._log.exception("The worker of a pod failed; its processes go on", pod=pod_id)
                self.worker_failures += 1
                await self._workers[pod_id].report_failure(error, _CRASH_PAUSE)
                self._workers[pod_id] = PodWorker(tools, pod_id, self._rng)
                self._changed.set()
            else:
                del self._workers[pod_id]
                self._realities.pop(pod_id, None)
                self._changed.set()
                return

    async def _keep_house(self, tools: Tools) -> None:
        """Remove, now and then, what no pod needs any more."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING)
            used = set().union(*(worker.manifests() for worker in self._workers.values()))
            try:
                tools.installer.prune(used, keep=self._settings.artifact_keep)
                for directory in self._logs.expired(self._workers):
                    self._state.trash.put(directory)
            except OSError as error:
                self._log.warning("What is not needed any more can't be removed", error=str(error))

    @asynccontextmanager
    async def _tools(self) -> AsyncIterator[Tools]:
        """What the pods share, and the connections behind it."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            connections = await stack.enter_async_context(aiohttp.ClientSession(trust_env=True))
            probes = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
            )
            downloads = Downloads(
                connections, settings.artifact_sources, limit=settings.artifact_limit, timeout=settings.artifact_timeout
            )
            stack.callback(downloads.close)
            artifacts = Artifacts(
                self._state.artifacts,
                downloads,
                self._state.trash,
                limit=settings.artifact_limit,
                timeout=settings.unpack_timeout,
            )
            artifacts.clean()
            yield Tools(
                store=self._store,
                keys=self._keys,
                settings=settings,
                address=self._address,
                state=self._state,
                installer=Installer(self._store, self._keys, self._state, artifacts),
                ports=Ports(*settings.port_range, self._rng),
                prober=Prober(probes, self._address),
                registration=self.registration,
                discovery=discovery_for(self._store, settings.node, settings.discovery_interval),
            )


def decode_intent(prefix: str, key: str, value: bytes) -> Intent:
    """Read an intent under `prefix`. Raises `BadRecord`, also for a pod id or digest that must not be a file name."""
    intent = decode(Intent, key, value)
    pod_id = key.removeprefix(prefix)
    if not is_dns_label(pod_id):
        raise BadRecord(key, f"{pod_id!r} is not a DNS label, as pod ids must be")
    if re.fullmatch(r"[0-9a-f]{64}", intent.manifest) is None:
        raise BadRecord(key, "manifest: must be a sha256 in lower-case hex")
    return intent
