"""The Framework operator: the agreement about the CRD, then informers, then syncs, in one control loop.

The model: handlers turn what the informers see into keys; the workers of the loop (`controllers.loop.control_loop`)
take keys from the queue and sync each Framework (`controllers.framework.reconciler`). The objects of a Framework carry
its name in a label, which leads to its key; the step decides by UIDs which attempt an object belongs to, and whether it
is a leftover or a stranger.

The operator's mode and the Framework CRD that the API server has must agree, because the two modes store the status in
different ways, and the API server reports no error to an operator of the wrong one: it drops a status that comes with
the main resource when the CRD has a status subresource. An operator that continued would act on facts that no successor
finds, and the successor would run the job again. So the agreement is verified before the first sync, then every few
seconds, and at once when a status was not stored (`Agreement.doubt`). While there is a problem, no Framework is synced.

The operator may be cancelled at any moment. Run it under an election (`store.kube.leaderelection.election`), with an
API that is fenced by it: two operators would not break the documented guarantees, but would undo each other's work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from controllers.framework.api.types import FRAMEWORK_NAME, FRAMEWORKS, FrameworkStatus
from controllers.framework.api.wire import CRD_NAME, Mode, crd
from controllers.framework.config import FrameworkConfig
from controllers.framework.reconciler import FrameworkSync, Incomplete, StatusNotKept, Views
from controllers.framework.reporting import History, Measurements
from controllers.framework.step.context import Gone
from controllers.loop.control_loop import (
    ChildHandler,
    ControlLoop,
    JobMetrics,
    NoJobMetrics,
    ObjectHandler,
    ReconcileResult,
)
from controllers.loop.workqueue import MetricsProvider, WorkQueue
from store.kube.api.errors import AlreadyExists, Forbidden, KubeError
from store.kube.api.objects import (
    CONFIG_MAPS,
    CUSTOM_RESOURCE_DEFINITIONS,
    PODS,
    Object,
    Resource,
    join_key,
    key_of,
    labels_of,
    namespace_of,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state

log = structlog.get_logger(__name__)

_EXPECTED = (KubeError, Incomplete, StatusNotKept)  # errors logged without a traceback

RETRY = 1.0  # seconds between two checks while there is a problem
CHECK = 5.0  # seconds between two checks while there is none
STATUS_SUBRESOURCE = Resource(FRAMEWORKS.group, FRAMEWORKS.version, "frameworks/status", FRAMEWORKS.kind)


class FrameworkOperator:
    """Runs the Frameworks of `namespaces`; of all namespaces if none is named.

    `config`: the settings of frameworkcontroller.yaml. `clock`: Unix seconds.
    """

    def __init__(
        self,
        api: KubeApi,
        config: FrameworkConfig,
        recorder: Recorder,
        *,
        namespaces: Sequence[str] = (),
        metrics: JobMetrics | None = None,
        queue_metrics: MetricsProvider | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self.queue: WorkQueue[str] = WorkQueue("frameworks", metrics=queue_metrics)
        self._agreement = Agreement(api, "native" if config.native_mode else "compatible", self.queue)
        self._measurements = Measurements(metrics or NoJobMetrics())
        self._informers: dict[str, list[Informer]] = {
            namespace: _informers(api, namespace) for namespace in (namespaces or ("",))
        }
        self._history = History(config)
        self._sync = FrameworkSync(
            api,
            config,
            lambda namespace: Views(*(self._informers.get(namespace) or self._informers[""])),
            self.queue,
            recorder,
            self._history,
            self._measurements,
            clock=clock,
            rng=rng,
        )
        self._loop = ControlLoop(self.queue, self._timed_sync, workers=config.workers, expected=_EXPECTED)
        for frameworks, config_maps, pods in self._informers.values():
            frameworks.add_handler(ObjectHandler(self._framework_changed, self._framework_gone))
            config_maps.add_handler(FrameworkChildHandler(self.queue, self._sync))
            pods.add_handler(FrameworkChildHandler(self.queue, self._sync, self._history.pod_deleted))

    async def run(self) -> None:
        """Work until cancelled; syncs in flight end within a few seconds."""
        await self._loop.run([self._agreement], self.informers)

    @property
    def informers(self) -> list[Informer]:
        return [informer for group in self._informers.values() for informer in group]

    def problems(self) -> Mapping[str, str]:
        """Return why the operator does not work, by component; "" for a component without a problem."""
        views = {informer.resource.plural: informer.problem for informer in self.informers}
        waiting = "" if self._loop.has_synced else "the caches are not complete yet"
        return {"operator": self._agreement.problem or waiting, **views}

    def statuses(self) -> list[FrameworkStatus]:
        """Return the expected status of every known Framework that has one."""
        return self._sync.statuses()

    def _framework_changed(self, framework: Object) -> None:
        if not self._sync.is_echo(framework):
            self.queue.wake(key_of(framework))

    def _framework_gone(self, framework: Object) -> None:
        self._history.framework_deleted(framework)
        self.queue.wake(key_of(framework))

    async def _timed_sync(self, key: str) -> float | None:
        if self._agreement.problem:
            self._agreement.park(key)
            return None
        began = time.perf_counter()
        try:
            requeue_after = await self._sync.sync(key)
        except Exception as error:
            if isinstance(error, StatusNotKept):
                self._agreement.doubt(str(error))
            result: ReconcileResult = "retry" if isinstance(error, _EXPECTED) else "error"
            self._measurements.synced(result, time.perf_counter() - began)
            raise
        self._measurements.synced("ok", time.perf_counter() - began)
        return requeue_after


class FrameworkChildHandler(ChildHandler):
    """Queues the Framework of a ConfigMap or pod, and reports the object's deletion to the next step.

    `gone`: called with the last known state of each deleted object that has the label.
    """

    def __init__(
        self, queue: WorkQueue[str], sync: FrameworkSync, gone: Callable[[Object], None] | None = None
    ) -> None:
        super().__init__(framework_key, lambda key: queue.wake(key, sync.patience.seconds))
        self._sync, self._gone = sync, gone

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        final = last_state(obj)
        key = framework_key(final)
        if self._gone is not None and key is not None:
            self._gone(final)
        if key is not None and not isinstance(obj, DeletedFinalStateUnknown):  # a tombstone's state may be stale
            self._sync.tell(key, Gone(uid_of(final), final))
        super().deleted(obj)


def framework_key(obj: Object) -> str | None:
    """Return the key of the Framework that a ConfigMap's or pod's label names; None without the label."""
    name = labels_of(obj).get(FRAMEWORK_NAME)
    return join_key(namespace_of(obj), name) if name else None


def _informers(api: KubeApi, namespace: str) -> list[Informer]:
    """Return the informers on Frameworks, their ConfigMaps and their pods."""
    return [
        Informer(api, FRAMEWORKS, namespace=namespace),
        Informer(api, CONFIG_MAPS, namespace=namespace, label_selector=FRAMEWORK_NAME),
        Informer(
            api,
            PODS,
            namespace=namespace,
            label_selector=FRAMEWORK_NAME,
            indexers={"framework": lambda pod: [key] if (key := framework_key(pod)) else []},
        ),
    ]


class Agreement:
    """`problem`: why the CRD does not match the mode, or ""."""

    def __init__(self, api: KubeApi, mode: Mode, queue: WorkQueue[str]) -> None:
        self.problem = "the operator has not started"
        self._api, self._mode, self._queue = api, mode, queue
        self._parked: dict[str, None] = {}
        self._doubted, self._reached = asyncio.Event(), asyncio.Event()

    async def synced(self) -> None:
        """Wait until the API server has served Frameworks in our mode."""
        await self._reached.wait()

    async def run(self) -> None:
        """Check repeatedly, until cancelled. Create the CRD at the start where that is allowed, but not again."""
        while self.problem:
            await self._look(may_create=True)
            if self.problem:
                await asyncio.sleep(RETRY)
        self._reached.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY if self.problem else CHECK):
                    await self._doubted.wait()
            self._doubted.clear()
            had_problem = bool(self.problem)
            await self._look(may_create=False)
            if not self.problem:
                if had_problem:
                    log.info("Framework CRD matches the mode again", name=CRD_NAME, mode=self._mode)
                parked, self._parked = self._parked, {}
                for key in parked:
                    self._queue.add(key)

    def park(self, key: str) -> None:
        """Keep the key until a check finds no problem; then it is queued again."""
        self._parked[key] = None

    def doubt(self, why: str) -> None:
        """Stop syncing Frameworks until a check finds no problem."""
        self.problem = self.problem or why
        self._doubted.set()

    async def _look(self, *, may_create: bool) -> None:
        try:
            problem = await self._find_problem(may_create=may_create)
        except KubeError as error:
            if not may_create and not self.problem:
                return  # unreachable: no change is known, and nothing can be stored, either
            problem = f"cannot read the Framework CRD from the API server: {error}"
        if problem and problem != self.problem:
            log.warning("Frameworks are not synced", reason=problem)
        self.problem = problem

    async def _find_problem(self, *, may_create: bool) -> str:
        if not await self._api.served(FRAMEWORKS, fresh=True):
            if may_create:
                try:
                    await self._api.create(CUSTOM_RESOURCE_DEFINITIONS, crd(self._mode))
                    log.info("CRD created", name=CRD_NAME, mode=self._mode)
                except AlreadyExists:
                    pass
                except Forbidden as error:
                    raise Forbidden(
                        f"the CRD {CRD_NAME} is not installed, and this operator may not create it; apply "
                        f"deploy/kubernetes/crd.yaml ({error})",
                        status=error.status,
                    ) from error
            if not may_create or not await self._api.served(FRAMEWORKS, fresh=True):
                return f"the API server does not serve {CRD_NAME}; if that lasts, apply deploy/kubernetes/crd.yaml"
        has_subresource = await self._api.served(STATUS_SUBRESOURCE, fresh=True)
        if has_subresource == (self._mode == "native"):
            return ""
        other = "native" if has_subresource else "compatible"
        return (
            f"the installed CRD {CRD_NAME} is for {other} mode, and this operator is set to {self._mode} mode: change "
            "the setting, or apply the other CRD"
        )
