"""The worker of one pod: brings what runs to what its newest order says, whatever the others do.

The model: `want` only notes the newest order; one task (`run`) decides the next step by `plan.next_step`, does it,
and decides again. Waiting for the store or for an installation ends as soon as the order makes it pointless; stopping
and starting are not interrupted. What fails is shown in reality and tried again with a growing delay, while what ran
before goes on: a changed manifest is installed completely before anything is stopped.

A worker begins with what an earlier agent recorded on disk and adopts its processes without asking the store. It ends
when the pod is gone and nothing of it is left. Cancelling it leaves the processes running, unless the settings say
otherwise.

A pod is removed only when a consistent read finds no intent, in the same tree in which its intent was last seen: when
the node's spec was created anew meanwhile, even while no agent ran, the store was emptied or replaced, and a missing
intent means nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import structlog

from controllers.ratelimit import ExponentialRateLimiter
from rcfarm.agent import launch
from rcfarm.agent.errors import AgentError, describe_os_error
from rcfarm.agent.health import FlapLimiter
from rcfarm.agent.installer import Installed
from rcfarm.agent.plan import Gone, Keep, Order, Step, Wanted, next_step, pod_state, supersedes
from rcfarm.agent.probes import Verdict
from rcfarm.agent.publisher import Publisher
from rcfarm.agent.running import RunningPod, Tools, pod_context
from rcfarm.agent.state import PodRecord
from store.history import Belief
from store.kv import Entry, StoreError
from store.manifest import Launchable, Manifest
from store.records import Health, Intent, PodState, Reality, utc_now

log = structlog.get_logger(__name__)

_LAST_WORDS = 2.0  # seconds that the writing of a pod's last state may take when the agent stops it

T = TypeVar("T")


class Held(AgentError):
    """The pod would be removed, but something speaks against it."""


class PodWorker:
    """One pod of this node."""

    def __init__(self, tools: Tools, pod_id: str, rng: random.Random) -> None:
        settings = tools.settings
        self.pod_id = pod_id
        self._tools = tools
        self._log = log.bind(pod=pod_id, node=settings.node)
        self._publisher = Publisher(tools.store, tools.keys, settings.node, pod_id, tools.registration, rng)
        self._limiter = FlapLimiter(settings.flap_burst, settings.flap_interval)
        self._retries: ExponentialRateLimiter[str] = ExponentialRateLimiter(
            settings.install_retry, settings.install_retry_cap
        )
        self._order: Order = Keep()
        self._tree = ""
        self._rc = ""
        self._changed, self._superseded = asyncio.Event(), asyncio.Event()
        self._pod: RunningPod | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._phase: PodState | None = None
        self._reason = ""
        self._health: Health | None = None
        self._blocked: Health | None = None
        self._shown: Reality | None = None
        self._is_new = False  # no verdict on the processes that run now yet
        self._installing = ""

    def want(self, order: Order, *, rc: str = "") -> None:
        """The newest order. `rc`: whose health is on record, for a pod of which nothing else is known."""
        if supersedes(order, self._order):
            self._superseded.set()
        if order != self._order:
            self._order = order
            self._changed.set()
        if isinstance(order, Wanted):
            self._publisher.intent_index, self._tree = order.index, order.tree
        elif isinstance(order, Gone):
            self._publisher.intent_index = None
        self._rc = self._rc or rc

    def renew(self) -> None:
        """The agent holds a new session."""
        self._publisher.renew()
        self._changed.set()

    def beliefs(self) -> Iterator[Belief]:
        """What the store should say of the pod."""
        return self._publisher.beliefs()

    def manifests(self) -> set[str]:
        """The manifests that the pod runs or is about to run."""
        running = {self._pod.record.manifest} if self._pod else set()
        return (running | {self._installing}) - {""}

    @property
    def rc(self) -> str:
        """The RC whose health is on record for the pod, or will be; "" while it is not known."""
        return self._rc

    @property
    def state(self) -> PodState:
        """What the pod is doing, for metrics."""
        if self._phase is None and self._pod is not None:
            return pod_state(self._pod.processes().values())
        return self._phase or "starting"

    @property
    def reason(self) -> str:
        """Why the pod is not as it should be, in words, or ""."""
        processes = self._pod.processes().values() if self._pod else ()
        return self._reason or next((process.reason for process in processes if process.reason), "")

    @property
    def health(self) -> Health | None:
        """What is published of the pod's health."""
        manifest = self._order.intent.manifest if isinstance(self._order, Wanted) else ""
        if self._pod is None:
            return msgspec.structs.replace(self._blocked, manifest=manifest) if self._blocked else self._health
        health, running = self._health, self._pod.record.manifest
        if self._blocked is not None:
            health = health or Health("unknown", running, since=self._blocked.since)
            health = msgspec.structs.replace(health, condition="blocked", cause=self._blocked.cause)
        return msgspec.structs.replace(health, manifest=running) if health else None

    @property
    def restarts(self) -> int:
        """How often processes of the pod were started again, since it runs its manifest."""
        return sum(process.restarts for process in self._pod.processes().values()) if self._pod else 0

    async def report_failure(self, error: BaseException, seconds: float) -> None:
        """Publish, for so long, that this worker has ended by an error that it does not know. Its processes go on."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        words = f"{type(error).__name__}: {error}"
        self._reason = f"the agent failed in its work on this pod, and tries again every {seconds:g} s: {words}"
        self._block(self._reason)
        publishing = asyncio.create_task(self._publisher.run())
        try:
            async with asyncio.timeout(seconds):
                while True:
                    self._changed.clear()
                    shown = self._shown or Reality(manifest="", rc=self._rc, state="failed")
                    self._publisher.show(msgspec.structs.replace(shown, reason=self._reason), self.health)
                    await self._changed.wait()
        except TimeoutError:
            pass  # its successor goes on
        finally:
            publishing.cancel()
            await asyncio.wait([publishing])

    async def run(self) -> None:
        """Converge until the pod is gone, or until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publisher.run())
            try:
                self._adopt(tasks)
                await self._converge_until_gone(tasks)
            except asyncio.CancelledError:
                if self._tools.settings.stop_pods_on_exit:
                    await self._stop_and_tell()
                raise
            finally:
                await self._end_supervision()
                if self._pod is not None:
                    self._pod.release()
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
                delay = self._failed(error)
            else:
                self._retries.forget("")
                if self._blocked is not None:
                    self._blocked = None
                    self._show()
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._changed.wait()

    async def _converge(self, tasks: asyncio.TaskGroup, order: Order) -> bool:
        """Do the next step. Returns whether the pod is gone and forgotten."""
        pod = self._pod
        step = next_step(order, pod.installed.manifest_id if pod else None, lost_port=bool(pod and pod.lost_port))
        if step in (Step.INSTALL, Step.REPLACE) and isinstance(order, Wanted):
            await self._replace(tasks, order.intent)
        elif step is Step.RESTART and pod is not None:
            await self._restart(tasks, pod)
        elif step is Step.REMOVE:
            return await self._remove()
        elif step is Step.FORGET:
            return await self._forget()
        else:
            self._settle(order)
        return False

    def _settle(self, order: Order) -> None:
        """What runs is what should; only what is told of it may have changed."""
        self._reason, self._installing = order.reason if isinstance(order, Keep) else "", ""
        if self._pod is None:
            self._phase = "failed"  # an intent that can't be read, for a pod that does not run
        elif isinstance(order, Wanted):
            self._rc = order.intent.rc
            if (self._rc, self._tree) != (self._pod.record.rc, self._pod.record.tree):
                self._pod.hand_over(self._rc, self._tree)
            self._tools.discovery.want(self.pod_id, self._pod.service(order.intent.labels))
        self._show()

    async def _replace(self, tasks: asyncio.TaskGroup, intent: Intent) -> None:
        """Install what the intent says; once all of it is here, stop what runs, and start it."""
        if self._installing != intent.manifest:  # not one that has failed already: its reason stays until it is over
            self._phase = None if self._pod else "installing"
            self._reason = f"installing manifest {intent.manifest[:12]}"
        self._rc, self._installing = intent.rc, intent.manifest
        self._show()
        installed = await self._unless_superseded(self._install(intent.manifest))
        if installed is None:
            return
        old = self._pod.record if self._pod else self._tools.state.load_pod(self.pod_id)
        groups = self._pod.groups() if self._pod else []
        wanted = installed.manifest.ports
        ports = self._tools.ports.assign(self.pod_id, wanted, old.ports if old else {}, groups)
        record = PodRecord(manifest=installed.manifest_id, rc=intent.rc, tree=self._tree, ports=ports)
        self._check(installed, record)
        await self._stop()
        self._start(tasks, installed, record)

    async def _install(self, manifest_id: str) -> Installed:
        await self._tools.registration.held()  # whoever does not hold the node must not begin anything on it
        return await self._tools.installer.install(manifest_id)

    def _check(self, installed: Installed, record: PodRecord) -> None:
        """Find out what would fail before anything is stopped. Raises `InstallFailed`."""
        context = pod_context(self._tools, self.pod_id, record, installed)
        launch.config_file(installed.manifest)
        for name in installed.manifest.launchables:
            spec = launch.launch_spec(context, name, self._tools.state.paths(self.pod_id, name))
            launch.check_program(spec, f"launchables.{name}")

    async def _restart(self, tasks: asyncio.TaskGroup, pod: RunningPod) -> None:
        """A port that was chosen for the pod is not free any more: choose again, for all of its processes."""
        record = pod.record
        ports = self._tools.ports.assign(self.pod_id, pod.installed.manifest.ports, record.ports, pod.groups())
        await self._stop()
        self._start(tasks, pod.installed, msgspec.structs.replace(record, ports=ports, launchables={}))

    async def _remove(self) -> bool:
        if await self._unless_superseded(self._confirm_gone()) is None:
            return False
        self._log.info("The pod's intent is gone; stopping it")
        await self._stop()
        self._tools.state.remove_pod(self.pod_id)
        self._tools.ports.release(self.pod_id)
        return await self._forget()

    async def _forget(self) -> bool:
        """Remove the pod's records. Raises `Held` when an intent came back: it may be gone before the view shows it,
        and then no order would wake this worker."""
        removed = await self._unless_superseded(self._publisher.remove(self._rc))
        if removed is False:
            raise Held("there is an intent for it again")
        return bool(removed)

    async def _confirm_gone(self) -> bool:
        """Be sure that there is no intent. Raises `Held` when that can't be believed."""
        await self._tools.registration.held()
        store, keys, node = self._tools.store, self._tools.keys, self._tools.settings.node
        spec = await store.get(keys.node_spec(node), consistent=True)
        if self._tree and not (self._is_in_its_tree(spec) or self._tools.settings.stop_orphans):
            raise Held(
                "its intent vanished together with the node's record: the store was emptied or replaced, so the pod is "
                "kept until there is an intent for it again: apply its RC again (`rcfarm rc apply`), and delete it if "
                "the pod should stop, or restart this agent as `rcfarm agent --set agent.stop_orphans=true`"
            )
        if await store.get(keys.intent(node, self.pod_id), consistent=True) is not None:
            raise Held("a stale answer of the store showed no intent; there is one")
        return True

    def _is_in_its_tree(self, node_spec: Entry | None) -> bool:
        """Whether the pod's intent was last seen in the tree that the node is registered in, and that is still so."""
        registration = self._tools.registration
        index = node_spec.create_index if node_spec else 0
        return (self._tree, index) == (registration.tree, registration.tree_index)

    def _adopt(self, tasks: asyncio.TaskGroup) -> None:
        """Go on with what an earlier agent started."""
        record = self._tools.state.load_pod(self.pod_id)
        if record is None:
            return
        installed = self._tools.installer.find(record.manifest)
        if installed is None:
            self._log.error("The manifest of a running pod is lost; it can only be stopped", manifest=record.manifest)
            installed = _placeholder(self.pod_id, record)
        self._rc, self._tree = record.rc, record.tree
        self._publisher.recall(record.rc)
        self._supervise(tasks, installed, record)

    def _start(self, tasks: asyncio.TaskGroup, installed: Installed, record: PodRecord) -> None:
        self._tools.state.save_pod(self.pod_id, record)
        self._log.info("Starting the pod", manifest=installed.manifest_id, ports=record.ports)
        self._supervise(tasks, installed, record)
        self._changed.set()

    def _supervise(self, tasks: asyncio.TaskGroup, installed: Installed, record: PodRecord) -> None:
        self._phase, self._reason, self._installing = None, "", ""
        self._pod = RunningPod(
            self._tools,
            self.pod_id,
            installed,
            record,
            self._limiter,
            on_change=self._process_changed,
            on_verdict=self._verdict,
        )
        self._tools.ports.settle(self.pod_id, record.ports)
        self._limiter.forget()
        self._is_new = True
        self._supervision = tasks.create_task(self._pod.run())

    async def _stop(self) -> None:
        """Stop what runs, if anything does."""
        if self._pod is None:
            return
        await self._end_supervision()
        self._verdict(Verdict("critical", "the pod is being stopped"))
        self._tools.discovery.want(self.pod_id, None)  # so that nobody is sent to a pod that is going
        await self._pod.stop()
        self._pod = None

    async def _stop_and_tell(self) -> None:
        pod = self._pod
        await self._stop()
        self._pod = pod  # for `_show`: its processes are stopped
        self._show()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await self._publisher.flush()

    async def _end_supervision(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision])

    def _process_changed(self) -> None:
        if self._pod is not None and self._pod.lost_port:
            self._changed.set()
        self._show()

    def _verdict(self, verdict: Verdict) -> None:
        if self._pod is None:
            return
        old, manifest = self._health, self._pod.record.manifest
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
        self._tools.discovery.report(self.pod_id, verdict)
        self._show()

    def _failed(self, error: Exception) -> float:
        """Show why the last step failed. Returns seconds until it is tried again."""
        reason = describe_os_error(error, self._tools.state.root) if isinstance(error, OSError) else str(error)
        delay = self._retries.when("", 0.0)
        self._log.warning("The pod can't be brought to its intent", reason=reason, retry_in=delay)
        self._reason = reason
        if self._pod is None:
            self._phase = "failed"
        self._block(reason)
        self._show()
        return delay

    def _block(self, reason: str) -> None:
        """The pod's health is to say that it can't be brought to its intent."""
        since = self._blocked.since if self._blocked else utc_now()
        self._blocked = Health("critical", "", reason, since, condition="blocked", cause=reason)

    def _show(self) -> None:
        """Publish what is known now."""
        pod = self._pod
        if isinstance(self._order, Gone) and pod is None:
            return
        processes = pod.processes() if pod else {}
        reality = Reality(
            manifest=pod.record.manifest if pod else "",
            rc=pod.record.rc if pod else self._rc,
            state=self.state,
            launchables=processes,
            ports=pod.record.ports if pod else {},
            address=self._tools.address,
            reason=self.reason,
        )
        self._shown = reality
        self._publisher.show(reality, self.health)

    async def _unless_superseded(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when a newer order made it pointless."""
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
                task.exception()  # of no interest when a newer order came at the same time


def _placeholder(pod_id: str, record: PodRecord) -> Installed:
    """Stands for a manifest that is lost: it starts nothing, and it is no intent's manifest."""
    launchables = {name: Launchable(command=["false"], restart="never") for name in record.launchables}
    return Installed("", Manifest(id=pod_id, launchables=launchables), {})
