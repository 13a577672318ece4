"""`rcfarm tasks`: a task engine with its store, its session, its plugins, its metrics and its probe."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from controllers.tasks.api.errors import TaskError
from controllers.tasks.engine.engine import Engine, EngineSettings
from controllers.tasks.engine.outbox import EventSink, LogSink, WebhookSink
from controllers.tasks.io.catalog import Catalog
from controllers.tasks.io.data import open_data
from controllers.tasks.io.secrets import SecretManager
from controllers.tasks.plugins.http import HttpPlugin, http_entry, push_routes
from controllers.tasks.plugins.http_api import HttpSettings
from controllers.tasks.plugins.process import process_entry
from controllers.tasks.plugins.python import python_entry
from controllers.tasks.plugins.rc import DeployPlugin, deploy_entry
from controllers.tasks.plugins.task_pods import TaskPods
from controllers.tasks.registry import PluginRegistry, RegistryConfig
from rcfarm.config import token_in
from rcfarm.config.settings import BadSettings, KubeSettings, Settings, TasksSettings
from rcfarm.daemon.health import Condition, Health, StallDetector
from rcfarm.daemon.health_server import serving
from rcfarm.daemon.listener import parse_address
from rcfarm.daemon.logging import remove_from_events
from rcfarm.daemon.readiness import PORTS
from rcfarm.operations.rc_deploy import RCDeployer
from rcfarm.operations.tasks import described
from rcfarm.roles.base import VERSION, Role, run_role, secret_store_of
from rcfarm.roles.farm import scheduler_for
from rcfarm.roles.kube import access_of, limits_of
from rcfarm.roles.probe import ownership_conditions, session_metrics, view_metrics
from rcfarm.telemetry.kube import RestClientMetrics
from rcfarm.telemetry.prometheus import MeteredStore, WorkQueueMetrics, counter, gauge, labelled
from rcfarm.telemetry.tasks import engine_metrics, retention_metrics, schedule_metrics
from store.decoding import Undecodable, converted
from store.kube.api.protocol import KubeApi
from store.kube.client.client import KubeClient
from store.kube.client.transport import Credentials
from store.kv.protocol import SessionSpec, Store
from store.kv.session import SessionKeeper
from store.schema.keys import Keys

log = structlog.get_logger(__name__)

PUSH_PORT = 9706  # as an example in messages; the setting names the port
STALL_AFTER = 30.0  # seconds beyond the time limit of a plugin's call


def run_tasks(settings: Settings) -> int:
    """Run an engine until a signal. Return the exit code. Raises `BadSettings` and `NoConfig`."""
    http_settings(settings.tasks)  # what is wrong with it must end the command, not the daemon
    if settings.tasks.kubernetes:
        access_of(settings.kube)
    return run_role(settings, PORTS["tasks"], lambda store, registry: TasksRole(settings, store, registry))


class TasksRole(Role):
    """An engine with its metrics and its probe. `workqueue`: the metrics of work queues, if the registry has them."""

    name = "tasks"

    def __init__(
        self, settings: Settings, store: Store, registry: CollectorRegistry, workqueue: WorkQueueMetrics | None = None
    ) -> None:
        super().__init__(settings, store, registry)
        self._metrics = engine_metrics(registry, workqueue)
        self._is_metered = workqueue is not None

    async def work(self, keys: Keys) -> None:
        session, tasks = self.settings.session, self.settings.tasks
        spec = SessionSpec(f"rcfarm-tasks-{tasks.name}", session.ttl, session.check_ttl, session.lock_delay)
        store = self.store if self._is_metered else MeteredStore(self.store, self.registry)
        secret_store = secret_store_of(self.store, "tasks.secrets_token_file", tasks.secrets_token_file)
        secrets = SecretManager(
            env_prefix=tasks.secrets_prefix,
            directory=Path(tasks.secrets_dir) if tasks.secrets_dir else None,
            store=secret_store,
            keys=keys,
        )
        remove_from_events(secrets.redactor.process)
        data = open_data(tasks.data, max_dataset_size_bytes=tasks.max_dataset_size)
        catalog = Catalog(store, keys, data)
        farm = self.settings.farm
        pods = TaskPods(store, keys, scheduler_for(farm, store, keys), node_lost_after=farm.node_lost_after)
        deploys = DeployPlugin(store, keys, RCDeployer(store, keys))
        http = HttpPlugin(http_settings(tasks), redactor=secrets.redactor)
        registry = PluginRegistry(
            [
                process_entry(pods),
                deploy_entry(deploys),
                http_entry(http),
                python_entry(redactor=secrets.redactor),
            ]
        )
        registry.register_entry_points()
        async with AsyncExitStack() as stack:
            if secret_store is not None:
                stack.push_async_callback(secret_store.close)
            stack.callback(data.close)
            stack.push_async_callback(catalog.close)
            cluster = cluster_of(self.settings.kube, self.registry)
            engine = Engine(
                store,
                keys,
                engine_settings(tasks),
                SessionKeeper(store, spec),
                registry,
                data=data,
                secrets=secrets,
                redactor=secrets.redactor,
                sinks=sinks_of(tasks),
                catalog=catalog,
                kube=await stack.enter_async_context(cluster) if tasks.kubernetes else None,
                metrics=self._metrics,
                version=VERSION,
            )
            await stack.enter_async_context(receiving_pushes(tasks, http))
            probe = TasksProbe(engine, pods)
            self.health = Health(probe.stalled, probe.conditions)
            self.registry.register(probe)
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(pods.run()), group.create_task(deploys.run())]
                try:
                    await pods.synced()
                    await engine.start()
                finally:
                    for task in watching:
                        task.cancel()


class Cluster(NamedTuple):
    """The Kubernetes cluster that plugins use. Reads are not cached."""

    api: KubeApi

    def get_client(self) -> KubeApi:
        return self.api

    def get_cache(self) -> KubeApi:
        return self.api


@asynccontextmanager
async def cluster_of(kube: KubeSettings, registry: CollectorRegistry) -> AsyncIterator[Cluster]:
    """Yield the cluster of the settings. Raises `NoConfig`."""
    credentials = await Credentials.open(access_of(kube))
    requests = RestClientMetrics(registry, credentials.access.server)
    agent = f"rcfarm-tasks/{VERSION}"
    async with KubeClient(credentials, user_agent=agent, metrics=requests, limits=limits_of(kube)) as api:
        yield Cluster(api)


@asynccontextmanager
async def receiving_pushes(tasks: TasksSettings, http: HttpPlugin) -> AsyncIterator[str]:
    """Listen for pushes to the plugin `http`, if the settings have a listener. Yield `HOST:PORT`, or "". Raises
    `BadSettings`.

    Each address has a token of its own, so the listener may be beyond loopback. Bodies are not read.
    """
    address = parse_address(tasks.push_listen, PUSH_PORT, "tasks.push_listen") if tasks.push_listen else None
    if address is None:
        yield ""
        return
    app, pushed = web.Application(), web.Application()
    pushed.add_routes(push_routes(http))
    path = urlsplit(tasks.push_url).path.rstrip("/")
    if path:
        app.add_subapp(path, pushed)
    async with serving(app if path else pushed, address, setting="tasks.push_listen") as where:
        log.info("Listening for pushes", address=where, url=tasks.push_url)
        yield where


def engine_settings(tasks: TasksSettings) -> EngineSettings:
    """Return the engine's part of the settings."""
    return EngineSettings(
        name=tasks.name,
        selector=tasks.selector,
        concurrency=tasks.concurrency,
        call_timeout=tasks.call_timeout,
        plugins=RegistryConfig(tasks.enabled, dict(tasks.defaults)),
        concurrent_commits=tasks.concurrent_commits,
        watch_share=tasks.watch_share,
        claim_grace=tasks.claim_grace,
        handover_interval=tasks.handover_interval,
        retention_age=tasks.retention_age,
        retention_count=tasks.retention_count,
        retention_per_type=tasks.retention_per_type,
    )


