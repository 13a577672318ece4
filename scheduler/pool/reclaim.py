"""Sweeping: makes reservations match the pods that exist.

Reservations and pods are written by different transactions, so a crash in between leaves a reservation without its pod,
and a fleet formerly scheduled by labels has pods without reservations. A sweep compares both:

- A pod without a reservation gets one, at once: it uses the capacity, whichever process placed it. Only this
  can make a node's reservations exceed its capacity; its latest pods are then not eligible there.
- A reservation without a pod is first marked `releasing`, when two sweeps in a row have found it so, and freed by the
  next: a farm may take as long as a sweep's interval between reserving and placing, and once it is marked, no farm
  places a pod on it. Both steps carry the guard that there is still no such pod.
- A reservation marked `releasing` whose pod stays gets its mark removed.

`plan_sweep` is the pure decision; every farm may run a `Sweeper`, they can't harm each other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from scheduler.pool.ledger import Draft, Ledger, Reservation, chunked
from store.kv import ops
from store.kv.protocol import BadRecord, Store, StoreError
from store.schema.keys import Keys
from store.schema.labels import PodLocation
from store.schema.manifest import BadManifest, parse
from store.schema.records import Capacity, Intent, decode
from store.timing import in_turns

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 300.0  # seconds


class Finding(NamedTuple):
    """A reservation without a pod, or marked `releasing`."""

    pod: PodLocation
    releasing: bool
    placed: bool


class Sweep(NamedTuple):
    """The actions of a sweep, and its findings for the next one."""

    adopt: tuple[PodLocation, ...]
    mark: tuple[PodLocation, ...]
    unmark: tuple[PodLocation, ...]
    free: tuple[PodLocation, ...]
    findings: frozenset[Finding]


def plan_sweep(
    reserved: Mapping[PodLocation, Reservation], placed: Collection[PodLocation], before: Collection[Finding]
) -> Sweep:
    """Decide a sweep: `placed` are the pods that exist, `before` the findings of the last sweep."""
    findings = frozenset(
        Finding(pod, held.releasing, pod in placed)
        for pod, held in reserved.items()
        if held.releasing or pod not in placed
    )
    lasting = sorted(findings.intersection(before))
    mark = tuple(found.pod for found in lasting if not found.releasing)
    return Sweep(
        adopt=tuple(sorted(pod for pod in placed if pod not in reserved)),
        mark=mark,
        unmark=tuple(found.pod for found in lasting if found.placed),
        free=tuple(found.pod for found in lasting if found.releasing and not found.placed),
        findings=findings | {Finding(pod, releasing=True, placed=False) for pod in mark},
    )


class _Order(NamedTuple):
    pod: PodLocation
    intent: Intent
    modify_index: int


class Sweeper:
    """Sweeps the ledger. `interval` in seconds; it is spread a little, so that farms don't sweep in step."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        ledger: Ledger,
        *,
        interval: float = SWEEP_INTERVAL,
        rng: random.Random | None = None,
    ) -> None:
        self._store, self._keys, self._ledger = store, keys, ledger
        self._interval, self._rng = interval, rng or random.Random()
        self._before: frozenset[Finding] = frozenset()

    async def run(self) -> None:
        """Sweep until cancelled; a failed sweep is left to the next one."""
        while True:
            await asyncio.sleep(self._interval * self._rng.uniform(0.9, 1.1))
            try:
                await self.sweep()
            except StoreError as error:
                log.warning("Could not sweep reservations", error=str(error))

    async def begin(self) -> None:
        """Make the reservations of pods that have none, and nothing else. Raises the store's errors."""
        await self._adopt((await self._plan()).adopt)

    async def sweep(self) -> Sweep:
        """Compare reservations and pods, and correct what is due. Call it at most once per interval: what two sweeps
        find counts as lasting. Raises the store's errors.
        """
        sweep = await self._plan()
        await self._adopt(sweep.adopt)
        for pods, action in ((sweep.mark, "mark"), (sweep.unmark, "unmark"), (sweep.free, "free")):
            for chunk in chunked(pods):
                await self._ledger.change(partial(self._correct, action, chunk))
        self._before = sweep.findings
        if sweep.free:
            log.info("Freed reservations without a pod", pods=len(sweep.free))
        return sweep

    async def _plan(self) -> Sweep:
        """Decide node by node: pods of different nodes are independent."""
        await self._ledger.view.refresh()
        placed: dict[str, set[PodLocation]] = {}
        async for name in in_turns(await self._store.keys(self._keys.intents, consistent=True)):
            pod = PodLocation(*self._keys.parse_pod(name))
            placed.setdefault(pod.node, set()).add(pod)
        before: dict[str, list[Finding]] = {}
        for finding in self._before:
            before.setdefault(finding.pod.node, []).append(finding)
        sweeps = []
        async for node in in_turns(sorted({*self._ledger.nodes(), *placed, *before}), step=20):
            reserved = {PodLocation(node, pod_id): held for pod_id, held in self._ledger.pods(node).items()}
            sweeps.append(plan_sweep(reserved, placed.get(node, ()), before.get(node, ())))
        return Sweep(
            adopt=tuple(pod for sweep in sweeps for pod in sweep.adopt),
            mark=tuple(pod for sweep in sweeps for pod in sweep.mark),
            unmark=tuple(pod for sweep in sweeps for pod in sweep.unmark),
            free=tuple(pod for sweep in sweeps for pod in sweep.free),
            findings=frozenset(finding for sweep in sweeps for finding in sweep.findings),
        )

    def _correct(self, action: str, pods: Iterable[PodLocation], draft: Draft) -> None:
        """Mark, unmark or free reservations: free only marked ones, and mark or free only where there is no pod."""
        for node, pod_id in pods:
            held, key = draft.pods(node).get(pod_id), self._keys.intent(node, pod_id)
            if held is None:
                continue
            if action == "unmark":
                draft.put(node, pod_id, msgspec.structs.replace(held, releasing=False))
            elif key in draft.blocked:
                continue
            elif action == "mark":
                marked = msgspec.structs.replace(held, releasing=True)
                draft.put(node, pod_id, marked, ops.check_not_exists(key))
            elif held.releasing:
                draft.put(node, pod_id, None, ops.check_not_exists(key))

    async def _adopt(self, pods: Collection[PodLocation]) -> None:
        """Reserve the requests of these pods, as far as they are readable."""
        if not pods:
            return
        wanted, unreadable = set(pods), self._ledger.unreadable()
        orders = []
        for entry in (await self._store.list(self._keys.intents, consistent=True)).entries:
            pod = PodLocation(*self._keys.parse_pod(entry.key))
            if pod in wanted and pod.node not in unreadable:
                try:
                    orders.append(_Order(pod, decode(Intent, entry.key, entry.value), entry.modify_index))
                except BadRecord as error:
                    log.error("Could not reserve a pod's capacity", key=error.key, reason=error.reason)
        manifests = {order.intent.manifest: order.intent.rc for order in orders}
        requests: dict[str, Capacity] = {}
        for digests in chunked(manifests):
            entries = await asyncio.gather(*(self._store.get(self._keys.manifest(sha256)) for sha256 in digests))
            for sha256, found in zip(digests, entries, strict=True):
                try:
                    if found is None:
                        raise BadManifest("it is not in the store")
                    requests[sha256] = parse(found.value).requested()
                except BadManifest as error:
                    rc_id = manifests[sha256]
                    log.error("Could not reserve the capacity of pods", rc=rc_id, manifest=sha256, reason=str(error))
        known = [order for order in orders if order.intent.manifest in requests]
        for chunk in chunked(known):
            await self._ledger.change(partial(self._reserve_for, chunk, requests))
        log.info("Reserved capacity for running pods", pods=len(known), not_readable=len(pods) - len(known))

    def _reserve_for(self, orders: Iterable[_Order], requests: Mapping[str, Capacity], draft: Draft) -> None:
        for (node, pod_id), intent, index in orders:
            key = self._keys.intent(node, pod_id)
            if pod_id not in draft.pods(node) and key not in draft.blocked:
                reservation = Reservation(request=requests[intent.manifest])
                draft.put(node, pod_id, reservation, ops.check_index(key, index))
