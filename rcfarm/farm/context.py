"""What the parts of a farm share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from controllers.ownership.membership import Membership
from rcfarm.config.settings import FarmSettings
from rcfarm.farm.brake import BrakeWatch
from rcfarm.farm.chronicle import Chronicle
from rcfarm.farm.manifests import Manifests
from rcfarm.farm.shard import Intents
from rcfarm.telemetry.prometheus import FarmMetrics
from scheduler.nodes import NodeTable
from scheduler.protocol import Scheduler
from store.kv.protocol import Store
from store.kv.session import SessionKeeper
from store.schema.history import HistoryWatch
from store.schema.keys import Keys
from store.schema.records import FarmMember
from store.schema.selectors import Selector

if TYPE_CHECKING:
    from rcfarm.farm.decision_log import DecisionLog
    from rcfarm.farm.notifier import Notifier


@dataclass(frozen=True, slots=True)
class FarmContext:
    """The parts of a farm that do not depend on its session: the farm makes it once, and each term works with it.

    `clock` is monotonic, in seconds; `log` names the farm; `meta_lost` is set when the store's `meta` is missing.
    """

    store: Store
    keys: Keys
    settings: FarmSettings
    keeper: SessionKeeper
    selector: Selector
    membership: Membership[FarmMember]
    nodes: NodeTable
    scheduler: Scheduler
    manifests: Manifests
    intents: Intents
    brake: BrakeWatch
    chronicle: Chronicle
    notifier: Notifier | None
    decisions: DecisionLog | None
    history: HistoryWatch
    meta_lost: asyncio.Event
    metrics: FarmMetrics
    clock: Callable[[], float]
    log: Any

    def leads(self, task: str) -> Callable[[], bool]:
        """Return a function that says whether this farm is the one that does the task for all farms."""
        return lambda: self.membership.leads(task)