def sinks_of(tasks: TasksSettings) -> list[EventSink]:
    """Return where events go beside the store."""
    sinks: list[EventSink] = [LogSink()] if tasks.log_events else []
    headers = {}
    if tasks.webhook_token_file:
        headers["Authorization"] = f"Bearer {token_in('tasks.webhook_token_file', tasks.webhook_token_file)}"
    several = len(tasks.webhooks) > 1
    sinks += [
        WebhookSink(url, name=f"webhook-{number}" if several else "webhook", headers=headers)
        for number, url in enumerate(tasks.webhooks, 1)
    ]
    return sinks


def http_settings(tasks: TasksSettings) -> HttpSettings:
    """Return the settings of the plugin `http`. Raises `BadSettings`."""
    own = {"remotes": tasks.http_remotes, "push_url": tasks.push_url, "push_secret": tasks.push_secret}
    try:
        found = converted(own, HttpSettings)
        found.check()
    except (Undecodable, TaskError) as error:
        raise BadSettings(f"tasks.http_remotes: {error}") from error
    return found


class TasksProbe(Collector):
    """Answers for one engine. Register it with the registry that `/metrics` shows.

    `clock`: monotonic, in seconds; by default the engine's.
    """

    def __init__(self, engine: Engine, pods: TaskPods, clock: Callable[[], float] | None = None) -> None:
        self._engine, self._pods = engine, pods
        self._working = StallDetector(engine.settings.call_timeout + STALL_AFTER, clock or engine.clock)

    def conditions(self) -> list[Condition]:
        """Return the conditions under which the engine works."""
        engine = self._engine
        views = [*engine.views(), *self._pods.views()]
        pauses = engine.term.report.pauses() if engine.term else []
        return [
            *ownership_conditions(views, engine.keeper, engine.membership, "engines"),
            *(Condition(f"{each.kind} {each.name}", True, described(each)) for each in pauses),
        ]

    def stalled(self) -> str:
        """Return why rounds make no progress, or "". A plugin that hangs is no stall: its calls have a time limit."""
        term = self._engine.term
        lanes = list(term.ownership.lanes.values()) if term else []
        completed = sum(lane.completed for lane in lanes) + (term.commits.transactions if term else 0)
        stuck = self._working.stalled_for(completed, busy=any(lane.is_busy for lane in lanes))
        return f"executions are queued, but no round has ended for {stuck:.0f} s" if stuck else ""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        engine, term = self._engine, self._engine.term
        yield gauge("rcfarm_engines", "Live engines with the same selector.", len(engine.membership.group()))
        yield from session_metrics(engine.keeper, "rcfarm_engine")
        yield from view_metrics([*engine.views(), *self._pods.views()], engine.clock(), "rcfarm_engine")
        held = list(term.ownership.held.values()) if term else []
        phases = Counter(
            live.state.state.phase.removeprefix("Phase") if live.state.state else "Undefined" for live in held
        )
        waits = Counter(wait.code for live in held if live.state.state for wait in live.state.state.reasons)
        yield gauge("rcfarm_owned_executions", "Executions that this engine owns.", len(held))
        yield labelled("rcfarm_executions", "Owned executions, by phase.", "phase", phases)
        yield labelled("rcfarm_execution_waits", "Reasons why owned executions wait.", "code", waits)
        text = "Executions that ended without success since the engine started, by the code of the reason."
        yield labelled("rcfarm_executions_ended", text, "code", engine.endings.counts, CounterMetricFamily)
        claims = term.ownership.claims if term else None
        yield counter("rcfarm_execution_claims", "Executions claimed.", claims.claimed if claims else 0)
        yield counter(
            "rcfarm_execution_claim_conflicts", "Claims that were refused.", claims.conflicts if claims else 0
        )
        commits = term.commits if term else None
        yield counter("rcfarm_engine_commits", "Transactions sent.", commits.transactions if commits else 0)
        yield counter("rcfarm_engine_commit_conflicts", "Transactions refused.", commits.conflicts if commits else 0)
        now, pauses = engine.wall(), term.report.pauses() if term else []
        paused = dict.fromkeys(engine.workshop.plugins.ids() if term else (), 0.0)
        for each in pauses:
            if each.kind == "plugin":
                paused[each.name] = max(paused[each.name], now - each.since)
        yield labelled(
            "rcfarm_task_plugin_paused_seconds", "How long a plugin has been paused; 0: it is not.", "plugin", paused
        )
        down = {name: now - pause.since if pause else 0.0 for name, pause in term.outbox.pauses.items()} if term else {}
        yield labelled(
            "rcfarm_task_sink_down_seconds", "How long a sink has taken no events; 0: it takes them.", "sink", down
        )
        backlog = len(term.outbox) if term else 0
        yield from schedule_metrics(term)
        yield from retention_metrics(term)
        yield gauge("rcfarm_task_outbox", "Executions with events that a sink has not taken.", backlog)
        queues = engine.ledger.book.queues
        limits = {name: queue.limit.units for name, queue in queues.items() if queue.limit}
        yield labelled("rcfarm_quota_units", "Units of a quota that may be held at once.", "resource", limits)
        used = {name: queue.used for name, queue in queues.items()}
        yield labelled("rcfarm_quota_held_units", "Units that are held.", "resource", used)
        holders = {name: len(queue.grants) for name, queue in queues.items()}
        yield labelled("rcfarm_quota_holders", "Tasks that hold units.", "resource", holders)
        waiting = {name: len(queue.tickets) for name, queue in queues.items()}
        yield labelled("rcfarm_quota_waiters", "Tasks that wait for units.", "resource", waiting)
        yield counter("rcfarm_quota_conflicts", "Decisions over quotas that were repeated.", engine.ledger.conflicts)
