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

from controllers.framework.agreement import Agreement
from controllers.framework.config import FrameworkConfig
from controllers.framework.constants import FRAMEWORK_NAME, FRAMEWORKS
from controllers.framework.handlers import ChildHandler, FrameworkHandler, PodHandler, framework_key
from controllers.framework.history import History
from controllers.framework.meter import Meter
from controllers.framework.sync import FrameworkSync, Incomplete, StatusNotKept, Views
from controllers.framework.types import FrameworkStatus
from controllers.job_metrics import JobMetrics, NoJobMetrics, ReconcileResult
from controllers.workers import Workers
from controllers.workqueue import MetricsProvider, WorkQueue
from store.kube.api import KubeApi
from store.kube.errors import KubeError
from store.kube.events import Recorder
from store.kube.informer import Informer
from store.kube.resources import CONFIG_MAPS, PODS

_EXPECTED = (KubeError, Incomplete, StatusNotKept)  # what needs no traceback


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
        self._agreement = Agreement(api, "native" if config.native_mode else "compatible", self._resume)
        self._parked: dict[str, None] = {}  # keys that came while the CRD did not fit
        self._waiting = "the caches are not complete yet"
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
        await self._agreement.reach()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(informer.run()) for informer in self.informers]
            background.append(group.create_task(self._agreement.keep()))
            try:
                for informer in self.informers:
                    await informer.synced()
                self._waiting = ""
                await self._workers.run()
            finally:
                for task in background:
                    task.cancel()

    @property
    def informers(self) -> list[Informer]:
        return [informer for group in self._informers.values() for informer in group]

    def problems(self) -> Mapping[str, str]:
        """What keeps the operator from working, by name; "" where nothing does."""
        views = {informer.resource.plural: informer.problem for informer in self.informers}
        return {"operator": self._agreement.problem or self._waiting, **views}

    def statuses(self) -> list[FrameworkStatus]:
        """Of every known Framework that has one, as the operator expects it to be."""
        return self._sync.statuses()

    def _views(self, namespace: str) -> Views:
        return Views(*(self._informers.get(namespace) or self._informers[""]))

    def _resume(self) -> None:
        """Queue what was parked."""
        parked, self._parked = self._parked, {}
        for key in parked:
            self.queue.add(key)

    async def _timed_sync(self, key: str) -> None:
        if self._agreement.problem:
            self._parked[key] = None
            return
        began = time.perf_counter()
        self._meter.began(key)
        try:
            await self._sync.sync(key)
        except Exception as error:
            if isinstance(error, StatusNotKept):
                self._agreement.doubt(str(error))
            result: ReconcileResult = "retry" if isinstance(error, _EXPECTED) else "error"
            self._metrics.reconciled(FRAMEWORKS.kind, result, time.perf_counter() - began)
            raise
        finally:
            self._meter.ended(key)
        self._metrics.reconciled(FRAMEWORKS.kind, "ok", time.perf_counter() - began)


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
