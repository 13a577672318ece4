"""A real Consul server for tests.

`ConsulServer` owns one `consul agent` process on free ports of the loopback interface. It counts as started when it
grants a session: that takes a leader, a working token and the node's own registration. The process can be stopped,
killed, paused (SIGSTOP) and started again on the same ports; with `durable=True` its data survives that.

The binary comes from `$RCFARM_SERVERS/consul`, by default `.servers/consul`. Without it tests are skipped, or fail when
`RCFARM_REQUIRE_SERVERS=1`, as in CI.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.programs.server_process import Program, servers_directory

if TYPE_CHECKING:
    from store.consul.client import ConsulSettings
    from store.consul.store import ConsulStore

START_TIMEOUT = 60.0
BOOTSTRAP_TOKEN = "5b1f7a52-6d5c-4f0e-9f4c-3f6f7f0f2f11"
_PORTS = ("http", "server", "serf_lan")

StartConsul = Callable[..., "ConsulServer"]


class ConsulServer(Program):
    """One Consul server. `token` is the bootstrap token when ACLs are on, else None.

    `durable`: keeps its data in a directory across restarts; otherwise in memory (`-dev`).
    `acl`: default policy deny. `max_connections`: Consul's `http_max_conns_per_client`.
    `config`: further keys of Consul's configuration file. `leaderless`: waits for a second server that never comes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        durable: bool = False,
        acl: bool = False,
        max_connections: int | None = None,
        config: dict[str, Any] | None = None,
        leaderless: bool = False,
    ) -> None:
        self.directory = directory
        self.durable = durable or leaderless
        self.leaderless = leaderless
        self.token = BOOTSTRAP_TOKEN if acl else None
        self.max_connections = max_connections
        self.config = config or {}
        self.ports: dict[str, int] = {}
        super().__init__("consul", directory / "consul.log")

    @property
    def address(self) -> str:
        """`127.0.0.1:PORT` of the HTTP API."""
        return f"127.0.0.1:{self.ports['http']}"

    @property
    def url(self) -> str:
        """As `--store` takes it."""
        return f"consul://{self.address}"

    def start(self) -> None:
        """Start and wait until sessions are granted. If a port is taken in the meantime, retry with other ports."""
        for attempt in range(5):
            if not self.ports or attempt:
                self.ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
            self._spawn()
            if self._wait_until_ready():
                return
            if "address already in use" not in self.log():
                break
        raise AssertionError(f"Consul did not start; the end of its log:\n{self.log()[-2000:]}")

    def start_later(self) -> None:
        """Start the process and do not wait: for one of several servers, which become ready together."""
        if not self.ports:
            self.ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._spawn()

    def until_ready(self) -> None:
        """Wait until sessions are granted."""
        assert self._wait_until_ready(), f"Consul did not start; the end of its log:\n{self.log()[-2000:]}"

    def stop(self) -> None:
        """Stop as an operator would (SIGTERM); does nothing when it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop, then start on the same ports; a durable server keeps its data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop every thread of the server (SIGSTOP); it answers nothing until `resume`."""
        super().pause()
        deadline = time.monotonic() + START_TIMEOUT
        while not self._is_stopped():  # the signal reaches the threads one by one, with delays on a busy machine
            assert time.monotonic() < deadline, "the server does not stop"
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        stats = [stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def request(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> Any:
        """Make one plain API call, independent of the code under test. Return the decoded JSON, or None without a body.

        Raises `urllib.error.HTTPError` for a refusal. `token` defaults to the bootstrap token.
        """
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{self.address}{path}", data=data, method=method)
        if token or self.token:
            request.add_header("X-Consul-Token", token or self.token or "")
        with urllib.request.urlopen(request, timeout=10) as response:
            answer = response.read()
        return json.loads(answer) if answer.strip() else None

    def create_token(self, rules: str) -> str:
        """Return a new ACL token that may do what `rules` (HCL) say."""
        name = f"test-{secrets.token_hex(4)}"
        policy = self.request("PUT", "/v1/acl/policy", {"Name": name, "Rules": rules})
        return str(self.request("PUT", "/v1/acl/token", {"Policies": [{"ID": policy["ID"]}]})["SecretID"])

    def _spawn(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "consul.json"
        config.write_text(json.dumps(self._configuration()))
        mode = [f"-data-dir={self.directory / 'data'}", "-server"] if self.durable else ["-dev"]
        self.log_file.unlink(missing_ok=True)
        self.run([str(consul_binary()), "agent", *mode, f"-config-file={config}"], start_new_session=True)

    def _configuration(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "bind_addr": "127.0.0.1",
            "client_addr": "127.0.0.1",
            "node_name": "consul-test",
            "disable_host_node_id": True,
            "disable_update_check": True,
            "ports": {**self.ports, "serf_wan": -1, "grpc": -1, "dns": -1},
        }
        if self.durable:
            config["performance"] = {"raft_multiplier": 1, "rpc_hold_timeout": "200ms"}
            config["bootstrap_expect"] = 2 if self.leaderless else 1
        if self.token:
            tokens = {"master": self.token, "agent": self.token}
            config["acl"] = {"enabled": True, "default_policy": "deny", "tokens": tokens}
        if self.max_connections:
            config["limits"] = {"http_max_conns_per_client": self.max_connections}
        ports = config["ports"] | self.config.get("ports", {})
        return config | self.config | {"ports": ports}

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if not self.is_running:
                return False
            with contextlib.suppress(OSError):
                self._check_ready()
                return True
            time.sleep(0.02)
        self.kill()
        return False

    def _check_ready(self) -> None:
        if self.leaderless:
            self.request("GET", "/v1/status/leader")
            return
        session = self.request("PUT", "/v1/session/create", {"TTL": "10s"})
        self.request("PUT", f"/v1/session/destroy/{session['ID']}")

    def _end(self, sig: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, sig)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def consul_binary() -> Path:
    """Return where the Consul program is. Skips or fails the test when there is none."""
    return servers_directory("consul") / "consul"


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


@contextlib.asynccontextmanager
async def opened(settings: ConsulSettings, **options: Any) -> AsyncIterator[ConsulStore]:
    """Yield a store on a Consul, and close it afterwards."""
    from store.consul.store import ConsulStore

    store = ConsulStore(settings, **options)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(scope="session")
def consul(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsulServer]:
    """The Consul that all tests of this run share: each works under its own `root`. Never stop or pause this one."""
    server = ConsulServer(tmp_path_factory.mktemp("consul"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def root() -> str:
    """A root prefix (as `Keys(root)` takes it) that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def consul_store(consul: ConsulServer) -> AsyncIterator[ConsulStore]:
    """A store on the shared Consul."""
    from store.consul.client import ConsulSettings

    async with opened(ConsulSettings.from_env(consul.url)) as store:
        yield store


@pytest.fixture
def start_consul(tmp_path: Path) -> Iterator[StartConsul]:
    """Start a Consul of this test's own: `start_consul(durable=True, acl=True, max_connections=…, config=…)`."""
    servers: list[ConsulServer] = []

    def start(**options: Any) -> ConsulServer:
        directory = tmp_path / f"consul-{len(servers)}"
        server = ConsulServer(directory, **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()
        shutil.rmtree(server.directory, ignore_errors=True)


class ConsulCluster:
    """Several durable servers that elect a leader among themselves."""

    def __init__(self, directory: Path, size: int) -> None:
        self.servers: list[ConsulServer] = []
        for number in range(size):
            server = ConsulServer(directory / f"server-{number}", durable=True)
            server.ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
            self.servers.append(server)
        joining = [f"127.0.0.1:{server.ports['serf_lan']}" for server in self.servers]
        for number, server in enumerate(self.servers):
            server.config = {"node_name": f"server-{number}", "bootstrap_expect": size, "retry_join": joining}
            server.config["retry_interval"] = "1s"

    def start(self) -> None:
        """Start all servers and wait until each grants sessions."""
        for server in self.servers:
            server.start_later()
        for server in self.servers:
            server.until_ready()

    def stop(self) -> None:
        """Kill all servers: a graceful stop would make the others forget a server."""
        for server in self.servers:
            server.kill()

    @property
    def leader(self) -> ConsulServer:
        """The server that leads."""
        address = self.servers[0].request("GET", "/v1/status/leader")
        return next(server for server in self.servers if address == f"127.0.0.1:{server.ports['server']}")


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Callable[[int], ConsulCluster]]:
    """Start a cluster of Consul servers: `start_cluster(3)`."""
    clusters: list[ConsulCluster] = []

    def start(size: int) -> ConsulCluster:
        cluster = ConsulCluster(tmp_path / f"cluster-{len(clusters)}", size)
        clusters.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in clusters:
        cluster.stop()
        for server in cluster.servers:
            shutil.rmtree(server.directory, ignore_errors=True)


@pytest.fixture
def consul_server(start_consul: StartConsul) -> ConsulServer:
    """A fresh Consul in memory that the test may stop, kill and pause."""
    return start_consul()
