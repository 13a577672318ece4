"""The Framework operator: informers, a work queue and workers, started in that order and stopped in the reverse.

The model: handlers turn what the informers see into keys; `workers` tasks take keys from the queue and sync each
Framework (`controllers.framework.sync`), never two of them the same one. Nothing is synced before all caches are
complete: a pod that is not in the cache must mean that it does not exist.

The operator may be cancelled at any moment. Run it under an election (`store.kube.lease`), with an API that is fenced
by it: two operators would not break the promises of section "guarantees" in the docs, but would undo each other's work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from controllers.framework.config import FrameworkConfig
from controllers.framework.constants import FRAMEWORK_NAME, FRAMEWORKS
from controllers.framework.crd import CRD_NAME, Mode, crd
from controllers.framework.handlers import ChildHandler, FrameworkHandler, PodHandler, framework_key
from controllers.framework.history import History
from controllers.framework.meter import Meter
from controllers.framework.sync import FrameworkSync, Incomplete, Views
from controllers.framework.types import FrameworkStatus
from controllers.job_metrics import JobMetrics, NoJobMetrics, ReconcileResult
from controllers.workers import Workers
from controllers.workqueue import MetricsProvider, WorkQueue
from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, Forbidden, KubeError
from store.kube.events import Recorder
from store.kube.informer import Informer
from store.kube.resources import CONFIG_MAPS, CUSTOM_RESOURCE_DEFINITIONS, PODS, Resource

log = structlog.get_logger(__name__)

_EXPECTED = (KubeError, Incomplete)  # what needs no traceback
CRD_RETRY = 1.0  # seconds between two looks for the CRD
STATUS_SUBRESOURCE = Resource(FRAMEWORKS.group, FRAMEWORKS.version, "frameworks/status", FRAMEWORKS.kind)


class FrameworkOperator:
    """Runs the Frameworks of `namespaces`; of all of them where none is named.

    `config`: what frameworkcontroller.yaml says. `clock`: Unix seconds.
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
        self._api = api
        self._mode: Mode = "native" if config.native_mode else "compatible"
        self._waiting = "the operator has not started"
        self._metrics = metrics or NoJobMetrics()
        self.queue: WorkQueue[str] = WorkQueue("frameworks", metrics=queue_metrics)
        self._meter = Meter(self._metrics, self.queue)
        self._informers: dict[str, list[Informer]] = {
            namespace: _informers(api, namespace) for namespace in (namespaces or ("",))
        }
        history = History(config)
        self._sync = FrameworkSync(
            api, config, self._views, self.queue, recorder, history, self._meter, clock=clock, rng=rng
        )
        self._workers = Workers(self.queue, self._timed_sync, count=config.worker_number, expected=_EXPECTED)
        for frameworks, config_maps, pods in self._informers.values():
            frameworks.add_handler(FrameworkHandler(self._meter, self._sync, history))
            config_maps.add_handler(ChildHandler(self._meter, self._sync))
            pods.add_handler(PodHandler(self._meter, self._sync, history))

    async def run(self) -> None:
        """Work until cancelled; what was begun is finished within a few seconds."""
        await self._agree_on_crd()
        async with asyncio.TaskGroup() as group:
            informers = [group.create_task(informer.run()) for informer in self.informers]
            try:
                self._waiting = "the caches are not complete yet"
                for informer in self.informers:
                    await informer.synced()
                self._waiting = ""
                await self._workers.run()
            finally:
                for task in informers:
                    task.cancel()

    @property
    def informers(self) -> list[Informer]:
        return [informer for group in self._informers.values() for informer in group]

    def problems(self) -> Mapping[str, str]:
        """What keeps the operator from working, by name; "" where nothing does."""
        views = {informer.resource.plural: informer.problem for informer in self.informers}
        return {"operator": self._waiting, **views}

    def statuses(self) -> list[FrameworkStatus]:
        """Of every known Framework that has one, as the operator expects it to be."""
        return self._sync.statuses()

    def _views(self, namespace: str) -> Views:
        return Views(*(self._informers.get(namespace) or self._informers[""]))

    async def _timed_sync(self, key: str) -> None:
        began = time.perf_counter()
        self._meter.began(key)
        try:
            await self._sync.sync(key)
        except Exception as error:
            result: ReconcileResult = "retry" if isinstance(error, _EXPECTED) else "error"
            self._metrics.reconciled(FRAMEWORKS.kind, result, time.perf_counter() - began)
            raise
        finally:
            self._meter.ended(key)
        self._metrics.reconciled(FRAMEWORKS.kind, "ok", time.perf_counter() - began)

    async def _agree_on_crd(self) -> None:
        """Wait until the API server serves Frameworks in our mode; create the CRD where that is allowed."""
        while self._waiting:
            try:
                problem = await self._crd_problem()
            except KubeError as error:
                problem = f"the API server can't be asked for the Framework CRD: {error}"
            if problem and problem != self._waiting:
                log.warning("Frameworks can't be run yet", reason=problem)
            self._waiting = problem
            if problem:
                await asyncio.sleep(CRD_RETRY)

    async def _crd_problem(self) -> str:
        if not await self._api.served(FRAMEWORKS):
            await self._create_crd()
            if not await self._api.served(FRAMEWORKS):
                return f"the API server does not serve {CRD_NAME} yet"
        has_subresource = await self._api.served(STATUS_SUBRESOURCE)
        if has_subresource == (self._mode == "native"):
            return ""
        other = "native" if has_subresource else "compatible"
        return (
            f"the installed CRD {CRD_NAME} is for {other} mode, and this operator is set to {self._mode} mode: change "
            "the setting, or apply the other CRD"
        )

    async def _create_crd(self) -> None:
        try:
            await self._api.create(CUSTOM_RESOURCE_DEFINITIONS, crd(self._mode))
        except AlreadyExists:
            return
        except Forbidden as error:
            raise Forbidden(
                f"the CRD {CRD_NAME} is not installed, and this operator may not create it; apply "
                f"deploy/kubernetes/crd.yaml ({error})",
                status=error.status,
            ) from error
        log.info("Created the CRD", name=CRD_NAME, mode=self._mode)


def _informers(api: KubeApi, namespace: str) -> list[Informer]:
    """Of Frameworks, their ConfigMaps and their pods."""
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
