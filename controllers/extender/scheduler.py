"""HivedScheduler: connects kube-scheduler's calls and the API server's events with the algorithm's decisions.

The model: informers and calls change `view` in single steps, so the event loop is the lock. Whatever takes time is
outside of these steps: Bindings and Evictions are posted while other decisions are made. Nodes are added before pods,
and no call is answered before every node and pod of the first lists was added (`ready`).

A call that comes too early (before that, or before the pod itself was seen) waits briefly, because after an error
kube-scheduler calls again only much later. Filters take turns: after a decision to wait, the answer and all other
filters are held back for `waiting_pod_scheduling_block_milli_sec`, which is how HiveD approximates FIFO; cluster
events, other calls and inspection are not.

A pod is bound with one POST that sets its node and its annotations together. The API server accepts a binding once. If
it refuses because the pod already has a node, binding counts as done when the pod has the intended node and
annotations: an earlier response was lost, or another process posted the same binding.

The three calls are those of HiveD's `ExtenderHandlers`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

import structlog

from controllers.extender.cluster_state import ClusterInformers, Replacement, SchedulingView, newly_downgraded, rebuild
from controllers.extender.eviction import Evictor, EvictVictims
from controllers.extender.pod_states import ExtenderCall, PodScheduleStatus, PodState, check_admitted, is_allocated
from controllers.extender.reporting import Metrics, Outcome
from controllers.extender.wire import (
    COMPONENT,
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
    ExtenderPreemptionResult,
    MetaVictims,
)
from scheduler.hived.algorithm import (
    HivedAlgorithm,
    PodPreemptInfo,
    PodScheduleResult,
    SchedulingPhase,
)
from scheduler.hived.contract import extract_pod_bind_annotations
from scheduler.hived.errors import HivedError, NotNow, UserError
from store.kube.api.errors import Conflict, KubeError, NotFound
from store.kube.api.objects import NODES, PODS, Object, annotations_of, join_key, key_of, name_of, namespace_of, uid_of
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder

log = structlog.get_logger(__name__)

NOT_READY: Final = "not all nodes and pods are known yet: see /readyz; try again"
PATIENCE: Final = 1.0  # seconds that a call waits for the view or its pod; kube-scheduler gives up after 5


class HivedScheduler:
    """Answers kube-scheduler's calls; `run` keeps its view current.

    `force_pod_bind_threshold`, `waiting_pod_scheduling_block_milli_sec`: as in HiveD's file; both may be changed at any
    time. `evict_victims`: see `Evictor`. `clock`: monotonic seconds. `ready`: set while calls are answered.
    """

    def __init__(
        self,
        api: KubeApi,
        algorithm: HivedAlgorithm,
        *,
        force_pod_bind_threshold: int = 3,
        waiting_pod_scheduling_block_milli_sec: int = 0,
        evict_victims: EvictVictims = "auto",
        recorder: Recorder | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.force_pod_bind_threshold = force_pod_bind_threshold
        self.waiting_pod_scheduling_block_milli_sec = waiting_pod_scheduling_block_milli_sec
        self.ready = asyncio.Event()
        self._api, self._metrics, self._clock = api, metrics or Metrics(), clock
        self.view = SchedulingView(algorithm, recorder=recorder, metrics=metrics)
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
        self.view.gone = self.evictor.gone
        self._turn, self._replacing = asyncio.Lock(), asyncio.Lock()
        self._awaited: dict[str, asyncio.Event] = {}  # by UID: pods with a call before they were seen
        self._force_binding: set[str] = set()
        self._group: asyncio.TaskGroup | None = None

    @property
    def algorithm(self) -> HivedAlgorithm:
        """Return the current algorithm; see `replace`."""
        return self.view.algorithm

    async def run(self) -> None:
        """Keep the view current and act on it until cancelled."""
        async with asyncio.TaskGroup() as group:
            try:
                self._group = group
                self.evictor.group = group
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
                self.evictor.group = None
                self._group = None

    async def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """Return the node to bind the pod to, or why it has to wait. Raises `HivedError`."""
        await self._wait_for(uid_of(args.pod))
        suggested = dict.fromkeys(args.node_names).keys()
        async with self._turn:
            status = self._decide(SchedulingPhase.FILTERING, args.pod, suggested)
            if status.pod_state == PodState.BINDING:
                reason = why_force_bind(
                    status, threshold=self.force_pod_bind_threshold, suggested=suggested, nodes=self.view.nodes.keys()
                )
                pod, uid = status.pod, uid_of(status.pod)
                if reason and uid not in self._force_binding and self._group is not None:
                    log.warning("Binding pod without kube-scheduler", pod=key_of(pod), uid=uid, reason=reason)
                    self._force_binding.add(uid)
                    self._group.create_task(self._force_bind(pod), name=f"binding of {key_of(pod)}")
                return ExtenderFilterResult(node_names=(status.pod["spec"]["nodeName"],))
            result = status.pod_schedule_result
            assert result is not None, "a filter leaves its decision in the status"
            if result.pod_preempt_info is not None:
                self.evictor.filtered(status.pod, suggested)
                found = result.pod_preempt_info
                victims = ", ".join(map(key_of, found.victim_pods))
                return ExtenderFilterResult(failed_nodes={found.node: f"waits for pods to be preempted: {victims}"})
            await asyncio.sleep(self.waiting_pod_scheduling_block_milli_sec / 1000)
        problem = "no free or preemptible cells now"
        if result.pod_wait_info is not None and result.pod_wait_info.reason:
            problem = f"{problem}: {result.pod_wait_info.reason}"
        # under a node that does not exist, so that it appears in the pod's condition
        return ExtenderFilterResult(failed_nodes={COMPONENT: problem})

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        """Bind the pod to the node that was decided; may be repeated. Raises `HivedError` if the pod is not bound."""
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
        """Return the victims on one node; None if the pod has to wait, or may be filtered again.

        Raises `HivedError`.
        """
        await self._wait_for(uid_of(args.pod))
        if (status := self.view.statuses.get(uid_of(args.pod))) is not None:
            self.evictor.preempt_called(status.pod)
        status = self._decide(SchedulingPhase.PREEMPTING, args.pod, args.node_name_to_meta_victims.keys())
        result = status.pod_schedule_result
        found = None if result is None else result.pod_preempt_info
        if found is None:
            return ExtenderPreemptionResult()
        return ExtenderPreemptionResult({found.node: MetaVictims(tuple(map(uid_of, found.victim_pods)))})

    async def replace(self, build: Callable[[], HivedAlgorithm]) -> Replacement:
        """Switch to another algorithm, built and filled from a capture in a thread while the current one continues.

        Allocated pods keep their places; waiting pods are scheduled again. If `build` raises, nothing has changed and
        its error is raised.
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
            "Configuration reloaded",
            recovered=len(replacement.recovered),
            failed=dict(replacement.failed),
            downgraded=list(replacement.downgraded),
        )
        self.view.lost_quota(replacement.downgraded, "another configuration")
        return replacement

    def check_ready(self) -> None:
        """Raise `NotNow` until the view is complete: decisions on a part of it would be wrong."""
        if not self.ready.is_set():
            raise NotNow(NOT_READY)

    async def _wait_for(self, uid: str) -> None:
        """Wait until the view has the pod, at most `PATIENCE`. Raises `NotNow` if the view is still incomplete."""
        if self.ready.is_set() and uid in self.view.statuses:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await self.ready.wait()
                if uid not in self.view.statuses:
                    await self._awaited.setdefault(uid, asyncio.Event()).wait()
        except TimeoutError:
            pass  # check_ready decides
        finally:
            self._awaited.pop(uid, None)
        self.check_ready()

    def _pod_seen(self, pod: Object) -> None:
        if (awaited := self._awaited.get(uid_of(pod))) is not None:
            awaited.set()

    def _decide(self, phase: SchedulingPhase, pod: Object, suggested: Collection[str]) -> PodScheduleStatus:
        """Decide on a pod, and record the decision or refusal. Raises `HivedError`.

        kube-scheduler repeats calls while a pod waits; unchanged decisions are logged at debug level. A refusal is
        logged by the caller, at debug level unless `is_news`.
        """
        began, earlier = self._clock(), self.view.statuses.get(uid_of(pod))
        state, last = (None, None) if earlier is None else (earlier.pod_state, earlier.pod_schedule_result)
        decide = self.view.filter if phase is SchedulingPhase.FILTERING else self.view.preempt
        try:
            status = decide(pod, suggested)
        except HivedError as error:
            self._metrics.decided(phase, "error", self._clock() - began)
            if (refused := self.view.statuses.get(uid_of(pod))) is not None:
                error.is_news = refused.refusal != str(error)
                refused.refusal = str(error)
            raise
        decision, details = _described(status.pod_schedule_result)
        if not status.pod_bind_attempts:
            self._metrics.decided(phase, decision, self._clock() - began)
        else:
            details |= {"attempt": status.pod_bind_attempts}
        is_news = status.pod_bind_attempts or status.refusal or last is None or state != status.pod_state
        status.refusal = ""
        write = log.info if is_news or _described(last) != (decision, details) else log.debug
        write("Decided", pod=key_of(status.pod), uid=uid_of(pod), phase=phase, decision=decision, **details)
        return status

    def _decide_to_evict(self, uid: str, suggested: Collection[str]) -> PodPreemptInfo | None:
        status = self.view.statuses.get(uid)
        if status is None or is_allocated(status.pod_state):
            return None
        try:
            result = self._decide(SchedulingPhase.PREEMPTING, status.pod, suggested).pod_schedule_result
            return None if result is None else result.pod_preempt_info
        except UserError:
            return None  # the pod's owner gets the error at the next filter
        except Exception:  # one pod's trouble must not end the scheduler
            log.exception("Could not select victims for the pod", pod=key_of(status.pod), uid=uid)
            return None

    async def _force_bind(self, pod: Object) -> None:
        """Bind without kube-scheduler. A failure has been logged; the next filter tries again."""
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
            log.warning("Pod not bound", **names, reason=str(error))
            raise
        self._metrics.bound(forced=forced, ok=True)
        log.info("Pod bound", **names)


