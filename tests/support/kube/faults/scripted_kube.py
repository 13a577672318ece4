"""An API in front of another, with a network between that a test controls: calls fail, or come and go late.

Faults affect the way of a call: unless the fault comes before, the inner API really carries out the call.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from store.kube.api.errors import KubeError
from store.kube.api.objects import Object, Resource
from store.kube.api.protocol import KubeApi

_AWAITED = frozenset({"get", "list", "create", "replace", "patch", "delete", "served"})


class Call(NamedTuple):
    """A call as it was made; `at` in seconds of the loop's time. `resource`: PLURAL or PLURAL/SUBRESOURCE."""

    verb: str
    name: str
    at: float
    resource: str
    group: str


class ScriptedKube:
    """`fault`: raised by every call before it arrives; `faults`: by those of one verb, or of one `(verb, name)`.
    `lost`: raised instead of each answer, after the call was carried out.

    `request_delay`, `answer_delay`: seconds that a call is under way, each way. `calls`: all that were made.
    """

    def __init__(self, inner: KubeApi) -> None:
        self.inner = inner
        self.fault: KubeError | None = None
        self.faults: dict[str | tuple[str, str], KubeError] = {}
        self.lost: KubeError | None = None
        self.request_delay = self.answer_delay = 0.0
        self.calls: list[Call] = []

    def verbs(self) -> list[str]:
        """Return the verbs of all calls, in order."""
        return [call.verb for call in self.calls]

    def times(self, verb: str, name: str = "") -> list[float]:
        """Return when calls of a verb were made (about one object)."""
        return [call.at for call in self.calls if call.verb == verb and name in ("", call.name)]

    def watch(self, resource: Resource, *arguments: Any, **options: Any) -> Any:
        self._note("watch", resource, "", "")
        return self.inner.watch(resource, *arguments, **options)

    def _note(self, verb: str, resource: Resource, name: str, subresource: str) -> None:
        where = f"{resource.plural}/{subresource}" if subresource else resource.plural
        self.calls.append(Call(verb, name, asyncio.get_running_loop().time(), where, resource.group))

    def __getattr__(self, verb: str) -> Any:
        if verb not in _AWAITED:
            return getattr(self.inner, verb)

        async def call(*arguments: Any, **options: Any) -> Any:
            name = _name(arguments[1]) if len(arguments) > 1 else ""
            self._note(verb, arguments[0], name, options.get("subresource", ""))
            if self.request_delay:
                await asyncio.sleep(self.request_delay)
            if fault := self.fault or self.faults.get(verb) or self.faults.get((verb, name)):
                raise fault
            answer = await getattr(self.inner, verb)(*arguments, **options)
            if self.answer_delay:
                await asyncio.sleep(self.answer_delay)
            if self.lost:
                raise self.lost
            return answer

        return call


def _name(target: str | Object) -> str:
    return target if isinstance(target, str) else str(target["metadata"].get("name") or "")
