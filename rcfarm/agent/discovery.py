"""Pods with ports as services of the local Consul agent, so that its DNS and its catalog find them.

The model: `want` and `report` only record the desired registrations; one task (`run`) applies them to the Consul agent
on every change and periodically, so a Consul agent that lost them gets them back. A service that can't be registered is
retried and blocks no other; nothing else waits for discovery.

Each service has one TTL check, which carries the verdict of the node agent: there is one truth about a pod's health,
also where the check is a command or the pod has several processes. The TTL is long enough for a restart of the
agent; an agent that stays away takes its pods out of discovery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import structlog

from rcfarm.agent.health import Verdict
from store.consul.store import ConsulStore
from store.kv.protocol import Store, StoreError

log = structlog.get_logger(__name__)

_TTL = 60.0  # seconds
_REPORT = _TTL / 3
_RETRY = 5.0


class Service(NamedTuple):
    """A pod as clients find it, by `name`. `ports`: name → number; `port` is the one that its DNS name answers."""

    name: str
    address: str
    port: int
    ports: Mapping[str, int]
    labels: Mapping[str, str]
    rc: str


class Discovery:
    """The services of this node at its Consul agent; a store that is no Consul has none, and `want` has no effect.

    `interval`: seconds between two full comparisons.
    """

    def __init__(self, store: Store, node: str, interval: float) -> None:
        self._agent: Any = store.api.agent if isinstance(store, ConsulStore) else None
        self._prefix = f"rcfarm:{node}:"  # ':' is in no name, so no other node's services begin like this
        self._interval = interval
        self._services: dict[str, Service] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._registered: dict[str, Service | None] = {}  # None: an earlier agent's
        self._reported: dict[str, tuple[Verdict, float]] = {}
        self._failing: set[str] = set()  # pods, and "" for the comparison
        self._changed = asyncio.Event()

    def want(self, pod_id: str, service: Service | None) -> None:
        """Set the pod's service; None removes it."""
        if service is None:
            self._services.pop(pod_id, None)
            self._verdicts.pop(pod_id, None)
        else:
            self._services[pod_id] = service
        self._changed.set()

    def report(self, pod_id: str, verdict: Verdict) -> None:
        """Set the pod's health."""
        self._verdicts[pod_id] = verdict
        self._changed.set()

    async def run(self) -> None:
        """Keep the published services equal to the desired ones, until cancelled."""
        if self._agent is None:
            await asyncio.Event().wait()
        compare_at = 0.0
        while True:
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            if now >= compare_at:
                compare_at = now + self._interval
                with self._isolated(""):  # those of an earlier agent as well
                    found = await self._agent.services()
                    ids = [
                        service_id[len(self._prefix) :] for service_id in found if service_id.startswith(self._prefix)
                    ]
                    self._registered = {pod_id: self._registered.get(pod_id) for pod_id in ids}
            known = sorted(self._registered.keys() | self._services.keys())
            for pod_id in known:
                with self._isolated(pod_id):
                    await self._reconcile(pod_id, now)
            self._failing &= {"", *known}
            if self._failing:
                compare_at = 0.0
                await asyncio.sleep(_RETRY)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(_REPORT, self._interval)):
                        await self._changed.wait()

    @contextmanager
    def _isolated(self, pod_id: str) -> Iterator[None]:
        """Note whether the work on a pod fails; a repeated failure is logged only once."""
        try:
            yield
        except StoreError as error:
            if pod_id not in self._failing:
                log.warning("The Consul agent refused or did not answer; discovery waits", pod=pod_id, error=str(error))
            self._failing.add(pod_id)
        else:
            self._failing.discard(pod_id)

    async def _reconcile(self, pod_id: str, now: float) -> None:
        service = self._services.get(pod_id)
        if service is None:
            await self._agent.service.deregister(self._prefix + pod_id)
            self._registered.pop(pod_id, None)
            self._reported.pop(pod_id, None)
            log.info("Service deregistered", pod=pod_id)
            return
        if self._registered.get(pod_id) != service:
            await self._agent.service.register(
                service.name,
                service_id=self._prefix + pod_id,
                address=service.address,
                port=service.port,
                tags=[f"{key}={value}" for key, value in sorted(service.labels.items())],
                meta={"rc": service.rc} | {f"port-{name}": str(number) for name, number in service.ports.items()},
                check={
                    "CheckID": self._prefix + pod_id,
                    "Name": f"health of pod {pod_id}",
                    "TTL": f"{_TTL:g}s",
                    "Status": "critical",
                },
            )
            self._registered[pod_id] = service
            self._reported.pop(pod_id, None)
            log.info("Service registered", pod=pod_id, port=service.port)
        verdict = self._verdicts.get(pod_id)
        reported, at = self._reported.get(pod_id, (None, 0.0))
        if verdict is not None and (verdict != reported or now - at >= _REPORT):
            check = self._agent.check
            report = {"passing": check.ttl_pass, "warning": check.ttl_warn}.get(verdict.status, check.ttl_fail)
            await report(self._prefix + pod_id, notes=verdict.output)
            self._reported[pod_id] = verdict, now
