"""Evicting victims ourselves, for kube-schedulers that do not ask whom to preempt.

Preemption works through kube-scheduler's call of `preempt`. Several releases never make it (1.20 and 1.21 forget their
extenders when they preempt, kubernetes#102971; later ones leave out nodes on which they see nobody to preempt), so a
pod with a decision to preempt would wait for ever. One that does make it, makes it within the same attempt,
milliseconds after the filter. So when a second filter of a pod ends in that decision with no `preempt` in between, its
kube-scheduler counts as one that does not call, until it does. Nor is the second filter waited for: in a quiet cluster
it may come minutes later, so one that has never called counts as such after `SILENCE` as well. From then on we take the
decision of the preempting phase and post Evictions.

The model: one task per preempting pod waits until it is certain that its kube-scheduler leaves it at that; it is
cancelled when that calls. Then it asks for the decision, posts Evictions of the victims that it names, on all
nodes, and of nobody else, and decides again when one of them is gone or a pause is over; it ends when there is no one
left to evict, or the pod is not waiting any more. A victim is asked to leave once, under its UID, however many pods
want its place. Disruption budgets are respected: the preemptor waits, and its owner is told.
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

from scheduler.hived.pod_contract import is_hived_enabled
from scheduler.hived.pod_events import PodEvents
from scheduler.hived.scheduler_metrics import NoSchedulerMetrics, SchedulerMetrics
from scheduler.hived.types import PodPreemptInfo
from store.kube.api import KubeApi
from store.kube.errors import BadRequest, Conflict, KubeError, NotFound, TooManyRequests
from store.kube.events import Recorder
from store.kube.objects import Object, is_deleting, key_of, name_of, namespace_of, uid_of
from store.kube.reflector_policy import Backoff
from store.kube.resources import PODS

log = structlog.get_logger(__name__)

EvictVictims: TypeAlias = Literal["auto", "always", "never"]

FILTERS_WITHOUT_PREEMPT: Final = 2  # decisions to preempt, after which a kube-scheduler counts as one that never asks
SILENCE: Final = 2.0  # seconds without a `preempt` after the first one, which a busy kube-scheduler may need
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds until victims that have not gone are looked at again
_VERSIONS: Final = ("policy/v1", "policy/v1beta1")  # of Evictions; API servers before 1.22 know the second only

Decide: TypeAlias = Callable[[str, Collection[str]], PodPreemptInfo | None]


class SilentSchedulers:
    """Finds out which kube-schedulers, by `schedulerName`, never call `preempt`."""

    def __init__(self) -> None:
        self._silent: set[str] = set()
        self._asking: set[str] = set()  # those that have called
        self._unanswered: dict[str, int] = {}  # decisions to preempt, by pod UID

    def filtered(self, pod: Object) -> bool:
        """A filter of the pod ended in a decision to preempt. Whether its kube-scheduler will leave it at that."""
        if _scheduler_of(pod) in self._silent:
            return True
        unanswered = self._unanswered[uid_of(pod)] = self._unanswered.get(uid_of(pod), 0) + 1
        if unanswered < FILTERS_WITHOUT_PREEMPT:
            return False
        self._add(_scheduler_of(pod))
        return True

    def passed(self, pod: Object) -> bool:
        """`SILENCE` is over since the pod's first such filter. Whether its kube-scheduler will leave it at that."""
        if _scheduler_of(pod) in self._asking:
            return False
        self._add(_scheduler_of(pod))
        return True

    def called(self, pod: Object) -> None:
        """kube-scheduler asked whom the pod preempts."""
        self._asking.add(_scheduler_of(pod))
        self._silent.discard(_scheduler_of(pod))
        self._unanswered.pop(uid_of(pod), None)

    def forget(self, uid: str) -> None:
        self._unanswered.pop(uid, None)

    def _add(self, scheduler: str) -> None:
        if scheduler not in self._silent:
            self._silent.add(scheduler)
            log.info("This kube-scheduler does not ask whom to preempt", scheduler=scheduler)


