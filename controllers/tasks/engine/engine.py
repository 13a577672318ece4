"""The engine: drives executions of tasks through their plugins, each by one engine at a time.

The model: `start` runs one *term* after the other, each under one session (`controllers.ownership`). Objects that do
not depend on the session live in the engine: the loaded plugins, the view of the quotas, the members. A term wires

    Executions  what is ours, what is due, and the workers        (`controllers.tasks.engine.executions`)
    Rounds      decide, commit, act                               (`controllers.tasks.engine.round`)
    step()      what to do for one execution, purely              (`controllers.tasks.step`)
    Outbox      committed events on their way to the sinks        (`controllers.tasks.engine.outbox`)
    Report      what operators read of this engine                (`controllers.tasks.engine.report`)

When the session is lost everything in the term is cancelled; the store refuses what was on its way. Cancelling `start`
suspends: rounds in flight may end, plugins' calls are cancelled, remote work is never touched, and other engines claim
the executions at once. Only an operator's request or a deadline aborts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from controllers.loop.workqueue import MetricsProvider
from controllers.ownership import terms
from controllers.ownership.membership import Leadership, Membership
from controllers.tasks.api.data import SecretManager
from controllers.tasks.api.plugin import KubeClient, MetricsScope, PluginEntry, SetupContext
from controllers.tasks.api.resources import ResourceNamespace
from controllers.tasks.engine.endings import Endings
from controllers.tasks.engine.executions import Executions
from controllers.tasks.engine.guard import CALL_TIMEOUT, GuardMetrics, PluginGuard
from controllers.tasks.engine.outbox import EventSink, Outbox, OutboxMetrics
from controllers.tasks.engine.report import Report
from controllers.tasks.engine.retention import Retention
from controllers.tasks.engine.round import Rounds, RoundTools
from controllers.tasks.engine.scheduler import Scheduler
from controllers.tasks.engine.workshop import NoMetrics, Workshop
from controllers.tasks.io.catalog import Catalog
from controllers.tasks.io.data import DataStore
from controllers.tasks.outcomes import Policy
from controllers.tasks.registry import PluginRegistrar, PluginRegistry, RegistryConfig
from controllers.tasks.resources import QUOTA, declare_quotas
from controllers.tasks.retention import Limits
from scheduler.quota.ledger import QuotaLedger
from store.kv.group_commit import GroupCommit
from store.kv.protocol import BadRecord, Store, StoreError
from store.kv.session import SessionKeeper
from store.kv.view import TreeView
from store.redaction import Redactor
from store.schema.history import HistoryWatch
from store.schema.keys import Keys
from store.schema.records import decode, utc_now
from store.schema.selectors import Selector
from store.schema.tasks import EngineMember, TaskEvent, TaskOwner
from store.timing import Backoff, retried

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of one engine. Durations in seconds.

    - `name`: unique among the live engines. `selector`: of the labels of executions that it claims; "" for all.
    - `concurrency`: rounds in flight per plugin. `call_timeout`: for one call of a plugin; 0 for no limit.
    - `plugins`: which are enabled, and the defaults of task types. `policy`: retries and back-offs.
    - `concurrent_commits`: transactions in flight at once. `watch_share`: part of a core for refreshing views.
    - `claim_grace`, `handover_interval`: as the farm's. `resource_manager`: the first part of plugins' resource names.
    - `quotas`: "quota"; or "noop", which grants plugins all that they ask for.
    - `retention_age`, `retention_count`, `retention_per_type`: how long ended executions are kept, how many, and
      how many of one type in one project; 0 for no limit.
    """

    name: str
    selector: str = ""
    concurrency: int = 128
    call_timeout: float = CALL_TIMEOUT
    plugins: RegistryConfig = field(default_factory=RegistryConfig)
    policy: Policy = field(default_factory=Policy)
    concurrent_commits: int = 12
    watch_share: float = 0.2
    claim_grace: float = 10.0
    handover_interval: float = 0.1
    resource_manager: str = "rcfarm"
    quotas: str = QUOTA
    retention_age: float = 7 * 86400.0
    retention_count: int = 10_000
    retention_per_type: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Where an engine's measurements go; None: nowhere."""

    workqueue: MetricsProvider | None = None
    guard: GuardMetrics | None = None
    outbox: OutboxMetrics | None = None
    plugins: Callable[[str], MetricsScope] = lambda plugin: NoMetrics()


