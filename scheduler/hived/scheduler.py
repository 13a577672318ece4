"""HivedScheduler: kube-scheduler's calls and the API server's news on one side, the algorithm's decisions on the other.

The model: informers and calls change `view` in single steps, so the event loop is the lock. Whatever takes time is
outside of these steps: a Binding is posted while others are decided about, and Evictions too. Nodes are told before
pods, and no call is answered before every node and pod of the first lists was told of (`ready`).

A call that comes a moment too early (before that, or before the pod itself was seen) waits for it a little, because
kube-scheduler asks again only much later after an error. Filters take turns: after a decision to wait, the answer and
all other filters are held back for `waiting_pod_scheduling_block_milli_sec`, which is how HiveD approximates FIFO; news
of the cluster, other calls and inspection are not.

Source: the seed's `ExtenderHandlers`, whose three calls this answers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog

from scheduler.hived.binding import bind_pod, why_force_bind
from scheduler.hived.cluster_informers import ClusterInformers
from scheduler.hived.errors import HivedError, NotNow, UserError
from scheduler.hived.eviction import Evictor, EvictVictims
from scheduler.hived.extender_types import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
    ExtenderPreemptionResult,
    MetaVictims,
)
from scheduler.hived.pod_states import ExtenderCall, PodScheduleStatus, PodState, check_admitted, is_allocated
from scheduler.hived.replay import Replacement, newly_downgraded, rebuild
from scheduler.hived.scheduler_metrics import Decision, NoSchedulerMetrics, SchedulerMetrics
from scheduler.hived.scheduling_view import SchedulingView
from scheduler.hived.types import (
    PodPreemptInfo,
    PodScheduleResult,
    PodWaitInfo,
    SchedulerAlgorithm,
    SchedulingPhase,
)
from scheduler.hived.wire import COMPONENT
from store.kube.api import KubeApi
from store.kube.events import Recorder
from store.kube.objects import Object, join_key, key_of, uid_of

log = structlog.get_logger(__name__)

NOT_READY: Final = "not all nodes and pods are known yet: /readyz says what is in the way; try again"
PATIENCE: Final = 1.0  # seconds that a call waits for what it came too early for; kube-scheduler gives up after 5


class HivedScheduler:
    """Answers kube-scheduler's calls; `run` keeps its view current.

    `force_pod_bind_threshold`, `waiting_pod_scheduling_block_milli_sec`: as in HiveD's file; both may be changed at any
    time. `evict_victims`: see `Evictor`. `clock`: monotonic seconds. `ready`: calls are answered.
    """

    def __init__(
        self,
        api: KubeApi,
        algorithm: SchedulerAlgorithm,
        *,
        force_pod_bind_threshold: int = 3,
        waiting_pod_scheduling_block_milli_sec: int = 0,
        evict_victims: EvictVictims = "auto",
        recorder: Recorder | None = None,
        metrics: SchedulerMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.force_pod_bind_threshold = force_pod_bind_threshold
        self.waiting_pod_scheduling_block_milli_sec = waiting_pod_scheduling_block_milli_sec
        self.ready = asyncio.Event()
        self._api, self._metrics, self._clock = api, metrics or NoSchedulerMetrics(), clock
        self.view = SchedulingView(algorithm, recorder=recorder, metrics=metrics, gone=self._gone)
        self.informers = ClusterInformers(api, self.view, self._pod_seen, clock=clock, rng=rng)
        self.evictor = Evictor(
            api,
            self._decide_to_evict,
            self.informers.pods.get,
            mode=evict_victims,
            recorder=recorder,
            metrics=metrics,
            clock=clock,
            rng=rng,
        )
        self._turn, self._replacing = asyncio.Lock(), asyncio.Lock()
        self._awaited: dict[str, asyncio.Event] = {}  # by UID: pods that were asked about before they were seen
        self._force_binding: set[str] = set()
        self._group: asyncio.TaskGroup | None = None

    @property
    def algorithm(self) -> SchedulerAlgorithm:
        """The one that decides now; see `replace`."""
        return self.view.algorithm

    async def run(self) -> None:
        """Keep the view current and act on it until cancelled."""
        async with asyncio.TaskGroup() as group:
            try:
                self._group = group
                self.evictor.start(group)
                group.create_task(self.informers.nodes.run(), name="nodes")
                await self.informers.nodes.synced()
                group.create_task(self.informers.pods.run(), name="pods")
                await self.informers.pods.synced()
                self.view.is_complete = True
                self.ready.set()
                log.info("Ready to schedule", nodes=len(self.view.nodes), pods=dict(self.view.statuses.by_state()))
                await asyncio.Event().wait()
            finally:
                self.view.is_complete = False
                self.ready.clear()
                self.evictor.stop()
                self._group = None

    async def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """The node to bind the pod to, or why it has to wait. Raises `HivedError`."""
        await self._wait_for(uid_of(args.pod))
        suggested = dict.fromkeys(args.node_names).keys()
        async with self._turn:
            status = self._filter(args.pod, suggested)
            if status.pod_state == PodState.BINDING:
                self._see_to_binding(status, suggested)
                return ExtenderFilterResult(node_names=(status.pod["spec"]["nodeName"],))
            result = status.pod_schedule_result
            assert result is not None, "a filter leaves its decision in the status"
            if result.pod_preempt_info is not None:
                self.evictor.filtered(status.pod, suggested)
                return ExtenderFilterResult(failed_nodes=_waiting_for_victims(result.pod_preempt_info))
            await asyncio.sleep(self.waiting_pod_scheduling_block_milli_sec / 1000)
        return ExtenderFilterResult(failed_nodes=_waiting(result.pod_wait_info))

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        """Bind the pod as it was decided; any number of times. Raises `HivedError` when it is not bound."""
        await self._wait_for(args.pod_uid)
        status = self.view.statuses.get(args.pod_uid)
        node = "" if status is None else str(status.pod["spec"].get("nodeName") or "")
        pod = join_key(args.pod_namespace, args.pod_name)
        check_admitted(ExtenderCall.BIND, self.view.statuses.state(args.pod_uid), pod, node)
        if args.node != node:
            raise UserError(f"bind of pod {pod}: it was decided for node {node}, not for {args.node}")
        assert status is not None, "unknown pods are not admitted"
        if status.pod_state == PodState.BINDING:
            await self._bind(status.pod, forced=False)
        return ExtenderBindingResult()

    async def preempt(self, args: ExtenderPreemptionArgs) -> ExtenderPreemptionResult:
        """The pods that must leave one node for the pod; None when it has to wait, or may be filtered again.

        Raises `HivedError`.
        """
        await self._wait_for(uid_of(args.pod))
        if (status := self.view.statuses.get(uid_of(args.pod))) is not None:
            self.evictor.preempt_called(status.pod)
        found = self._preempt(args.pod, args.node_name_to_meta_victims.keys()).pod_preempt_info
        if found is None:
            return ExtenderPreemptionResult()
        return ExtenderPreemptionResult({found.node: MetaVictims(tuple(map(uid_of, found.victim_pods)))})

    async def replace(self, build: Callable[[], SchedulerAlgorithm]) -> Replacement:
        """Let another algorithm take over: `build` it and tell it all there is, in a thread, while this one goes on.

        Allocated pods keep their places; what waits is decided about anew. Raises what `build` raises, and then nothing
        has changed.
        """
        async with self._replacing:
            await self.ready.wait()
            capture = self.view.capture()
            try:
                rebuilt = await asyncio.to_thread(rebuild, build, capture)
            except BaseException:
                self.view.abandon()
                raise
            before = self.view.algorithm
            self.view.swap(rebuilt.algorithm)
        replacement = Replacement(rebuilt.recovered, rebuilt.failed, newly_downgraded(before, rebuilt.algorithm))
        log.info(
            "Another configuration decides now",
            recovered=len(replacement.recovered),
            failed=dict(replacement.failed),
            downgraded=list(replacement.downgraded),
        )
        self.view.lost_quota(replacement.downgraded, "another configuration")
        return replacement

    def check_ready(self) -> None:
        """Raises `NotNow` until the view is whole: what follows from a part of it would mislead."""
        if not self.ready.is_set():
            raise NotNow(NOT_READY)

    async def _wait_for(self, uid: str) -> None:
        """Until the view knows the pod, within `PATIENCE`. Raises `NotNow` when there is no whole view even then."""
        if self.ready.is_set() and uid in self.view.statuses:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await self.ready.wait()
                if uid not in self.view.statuses:
                    await self._awaited.setdefault(uid, asyncio.Event()).wait()
        except TimeoutError:
            pass  # the view tells below
        finally:
            self._awaited.pop(uid, None)
        self.check_ready()

    def _pod_seen(self, pod: Object) -> None:
        if (awaited := self._awaited.get(uid_of(pod))) is not None:
            awaited.set()

    def _gone(self, uid: str) -> None:
        self.evictor.gone(uid)

    def _filter(self, pod: Object, suggested: Collection[str]) -> PodScheduleStatus:
        began, before = self._clock(), self._last(pod)
        try:
            status = self.view.filter(pod, suggested)
        except HivedError as error:
            self._refused(SchedulingPhase.FILTERING, pod, error, began)
            raise
        self._decided(SchedulingPhase.FILTERING, status, began, before)
        return status

    def _preempt(self, pod: Object, suggested: Collection[str]) -> PodScheduleResult:
        began, before = self._clock(), self._last(pod)
        try:
            result = self.view.preempt(pod, suggested)
        except HivedError as error:
            self._refused(SchedulingPhase.PREEMPTING, pod, error, began)
            raise
        self._decided(SchedulingPhase.PREEMPTING, self.view.statuses[uid_of(pod)], began, before)
        return result

    def _decide_to_evict(self, uid: str, suggested: Collection[str]) -> PodPreemptInfo | None:
        status = self.view.statuses.get(uid)
        if status is None or is_allocated(status.pod_state):
            return None
        try:
            return self._preempt(status.pod, suggested).pod_preempt_info
        except UserError:
            return None  # the next filter will tell the pod's owner
        except Exception:  # one pod's trouble must not end the scheduler
            log.exception("Victims of a pod can't be decided about", pod=key_of(status.pod), uid=uid)
            return None

    def _see_to_binding(self, status: PodScheduleStatus, suggested: Collection[str]) -> None:
        """Post the Binding ourselves, in a task, where kube-scheduler won't."""
        reason = why_force_bind(
            status, threshold=self.force_pod_bind_threshold, suggested=suggested, nodes=self.view.nodes.keys()
        )
        pod, uid = status.pod, uid_of(status.pod)
        if reason and uid not in self._force_binding and self._group is not None:
            log.warning("Binding a pod without kube-scheduler", pod=key_of(pod), uid=uid, reason=reason)
            self._force_binding.add(uid)
            self._group.create_task(self._force_bind(pod), name=f"binding of {key_of(pod)}")

    async def _force_bind(self, pod: Object) -> None:
        """A failure has been logged, and the next filter tries again."""
        try:
            with suppress(HivedError):
                await self._bind(pod, forced=True)
        finally:
            self._force_binding.discard(uid_of(pod))

    async def _bind(self, pod: Object, *, forced: bool) -> None:
        names = {"pod": key_of(pod), "uid": uid_of(pod), "node": pod["spec"]["nodeName"], "forced": forced}
        try:
            await bind_pod(self._api, pod)
        except HivedError as error:
            self._metrics.bound(forced=forced, ok=False)
            log.warning("A pod was not bound", **names, reason=str(error))
            raise
        self._metrics.bound(forced=forced, ok=True)
        log.info("Bound a pod", **names)

    def _last(self, pod: Object) -> tuple[PodState, PodScheduleResult | None]:
        """Where a pod stands, and what was decided on it last."""
        status = self.view.statuses.get(uid_of(pod))
        return (PodState.UNKNOWN, None) if status is None else (status.pod_state, status.pod_schedule_result)

    def _decided(
        self,
        phase: SchedulingPhase,
        status: PodScheduleStatus,
        began: float,
        before: tuple[PodState, PodScheduleResult | None],
    ) -> None:
        """Pods are asked about for as long as they wait: what was decided as before is told to those who debug."""
        pod, result = status.pod, status.pod_schedule_result
        decision, details = _told(result)
        if not status.pod_bind_attempts:
            self._metrics.decided(phase, decision, self._clock() - began)
        else:
            details |= {"attempt": status.pod_bind_attempts}
        is_news = status.pod_bind_attempts or status.refusal or before[1] is None or before[0] != status.pod_state
        status.refusal = ""
        tell = log.info if is_news or _told(before[1]) != (decision, details) else log.debug
        tell("Decided", pod=key_of(pod), uid=uid_of(pod), phase=phase, decision=decision, **details)

    def _refused(self, phase: SchedulingPhase, pod: Object, error: HivedError, began: float) -> None:
        """Whoever answers the call logs it, for debugging if it is no news."""
        self._metrics.decided(phase, "error", self._clock() - began)
        if (status := self.view.statuses.get(uid_of(pod))) is not None:
            error.is_news = status.refusal != str(error)
            status.refusal = str(error)


def _told(result: PodScheduleResult | None) -> tuple[Decision, dict[str, Any]]:
    """A decision for the log."""
    if result is not None and result.pod_bind_info is not None:
        info = result.pod_bind_info
        return "bind", {"node": info.node, "devices": list(info.leaf_cell_isolation)}
    if result is not None and result.pod_preempt_info is not None:
        found = result.pod_preempt_info
        return "preempt", {"node": found.node, "victims": [key_of(victim) for victim in found.victim_pods]}
    return "wait", {"reason": _reason(None if result is None else result.pod_wait_info)}


def _reason(wait: PodWaitInfo | None) -> str:
    return "" if wait is None else wait.reason


def _waiting(wait: PodWaitInfo | None) -> Mapping[str, str]:
    """The reason stands under a node that does not exist, so that it gets into the pod's condition."""
    reason = _reason(wait)
    return {COMPONENT: "no free or preemptible cells now" + (f": {reason}" if reason else "")}


def _waiting_for_victims(found: PodPreemptInfo) -> Mapping[str, str]:
    return {found.node: f"waits for pods to be preempted: {', '.join(map(key_of, found.victim_pods))}"}