@dataclass(slots=True)
class _Preemption:
    """A pod for which victims are evicted, once it is `certain` that nobody else does. `suggested`: the nodes of its
    last filter.
    """

    pod: Object
    suggested: Collection[str]
    certain: asyncio.Event = field(default_factory=asyncio.Event)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Evictor:
    """Evicts on behalf of pods that are told of in `filtered`.

    `decide`: takes the decision of the preempting phase for a pod, given its UID and nodes; None when nobody has to go
    or the pod does not wait any more. `current`: a pod by its key, as last seen. `mode`: `auto` evicts for
    kube-schedulers that do not ask, `always` for all, `never` for none.
    """

    def __init__(
        self,
        api: KubeApi,
        decide: Decide,
        current: Callable[[str], Object | None],
        *,
        mode: EvictVictims = "auto",
        recorder: Recorder | None = None,
        metrics: SchedulerMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.mode = mode
        self._api, self._decide, self._current = api, decide, current
        self._events, self._metrics = PodEvents(recorder), metrics or NoSchedulerMetrics()
        self._clock, self._rng = clock, rng or random.Random()
        self._schedulers = SilentSchedulers()
        self._preemptions: dict[str, _Preemption] = {}
        self._asked: set[str] = set()  # UIDs of victims whose Eviction is on its way or was accepted
        self._version = _VERSIONS[0]
        self._group: asyncio.TaskGroup | None = None

    def start(self, group: asyncio.TaskGroup) -> None:
        """Evict in tasks of this group from now on."""
        self._group = group

    def stop(self) -> None:
        """Begin with no more pods; ending the group ends what was begun."""
        self._group = None

    def filtered(self, pod: Object, suggested: Collection[str]) -> None:
        """A filter of the pod ended in a decision to preempt."""
        if self.mode == "never" or _preempts_nobody(pod) or self._group is None:
            return
        is_certain = self._schedulers.filtered(pod) or self.mode == "always"
        preemption = self._preemptions.get(uid_of(pod))
        if preemption is None:
            preemption = self._preemptions[uid_of(pod)] = _Preemption(pod, suggested)
            preemption.task = self._group.create_task(self._drive(preemption), name=f"evictions for {key_of(pod)}")
        preemption.suggested = suggested
        if is_certain:
            preemption.certain.set()

    def preempt_called(self, pod: Object) -> None:
        """kube-scheduler asked whom the pod preempts, and so will see to it."""
        self._schedulers.called(pod)
        if self.mode == "auto" and (preemption := self._preemptions.pop(uid_of(pod), None)) is not None:
            assert preemption.task is not None, "a preemption is kept with its task"
            preemption.task.cancel()

    def gone(self, uid: str) -> None:
        """A pod was deleted or has completed."""
        self._schedulers.forget(uid)
        if uid in self._asked:
            self._asked.discard(uid)
            for preemption in self._preemptions.values():
                preemption.wake.set()

    async def _drive(self, preemption: _Preemption) -> None:
        backoff = Backoff(initial=FIRST_PAUSE, cap=LAST_PAUSE, clock=self._clock, rng=self._rng)
        uid = uid_of(preemption.pod)
        try:
            if not await self._is_ours(preemption):
                return
            while (found := self._decide(uid, preemption.suggested)) is not None:
                preemption.wake.clear()
                asked_to_wait = await self._evict_all(preemption.pod, found)
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.pause(asked_to_wait)):
                        await preemption.wake.wait()
        finally:
            if self._preemptions.get(uid) is preemption:
                del self._preemptions[uid]

    async def _is_ours(self, preemption: _Preemption) -> bool:
        """Wait until it is certain, or long enough to know."""
        try:
            async with asyncio.timeout(SILENCE):
                await preemption.certain.wait()
        except TimeoutError:
            return self._schedulers.passed(preemption.pod)
        return True

    async def _evict_all(self, preemptor: Object, found: PodPreemptInfo) -> float | None:
        """The longest pause, in seconds, that the API server asks for."""
        victims = found.victim_pods + found.elsewhere
        pauses = [await self._evict(preemptor, victim) for victim in victims if self._may_evict(victim)]
        return max((pause for pause in pauses if pause is not None), default=None)

    def _may_evict(self, victim: Object) -> bool:
        """Not one that was asked to leave, is leaving or has left; and nothing that is not HiveD's."""
        current = self._current(key_of(victim))
        return (
            uid_of(victim) not in self._asked
            and is_hived_enabled(victim)
            and current is not None
            and uid_of(current) == uid_of(victim)
            and not is_deleting(current)
        )

    async def _evict(self, preemptor: Object, victim: Object) -> float | None:
        """How long the API server asks to wait, in seconds, if it does."""
        self._asked.add(uid_of(victim))
        accepted = False
        try:
            await self._post(victim)
            accepted = True
        except (NotFound, Conflict):
            self._metrics.evicted("gone")
        except TooManyRequests as error:
            self._metrics.evicted("budget")
            self._tell_budget(preemptor, victim, error)
            return error.retry_after
        except KubeError as error:
            self._metrics.evicted("failed")
            log.warning("A victim can't be evicted; trying again", **_names(preemptor, victim), error=str(error))
            return error.retry_after
        finally:
            if not accepted:
                self._asked.discard(uid_of(victim))
        if accepted:
            self._metrics.evicted("accepted")
            log.info("Evicted a victim", **_names(preemptor, victim))
            self._events.event(victim, "Normal", "Preempted", f"Preempted by {key_of(preemptor)}")
        return None

    async def _post(self, victim: Object) -> None:
        version = self._version  # that another task may have found to be too new when the answer comes
        try:
            await self._post_as(version, victim)
        except BadRequest:
            if version == _VERSIONS[-1]:
                raise
            self._version = _VERSIONS[-1]
            await self._post_as(self._version, victim)

    async def _post_as(self, version: str, victim: Object) -> None:
        name, namespace = name_of(victim), namespace_of(victim)
        body = {
            "apiVersion": version,
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid_of(victim)}},
        }
        await self._api.create(PODS, body, namespace, name=name, subresource="eviction")

    def _tell_budget(self, preemptor: Object, victim: Object, error: TooManyRequests) -> None:
        log.warning("A disruption budget keeps a victim; trying again", **_names(preemptor, victim), error=str(error))
        message = f"Waits for pod {key_of(victim)}, which a PodDisruptionBudget keeps from being evicted"
        self._events.event(preemptor, "Warning", "PreemptionBlocked", message)


def _scheduler_of(pod: Object) -> str:
    return str(pod["spec"].get("schedulerName") or "default-scheduler")


def _preempts_nobody(pod: Object) -> bool:
    return bool(pod["spec"].get("preemptionPolicy") == "Never")


def _names(preemptor: Object, victim: Object) -> dict[str, str]:
    return {
        "pod": key_of(preemptor),
        "uid": uid_of(preemptor),
        "victim": key_of(victim),
        "victim_uid": uid_of(victim),
    }
