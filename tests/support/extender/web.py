"""HiveD's web server under test: on loopback, before handlers with scripted answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
from aiohttp import web

from controllers.extender.pod_states import ExtenderCall
from controllers.extender.reporting import CallResult, Metrics
from controllers.extender.server import CALLS, extender_app
from controllers.extender.wire import (
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    ExtenderPreemptionArgs,
    ExtenderPreemptionResult,
)
from scheduler.hived.errors import UserError
from scheduler.hived.inspection.inspection import Inspection
from store.http_server import listening
from store.kube.api.objects import Object

T = TypeVar("T")

POD: Object = {"metadata": {"name": "train-0", "namespace": "research", "uid": "5e1f"}, "spec": {"containers": []}}


@dataclass
class ScriptedHandlers:
    """Returns or raises its scripted answer, and keeps its arguments."""

    answer: ExtenderFilterResult | ExtenderBindingResult | ExtenderPreemptionResult | Exception | None = None
    asked: list[ExtenderArgs | ExtenderBindingArgs | ExtenderPreemptionArgs] = field(default_factory=list)

    async def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        return self._answer(args, ExtenderFilterResult)

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        return self._answer(args, ExtenderBindingResult)

    async def preempt(self, args: ExtenderPreemptionArgs) -> ExtenderPreemptionResult:
        return self._answer(args, ExtenderPreemptionResult)

    def _answer(self, args: ExtenderArgs | ExtenderBindingArgs | ExtenderPreemptionArgs, kind: type[T]) -> T:
        self.asked.append(args)
        if isinstance(self.answer, Exception):
            raise self.answer
        assert isinstance(self.answer, kind), f"{self.answer} is no {kind.__name__}"
        return self.answer


@dataclass
class ScriptedInspection(Inspection):
    """Snapshots by name: `groups`, `cells`, each in pieces. Other names do not exist.

    `problem`: raised instead.
    """

    documents: dict[str, Iterable[bytes]] = field(default_factory=dict)
    problem: Exception | None = None

    def _document(self, name: str) -> Iterable[bytes]:
        if self.problem is not None:
            raise self.problem
        if name not in self.documents:
            raise UserError(f"{name} does not exist")
        return self.documents[name]

    async def affinity_groups(self) -> Iterable[bytes]:
        return self._document("groups")

    async def affinity_group(self, name: str) -> Iterable[bytes]:
        return self._document(f"group {name}")

    async def cluster_status(self) -> Iterable[bytes]:
        return self._document("cluster")

    async def physical_cluster(self) -> Iterable[bytes]:
        return self._document("physical")

    async def virtual_clusters(self) -> Iterable[bytes]:
        return self._document("virtual")

    async def virtual_cluster(self, name: str) -> Iterable[bytes]:
        return self._document(f"virtual {name}")

    async def snapshot(self) -> Iterable[bytes]:
        return self._document("snapshot")


@dataclass
class KeptCalls(Metrics):
    """Keeps the metrics of calls."""

    results: list[tuple[ExtenderCall, CallResult]] = field(default_factory=list)

    def answered(self, call: ExtenderCall, result: CallResult, seconds: float) -> None:
        assert seconds >= 0
        self.results.append((call, result))


@dataclass
class WebClient:
    """A client of a running server, with the server's parts."""

    session: aiohttp.ClientSession
    url: str
    handlers: ScriptedHandlers
    inspection: ScriptedInspection
    metrics: KeptCalls

    async def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str, str]:
        """Return status, content type and text."""
        async with self.session.request(method, self.url + path, data=body, allow_redirects=False) as answer:
            return answer.status, answer.content_type, await answer.text()

    async def post(self, path: str, body: bytes) -> str:
        """Return the text of an answer of status 200."""
        status, content_type, text = await self.request("POST", path, body)
        assert (status, content_type) == (200, "application/json"), text
        return text

    async def get(self, path: str) -> tuple[int, str]:
        status, _, text = await self.request("GET", path)
        return status, text


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve on a free port of loopback, within the extender's own bounds; yield the URL."""
    async with listening(app, "127.0.0.1", 0, CALLS) as address:
        yield f"http://{address}"


@asynccontextmanager
async def web_client(*, node_cache_capable: bool = True) -> AsyncIterator[WebClient]:
    """Yield a client of a server of scripted parts."""
    handlers, inspection, metrics = ScriptedHandlers(), ScriptedInspection(), KeptCalls()

    async with (
        served(extender_app(handlers, inspection, metrics, node_cache_capable=node_cache_capable)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield WebClient(session, url, handlers, inspection, metrics)
