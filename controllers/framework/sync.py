"""Bringing one Framework forward: step, persist, act, and again with what came of it, until nothing is left to do now.

The model: the operator knows each Framework twice. What it *expects* the status to be is kept here and is what every
step builds on, for it holds facts that no cache shows yet. What is *stored* is what the API server has confirmed. A
sync first makes sure that the expected status is stored, if an earlier write was not confirmed; nothing is acted on
before the status that says so is stored. A crash forgets only what is expected; the next operator goes on from what
is stored.

A status that only repeats what can be read from the objects again may be stored a moment later, together with what
happens meanwhile.

`FrameworkSync` is called with one key at a time and never twice at once for the same key; the work queue sees to that.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import structlog

from controllers.clocks import loop_time
from controllers.framework.actions import Create, Note, Outcome, Step
from controllers.framework.config import FrameworkConfig
from controllers.framework.constants import FRAMEWORKS, config_map_name
from controllers.framework.execution import perform
from controllers.framework.history import History
from controllers.framework.meter import Meter
from controllers.framework.native import Surrounding, surround, surroundings
from controllers.framework.patience import Patience
from controllers.framework.step import step
from controllers.framework.types import Framework, FrameworkStatus
from controllers.framework.wire import BadFramework, decode_framework, decode_status, encode_status, status_patch
from controllers.workqueue import WorkQueue
from store.kube.api import KubeApi
from store.kube.errors import Conflict, Invalid, NotFound
from store.kube.events import Recorder
from store.kube.objects import Object, join_key, name_of, namespace_of, resource_version_of, split_key, uid_of

log = structlog.get_logger(__name__)

DEFER = 1.0  # seconds that a status may wait to be stored together with the next one
WRITE_TRIES = 5  # writes of one status that may meet somebody else's
ROUNDS = 100  # steps in a row after which another Framework gets its turn


class Cache(Protocol):
    """What is read of an informer."""

    def get(self, key: str) -> Object | None: ...

    def by_index(self, index: str, value: str) -> list[Object]: ...


class Views(NamedTuple):
    """The caches that a Framework's sync reads. Pods have an index "framework", by the Framework's key."""

    frameworks: Cache
    config_maps: Cache
    pods: Cache


class Incomplete(Exception):
    """Not everything that a step asked for could be done; it is tried again under the queue's back-off."""


class StatusNotKept(Exception):
    """The API server took a status and did not store it: the CRD is not of the operator's mode."""


@dataclass(slots=True)
class Memory:
    """What is remembered of one Framework. `latest`: its newest known state, from the cache or a write's answer.

    `outcomes`: what the next step has to be told. `store_by`: until when the expected status may wait; None when it
    may not, on the loop's clock. `surroundings`: what was made for the pods of the attempt.
    """

    uid: str
    latest: Object
    expected: FrameworkStatus | None = None
    stored: FrameworkStatus | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    store_by: float | None = None
    surroundings: tuple[Surrounding, ...] = ()


