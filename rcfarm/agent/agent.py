"""The node agent: turns the intents of one node into running processes, and reports their state.

The model: a view of `intent/<node>/` and the records on disk determine the pods; each has its own worker
(`rcfarm.agent.pods.worker`), so a slow or failing pod delays no other. This module starts and ends the workers, passes
them their newest orders, and owns what they share: session, registration, artifact cache, ports, discovery, logs.

At the start, the pods on disk are adopted before anything is read from the store, and kept as they are until it
answers. Orders are only given from a synced view, once the node is registered. When the tree was replaced (the node's
spec was created again), the view is read again, consistently, before it is used.

Stopping the agent ends its session at once, so that its node counts as not live, and leaves the processes alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import aiohttp
import msgspec
import structlog

from rcfarm.agent.cgroups import Groups, Sample
from rcfarm.agent.discovery import Discovery
from rcfarm.agent.errors import StateError
from rcfarm.agent.health import Prober
from rcfarm.agent.install import Artifacts, Downloads, Installer
from rcfarm.agent.listener import PodListener, check_access, read_access
from rcfarm.agent.log_files import LogRecords
from rcfarm.agent.log_rotation import LogKeeper
from rcfarm.agent.pods import plan
from rcfarm.agent.pods.running import PodDependencies, RunningPod
from rcfarm.agent.pods.worker import PodWorker
from rcfarm.agent.ports import Ports
from rcfarm.agent.registration import Registration
from rcfarm.agent.secrets import PodSecrets
from rcfarm.agent.state import StateDir
from rcfarm.config.agent import AgentSettings, detected_address
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, BadRecord, SessionSpec, Store, StoreError
from store.kv.session import SessionKeeper
from store.kv.view import TreeView
from store.schema.history import HistoryWatch
from store.schema.keys import LAYOUT, Keys, is_dns_label
from store.schema.records import NO_SPACE, Intent, NodeAlive, Reality, decode, utc_now

log = structlog.get_logger(__name__)

_CRASH_PAUSE = 5.0  # seconds until a pod's worker is restarted after an error in it
_CLEANUP_INTERVAL = 3600.0
_LOCK_TIMEOUT = 1.0
_RENEW_RETRY = 1.0
_HISTORY_INTERVAL = 3.0  # seconds between two comparisons of the written records with the store
_RESYNC = 60.0  # seconds after which orders are passed again without a change
_SAMPLE_INTERVAL = 10.0  # seconds between two readings of what the pods use
_USAGE_INTERVAL = 60.0  # seconds between two writes of a pod's record for its use alone
_USAGE_WRITES = 10  # such writes after one reading: at most one a second, whatever the pods do


class Agent:
    """The agent of one node. `version` is shown in the store; `rng` spreads retries; `secret_store`: from which the
    secrets of pods are read, if not from `store`."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: AgentSettings,
        *,
        version: str = "",
        rng: random.Random | None = None,
        secret_store: Store | None = None,
    ) -> None:
        self._settings = settings.checked()
        check_access(settings)
        self._store, self._keys = store, keys
        self._secret_store = secret_store
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
            beliefs=lambda: (belief for worker in self.workers.values() for belief in worker.publisher.beliefs()),
            on_rewritten=self._note_registration,
            interval=_HISTORY_INTERVAL,
            rng=self._rng,
        )
        self._tree = ""
        self._realities: dict[str, str] = {}  # the RC of each pod with a reality record in the store
        self.workers: dict[str, PodWorker] = {}  # of each pod of this node
        self.worker_failures = 0
        self.groups = Groups()  # of its pods; those that it may use are known once it runs
        self._listener: PodListener | None = None
        self.log_records = LogRecords(self._state.logs)
        self._logs = LogKeeper(
            self._state.logs,
            size=settings.log_size,
            files=settings.log_files,
            keep=settings.log_keep,
            records=self.log_records,
        )

    @property
    def problem(self) -> str:
        """Return why the agent can't do its work now, or ""."""
        if self.registration.session is None:
            return self.registration.problem or "the session is lost; waiting for the store"
        return "" if self.view.is_synced else "the node's intents are not read yet"

    @property
    def full_disk(self) -> str:
        """A pod's report of a full disk, or ""."""
        return next((worker.reason for worker in self.workers.values() if NO_SPACE in worker.reason), "")

    async def run(self) -> None:
        """Work until cancelled. Raises `StateError` when the state directory can't be used."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LOCK_TIMEOUT
        while True:  # a child that a killed agent had just forked may hold its lock for a moment yet
            try:
                self._state.open()
                break
            except StateError:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_LOCK_TIMEOUT / 20)
        self.groups = Groups.open(self._state.root, self._settings.node, use=self._settings.cgroups)
        self.registration.alive = msgspec.structs.replace(self.registration.alive, limits=self.groups.enforcement)
        self._log.info("Limits of pods", **msgspec.structs.asdict(self.groups.enforcement))
        try:
            async with self._dependencies() as dependencies, asyncio.TaskGroup() as shared:
                supporting = [
                    shared.create_task(work)
                    for work in (
                        self.keeper.run(),
                        self.registration.run(),
                        self.view.run(),
                        self._history.run(),
                        dependencies.discovery.run(),
                        self._logs.run(self._settings.log_interval),
                        self._state.trash.run(),
                    )
                ]
                try:
                    await self._work(dependencies)
                finally:
                    for task in supporting:
                        task.cancel()
        finally:
            self.groups.close()
            self._state.close()

    async def _work(self, dependencies: PodDependencies) -> None:
        async with asyncio.TaskGroup() as pods:
            self._state.discard_remains()
            recorded = self._state.load_pods()
            if leaked := self.groups.collect(recorded):
                self._log.warning("Killed what was left of pods that are not on record", pods=leaked)
            for pod_id in recorded:
                self._start_worker(pods, dependencies, pod_id)
            pods.create_task(self._remove_unused_files(dependencies))
            pods.create_task(self._sample_usage())
            await self.view.synced()
            while True:
                self._changed.clear()
                if self._newly_registered:
                    await self._renew()
                if self._tree:
                    for pod_id, order in self._orders().items():
                        if pod_id not in self.workers:
                            self._start_worker(pods, dependencies, pod_id)
                        self.workers[pod_id].want(order, rc=self._realities.get(pod_id, ""))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RESYNC):
                        await self._changed.wait()

    def _note_registration(self) -> None:
        self._newly_registered = True
        self._changed.set()

    def _orders(self) -> dict[str, plan.Order]:
        """Return the order of every pod, as the view shows it."""
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
        return plan.orders(intents, unreadable, self.workers, self._realities)

    async def _renew(self) -> None:
        """After a new session: read what may have been missed, and have everything written again."""
        self._newly_registered, tree = False, self.registration.tree
        node, found = self._settings.node, dict[str, str]()
        try:
            if self._tree != tree:
                await self.view.refresh()
            for prefix in (self._keys.node_realities(node), self._keys.node_task_pods(node)):
                for entry in (await self._store.list(prefix, consistent=True)).entries:
                    try:
                        found[entry.key[len(prefix) :]] = decode(Reality, entry.key, entry.value).rc
                    except BadRecord as error:
                        self._log.error("A record of this node is undecodable and will be rewritten", reason=str(error))
                        found[entry.key[len(prefix) :]] = ""
            self._realities = {pod_id: rc for pod_id, rc in found.items() if is_dns_label(pod_id)}
            await self._remove_foreign_health()
        except StoreError as error:
            self._log.warning("The store could not be read after registering; retrying", error=str(error))
            await asyncio.sleep(_RENEW_RETRY)
            self._note_registration()
            return
        self._tree = tree
        for worker in self.workers.values():
            worker.renew()

    async def _remove_foreign_health(self) -> None:
        """Remove health records that belong to no pod of this node, as a restored store may contain. A worker whose pod
        has no intent removes its own."""
        keys, node = self._keys, self._settings.node
        found = (await self._store.txn([ops.get_tree(prefix) for prefix in keys.node_healths(node)])).entries
        rcs = {record.value.rc for record in self.view.records.values()} | {w.rc for w in self.workers.values()}
        known = {keys.health(rc, node) for rc in rcs if rc}
        removing = [ops.delete_cas(entry.key, entry.modify_index) for entry in found if entry.key not in known]
        session = self.registration.session
        if session is None or not removing:  # without a session, the next registration calls this again
            return
        self._log.warning(
            "Removing health records that belong to no pod of this node", keys=[op.key for op in removing]
        )
        fence = ops.check_session(keys.node_alive(node), session)
        for start in range(0, len(removing), MAX_TXN_OPS - 1):
            await self._store.txn([fence, *removing[start : start + MAX_TXN_OPS - 1]])

    def _start_worker(self, pods: asyncio.TaskGroup, dependencies: PodDependencies, pod_id: str) -> None:
        self.workers[pod_id] = PodWorker(dependencies, pod_id, self._rng)
        pods.create_task(self._run_worker(dependencies, pod_id))

    async def _run_worker(self, dependencies: PodDependencies, pod_id: str) -> None:
        """Run the worker of a pod until the pod is gone; after an error in it, start a new one from the records on
        disk."""
        while True:
            try:
                await self.workers[pod_id].run()
            except Exception as error:  # a fault in one pod's worker must not affect other pods
                self._log.exception("The worker of a pod failed; its processes go on", pod=pod_id)
                self.worker_failures += 1
                await self.workers[pod_id].report_failure(error, _CRASH_PAUSE)
                self.workers[pod_id] = PodWorker(dependencies, pod_id, self._rng)
                self._changed.set()
            else:
                del self.workers[pod_id]
                if self._listener is not None:
                    self._listener.gone(pod_id)
                self._realities.pop(pod_id, None)
                self._changed.set()
                return

    async def _remove_unused_files(self, dependencies: PodDependencies) -> None:
        """Remove, once per hour, the artifacts, manifests and logs that no pod needs."""
        while True:
            await asyncio.sleep(_CLEANUP_INTERVAL)
            used = set().union(*(worker.manifests() for worker in self.workers.values()))
            try:
                dependencies.installer.prune(used, keep=self._settings.artifact_keep)
                for directory in self._logs.expired(self.workers):
                    self._state.trash.put(directory)
                    self.log_records.forget(directory)
            except OSError as error:
                self._log.warning("Unused files could not be removed", error=str(error))

    async def _sample_usage(self) -> None:
        """Read regularly what the pods use, and have the most outdated records written again, a few at a time."""
        loop, written = asyncio.get_running_loop(), dict[str, float]()
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL)
            pods = {pod_id: worker.pod for pod_id, worker in self.workers.items() if worker.pod is not None}
            samples = await asyncio.to_thread(samples_of, pods)
            now = loop.time()
            for pod_id, pod in pods.items():
                pod.sampled(samples[pod_id], now)
            written = {pod_id: at for pod_id, at in written.items() if pod_id in pods}
            due = [
                pod_id
                for pod_id, pod in pods.items()
                if pod.has_other_usage() and now - written.get(pod_id, -_USAGE_INTERVAL) >= _USAGE_INTERVAL
            ]
            for pod_id in sorted(due, key=lambda pod_id: written.get(pod_id, 0.0))[:_USAGE_WRITES]:
                if (worker := self.workers.get(pod_id)) is not None and worker.pod is pods[pod_id]:
                    written[pod_id] = now
                    worker.show_usage()

    @asynccontextmanager
    async def _dependencies(self) -> AsyncIterator[PodDependencies]:
        """Yield the dependencies that the pods share, and serve logs and commands while the context lasts."""
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
            if (access := read_access(settings, self._state.root)) is not None:
                self._listener = PodListener(
                    settings, access, self._store, self._keys, self.log_records, self._state.logs, self.workers.get
                )
                url, loopback = await stack.enter_async_context(self._listener.serving(self._address))
                self.registration.alive = msgspec.structs.replace(
                    self.registration.alive, listener=url, loopback=loopback
                )
            yield PodDependencies(
                store=self._store,
                keys=self._keys,
                settings=settings,
                address=self._address,
                state=self._state,
                groups=self.groups,
                installer=Installer(self._store, self._keys, self._state, artifacts),
                ports=Ports(*settings.port_range, self._rng),
                prober=Prober(probes, self._address),
                registration=self.registration,
                discovery=Discovery(self._store, settings.node, settings.discovery_interval),
                secrets=PodSecrets(self._secret_store or self._store, self._keys, settings.secret_files),
                logs=self.log_records,
            )


def samples_of(pods: Mapping[str, RunningPod]) -> dict[str, dict[str, Sample]]:
    """Return what each pod's launchables use now. Reads a few files for each."""
    return {pod_id: pod.sample() for pod_id, pod in pods.items()}


def decode_intent(prefix: str, key: str, value: bytes) -> Intent:
    """Read an intent under `prefix`. Raises `BadRecord`, also for a pod id or digest that must not be a file name."""
    intent = decode(Intent, key, value)
    pod_id = key.removeprefix(prefix)
    if not is_dns_label(pod_id):
        raise BadRecord(key, f"{pod_id!r} is not a DNS label, as pod ids must be")
    if re.fullmatch(r"[0-9a-f]{64}", intent.manifest) is None:
        raise BadRecord(key, "manifest: must be a sha256 in lower-case hex")
    return intent
