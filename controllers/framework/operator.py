"""The Framework operator: the agreement about the CRD, then informers, then syncs, in one control loop.

The model: handlers turn what the informers see into keys; the workers of the loop (`controllers.loop.control_loop`)
take keys from the queue and sync each Framework, one at a time per key. The objects of a Framework carry its name in a
label, which leads to its key; the step decides by UIDs which attempt an object belongs to, and whether it is a leftover
or a stranger.

A sync steps, persists, acts, and repeats with the outcomes, until no action is left. The operator keeps two statuses of
each Framework. The *expected* one is the basis of every step, for it holds facts that no cache shows yet. The *stored*
one is what the API server has confirmed. A sync first stores the expected status, if an earlier write was not
confirmed; no action is taken before the status that it relies on is stored. A crash loses only the expected status; the
next operator continues from the stored one. A status that differs only in facts that can be read from the objects again
may be stored a moment later, together with the next changes.

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
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import structlog

from controllers.framework.api.types import FRAMEWORK_NAME, FRAMEWORKS, Framework, FrameworkStatus, config_map_name
from controllers.framework.api.wire import (
    CRD_NAME,
    BadFramework,
    Mode,
    crd,
    decode_framework,
    decode_status,
    encode_status,
    status_patch,
)
from controllers.framework.config import FrameworkConfig
from controllers.framework.executor import Surrounding, perform, surround, surroundings
from controllers.framework.reporting import KIND, History, count_changes, count_outcomes
from controllers.framework.step.context import Create, Gone, Note, Outcome, Step, lasting
from controllers.framework.step.step import step
from controllers.loop.control_loop import (
    ChildHandler,
    ControlLoop,
    JobMetrics,
    NoJobMetrics,
    ObjectHandler,
    ReconcileResult,
    write_onto_latest,
)
from controllers.loop.workqueue import MetricsProvider, WorkQueue, loop_time
from store.kube.api.errors import AlreadyExists, Conflict, Forbidden, Invalid, KubeError, NotFound
from store.kube.api.objects import (
    CONFIG_MAPS,
    CUSTOM_RESOURCE_DEFINITIONS,
    PODS,
    Object,
    Resource,
    join_key,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    resource_version_of,
    split_key,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state

log = structlog.get_logger(__name__)

RETRY = 1.0  # seconds between two checks while there is a problem
CHECK = 5.0  # seconds between two checks while there is none
STATUS_SUBRESOURCE = Resource(FRAMEWORKS.group, FRAMEWORKS.version, "frameworks/status", FRAMEWORKS.kind)

DEFER = 1.0  # seconds that a status may wait to be stored together with the next one
ROUNDS = 100  # steps in a row after which another Framework gets its turn

LEAST = 0.05  # seconds that an event may wait for others
MOST = 1.0  # seconds
WRITES = 6.0  # duration of that wait, in average writes
_WEIGHT = 0.1  # of the newest write in the average


class Incomplete(Exception):
    """Some actions of a step failed; the sync is retried under the queue's back-off."""


class StatusNotKept(Exception):
    """The API server accepted a status and did not store it: the CRD does not match the operator's mode."""


