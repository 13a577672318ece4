"""The network between one process and its API server: it can be scripted, flaky, or end with the process.

Faults affect the way of a call: unless the fault comes before, the inner API really carries out the call.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

from store.kube.api.errors import Conflict, KubeError, ServerError, ServerTimeout, TooManyRequests, Unreachable
from store.kube.api.objects import Resource
from store.kube.api.protocol import KubeApi, WatchEvent

REFUSALS: list[KubeError] = [
    ServerError("500", status=500),
    TooManyRequests("429", status=429),
    Unreachable("connection refused"),
]
LOSSES: list[KubeError] = [Unreachable("answer lost"), ServerTimeout("504", status=504)]
Moment = Literal["before", "after"]
_AWAITED = frozenset({"get", "list", "create", "replace", "patch", "delete", "served"})


class Call(NamedTuple):
    """A call as it was made; `at` in seconds of the loop's time. `resource`: PLURAL or PLURAL/SUBRESOURCE. `number`:
    how many came before it."""

    verb: str
    name: str
    at: float
    resource: str
    group: str
    number: int


class Network:
    """A `KubeApi` in front of another; `before` and `after` run around each call. `calls`: all that were made."""

    def __init__(self, inner: KubeApi) -> None:
        self.inner = inner
        self.calls: list[Call] = []

    async def before(self, call: Call) -> None:
        """Delay the call or raise its error; it has not arrived."""

    async def after(self, call: Call) -> None:
        """Delay the answer, or raise an error in its place."""

    def watch(self, resource: Resource, *arguments: Any, **options: Any) -> Any:
        return self.inner.watch(resource, *arguments, **options)

    def note(self, verb: str, resource: Resource, name: str = "", subresource: str = "") -> Call:
        where = f"{resource.plural}/{subresource}" if subresource else resource.plural
        now, number = asyncio.get_running_loop().time(), len(self.calls)
        self.calls.append(Call(verb, name, now, where, resource.group, number))
        return self.calls[-1]

    def __getattr__(self, verb: str) -> Any:
        if verb not in _AWAITED:
            return getattr(self.inner, verb)

        async def call(resource: Resource, target: Any = "", *arguments: Any, **options: Any) -> Any:
            name = target if isinstance(target, str) else str(target["metadata"].get("name") or "")
            made = self.note(verb, resource, name, options.get("subresource", ""))
            await self.before(made)
            given = (resource, target, *arguments) if target != "" else (resource,)
            answer = await getattr(self.inner, verb)(*given, **options)
            await self.after(made)
            return answer

        return call


class ScriptedKube(Network):
    """`fault`: raised by every call before it arrives; `faults`: by those of one verb, or of one `(verb, name)`.
    `lost`: raised instead of each answer, after the call was carried out.

    `request_delay`, `answer_delay`: seconds that a call is under way, each way. Watches are among the `calls`.
    """

    def __init__(self, inner: KubeApi) -> None:
        super().__init__(inner)
        self.fault: KubeError | None = None
        self.faults: dict[str | tuple[str, str], KubeError] = {}
        self.lost: KubeError | None = None
        self.request_delay = self.answer_delay = 0.0

    def verbs(self) -> list[str]:
        """Return the verbs of all calls, in order."""
        return [call.verb for call in self.calls]

    def times(self, verb: str, name: str = "") -> list[float]:
        """Return when calls of a verb were made (about one object)."""
        return [call.at for call in self.calls if call.verb == verb and name in ("", call.name)]

    async def before(self, call: Call) -> None:
        if self.request_delay:
            await asyncio.sleep(self.request_delay)
        if fault := self.fault or self.faults.get(call.verb) or self.faults.get((call.verb, call.name)):
            raise fault

    async def after(self, call: Call) -> None:
        if self.answer_delay:
            await asyncio.sleep(self.answer_delay)
        if self.lost:
            raise self.lost

    def watch(self, resource: Resource, *arguments: Any, **options: Any) -> Any:
        self.note("watch", resource)
        return super().watch(resource, *arguments, **options)


class FlakyKube(Network):
    """Of all calls, the share `refused` fails before anything is done (patches by a conflict, too), the share `lost`
    afterwards. `dead`: the process has died, and no call leaves any more."""

    def __init__(self, inner: KubeApi, rng: random.Random, *, refused: float, lost: float) -> None:
        super().__init__(inner)
        self.rng, self.refused, self.lost = rng, refused, lost
        self.dead = False

    async def before(self, call: Call) -> None:
        conflicts: list[KubeError] = [Conflict("409", status=409)] if call.verb == "patch" else []
        self._strike(self.refused, [*REFUSALS, *conflicts])

    async def after(self, call: Call) -> None:
        self._strike(self.lost, LOSSES)

    @asynccontextmanager
    async def watch(self, *arguments: Any, **options: Any) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        self._strike(self.refused, REFUSALS)
        async with self.inner.watch(*arguments, **options) as events:
            yield events

    def _strike(self, share: float, errors: list[KubeError]) -> None:
        if self.dead:
            raise Unreachable("this process is dead")
        if self.rng.random() < share:
            raise self.rng.choice(errors)


class MortalKube(Network):
    """At call number `dies_at`, from 0, the process dies: `before` the call leaves, or `after` the server has done what
    it asks for. Watches don't count.

    A dead process makes no calls and gets no answers: its calls wait for ever, for the test to cancel them.
    """

    def __init__(self, inner: KubeApi, dies_at: float = math.inf, moment: Moment = "before") -> None:
        super().__init__(inner)
        self.died = asyncio.Event()
        self._dies_at, self._moment = dies_at, moment

    async def before(self, call: Call) -> None:
        if call.number == self._dies_at and self._moment == "before":
            self.died.set()
        await self._live()

    async def after(self, call: Call) -> None:
        if call.number == self._dies_at:
            self.died.set()
        await self._live()

    @asynccontextmanager
    async def watch(self, *arguments: Any, **options: Any) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        await self._live()
        async with self.inner.watch(*arguments, **options) as events:
            yield self._received(events)

    async def _received(self, events: AsyncIterator[WatchEvent]) -> AsyncIterator[WatchEvent]:
        async for event in events:
            await self._live()
            yield event

    async def _live(self) -> None:
        """Return while the process lives, else never."""
        if self.died.is_set():
            await asyncio.get_running_loop().create_future()
