"""The programs of the fleet, each on its machine: Consul servers, farms, agents, and commands of operators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.chaos.network import Network
from tests.support.agent.agents import kill_started_under
from tests.support.programs.cli import Ran
from tests.support.programs.server_process import REPOSITORY, Program

SERVERS = ("s1", "s2", "s3")
FARMS = ("f1", "f2", "f3")
NODES = ("n1", "n2", "n3", "n4")
POOLS = {"n1": "web", "n2": "web", "n3": "db", "n4": "db"}
ROOT = "rcfarm"
PROGRAM = "sleep"  # the command of every pod: one process without children
_PATIENCE = 30.0  # seconds that a program may take to stop in order


class MachineProgram(Program):
    """A program on one machine."""

    def __init__(self, name: str, command: list[str], log: Path, environ: Mapping[str, str]) -> None:
        super().__init__(name, log)
        self._command, self._environ = command, dict(environ)

    def start(self, *options: str) -> None:
        """Start it, unless it runs; with further options for this life."""
        if not self.is_running:
            self.run([*self._command, *options], env=self._environ)

    def kill(self) -> None:
        super().kill()
        self._process = None

    async def stop(self) -> int:
        """Send SIGTERM. Return the exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        process.terminate()
        try:
            return await asyncio.to_thread(process.wait, _PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)

    def take_exit(self) -> int | None:
        """Return how it ended on its own, once; None while it runs, or when it was ended here."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            self._process = None
        return code

    def pause(self) -> None:
        if self.is_running:
            super().pause()

    def resume(self) -> None:
        if self.is_running:
            super().resume()


class PodProcess(NamedTuple):
    """A process of a pod, found on the machine."""

    node: str
    pod_id: str
    pid: int


class Site:
    """All programs, by the names of their machines."""

    def __init__(self, directory: Path, network: Network, consul: Path, *, local_agents: bool = False) -> None:
        """`local_agents`: each farm and node agent talks to a Consul agent of its own machine, else to a server."""
        self.directory, self.network, self.local_agents = directory, network, local_agents
        self._consul = consul
        self.programs: dict[str, MachineProgram] = {}
        self._environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("RCFARM_", "CONSUL_"))
        }
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0, sock_connect=1.0))

    def decisions(self, farm: str) -> Path:
        """Return the folder of a farm's decision log."""
        return self.directory / "decisions" / farm

    async def start(self) -> None:
        """Start everything. Return when Consul has a leader."""
        for name in SERVERS:
            self._add_consul(name, name, {"server": True, "bootstrap_expect": len(SERVERS)})
        while not await self.leader():
            await asyncio.sleep(0.2)
        if self.local_agents:
            for name in (*FARMS, *NODES):
                self._add_consul(local_agent(name), name, {"server": False})
        for number, name in enumerate(FARMS):
            options = ["--set=farm.node_lost_after=11", "--set=farm.manifest_gc_interval=5"]
            options.append(f"--set=farm.decision_log={self.decisions(name)}")
            self._add_daemon(name, "farm", self._store_of(name, number), "--name", name, *options)
        for number, name in enumerate(NODES):
            fields = {"address": "127.0.0.1", "default_user": os.geteuid(), "labels": f"pool={POOLS[name]}"}
            options = [f"--set=agent.{field}={value}" for field, value in fields.items()]
            state_dir = str(self.state_dir(name))
            self._add_daemon(
                name, "agent", self._store_of(name, number), "--node", name, "--state-dir", state_dir, *options
            )

    async def close(self) -> None:
        """End every process."""
        await self.http.close()
        for program in self.programs.values():
            program.kill()
        kill_started_under(self.directory / "nodes")

    def url(self, machine: str) -> str:
        return f"consul://{self.network.address(machine)}:8500"

    def _store_of(self, name: str, number: int) -> str:
        return self.url(name if self.local_agents else SERVERS[number % len(SERVERS)])

    def state_dir(self, node: str) -> Path:
        return self.directory / "nodes" / node

    def data_dir(self, server: str) -> Path:
        return self.directory / "consul" / server

    async def request(self, server: str, method: str, path: str, body: Any = None) -> Any:
        """Call Consul itself, past the code under test. Raises `aiohttp.ClientError` or `TimeoutError`."""
        url = f"http://{self.network.address(server)}:8500{path}"
        async with self.http.request(method, url, json=body) as answer:
            if answer.status != 200:
                raise aiohttp.ClientError(f"{answer.status} {(await answer.text())[:200]}")
            return await answer.json(content_type=None)

    async def leader(self) -> str:
        """Return the server that leads, as far as any knows; "" when none does."""
        for server in SERVERS:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                address = str(await self.request(server, "GET", "/v1/status/leader")).partition(":")[0]
                for name in SERVERS:
                    if self.network.address(name) == address:
                        return name
        return ""

    async def rejoin(self) -> None:
        """Make Consul's members join again now, as an operator would: on its own, Consul retries every 30 s."""
        others = (*SERVERS, *FARMS, *NODES) if self.local_agents else SERVERS
        joins = [(server, other) for server in SERVERS for other in others if server != other]
        await asyncio.gather(*(self._join(server, other) for server, other in joins))

    async def _join(self, server: str, other: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await self.request(server, "PUT", f"/v1/agent/join/{self.network.address(other)}")

    async def command(self, *arguments: str, server: str = SERVERS[0], stdin: str = "") -> Ran:
        """Run `rcfarm …` on the operators' machine."""
        environ = {"RCFARM_STORE": self.url(server), "RCFARM_STORE_ROOT": ROOT}
        return await self._run([sys.executable, "-m", "rcfarm", *arguments], environ, stdin)

    async def consul(self, *arguments: str, server: str) -> Ran:
        """Run `consul …` on the operators' machine."""
        address = f"http://{self.network.address(server)}:8500"
        return await self._run([str(self._consul), *arguments], {"CONSUL_HTTP_ADDR": address}, "")

    async def _run(self, command: list[str], environ: dict[str, str], stdin: str) -> Ran:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=REPOSITORY,
            env=self._environ | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = await process.communicate(stdin.encode())
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return Ran(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))

    def pod_processes(self) -> list[PodProcess]:
        """Return the processes of all pods, of which there should be one for each pod."""
        found = []
        nodes = f"RCFARM_DIR={self.directory / 'nodes'}/"
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or not (entry / "cmdline").read_bytes().startswith(f"{PROGRAM}\0".encode()):
                    continue
                variables = (entry / "environ").read_text(errors="replace").split("\0")
                if any(variable.startswith(nodes) for variable in variables):
                    values = dict(variable.partition("=")[::2] for variable in variables)
                    found.append(PodProcess(values["RCFARM_NODE"], values["RCFARM_POD_ID"], int(entry.name)))
        return found

    @staticmethod
    def kill_pod(process: PodProcess) -> None:
        """Send SIGKILL to the process of a pod."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    def save_data(self, target: Path) -> None:
        """Copy the servers' data directories at one moment: the servers are paused for the copy."""
        running = [self.programs[server] for server in SERVERS if self.programs[server].is_running]
        for program in running:
            program.pause()
        for server in SERVERS:
            shutil.copytree(self.data_dir(server), target / server)
        for program in running:
            program.resume()

    async def load_data(self, source: Path) -> None:
        """Restart all servers with older data directories."""
        for server in SERVERS:
            self.programs[server].kill()
        for server in SERVERS:
            shutil.rmtree(self.data_dir(server))
            shutil.copytree(source / server, self.data_dir(server))
        for server in SERVERS:
            self.programs[server].start()

    def _add_daemon(self, name: str, role: str, url: str, *options: str) -> None:
        common = ["--store", url, "--root", ROOT, "--listen", "off", "--log-format", "json"]
        self._add(name, name, [sys.executable, "-m", "rcfarm", role, *common, *options])

    def _add_consul(self, name: str, machine: str, role: Mapping[str, object]) -> None:
        address = self.network.address(machine)
        configuration = {
            **role,
            "node_name": name,
            "data_dir": str(self.data_dir(name)),
            "bind_addr": address,
            "client_addr": address,
            "retry_join": [self.network.address(server) for server in SERVERS if server != machine],
            "retry_interval": "1s",
            "skip_leave_on_interrupt": True,
            "leave_on_terminate": False,
            "disable_host_node_id": True,
            "disable_update_check": True,
            "autopilot": {"cleanup_dead_servers": False},
            "performance": {"raft_multiplier": 1},
            "ports": {"dns": -1, "serf_wan": -1, "grpc": -1},
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps(configuration))
        self._add(name, machine, [str(self._consul), "agent", f"-config-file={file}"])

    def _add(self, name: str, machine: str, command: list[str]) -> None:
        inside = self.network.inside(machine, command)
        self.programs[name] = MachineProgram(name, inside, self.directory / f"{name}.log", self._environ)
        self.programs[name].start()


def local_agent(machine: str) -> str:
    """Return the name of the Consul agent on the machine of a farm or a node agent."""
    return f"consul-{machine}"