class FrameworkSync:
    """Syncs Frameworks by their keys. `views`: those of a namespace. `clock`: Unix seconds."""

    def __init__(
        self,
        api: KubeApi,
        config: FrameworkConfig,
        views: Callable[[str], Views],
        queue: WorkQueue[str],
        recorder: Recorder,
        history: History,
        meter: Meter,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._config, self._views, self._queue = api, config, views, queue
        self._recorder, self._history, self._meter = recorder, history, meter
        self._subresource = "status" if config.native_mode else ""
        self._clock, self._rng = clock, rng or random.Random()
        self._memories: dict[str, Memory] = {}
        self.patience = Patience()

    def tell(self, key: str, outcome: Outcome) -> None:
        """Something that was seen of the Framework's objects, for the next step. The caller queues the key."""
        if memory := self._memories.get(key):
            memory.outcomes.append(outcome)

    def is_echo(self, obj: Object) -> bool:
        """Whether this state of a Framework is not newer than the answer to our own last write."""
        memory = self._memories.get(join_key(namespace_of(obj), name_of(obj)))
        return memory is not None and memory.uid == uid_of(obj) and _version(obj) <= _version(memory.latest)

    def statuses(self) -> list[FrameworkStatus]:
        """Of every known Framework that has one, as it is expected to be."""
        return [memory.expected for memory in self._memories.values() if memory.expected is not None]

    async def sync(self, key: str) -> None:
        """Bring one Framework as far forward as it gets now. Raises `Incomplete` or `KubeError` to be called again,
        `StatusNotKept` to be called again once the CRD fits."""
        cached = self._views(split_key(key)[0]).frameworks.get(key)
        if cached is None:
            if self._memories.pop(key, None):
                self._meter.deleted(key)
            return
        try:
            await self._advance(key, self._remembered(key, cached))
        except BadFramework as error:
            self._complain(key, cached, error)
        except NotFound:
            if await self._is_gone(key, cached):
                self._memories.pop(key, None)
            else:
                raise

    def _remembered(self, key: str, cached: Object) -> Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid_of(cached):
            status = decode_status(cached.get("status"))
            memory = self._memories[key] = Memory(uid_of(cached), cached, expected=status, stored=status)
        elif _version(cached) > _version(memory.latest):
            self._replace_latest(memory, cached)
        return memory

    def _replace_latest(self, memory: Memory, newer: Object) -> None:
        """Somebody else wrote. A status that is not ours any more is written again with the next step."""
        if newer.get("status") != memory.latest.get("status"):
            memory.stored = None
        memory.latest = newer

    async def _advance(self, key: str, memory: Memory) -> None:
        if memory.store_by is None:
            await self._store(memory, decode_framework(memory.latest, status=memory.expected))
        for _ in range(ROUNDS):
            framework = decode_framework(memory.latest, status=memory.expected)
            asked = self._step(key, memory, framework)
            is_new = asked.status is not framework.status
            framework = replace(framework, status=asked.status)
            if self._may_wait(key, memory, asked, is_new=is_new):
                self._arm(key, asked)
                return
            if not _only_creates_pods(memory, asked):
                await self._store(memory, framework)
            if not asked.actions:
                self._arm(key, asked)
                return
            self._meter.acts(key)
            await self._surround(memory, framework, asked)
            outcomes = await perform(self._api, framework, asked.actions, names_in_dns=self._config.headless_services)
            self._meter.performed(framework.namespace, asked.actions, outcomes)
            memory.outcomes += outcomes
        self._queue.add(key)

    def _step(self, key: str, memory: Memory, framework: Framework) -> Step:
        """Decide; from here on the outcomes are part of what is expected."""
        outcomes, memory.outcomes = memory.outcomes, []
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
        self._meter.stepped(framework.namespace, framework.status, asked.status)
        memory.expected = asked.status
        return asked

    def _may_wait(self, key: str, memory: Memory, asked: Step, *, is_new: bool) -> bool:
        """Whether the expected status may be stored later; then the key is queued for that time."""
        if memory.expected is memory.stored or asked.actions or (is_new and not asked.deferrable):
            return False
        now = loop_time()
        if memory.store_by is None:
            memory.store_by = now + DEFER
        if now >= memory.store_by:
            return False
        self._queue.add_after(key, memory.store_by - now)
        return True

    async def _store(self, memory: Memory, framework: Framework) -> None:
        """Write the expected status if it is not stored. Who wrote in between keeps what they wrote of the rest."""
        expected, memory.store_by = memory.expected, None
        if expected is memory.stored or expected is None:
            return
        wire = encode_status(expected, compress_large=self._config.large_framework_compression)
        began = loop_time()
        for attempt in range(WRITE_TRIES):
            patch = status_patch(replace(framework, resource_version=resource_version_of(memory.latest)), wire)
            try:
                answer = await self._api.patch(
                    FRAMEWORKS,
                    framework.name,
                    framework.namespace,
                    patch,
                    patch_type="json",
                    subresource=self._subresource,
                )
            except NotFound:
                key = join_key(framework.namespace, framework.name)
                if not self._subresource or await self._is_gone(key, memory.latest):
                    raise
                raise StatusNotKept(f"the API server has no place for the status of Framework {key}") from None
            except (Conflict, Invalid):
                fresh = await self._api.get(FRAMEWORKS, framework.name, framework.namespace)
                is_refused = resource_version_of(fresh) == resource_version_of(memory.latest)
                if is_refused or uid_of(fresh) != memory.uid or attempt + 1 == WRITE_TRIES:
                    raise
                memory.latest = fresh
                self._queue.add(join_key(framework.namespace, framework.name))  # what they wrote wants a step, too
            else:
                had, memory.latest = memory.latest.get("status"), answer
                if answer.get("status") != wire and answer.get("status") == had:
                    raise StatusNotKept(
                        f"the API server has dropped the status of Framework {framework.namespace}/{framework.name}"
                    )
                memory.stored = expected
                self.patience.observe(loop_time() - began)
                return

    async def _surround(self, memory: Memory, framework: Framework, asked: Step) -> None:
        """Before pods are created: what the settings want around them."""
        if not any(isinstance(action, Create) and action.target is not None for action in asked.actions):
            return
        wanted = surroundings(framework, self._config)
        if wanted != memory.surroundings:
            self._record(memory.latest, await surround(self._api, framework.namespace, wanted))
            memory.surroundings = wanted

    def _arm(self, key: str, asked: Step) -> None:
        if asked.next_wake is not None:
            self._queue.add_after(key, max(0.0, asked.next_wake.timestamp() - self._clock()))
        if asked.back_off:
            failed = [note.message for note in asked.events if note.type == "Warning"]
            raise Incomplete("; ".join(failed) or "an action has to be tried again")

    def _record(self, obj: Object, notes: Sequence[Note]) -> None:
        for note in notes:
            self._recorder.event(
                obj, note.type, note.reason, note.message, api_version=FRAMEWORKS.api_version, kind=FRAMEWORKS.kind
            )

    def _complain(self, key: str, obj: Object, error: BadFramework) -> None:
        log.warning("A Framework can't be read; it is left alone until it changes", key=key, error=str(error))
        self._record(obj, [Note("Warning", "InvalidFramework", str(error))])

    async def _is_gone(self, key: str, cached: Object) -> bool:
        """Whether a NotFound was about the Framework itself, which the cache still shows."""
        namespace, name = split_key(key)
        try:
            return uid_of(await self._api.get(FRAMEWORKS, name, namespace)) != uid_of(cached)
        except NotFound:
            return True


def _only_creates_pods(memory: Memory, asked: Step) -> bool:
    """Whether the actions rely on the tasks alone, and these are stored as they are.

    Then the UID of a ConfigMap that was just created can be stored together with those of its pods: after a crash in
    between all of them are orphans.
    """
    stored, expected = memory.stored, memory.expected
    if stored is None or expected is None or not asked.actions:
        return False
    tasks_are_stored = stored.attempt_status.task_role_statuses is expected.attempt_status.task_role_statuses
    return tasks_are_stored and all(isinstance(each, Create) and each.target is not None for each in asked.actions)


def _version(obj: Object) -> float:
    """For telling which of two states of one object is newer. Versions are numbers wherever etcd keeps them."""
    version = resource_version_of(obj)
    return int(version) if version.isdecimal() else math.inf