def _described(result: PodScheduleResult | None) -> tuple[Outcome, dict[str, Any]]:
    """Return a decision and its fields for the log."""
    if result is not None and result.pod_bind_info is not None:
        info = result.pod_bind_info
        return "bind", {"node": info.node, "devices": list(info.leaf_cell_isolation)}
    if result is not None and result.pod_preempt_info is not None:
        found = result.pod_preempt_info
        return "preempt", {"node": found.node, "victims": [key_of(victim) for victim in found.victim_pods]}
    wait = None if result is None else result.pod_wait_info
    return "wait", {"reason": "" if wait is None else wait.reason}


async def bind_pod(api: KubeApi, binding_pod: Object) -> None:
    """Bind a pod to the node in its spec, with the annotations of its placement (HiveD's `BindPod`).

    Raises `UserError` if the pod is gone or bound to something else, and `NotNow` if the API server fails to bind it.
    """
    name, namespace, wanted = name_of(binding_pod), namespace_of(binding_pod), extract_pod_bind_annotations(binding_pod)
    binding = {
        "apiVersion": PODS.api_version,
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": uid_of(binding_pod), "annotations": wanted},
        "target": {
            "apiVersion": NODES.api_version,
            "kind": NODES.kind,
            "name": binding_pod["spec"]["nodeName"],
        },
    }
    try:
        await api.create(PODS, binding, namespace, name=name, subresource="binding")
    except NotFound as error:
        raise UserError(f"pod {key_of(binding_pod)} can't be bound: {error}") from error
    except Conflict as error:
        found: Object | None = None
        with suppress(KubeError):
            found = await api.get(PODS, name, namespace)
        if (
            found is None
            or uid_of(found) != uid_of(binding_pod)
            or found["spec"].get("nodeName") != binding_pod["spec"]["nodeName"]
            or not wanted.items() <= annotations_of(found).items()
        ):
            raise UserError(f"pod {key_of(binding_pod)} can't be bound: {error}") from error
    except KubeError as error:
        raise NotNow(f"pod {key_of(binding_pod)} is not bound yet: {error}") from error


def why_force_bind(
    status: PodScheduleStatus, *, threshold: int, suggested: Collection[str], nodes: Collection[str]
) -> str:
    """Return why a Binding pod must be bound without kube-scheduler's help, or "".

    kube-scheduler binds only to nodes of its own call. `threshold`: filter calls to allow before binding; `nodes`: the
    nodes that exist.
    """
    node = status.pod["spec"]["nodeName"]
    if status.pod_bind_attempts >= threshold:
        return f"after {status.pod_bind_attempts} more filters it is still not bound"
    if node not in nodes:
        return f"node {node} does not exist, or was not seen yet"
    if node not in suggested:
        return f"node {node} is not among those that kube-scheduler asked about"
    return ""