class Term(terms.Term[Executions]):
    """The work of an engine under one session."""

    def __init__(self, engine: Engine, session: str, *, resumed: bool) -> None:
        settings, store, keys = engine.settings, engine.store, engine.keys
        pauses_changed = asyncio.Event()
        pauses_changed.set()  # what the term before had published does not hold any more
        self.commits = GroupCommit(store, concurrency=settings.concurrent_commits)
        executions = Executions(
            store,
            keys,
            engine.membership,
            session,
            lambda: engine.keeper.session_id == session,
            engine.workshop,
            engine.ledger,
            selector=engine.selector,
            claim_grace=settings.claim_grace,
            handover_interval=settings.handover_interval,
            watch_share=settings.watch_share,
            log=engine.log,
            clock=engine.clock,
            wall=engine.wall,
            metrics=engine.metrics.workqueue,
            resumed=resumed,
            on_pause=pauses_changed.set,
        )
        super().__init__(engine.keeper, executions)
        self.outbox = Outbox(
            engine.sinks,
            self._read_events,
            executions.delivered,
            clock=engine.clock,
            wall=engine.wall,
            metrics=engine.metrics.outbox,
            on_pause=pauses_changed.set,
        )
        self.rounds = Rounds(
            RoundTools(
                store=store,
                keys=keys,
                session=session,
                commits=self.commits,
                ledger=engine.ledger,
                guard=engine.guard,
                outbox=self.outbox,
                workshop=engine.workshop,
                policy=settings.policy,
                clock=engine.clock,
                wall=engine.wall,
                rng=engine.rng,
                is_held=executions.is_session_held,
                signal=executions.enqueue,
                dependencies=executions.dependencies,
                redactor=engine.redactor,
                circuits=executions.circuits,
                endings=engine.endings,
            )
        )
        self.scheduler = Scheduler(
            store, keys, engine.membership, session, clock=engine.clock, wall=engine.wall, log=engine.log
        )
        self.retention = Retention(
            store,
            keys,
            engine.data,
            executions,
            engine.ledger,
            Leadership(store, keys.retention, session, TaskOwner(settings.name, utc_now())),
            self.scheduler.specs,
            limits=Limits(settings.retention_age, settings.retention_count, settings.retention_per_type),
        )
        self.report = Report(
            engine.membership,
            session,
            executions,
            engine.endings,
            self.outbox,
            self.commits,
            engine.workshop.plugins,
            pauses_changed,
            engine.log,
        )
        self._engine = engine

    def work(self) -> Iterator[terms.Work]:
        engine = self._engine
        yield self.commits.run()
        yield self.outbox.run()
        yield self.ownership.work(self.rounds, self.outbox, engine.settings.concurrency)
        yield self.ownership.run()
        yield self.retention.run()
        yield self.scheduler.run()
        yield self.report.run()
        yield engine.history.keep(engine.membership.key, self.session, lambda: engine.membership.leads("history"))

    async def stop(self, grace: float) -> None:
        await self.ownership.stop(grace)

    async def _read_events(self, execution: str, first: int, end: int) -> Sequence[TaskEvent]:
        """Return events of an execution from the store, without those that can't be decoded."""
        events = []
        for entry in (await self._engine.store.list(self._engine.keys.events_of(execution))).entries:
            try:
                event = decode(TaskEvent, entry.key, entry.value)
            except BadRecord as error:
                log.error("An event can't be decoded, and is not sent", key=entry.key, error=str(error))
                continue
            if first <= event.n < end:
                events.append(event)
        return events


