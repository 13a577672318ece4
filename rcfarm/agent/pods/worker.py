"""The worker of one pod: reconciles its processes with its newest order, independently of other pods.

The model: `want` only records the newest order; one task (`run`) decides the next step by `plan.next_step`, does it,
and decides again. Waiting for the store or for an installation ends as soon as the order makes it pointless; stopping
and starting are not interrupted. A failure is shown in reality and retried with back-off, while the previous version
keeps running: a changed manifest is installed completely before anything is stopped.

A worker starts from the records that an earlier agent left on disk and adopts its processes without asking the store.
It ends when the pod and its records are gone. Cancelling it leaves the processes running, unless `stop_pods_on_exit` is
set.

A pod is removed only when a consistent read finds no intent, in the same tree in which its intent was last seen: if the
node's spec has been created again since, even while no agent ran, the store was emptied or replaced, and a missing
intent means nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog

from controllers.loop.workqueue import ExponentialRateLimiter
from rcfarm.agent.errors import AgentError, describe_os_error
from rcfarm.agent.health import FlapLimiter, Verdict
from rcfarm.agent.install import Installed
from rcfarm.agent.pods.plan import Gone, Keep, Order, Step, Wanted, next_step, pod_state, supersedes
from rcfarm.agent.pods.publisher import Publisher
from rcfarm.agent.pods.running import PodDependencies, RunningPod, check_program, config_file, launch_spec, pod_context
from rcfarm.agent.state import PodRecord
from store.kv.protocol import StoreError
from store.schema.manifest import Launchable, Manifest
from store.schema.records import Health, Intent, PodState, Reality, utc_now

log = structlog.get_logger(__name__)

_LAST_WRITE_TIMEOUT = 2.0  # seconds for writing a pod's last state when the agent stops it

T = TypeVar("T")


class RemovalRefused(AgentError):
    """The pod has no intent, but must not be removed; the message says why."""


class PodWorker:
    """One pod of this node. `rc`: the RC of its health record; "" while it is not known. `task`: the execution that it
    belongs to, if it belongs to no RC."""

    def __init__(self, dependencies: PodDependencies, pod_id: str, rng: random.Random) -> None:
        settings = dependencies.settings
        self.pod_id = pod_id
        self._dependencies = dependencies
        self._log = log.bind(pod=pod_id, node=settings.node)
        self.publisher = Publisher(
            dependencies.store, dependencies.keys, settings.node, pod_id, dependencies.registration, rng
        )
        self._limiter = FlapLimiter(settings.flap_burst, settings.flap_interval)
        self._retries: ExponentialRateLimiter[str] = ExponentialRateLimiter(
            settings.install_retry, settings.install_retry_cap
        )
        self._order: Order = Keep()
        self._tree = ""
        self.rc = self.task = ""
        self._changed, self._superseded = asyncio.Event(), asyncio.Event()
        self.pod: RunningPod | None = None  # the started version, if there is one
        self._supervision: asyncio.Task[None] | None = None
        self._phase: PodState | None = None
        self._reason = ""
        self._health: Health | None = None
        self._blocked: Health | None = None
        self._shown: Reality | None = None
        self._is_new = False  # no verdict on the processes that run now yet
        self._installing = ""

    def want(self, order: Order, *, rc: str = "") -> None:
        """Set the newest order. `rc`: the RC of the pod's health record, for a pod of which nothing else is known."""
        if supersedes(order, self._order):
            self._superseded.set()
        if order != self._order:
            self._order = order
            self._changed.set()
        if isinstance(order, Wanted):
            self.publisher.intent_index, self._tree = order.index, order.tree
        elif isinstance(order, Gone):
            self.publisher.intent_index = None
        self.rc = self.rc or rc

    def renew(self) -> None:
        """Write all records again, under the agent's new session."""
        self.publisher.renew()
        self._changed.set()

    def manifests(self) -> set[str]:
        """Return the manifests that the pod runs or is about to run."""
        running = {self.pod.record.manifest} if self.pod else set()
        return (running | {self._installing}) - {""}

    @property
    def state(self) -> PodState:
        """The pod's state, for metrics."""
        if self._phase is None and self.pod is not None:
            return pod_state(self.pod.processes().values())
        return self._phase or "starting"

    @property
    def reason(self) -> str:
        """Return why the pod is not in its desired state, or ""."""
        processes = self.pod.processes().values() if self.pod else ()
        return self._reason or next((process.reason for process in processes if process.reason), "")

    @property
    def health(self) -> Health | None:
        """The published health of the pod."""
        manifest = self._order.intent.manifest if isinstance(self._order, Wanted) else ""
        if self.pod is None:
            return msgspec.structs.replace(self._blocked, manifest=manifest) if self._blocked else self._health
        health, running = self._health, self.pod.record.manifest
        if self._blocked is not None:
            health = health or Health("unknown", running, since=self._blocked.since)
            health = msgspec.structs.replace(health, condition="blocked", cause=self._blocked.cause)
        return msgspec.structs.replace(health, manifest=running) if health else None

    @property
    def restarts(self) -> int:
        """Return how often processes of the pod were restarted since it runs its manifest."""
        return sum(process.restarts for process in self.pod.processes().values()) if self.pod else 0

    def show_usage(self) -> None:
        """Publish what the pod uses now."""
        if self.pod is not None:
            self.pod.show_usage()
            self._show()

    async def report_failure(self, error: BaseException, seconds: float) -> None:
        """Publish, for `seconds`, that an unexpected error ended this worker. The pod's processes keep running."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        words = f"{type(error).__name__}: {error}"
        self._reason = f"the agent failed on this pod and retries every {seconds:g} s: {words}"
        self._block(self._reason)
        publishing = asyncio.create_task(self.publisher.run())
        try:
            async with asyncio.timeout(seconds):
                while True:
                    self._changed.clear()
                    shown = self._shown or Reality(manifest="", rc=self.rc, state="failed", task=self.task)
                    self.publisher.show(msgspec.structs.replace(shown, reason=self._reason), self.health)
                    await self._changed.wait()
        except TimeoutError:
            pass  # the next worker takes over
        finally:
            publishing.cancel()
            await asyncio.wait([publishing])

    async def run(self) -> None:
        """Converge until the pod is gone, or until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self.publisher.run())
            try:
                self._adopt(tasks)
                await self._converge_until_gone(tasks)
            except asyncio.CancelledError:
                if self._dependencies.settings.stop_pods_on_exit:
                    pod = self.pod
                    await self._stop()
                    self.pod = pod  # for `_show`: its processes are stopped
                    self._show()
                    with suppress(StoreError, TimeoutError):
                        async with asyncio.timeout(_LAST_WRITE_TIMEOUT):
                            await self.publisher.flush()
                raise  # a worker that returns has removed its pod
            finally:
                await self._end_supervision()
                if self.pod is not None:
                    self.pod.release()
                publishing.cancel()

    async def _converge_until_gone(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._changed.clear()
            self._superseded.clear()
            delay = None
            try:
                if await self._converge(tasks, self._order):
                    return
            except (AgentError, StoreError, OSError) as error:
                reason = (
                    describe_os_error(error, self._dependencies.state.root)
                    if isinstance(error, OSError)
                    else str(error)
                )
                delay = self._retries.when("", 0.0)
                self._log.warning("The pod could not be reconciled with its intent", reason=reason, retry_in=delay)
                self._reason = reason
                if self.pod is None:
                    self._phase = "failed"
                self._block(reason)
                self._show()
            else:
                self._retries.forget("")
                if self._blocked is not None:
                    self._blocked = None
                    self._show()
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._changed.wait()

    async def _converge(self, tasks: asyncio.TaskGroup, order: Order) -> bool:
        """Do the next step. Return whether the pod is gone and forgotten."""
        pod = self.pod
        step = next_step(
            order,
            pod.installed.manifest_id if pod else None,
            lost_port=bool(pod and pod.lost_port),
            obeyed=pod.record.restart if pod else "",
        )
        if step in (Step.INSTALL, Step.REPLACE) and isinstance(order, Wanted):
            await self._replace(tasks, order.intent)
        elif step is Step.RESTART and pod is not None:
            # All processes, with other ports if one that the agent had chosen is no longer free.
            record = pod.record
            asked = (order.intent.restart if isinstance(order, Wanted) else "") or record.restart
            ports = self._dependencies.ports.assign(
                self.pod_id, pod.installed.manifest.ports, record.ports, pod.groups()
            )
            await self._stop()
            self._start(
                tasks, pod.installed, msgspec.structs.replace(record, ports=ports, launchables={}, restart=asked)
            )
        elif step is Step.REMOVE:
            if await self._unless_superseded(self._confirm_gone()) is None:
                return False
            self._log.info("The pod's intent is gone; stopping it")
            await self._stop()
            self._dependencies.state.remove_pod(self.pod_id)
            self._dependencies.ports.release(self.pod_id)
            return await self._forget()
        elif step is Step.FORGET:
            return await self._forget()
        else:  # the right processes are running; only the reported status may have changed
            self._reason, self._installing = order.reason if isinstance(order, Keep) else "", ""
            if self.pod is None:
                self._phase = "failed"  # an undecodable intent of a pod that does not run
            elif isinstance(order, Wanted):
                self.rc, self.task = order.intent.rc, order.intent.task
                record = self.pod.record
                if (self.rc, self.task, self._tree) != (record.rc, record.task, record.tree):
                    self.pod.hand_over(order.intent, self._tree)
                self._dependencies.discovery.want(self.pod_id, self.pod.service(order.intent.labels))
            self._show()
        return False

    async def _replace(self, tasks: asyncio.TaskGroup, intent: Intent) -> None:
        """Install the intent's manifest; then stop the running version and start the new one."""
        if self._installing != intent.manifest:  # a retry keeps the reason of the last failure
            self._phase = None if self.pod else "installing"
            self._reason = f"installing manifest {intent.manifest[:12]}"
        self.rc, self.task, self._installing = intent.rc, intent.task, intent.manifest
        self._show()
        if await self._unless_superseded(self._dependencies.registration.held()) is None:
            return  # an agent that does not hold the node must start nothing on it
        installed = await self._unless_superseded(self._dependencies.installer.install(intent.manifest))
        if installed is None:
            return
        old = self.pod.record if self.pod else self._dependencies.state.load_pod(self.pod_id)
        groups = self.pod.groups() if self.pod else []
        wanted = installed.manifest.ports
        ports = self._dependencies.ports.assign(self.pod_id, wanted, old.ports if old else {}, groups)
        record = PodRecord(
            manifest=installed.manifest_id,
            rc=intent.rc,
            task=intent.task,
            tree=self._tree,
            restart=intent.restart or "",
            ports=ports,
        )
        context = pod_context(self._dependencies, self.pod_id, record, installed)
        config_file(installed.manifest)  # what would fail at the start is found before anything is stopped
        for name, launchable in installed.manifest.launchables.items():
            at = f"launchables.{name}"
            secrets = await self._unless_superseded(self._dependencies.secrets.read(launchable, at))
            if secrets is None:
                return
            check_program(launch_spec(context, name, self._dependencies.state.paths(self.pod_id, name), secrets), at)
        await self._stop()
        if intent.task:
            coming = Reality(manifest=intent.manifest, rc="", state="starting", ports=ports, task=intent.task)
            if await self._unless_superseded(self.publisher.announce(coming)) is None:
                return
        self._start(tasks, installed, record)

    async def _forget(self) -> bool:
        """Remove the pod's records. Raises `RemovalRefused` if the intent exists again: the intent may be deleted
        before the view has shown it, and then no order would wake this worker."""
        removed = await self._unless_superseded(self.publisher.remove(self.rc))
        if removed is False:
            raise RemovalRefused("there is an intent for it again")
        return bool(removed)

    async def _confirm_gone(self) -> bool:
        """Confirm by consistent reads that there is no intent. Raises `RemovalRefused` if there is one, or if the tree
        is another."""
        await self._dependencies.registration.held()
        store, keys, node = self._dependencies.store, self._dependencies.keys, self._dependencies.settings.node
        spec, registration = await store.get(keys.node_spec(node), consistent=True), self._dependencies.registration
        index = spec.create_index if spec else 0
        # whether the intent was last seen in the tree that the node is, still, registered in
        is_in_its_tree = (self._tree, index) == (registration.tree, registration.tree_index)
        if self._tree and not (is_in_its_tree or self._dependencies.settings.stop_orphans):
            raise RemovalRefused(
                "its intent vanished together with the node's record: the store was emptied or replaced, so the pod is "
                "kept until there is an intent for it again: apply its RC again (`rcfarm rc apply`), and delete it if "
                "the pod should stop, or restart this agent as `rcfarm agent --set agent.stop_orphans=true`"
            )
        if await store.get(keys.intent(node, self.pod_id), consistent=True) is not None:
            raise RemovalRefused("a stale answer of the store showed no intent; there is one")
        return True

    def _adopt(self, tasks: asyncio.TaskGroup) -> None:
        """Adopt the processes that an earlier agent started."""
        record = self._dependencies.state.load_pod(self.pod_id)
        if record is None:
            return
        installed = self._dependencies.installer.find(record.manifest)
        if installed is None:
            self._log.error("The manifest of a running pod is lost; it can only be stopped", manifest=record.manifest)
            # a placeholder, which starts nothing and matches no intent
            launchables = {name: Launchable(command=["false"], restart="never") for name in record.launchables}
            installed = Installed("", Manifest(id=self.pod_id, launchables=launchables), {})
        self.rc, self.task, self._tree = record.rc, record.task, record.tree
        self.publisher.recall(record.rc)
        self._supervise(tasks, installed, record)

    def _start(self, tasks: asyncio.TaskGroup, installed: Installed, record: PodRecord) -> None:
        self._dependencies.state.save_pod(self.pod_id, record)
        self._log.info("Starting the pod", manifest=installed.manifest_id, ports=record.ports)
        self._supervise(tasks, installed, record)
        self._changed.set()

    def _supervise(self, tasks: asyncio.TaskGroup, installed: Installed, record: PodRecord) -> None:
        self._phase, self._reason, self._installing = None, "", ""
        self.pod = RunningPod(
            self._dependencies,
            self.pod_id,
            installed,
            record,
            self._limiter,
            on_change=self._process_changed,
            on_verdict=self._verdict,
        )
        self._dependencies.ports.claim(self.pod_id, record.ports)
        self._limiter.forget()
        self._is_new, self._health = True, None  # what was judged was another process
        self._supervision = tasks.create_task(self.pod.run())

    async def _stop(self) -> None:
        """Stop the pod's processes, if any run."""
        if self.pod is None:
            return
        await self._end_supervision()
        self._verdict(Verdict("critical", "the pod is being stopped"))
        # first, so that clients do not find a pod that is stopping
        self._dependencies.discovery.want(self.pod_id, None)
        await self.pod.stop()
        self.pod = None

    async def _end_supervision(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision])

    def _process_changed(self) -> None:
        if self.pod is not None and self.pod.lost_port:
            self._changed.set()
        self._show()

    def _verdict(self, verdict: Verdict) -> None:
        if self.pod is None:
            return
        old, manifest = self._health, self.pod.record.manifest
        is_same = old is not None and (old.status, old.manifest) == (verdict.status, manifest)
        self._health = Health(
            status=verdict.status,
            manifest=manifest,
            output=verdict.output,
            since=old.since if old and is_same and not self._is_new else utc_now(),
            condition=verdict.condition,
            cause=verdict.cause,
            restarts=verdict.restarts,
        )
        self._is_new = False
        self._dependencies.discovery.report(self.pod_id, verdict)
        self._show()

    def _block(self, reason: str) -> None:
        """Publish in the pod's health that it can't be reconciled with its intent."""
        since = self._blocked.since if self._blocked else utc_now()
        self._blocked = Health("critical", "", reason, since, condition="blocked", cause=reason)

    def _show(self) -> None:
        """Publish the pod's reality and health."""
        pod = self.pod
        if isinstance(self._order, Gone) and pod is None:
            return
        reality = self._reality()
        if pod is not None and reality != self._shown:  # it is written anyway
            pod.show_usage()
            reality = self._reality()
        self._shown = reality
        self.publisher.show(reality, self.health)

    def _reality(self) -> Reality:
        pod = self.pod
        return Reality(
            manifest=pod.record.manifest if pod else "",
            rc=pod.record.rc if pod else self.rc,
            state=self.state,
            launchables=pod.processes() if pod else {},
            ports=pod.record.ports if pod else {},
            address=self._dependencies.address,
            reason=self.reason,
            task=pod.record.task if pod else self.task,
        )

    async def _unless_superseded(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None when a newer order made it pointless."""
        task = asyncio.create_task(work)
        superseded = asyncio.create_task(self._superseded.wait())
        try:
            await asyncio.wait({task, superseded}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._superseded.is_set() else task.result()
        finally:
            task.cancel()
            superseded.cancel()
            await asyncio.wait({task, superseded})
            if not task.cancelled():
                task.exception()  # ignored: a newer order came at the same time
