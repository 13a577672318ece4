"""A started version of a pod: its processes, each under a supervisor, and the monitor of its health.

The model: `run` is one task that supervises all launchables and watches the pod's health; cancelling it leaves the
processes running. After that either `stop` ends them, or `release` leaves them to the next agent. Each supervisor's
record of its process goes into the pod's one record on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from rcfarm.agent.errors import AgentError
from rcfarm.agent.health.monitor import FlapLimiter, HealthMonitor
from rcfarm.agent.health.probes import Prober, Verdict
from rcfarm.agent.install.installer import Installed, Installer
from rcfarm.agent.node import ports
from rcfarm.agent.node.discovery import Discovery, Service
from rcfarm.agent.node.registration import Registration
from rcfarm.agent.processes import launch
from rcfarm.agent.processes.process import LaunchSpec
from rcfarm.agent.processes.supervisor import Supervisor
from rcfarm.agent.state import LaunchRecord, PodRecord, StateDir
from rcfarm.config.agent import AgentSettings
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.records import Labels, Process, utc_now
from store.timing import Backoff

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PodDependencies:
    """What the pods of one agent share."""

    store: Store
    keys: Keys
    settings: AgentSettings
    address: str
    state: StateDir
    installer: Installer
    ports: ports.Ports
    prober: Prober
    registration: Registration
    discovery: Discovery


class RunningPod:
    """One pod with its processes. `on_change`: a process changed; `on_verdict`: the pod's health did."""

    def __init__(
        self,
        dependencies: PodDependencies,
        pod_id: str,
        installed: Installed,
        record: PodRecord,
        limiter: FlapLimiter,
        *,
        on_change: Callable[[], None],
        on_verdict: Callable[[Verdict], None],
    ) -> None:
        self.installed = installed
        self.record = record
        self.lost_port = False
        self._dependencies = dependencies
        self._pod_id = pod_id
        self._on_change = on_change
        self._manifest = installed.manifest
        settings = dependencies.settings
        self._supervisors = {
            name: Supervisor(
                name,
                launchable,
                record.launchables.get(name, LaunchRecord()),
                self,
                Backoff(settings.restart_backoff, settings.restart_backoff_cap),
                proven_after=settings.restart_reset,
                log=log.bind(node=settings.node, pod=pod_id, launchable=name),
                now=utc_now,
            )
            for name, launchable in self._manifest.launchables.items()
        }
        check = self._manifest.health
        has_check = check.http or check.tcp or check.exec
        self._monitor = HealthMonitor(check, self._probe if has_check else None, self.processes, on_verdict, limiter)

    def processes(self) -> dict[str, Process]:
        """Return the state of every launchable."""
        return {name: supervisor.process for name, supervisor in self._supervisors.items()}

    def groups(self) -> list[int]:
        """Return the process groups of the pod."""
        return [process.pid for process in self.processes().values() if process.pid is not None]

    def service(self, labels: Labels) -> Service | None:
        """Return the service under which clients find the pod, or None without ports. Its main port is `http`, else the
        first."""
        numbers = self.record.ports
        if not numbers:
            return None
        port = numbers.get("http") or next(iter(numbers.values()))
        name = self._dependencies.settings.service_prefix + self._manifest.id
        return Service(name, self._dependencies.address, port, numbers, labels, self.record.rc)

    async def run(self) -> None:
        """Supervise until cancelled; the processes keep running."""
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors.values():
                tasks.create_task(supervisor.run())
            tasks.create_task(self._monitor.run())

    async def stop(self) -> None:
        """Stop all processes at once, each as its manifest says. Call it only once `run` has ended."""
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors.values():
                tasks.create_task(supervisor.stop())

    def release(self) -> None:
        """Leave the processes to the next agent. Call it only once `run` has ended."""
        for supervisor in self._supervisors.values():
            supervisor.release()

    def prepare(self, name: str) -> LaunchSpec:
        """See `SupervisorHost`."""
        try:
            ports.check_ports(self.record.ports, self._manifest.ports, self.groups())
        except ports.PortTaken as error:
            self.lost_port = error.chosen
            raise
        paths = self._dependencies.state.paths(self._pod_id, name)
        spec = launch.launch_spec(self._context(), name, paths)
        launch.prepare_files(self._manifest, spec.credentials, paths)
        launch.check_directory(spec, f"launchables.{name}")
        launch.check_program(spec, f"launchables.{name}")
        return spec

    def save(self, name: str, record: LaunchRecord) -> None:
        """See `SupervisorHost`."""
        saved = msgspec.structs.replace(self.record, launchables={**self.record.launchables, name: record})
        self._dependencies.state.save_pod(self._pod_id, saved)
        self.record = saved

    def changed(self) -> None:
        """See `SupervisorHost`."""
        self._monitor.changed()
        self._on_change()

    def hand_over(self, rc: str, tree: str) -> None:
        """Record the pod's new RC, and the tree of its intent; its processes see the RC when they are next started."""
        saved = msgspec.structs.replace(self.record, rc=rc, tree=tree)
        self._dependencies.state.save_pod(self._pod_id, saved)
        self.record = saved

    async def _probe(self) -> Verdict:
        """Run the check; the command of an exec check gets the environment of the first launchable."""
        check, command = self._manifest.health, None
        if check.exec is not None:
            name = next(iter(self._manifest.launchables))
            paths = self._dependencies.state.paths(self._pod_id, name)
            try:
                spec = launch.launch_spec(self._context(), name, paths)
                argv = [launch.expand(word, spec.env, "health.exec.command") for word in check.exec.command]
            except AgentError as error:
                return Verdict("critical", str(error))
            command = spec._replace(argv=argv, log=paths.check_output, limits={})
        return await self._dependencies.prober.probe(check, self.record.ports, command)

    def _context(self) -> launch.PodContext:
        return pod_context(self._dependencies, self._pod_id, self.record, self.installed)


def pod_context(
    dependencies: PodDependencies, pod_id: str, record: PodRecord, installed: Installed
) -> launch.PodContext:
    """Return the facts that the pod's processes get."""
    return launch.PodContext(
        node=dependencies.settings.node,
        address=dependencies.address,
        rc=record.rc,
        pod_id=pod_id,
        manifest_id=installed.manifest_id,
        manifest=installed.manifest,
        ports=record.ports,
        artifacts=installed.artifacts,
        users=launch.Users(dependencies.settings.default_user, dependencies.settings.allowed_users),
    )
