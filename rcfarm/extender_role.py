"""`rcfarm extender`: HiveD's scheduler extender, with its web server, its configuration's watcher, events and metrics.

The model: four components. Events come first and end last. The scheduler keeps its view of the cluster, under an
election where there is one: a standby holds no view, is not ready and answers kube-scheduler with an error. The watcher
gives the scheduler each new configuration. The web server comes last and ends first, so that calls in flight end while
the scheduler still works.

Two listeners: HiveD's own, at the `webServerAddress` of its file, for kube-scheduler and inspection; and that of every
daemon here, on loopback. The first is on all addresses by default, as HiveD's is: to write an address into HiveD's file
counts as consent, and kube-scheduler can send no token. It is open to every client that reaches it, unless
`extender.client_ca_file` makes it ask for a certificate. Both serve `/livez`, `/readyz` and `/metrics`; a `web.token`
is then needed for reasons and metrics on both.

What is there for good (cells, and the pods that the first list shows) is kept out of the garbage collector's sight. So
is what came later, once a full collection has found it to be in use: groups and pods refer to each other in no circle,
so they need no collector to go.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from rcfarm import daemon
from rcfarm.config import BadSettings, KubeSettings, Settings
from rcfarm.daemon import Component
from rcfarm.extender_metrics import ExtenderMetrics
from rcfarm.extender_probe import ExtenderProbe
from rcfarm.kube_role import clients, new_election
from rcfarm.logging import configure
from rcfarm.metrics import new_registry
from rcfarm.role_ports import PORTS
from rcfarm.roles import VERSION, run_components
from rcfarm.settled_heap import set_aside, settle
from rcfarm.web import Address, Health, health_routes, read_token, serving
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.config import HivedConfig
from scheduler.hived.config_diff import ConfigChange
from scheduler.hived.errors import InvalidConfig
from scheduler.hived.inspection import Inspected, Inspection
from scheduler.hived.listen_address import host_and_port
from scheduler.hived.pod_events import PodEvents
from scheduler.hived.reload import ConfigSource, ConfigWatcher, LoadedConfig, ReloadResult
from scheduler.hived.scheduler import HivedScheduler
from scheduler.hived.topology import Topology
from scheduler.hived.types import SchedulerAlgorithm
from scheduler.hived.web_server import CALLS, extender_app
from store.kube.api import KubeApi
from store.kube.events import EventRecorder
from store.kube.fence import FencedApi
from store.kube.objects import Object

log = structlog.get_logger(__name__)

NAME = "rcfarm-extender"
CALLS_END_WITHIN = 5.0  # seconds that calls in flight have when it stops, then as long again to be cancelled
WARNINGS = 20  # that are logged
NODES_SHOWN = 8


def run_extender(settings: Settings) -> int:
    """Run the extender until a signal; answers the exit code. Raises `BadSettings` and `NoConfig`."""
    configure(settings.log.level, settings.log.format)
    source = ConfigSource(settings.extender.file(os.environ), os.environ, Path(os.path.expanduser("~")))
    try:
        loaded = source.load()
    except InvalidConfig as error:
        raise BadSettings(_mistakes(source.path, error)) from error
    log.info("Read the configuration file", file=str(source.path), **_sizes(loaded.topology))
    for warning in loaded.config.warnings[:WARNINGS]:
        log.warning("In the configuration file", file=str(source.path), warning=str(warning))
    kube = _kube_settings(settings.kube, loaded.config)

    settle()

    async def main() -> int:
        registry = new_registry(VERSION)
        async with clients(NAME, kube, settings.extender, registry) as (api, lease_api, requests):
            role = ExtenderRole(msgspec.structs.replace(settings, kube=kube), source, loaded, api, lease_api, registry)
            groups = role.components()
            return await run_components(settings, PORTS["extender"], registry, groups, store=requests.host)

    return daemon.run(main)


class ExtenderRole:
    """A scheduler with what belongs to it. `lease_api`: what the election uses."""

    def __init__(
        self,
        settings: Settings,
        source: ConfigSource,
        loaded: LoadedConfig,
        api: KubeApi,
        lease_api: KubeApi,
        registry: CollectorRegistry,
    ) -> None:
        self._config, self._registry, self._token = loaded.config, registry, read_token(settings.web)
        self._settings = settings.extender
        self._recorder = EventRecorder(api, NAME, host=socket.gethostname())
        self._election = new_election(settings.extender, settings.kube, lease_api)
        self._metrics = ExtenderMetrics(registry)
        algorithm = HivedAlgorithm(loaded.topology)
        self._scheduler = HivedScheduler(
            FencedApi(api, self._election) if self._election else api,
            algorithm,
            force_pod_bind_threshold=loaded.config.force_pod_bind_threshold,
            waiting_pod_scheduling_block_milli_sec=loaded.config.waiting_pod_scheduling_block_milli_sec,
            evict_victims=settings.extender.evict_victims,
            recorder=self._recorder,
            metrics=self._metrics,
        )
        self._inspection = Inspection(
            Inspected(algorithm, loaded.content.decode()),
            self._scheduler.view.waiting,
            check=self._scheduler.check_ready,
        )
        self._watcher = ConfigWatcher(
            source,
            loaded,
            self._take_over,
            interval=settings.extender.reload_interval,
            told=self._reloaded,
        )
        self._probe = ExtenderProbe(self._scheduler, self._election, self._watcher, self._recorder)
        registry.register(self._probe)
        self.listening = ""
        set_aside()

    def components(self) -> list[list[Component]]:
        """What a daemon runs, in groups."""
        events = Component(name="events", run=self._recorder.run)
        scheduler = Component(
            name="extender", run=self._run, conditions=self._probe.conditions, stalled=self._probe.stalled
        )
        configuration = Component(name="configuration", run=self._watcher.run)
        return [[events], [scheduler, configuration], [Component(name="web server", run=self._serve)]]

    async def _run(self) -> None:
        if self._election is None:
            await self._schedule()
        else:
            await self._election.run(self._schedule)

    async def _schedule(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scheduler.run())
            await self._scheduler.ready.wait()
            self._tell_missing_nodes(self._watcher.in_use.topology)
            set_aside()

    async def _serve(self) -> None:
        settings = self._settings
        app = extender_app(
            self._scheduler, self._inspection, self._metrics, node_cache_capable=settings.node_cache_capable
        )
        health = Health(self._probe.stalled, self._probe.conditions)
        app.add_routes(health_routes(health, self._registry, token=self._token))
        address = Address(*host_and_port(self._config.web_server_address))
        async with serving(
            app,
            address,
            setting="webServerAddress",
            bounds=CALLS,
            tls=settings.tls,
            shutdown_timeout=CALLS_END_WITHIN,
        ) as where:
            self.listening = where
            asks = "a client certificate" if settings.client_ca_file else "nothing"
            log.info("Listening for kube-scheduler and inspection", address=where, asks_clients_for=asks)
            await asyncio.Event().wait()

    async def _take_over(self, loaded: LoadedConfig, change: ConfigChange) -> None:
        if change.cells:
            inspected: list[Inspected] = []

            def build() -> SchedulerAlgorithm:
                algorithm = HivedAlgorithm(loaded.topology)
                inspected.append(Inspected(algorithm, loaded.content.decode()))
                return algorithm

            try:
                await self._scheduler.replace(build)
            except BaseException:
                gc.unfreeze()  # the cells that were built in vain
                raise
            self._inspection.follow(inspected[0])
            self._tell_missing_nodes(loaded.topology)
            gc.unfreeze()  # so that the cells of the old one go; half a second where they are many
            set_aside()
        self._scheduler.force_pod_bind_threshold = loaded.config.force_pod_bind_threshold
        self._scheduler.waiting_pod_scheduling_block_milli_sec = loaded.config.waiting_pod_scheduling_block_milli_sec

    def _tell_missing_nodes(self, topology: Topology) -> None:
        names = dict.fromkeys(node for chain in topology.chains.values() for node in chain.nodes)
        missing = [name for name in names if name not in self._scheduler.view.nodes]
        if missing:
            log.warning(
                "Nodes of the configuration do not exist: their cells are bad until they do",
                number=len(missing),
                nodes=missing[:NODES_SHOWN],
            )

    def _reloaded(self, result: ReloadResult) -> None:
        self._metrics.reloaded(result)
        pod = _own_pod(os.environ)
        if self._watcher.problem and pod is not None:
            message = f"The configuration in use stays, for its file can't be used: {self._watcher.problem}"
            PodEvents(self._recorder).event(pod, "Warning", "HivedConfigRefused", message)


def _mistakes(path: Path, error: InvalidConfig) -> str:
    """One after the file's name, several below it."""
    hint = "" if path.exists() else "; name HiveD's file with --config, or in the environment as CONFIG"
    lines = str(error).splitlines()
    return f"{path}: {error}{hint}" if len(lines) == 1 else "\n  ".join([f"{path} can't be used:", *lines])


def _sizes(topology: Topology) -> dict[str, int]:
    chains = topology.chains.values()
    return {
        "chains": len(chains),
        "nodes": len({node for chain in chains for node in chain.nodes}),
        "leaf_cells": sum(len(chain.addresses[0]) for chain in chains),
        "virtual_clusters": len(topology.virtual_clusters),
    }


def _kube_settings(kube: KubeSettings, config: HivedConfig) -> KubeSettings:
    """What the settings say, else what HiveD's file does."""
    return msgspec.structs.replace(
        kube,
        server=kube.server or config.kube_api_server_address,
        kubeconfig=kube.kubeconfig or config.kube_config_file_path,
    )


def _own_pod(environ: Mapping[str, str]) -> Object | None:
    """The pod that this runs in, if the downward API tells."""
    variables = {"name": "POD_NAME", "namespace": "POD_NAMESPACE", "uid": "POD_UID"}
    metadata = {field: environ.get(variable, "") for field, variable in variables.items()}
    return {"metadata": metadata} if all(metadata.values()) else None