_EXPECTED = (KubeError, Incomplete, StatusNotKept)  # errors logged without a traceback


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
        self._metrics = metrics or NoJobMetrics()
        self._informers: dict[str, list[Informer]] = {
            namespace: _informers(api, namespace) for namespace in (namespaces or ("",))
        }
        self.informers = [informer for group in self._informers.values() for informer in group]
        self._history = History(config)
        self._sync = FrameworkSync(
            api,
            config,
            lambda namespace: Views(*(self._informers.get(namespace) or self._informers[""])),
            self.queue,
            recorder,
            self._history,
            self._metrics,
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
            self._metrics.reconciled(KIND, result, time.perf_counter() - began)
            raise
        self._metrics.reconciled(KIND, "ok", time.perf_counter() - began)
        return requeue_after


class FrameworkChildHandler(ChildHandler):
    """Queues the Framework of a ConfigMap or pod, and reports the object's deletion to the next step.

    `gone`: called with the last known state of each deleted object that has the label.
    """

    def __init__(
        self, queue: WorkQueue[str], sync: FrameworkSync, gone: Callable[[Object], None] | None = None
    ) -> None:
        super().__init__(framework_key, lambda key: queue.wake(key, sync.patience))
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


class Cache(Protocol):
    """The part of an informer that a sync reads."""

    def get(self, key: str) -> Object | None: ...

    def by_index(self, index: str, value: str) -> list[Object]: ...


class Views(NamedTuple):
    """The caches that a Framework's sync reads. Pods have an index "framework", by the Framework's key."""

    frameworks: Cache
    config_maps: Cache
    pods: Cache


@dataclass(slots=True)
class Memory:
    """The state kept of one Framework. `latest`: its newest known state, from the cache or the answer to a write.
    `outcomes`: those for the next step. `store_by`: the time, on the loop's clock, by which the expected status must be
    stored; None: at once. `surroundings`: the objects created around the attempt's pods.
    """

    uid: str
    latest: Object
    expected: FrameworkStatus | None = None
    stored: FrameworkStatus | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    store_by: float | None = None
    surroundings: tuple[Surrounding, ...] = ()


class FrameworkSync:
    """Syncs Frameworks by their keys. `views`: returns the caches of a namespace. `clock`: Unix seconds.

    `patience`: the seconds that an event may wait for others at present, by the average duration of writes.
    """

    def __init__(
        self,
        api: KubeApi,
        config: FrameworkConfig,
        views: Callable[[str], Views],
        queue: WorkQueue[str],
        recorder: Recorder,
        history: History,
        metrics: JobMetrics,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._config, self._views, self._queue = api, config, views, queue
        self._recorder, self._history, self._metrics = recorder, history, metrics
        self._subresource = "status" if config.native_mode else ""
        self._clock, self._rng = clock, rng or random.Random()
        self._memories: dict[str, Memory] = {}
        self.patience, self._average_write = LEAST, 0.0

    def tell(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome that an informer has seen for the next step. The caller queues the key."""
        if memory := self._memories.get(key):
            memory.outcomes.append(outcome)

    def is_echo(self, obj: Object) -> bool:
        """Return whether this state of a Framework is not newer than the answer to our own last write."""
        memory = self._memories.get(join_key(namespace_of(obj), name_of(obj)))
        return memory is not None and memory.uid == uid_of(obj) and _version(obj) <= _version(memory.latest)

    def statuses(self) -> list[FrameworkStatus]:
        """Return the expected status of every known Framework that has one."""
        return [memory.expected for memory in self._memories.values() if memory.expected is not None]

    async def sync(self, key: str) -> float | None:
        """Sync one Framework. Return the seconds after which it is due again without an event, or None.

        Raises `Incomplete` or `KubeError` to be called again, `StatusNotKept` to be called again once the CRD matches
        the mode.
        """
        woken = self._queue.take_wake_time(key)
        cached = self._views(split_key(key)[0]).frameworks.get(key)
        if cached is None:
            if self._memories.pop(key, None):
                self._metrics.job(KIND, "deleted", split_key(key)[0])
            return None
        try:
            memory = self._memories.get(key)
            if memory is None or memory.uid != uid_of(cached):
                status = decode_status(cached.get("status"))
                memory = self._memories[key] = Memory(uid_of(cached), cached, expected=status, stored=status)
            elif _version(cached) > _version(memory.latest):
                if cached.get("status") != memory.latest.get("status"):
                    memory.stored = None  # another client's write changed the status; the next step writes ours again
                memory.latest = cached
            return await self._advance(key, memory, woken)
        except BadFramework as error:
            log.warning("Unreadable Framework left alone until it changes", key=key, error=str(error))
            self._record(cached, [Note("Warning", "InvalidFramework", str(error))])
        except NotFound:
            if await self._is_gone(key, cached):
                self._memories.pop(key, None)
            else:
                raise
        return None

    async def _advance(self, key: str, memory: Memory, woken: float | None) -> float | None:
        if memory.store_by is None:
            await self._store(memory, decode_framework(memory.latest, status=memory.expected))
        known: list[Outcome] = []
        for _ in range(ROUNDS):
            framework = decode_framework(memory.latest, status=memory.expected)
            known, memory.outcomes = lasting(known) + memory.outcomes, []
            asked = self._step(key, memory, framework, known)
            is_new = asked.status is not framework.status
            framework = replace(framework, status=asked.status)
            if memory.expected is not memory.stored and not asked.actions and (asked.deferrable or not is_new):
                memory.store_by = loop_time() + DEFER if memory.store_by is None else memory.store_by
                if loop_time() < memory.store_by:
                    return self._next_sync(key, memory, asked)
            if not _only_creates_pods(memory, asked):
                await self._store(memory, framework)
            if not asked.actions:
                return self._next_sync(key, memory, asked)
            if woken is not None:
                self._metrics.acted(KIND, loop_time() - woken)
                woken = None
            if any(isinstance(action, Create) and action.target is not None for action in asked.actions):
                wanted = surroundings(framework, self._config)
                if wanted != memory.surroundings:
                    self._record(memory.latest, await surround(self._api, framework.namespace, wanted))
                    memory.surroundings = wanted
            outcomes = await perform(self._api, framework, asked.actions, names_in_dns=self._config.headless_services)
            count_outcomes(self._metrics, framework.namespace, asked.actions, outcomes)
            memory.outcomes += outcomes
        return 0.0

    def _step(self, key: str, memory: Memory, framework: Framework, outcomes: Sequence[Outcome]) -> Step:
        """Take one step. The expected status includes the outcomes from here on."""
        views = self._views(framework.namespace)
        asked = step(
            framework,
            views.config_maps.get(join_key(framework.namespace, config_map_name(framework.name))),
            {name_of(pod): pod for pod in views.pods.by_index("framework", key)},
            now=datetime.fromtimestamp(self._clock(), UTC),
            rng=self._rng,
            config=self._config,
            outcomes=outcomes,
        )
        self._history.retried(memory.latest, asked.history)
        self._record(memory.latest, asked.events)
        count_changes(self._metrics, framework.namespace, framework.status, asked.status)
        memory.expected = asked.status
        return asked

    async def _store(self, memory: Memory, framework: Framework) -> None:
        """Write the expected status if it is not stored. Concurrent changes of other fields by other clients stay."""
        expected, memory.store_by = memory.expected, None
        if expected is memory.stored or expected is None:
            return
        key = join_key(framework.namespace, framework.name)
        place = FRAMEWORKS, framework.name, framework.namespace
        wire = encode_status(expected, compress_large=self._config.compress_large_status)

        async def write(state: Object) -> Object:
            patch = status_patch(replace(framework, resource_version=resource_version_of(state)), wire)
            try:
                return await self._api.patch(*place, patch, patch_type="json", subresource=self._subresource)
            except NotFound:
                if not self._subresource or await self._is_gone(key, state):
                    raise
                raise StatusNotKept(f"the API server cannot store the status of Framework {key}") from None

        async def reread(conflict: KubeError) -> Object:
            fresh = await self._api.get(*place)
            is_refused = resource_version_of(fresh) == resource_version_of(memory.latest)
            if is_refused or uid_of(fresh) != memory.uid:
                raise conflict
            memory.latest = fresh
            self._queue.add(key)  # their change needs a step
            return fresh

        began = loop_time()
        answer = await write_onto_latest(memory.latest, write, reread, conflicts=(Conflict, Invalid))
        had, memory.latest = memory.latest.get("status"), answer
        if answer.get("status") != wire and answer.get("status") == had:
            raise StatusNotKept(f"the API server has dropped the status of Framework {key}")
        memory.stored = expected
        self._average_write += _WEIGHT * (loop_time() - began - self._average_write)
        self.patience = min(MOST, max(LEAST, WRITES * self._average_write))

    def _next_sync(self, key: str, memory: Memory, asked: Step) -> float | None:
        """Return the seconds until time alone changes something. Raises `Incomplete` if an action must be retried."""
        waits = [] if memory.store_by is None else [memory.store_by - loop_time()]
        if asked.next_wake is not None:
            waits.append(max(0.0, asked.next_wake.timestamp() - self._clock()))
        due = min(waits, default=None)
        if asked.back_off:
            if due is not None:
                self._queue.add_after(key, due)  # the back-off may be longer
            failed = [note.message for note in asked.events if note.type == "Warning"]
            raise Incomplete("; ".join(failed) or "an action must be retried")
        return due

    def _record(self, obj: Object, notes: Sequence[Note]) -> None:
        for note in notes:
            self._recorder.event(
                obj, note.type, note.reason, note.message, api_version=FRAMEWORKS.api_version, kind=FRAMEWORKS.kind
            )

    async def _is_gone(self, key: str, cached: Object) -> bool:
        """Return whether the Framework, which the cache still shows, does not exist any more."""
        namespace, name = split_key(key)
        try:
            return uid_of(await self._api.get(FRAMEWORKS, name, namespace)) != uid_of(cached)
        except NotFound:
            return True


def _only_creates_pods(memory: Memory, asked: Step) -> bool:
    """Return whether the actions rely on the tasks alone, and these are stored as they are.

    Then the UID of a ConfigMap that was just created can be stored together with those of its pods: after a crash in
    between all of them are orphans.
    """
    stored, expected = memory.stored, memory.expected
    if stored is None or expected is None or not asked.actions:
        return False
    tasks_are_stored = stored.attempt_status.task_role_statuses is expected.attempt_status.task_role_statuses
    return tasks_are_stored and all(isinstance(each, Create) and each.target is not None for each in asked.actions)


def _version(obj: Object) -> float:
    """Return the resource version as a number, for comparing two states of an object. etcd's versions are numbers."""
    version = resource_version_of(obj)
    return int(version) if version.isdecimal() else math.inf
