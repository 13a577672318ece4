"""What a test of a farm's term controls and looks at: its scheduler, its members, and what it owns."""

from __future__ import annotations

import asyncio
from collections import Counter

from rcfarm.farm.farm import Farm
from scheduler.label import LabelScheduler
from scheduler.protocol import Eligibility, NodeDirectory
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.keys import Keys
from store.schema.manifest import Manifest
from store.schema.records import FarmMember, encode
from store.schema.selectors import Selector
from tests.support.consul.scripted_store import ScriptedStore

KEYS = Keys(shards=4)
SOON = 1.0  # seconds of virtual time in which anything that does not wait on purpose has happened


class Stage:
    """Controls a scheduler: it hangs for some pods, fails for others, and counts calls."""

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.asked: Counter[str] = Counter()
        self.hanging: Counter[str] = Counter()
        self.cancelled: list[str] = []
        self.freed = 0

    def scheduler(self, directory: NodeDirectory) -> LabelScheduler:
        stage = self

        class Directed(LabelScheduler):
            @property
            def version(self) -> int:
                return super().version + stage.freed

            async def eligible_nodes(self, manifest: Manifest, node_selector: Selector) -> Eligibility:
                await stage.enter(manifest.id)
                return await super().eligible_nodes(manifest, node_selector)

        return Directed(directory)

    async def enter(self, pod_id: str) -> None:
        self.asked[pod_id] += 1
        if error := self.errors.get(pod_id):
            raise error
        if gate := self.gates.get(pod_id):
            self.hanging[pod_id] += 1
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(pod_id)
                raise
            finally:
                self.hanging[pod_id] -= 1


async def owner(store: ScriptedStore, rc_id: str) -> str | None:
    entry = await store.inner.get(KEYS.owner(rc_id))
    return entry.session if entry else None


def owned(farm: Farm) -> list[str]:
    return sorted(farm.term.ownership.held) if farm.term else []


async def member_that_does_nothing(store: ScriptedStore, farm: str) -> str:
    """Register a farm that is live and does not work."""
    session = (await store.inner.create_session(SessionSpec(farm, ttl=86400.0, check_ttl=None))).id
    await store.inner.txn([ops.lock(KEYS.farm(farm), encode(FarmMember(farm=farm)), session)])
    return session
