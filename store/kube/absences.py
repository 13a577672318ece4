"""Absences: is an object that a label selector no longer shows deleted, or has it only lost the label?

The model: a watch with a selector tells both in the same words. So each absent object is asked for by name, in a task
of its own, a few at a time. An object that is gone, or whose name belongs to another one, is reported once, and that
ends it. One that still exists is a *stray*: it is reported as found, and asked for again, ever more seldom, because no
watch will tell of its end. Whoever hears of the object in another way settles the matter, which ends the task.

A server that forbids to ask leaves only the watch to be believed: the object counts as gone.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from store.kube.api import KubeReader
from store.kube.errors import Forbidden, NotFound
from store.kube.intake import Intake
from store.kube.objects import Object, split_key, uid_of
from store.kube.reflector_policy import Backoff
from store.kube.resources import Resource

log = structlog.get_logger(__name__)

CONCURRENCY = 8  # questions at once
ASK_AGAIN = 10.0  # seconds until a stray is asked for again, at least; doubles
ASK_AGAIN_CAP = 150.0


class Verdicts(Protocol):
    """Who wants to know."""

    def found(self, key: str, obj: Object) -> None:
        """It still exists, in this state."""

    def gone(self, key: str) -> None:
        """It does not exist any more."""


class Absences:
    """Open questions about objects of one resource, by key."""

    def __init__(
        self,
        api: KubeReader,
        resource: Resource,
        intake: Intake,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._resource, self._intake = api, resource, intake
        self._clock, self._rng = clock, rng or random.Random()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._open: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._may_ask, self._fails = True, False

    def start(self, group: asyncio.TaskGroup) -> None:
        """Ask in tasks of this group from now on; ending the group closes all questions."""
        self._group, self._open = group, {}

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def ask(self, key: str, uid: str, verdicts: Verdicts) -> None:
        """Find out whether the object `uid` still exists. A question that is open already stays as it is."""
        assert self._group is not None, "absences are asked for while the informer runs"
        if key not in self._open:
            self._open[key] = self._group.create_task(self._follow(key, uid, verdicts))

    def settle(self, key: str) -> None:
        """Somebody knows better."""
        task = self._open.pop(key, None)
        if task is not None:
            task.cancel()

    async def _follow(self, key: str, uid: str, verdicts: Verdicts) -> None:
        after_error = Backoff(clock=self._clock, rng=self._rng)
        of_stray = Backoff(initial=ASK_AGAIN, cap=ASK_AGAIN_CAP, reset=math.inf, clock=self._clock, rng=self._rng)
        while True:
            try:
                obj = await self._look(key)
            except Exception as error:  # also one that nobody foresaw: it must not end the informer
                self._failed(key, error)
                await asyncio.sleep(after_error.pause(getattr(error, "retry_after", None)))
                continue
            self._fails = False
            if obj is None or uid_of(obj) != uid:
                del self._open[key]
                verdicts.gone(key)
                return
            if admitted := self._intake.admit(obj):
                try:
                    verdicts.found(key, admitted)
                except Exception as error:
                    self._intake.refuse(obj, f"it can't be kept: {error!r}")
            await asyncio.sleep(of_stray.pause())

    async def _look(self, key: str) -> Object | None:
        namespace, name = split_key(key)
        try:
            async with self._slots:
                return await self._api.get(self._resource, name, namespace)
        except NotFound:
            return None
        except Forbidden as error:
            if self._may_ask:
                self._may_ask = False
                log.warning(
                    "Objects that leave the selector count as deleted: allow the verb `get` to tell them apart",
                    resource=self._resource.plural,
                    error=str(error),
                )
            return None

    def _failed(self, key: str, error: Exception) -> None:
        """Say it once for all questions that fail in a row."""
        if not self._fails:
            self._fails = True
            log.warning(
                "Absent objects can't be asked for; they count as there until they can",
                resource=self._resource.plural,
                object=key,
                error=str(error) or repr(error),
            )
