"""Eviction of victims by the scheduler, for kube-schedulers that never call `preempt`.

Preemption works through kube-scheduler's call of `preempt`. Several releases never make it (1.20 and 1.21 ignore
extenders when they preempt, kubernetes#102971; later ones leave out nodes on which they see no victim), so a pod with a
decision to preempt would wait forever. A kube-scheduler that does call `preempt` does so within the same attempt,
milliseconds after the filter. So when a second filter of a pod ends in that decision with no `preempt` in between, its
kube-scheduler counts as silent until it calls. In a quiet cluster the second filter may come minutes later, so a
kube-scheduler that has never called counts as silent after `SILENCE` as well. For a silent one, we take the decision of
the preempting phase and post Evictions.

The model: one task per preempting pod waits until its kube-scheduler counts as silent; a `preempt` call cancels it.
Then the task takes the decision, posts Evictions of exactly the victims that the decision names, on all nodes, and
decides again when a victim is gone or after a pause; it ends when no victim is left, or the pod no longer waits. A
victim is evicted once, by UID, however many pods preempt it. Disruption budgets are respected: the preemptor waits,
with an Event.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import structlog

from controllers.extender.reporting import Metrics, write_event
from scheduler.hived.algorithm import PodPreemptInfo
from scheduler.hived.contract import is_hived_enabled
from store.kube.api.errors import BadRequest, Conflict, KubeError, NotFound, TooManyRequests
from store.kube.api.objects import PODS, Object, is_deleting, key_of, name_of, namespace_of, uid_of
from store.kube.api.protocol import KubeApi
from store.kube.events import Recorder
from store.kube.informer.reflector import new_backoff

log = structlog.get_logger(__name__)

EvictVictims: TypeAlias = Literal["auto", "always", "never"]

FILTERS_WITHOUT_PREEMPT: Final = 2  # decisions to preempt without a `preempt` call: the kube-scheduler is silent
SILENCE: Final = 2.0  # seconds without a `preempt` after the first one, which a busy kube-scheduler may need
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds until victims that have not gone are checked again
_VERSIONS: Final = ("policy/v1", "policy/v1beta1")  # of Evictions; API servers before 1.22 have only the second

Decide: TypeAlias = Callable[[str, Collection[str]], PodPreemptInfo | None]


@dataclass(slots=True)
class SilentSchedulers:
    """Detects the kube-schedulers, by `schedulerName`, that never call `preempt`."""

    _silent: set[str] = field(default_factory=set)
    _asking: set[str] = field(default_factory=set)  # those that have called
    _unanswered: dict[str, int] = field(default_factory=dict)  # decisions to preempt, by pod UID

    def filtered(self, pod: Object) -> bool:
        """Record a filter of the pod that decided to preempt. Return whether its kube-scheduler is silent."""
        if _scheduler_of(pod) in self._silent:
            return True
        unanswered = self._unanswered[uid_of(pod)] = self._unanswered.get(uid_of(pod), 0) + 1
        if unanswered < FILTERS_WITHOUT_PREEMPT:
            return False
        self._add(_scheduler_of(pod))
        return True

    def passed(self, pod: Object) -> bool:
        """Record that `SILENCE` passed since the pod's first such filter. Return whether its kube-scheduler
        is silent.
        """
        if _scheduler_of(pod) in self._asking:
            return False
        self._add(_scheduler_of(pod))
        return True

    def called(self, pod: Object) -> None:
        """Record a `preempt` call for the pod."""
        self._asking.add(_scheduler_of(pod))
        self._silent.discard(_scheduler_of(pod))
        self._unanswered.pop(uid_of(pod), None)

    def forget(self, uid: str) -> None:
        self._unanswered.pop(uid, None)

    def _add(self, scheduler: str) -> None:
        if scheduler not in self._silent:
            self._silent.add(scheduler)
            log.info("kube-scheduler does not call preempt; evicting its victims", scheduler=scheduler)


@dataclass(slots=True)
class _Preemption:
    """A pod for which victims are evicted once it is `certain` that kube-scheduler will not. `suggested`: the nodes of
    its last filter.
    """

    pod: Object
    suggested: Collection[str]
    certain: asyncio.Event = field(default_factory=asyncio.Event)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Evictor:
    """Evicts victims of pods passed to `filtered`.

    `decide`: takes the decision of the preempting phase for a pod, given its UID and nodes; None without victims or if
    the pod no longer waits. `current`: a pod by its key, as last seen. `mode`: `auto` evicts for silent
    kube-schedulers, `always` for all, `never` for none. `group`: evicts in tasks of this group; without one, it accepts
    no more pods.
    """

    def __init__(
        self,
        api: KubeApi,
        decide: Decide,
        current: Callable[[str], Object | None],
        *,
        mode: EvictVictims = "auto",
        recorder: Recorder | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.mode = mode
        self._api, self._decide, self._current = api, decide, current
        self._recorder, self._metrics = recorder, metrics or Metrics()
        self._clock, self._rng = clock, rng or random.Random()
        self._schedulers = SilentSchedulers()
        self._preemptions: dict[str, _Preemption] = {}
        self._asked: set[str] = set()  # UIDs of victims whose Eviction is in flight or was accepted
        self._version = _VERSIONS[0]
        self.group: asyncio.TaskGroup | None = None

    def filtered(self, pod: Object, suggested: Collection[str]) -> None:
        """Record a filter of the pod that decided to preempt."""
        never = self.mode == "never" or pod["spec"].get("preemptionPolicy") == "Never"
        if never or self.group is None:
            return
        is_certain = self._schedulers.filtered(pod) or self.mode == "always"
        preemption = self._preemptions.get(uid_of(pod))
        if preemption is None:
            preemption = self._preemptions[uid_of(pod)] = _Preemption(pod, suggested)
            preemption.task = self.group.create_task(self._drive(preemption), name=f"evictions for {key_of(pod)}")
        preemption.suggested = suggested
        if is_certain:
            preemption.certain.set()

    def preempt_called(self, pod: Object) -> None:
        """Record a `preempt` call for the pod: kube-scheduler will evict the victims."""
        self._schedulers.called(pod)
        if self.mode == "auto" and (preemption := self._preemptions.pop(uid_of(pod), None)) is not None:
            assert preemption.task is not None, "a preemption is kept with its task"
            preemption.task.cancel()

    def gone(self, uid: str) -> None:
        """Record that a pod was deleted or completed."""
        self._schedulers.forget(uid)
        if uid in self._asked:
            self._asked.discard(uid)
            for preemption in self._preemptions.values():
                preemption.wake.set()

    async def _drive(self, preemption: _Preemption) -> None:
        """Wait until kube-scheduler counts as silent, then evict until no victim is left."""
        backoff = new_backoff(self._clock, self._rng, first=FIRST_PAUSE, longest=LAST_PAUSE)
        uid = uid_of(preemption.pod)
        try:
            try:
                async with asyncio.timeout(SILENCE):
                    await preemption.certain.wait()
            except TimeoutError:
                if not self._schedulers.passed(preemption.pod):
                    return
            while (found := self._decide(uid, preemption.suggested)) is not None:
                preemption.wake.clear()
                victims = found.victim_pods + found.elsewhere
                pauses = [await self._evict(preemption.pod, each) for each in victims]
                asked_to_wait = max((pause for pause in pauses if pause is not None), default=None)  # by the API server
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.pause(asked_to_wait)):
                        await preemption.wake.wait()
        finally:
            if self._preemptions.get(uid) is preemption:
                del self._preemptions[uid]

    async def _evict(self, preemptor: Object, victim: Object) -> float | None:
        """Evict a victim that runs, asks for HiveD and was not evicted yet. Return the pause, in seconds, that the API
        server asks for, if any."""
        if uid_of(victim) in self._asked or not is_hived_enabled(victim):
            return None
        current = self._current(key_of(victim))
        if current is None or uid_of(current) != uid_of(victim) or is_deleting(current):
            return None
        self._asked.add(uid_of(victim))
        accepted = False
        try:
            await self._post(victim)
            accepted = True
        except (NotFound, Conflict):
            self._metrics.evicted("gone")
        except TooManyRequests as error:
            self._metrics.evicted("budget")
            names = _names(preemptor, victim)
            log.warning("Disruption budget blocks eviction; trying again", **names, error=str(error))
            message = f"Waiting for pod {key_of(victim)}, whose eviction a PodDisruptionBudget blocks"
            write_event(self._recorder, preemptor, "Warning", "PreemptionBlocked", message)
            return error.retry_after
        except KubeError as error:
            self._metrics.evicted("failed")
            log.warning("Could not evict victim; trying again", **_names(preemptor, victim), error=str(error))
            return error.retry_after
        finally:
            if not accepted:
                self._asked.discard(uid_of(victim))
        if accepted:
            self._metrics.evicted("accepted")
            log.info("Victim evicted", **_names(preemptor, victim))
            write_event(self._recorder, victim, "Normal", "Preempted", f"Preempted by {key_of(preemptor)}")
        return None

    async def _post(self, victim: Object) -> None:
        version = self._version  # another task may find it too new before the answer arrives
        name, namespace = name_of(victim), namespace_of(victim)
        while True:
            body = {
                "apiVersion": version,
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
                "deleteOptions": {"preconditions": {"uid": uid_of(victim)}},
            }
            try:
                await self._api.create(PODS, body, namespace, name=name, subresource="eviction")
            except BadRequest:
                if version == _VERSIONS[-1]:
                    raise
                version = self._version = _VERSIONS[-1]
            else:
                return


def _scheduler_of(pod: Object) -> str:
    return str(pod["spec"].get("schedulerName") or "default-scheduler")


def _names(preemptor: Object, victim: Object) -> dict[str, str]:
    return {
        "pod": key_of(preemptor),
        "uid": uid_of(preemptor),
        "victim": key_of(victim),
        "victim_uid": uid_of(victim),
    }