class Engine(terms.Runner[Term]):
    """One engine. Run `start()` once; read `term` from the same event loop.

    `registry`: the plugins, which are loaded by `start`. `data`: inputs and outputs. `sinks`: where events go beside
    the store. `catalog`: of cached results. `redactor`: removes the values of secrets from what is stored; by default
    that of `secrets`. `clock`: monotonic seconds, as the event loop's; `wall`: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: EngineSettings,
        keeper: SessionKeeper,
        registry: PluginRegistry,
        *,
        data: DataStore,
        secrets: SecretManager,
        redactor: Redactor | None = None,
        sinks: Sequence[EventSink] = (),
        catalog: Catalog | None = None,
        kube: KubeClient | None = None,
        metrics: EngineMetrics | None = None,
        address: str = "",
        version: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(keeper)
        self.store, self.keys, self.settings, self.sinks = store, keys, settings, sinks
        self.metrics = metrics or EngineMetrics()
        self.clock, self.wall, self.rng = clock, wall, rng or random.Random()
        self.selector = Selector.parse(settings.selector)
        self.log = log.bind(engine=settings.name)
        self.endings = Endings()
        self.guard = PluginGuard(timeout=settings.call_timeout, metrics=self.metrics.guard, clock=clock)
        self.enqueue = self.in_term(lambda term, execution: term.ownership.enqueue(execution))
        self.ledger = QuotaLedger(
            store,
            keys,
            clock=wall,
            mine=lambda execution: self.term is not None and execution in self.term.ownership.held,
            on_granted=self.in_term(lambda term, execution: term.ownership.enqueue(execution, first=True)),
            on_reason_changed=self.enqueue,
            rng=self.rng,
        )
        me = EngineMember(
            engine=settings.name,
            selector=str(self.selector),
            since=utc_now(),
            address=address,
            version=version,
        )
        members_changed = self.in_term(lambda term: term.ownership.members_changed())
        self.membership: Membership[EngineMember] = Membership(
            store, keys.engines, me, members_changed, kind="engine", clock=clock
        )
        self.redactor = redactor or getattr(secrets, "redactor", None) or Redactor()
        self.history = HistoryWatch(store, keys, self.views, clock=clock)
        self._registry = registry
        self._quotas: dict[ResourceNamespace, int] = {}  # declared by plugins while they are loaded
        self.data = data
        self._secrets, self._catalog, self._kube = secrets, catalog, kube
        self.workshop: Workshop

    async def start(self) -> None:
        """Load the plugins, then run terms until cancelled; stop in order; close the plugins. Raises `BadPlugin`."""
        plugins = await self._registry.load(self.settings.plugins, self._setup)
        self.workshop = Workshop(
            plugins,
            self.data,
            self._secrets,
            self.ledger,
            manager=self.settings.resource_manager,
            quotas=self.settings.quotas,
            catalog=self._catalog,
        )
        try:
            with self.guard.watchdog():
                await super().start()
        finally:
            await plugins.close()

    def views(self) -> Iterator[TreeView[Any]]:
        """Yield every view of this engine."""
        yield self.membership.view
        yield self.ledger.view
        if self.term:
            yield self.term.scheduler.view
            yield from self.term.ownership.views()

    def background(self) -> Iterator[terms.Work]:
        yield self.membership.view.run()
        yield self.ledger.run()
        yield self.history.run()

    async def ready(self) -> None:
        for view in (self.membership.view, self.ledger.view):
            await view.synced()
        await retried(
            lambda: declare_quotas(self.store, self.keys, self._quotas),
            on=StoreError,
            backoff=Backoff(0.2, 5.0, rng=self.rng),
        )

    def make_term(self, session: str, *, resumed: bool) -> Term:
        return Term(self, session, resumed=resumed)

    def _setup(self, entry: PluginEntry) -> SetupContext:
        resources = ResourceNamespace(self.settings.resource_manager).create_sub_namespace(entry.id)
        return SetupContext(
            enqueue_owner=lambda owner: self.enqueue(owner.name),
            metrics_scope=self.metrics.plugins(entry.id),
            secret_manager=self._secrets,
            resource_registrar=PluginRegistrar(self._quotas, resources),
            cluster=self._kube,
        )
