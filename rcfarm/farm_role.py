"""`rcfarm farm`: a farm with its store, its session, its scheduler, its metrics and its probe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry

from rcfarm.config import FarmSettings, Settings, scheduler_plugins
from rcfarm.farm import Farm
from rcfarm.farm_probe import FarmProbe
from rcfarm.metered_store import MeteredStore
from rcfarm.metrics import FarmMetrics
from rcfarm.role_ports import PORTS
from rcfarm.roles import VERSION, Role, run_role
from rcfarm.settled_heap import set_aside, settle
from rcfarm.web import Condition
from scheduler.base import NodeDirectory, Scheduler
from scheduler.label import LabelScheduler
from store.keys import Keys
from store.kv import SessionSpec, Store
from store.session import SessionKeeper

COLLECTIONS = (700, 10, 3)  # a full collection comes after 21,000 new objects
SETTLED = 10_000  # objects that have come and stay: the records of some 300 RCs


def run_farm(settings: Settings) -> int:
    """Run a farm until a signal; answers the exit code."""
    settle(thresholds=COLLECTIONS, least=SETTLED)
    set_aside()
    return run_role(settings, PORTS["farm"], lambda store, registry: FarmRole(settings, store, registry))


class FarmRole(Role):
    """A farm with its metrics and its probe."""

    name = "farm"

    def __init__(self, settings: Settings, store: Store, registry: CollectorRegistry) -> None:
        super().__init__(settings, store, registry)
        self._metrics = FarmMetrics(registry)
        self._probe: FarmProbe | None = None

    async def work(self, keys: Keys) -> None:
        session, farm = self.settings.session, self.settings.farm
        spec = SessionSpec(f"rcfarm-farm-{farm.name}", session.ttl, session.check_ttl, session.lock_delay)
        store = MeteredStore(self.store, self.registry)
        built = Farm(
            store,
            keys,
            farm,
            SessionKeeper(store, spec),
            scheduler_for(farm, store, keys),
            metrics=self._metrics,
            version=VERSION,
        )
        self._probe = FarmProbe(built)
        self.registry.register(self._probe)
        await built.start()

    def working_conditions(self) -> list[Condition]:
        return self._probe.conditions() if self._probe else []

    def stalled(self) -> str:
        return self._probe.stalled() if self._probe else ""


def scheduler_for(settings: FarmSettings, store: Store, keys: Keys) -> Callable[[NodeDirectory], Scheduler]:
    """What `farm.scheduler` names. The function of an entry point is called with the store, its keys and the directory
    of nodes, and returns a `Scheduler`."""
    if settings.scheduler == "label":
        return LabelScheduler
    if settings.scheduler == "pool":
        from scheduler.pool import PoolScheduler  # few farms need it, and each one waits for its imports

        return lambda directory: PoolScheduler(store, keys, directory, strategy=settings.pool_strategy)
    make = scheduler_plugins()[settings.scheduler].load()
    return partial(make, store, keys)
