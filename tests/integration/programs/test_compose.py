"""compose.yaml on a real Docker Engine: it starts as its comments say, and survives faults of its containers.

The tests share one fleet. Each begins with every container healthy and the RC converged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.support.programs.runtime import BUILD, Engine, until

pytestmark = pytest.mark.timeout(BUILD + 300)

PROJECT = "rcfarm-test"
FARMS = ("farm-a", "farm-b")
ENGINES = ("engine-a", "engine-b")
AGENTS = ("agent-1", "agent-2", "agent-3")
SERVERS = ("consul-1", "consul-2", "consul-3")
SERVICES = (*SERVERS, *FARMS, *ENGINES, *AGENTS)
TAKEOVER = 15.0  # seconds: the lease of 3 s, and a margin for a busy machine
ELECTION = 15.0  # seconds: about 3 s with compose.yaml's timing, and 12 to 15 s, then a restart, with Consul's own


class Stack:
    """The fleet of compose.yaml, with the example's RC."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def compose(self, *arguments: str) -> str:
        return self.engine.docker("compose", *arguments, COMPOSE_PROJECT_NAME=PROJECT)

    def rcfarm(self, farm: str, *arguments: str) -> str:
        return self.compose("exec", "-T", farm, "rcfarm", *arguments)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def kill(self, service: str) -> None:
        """Send SIGKILL from outside, after which the engine does not restart the container."""
        self.engine.docker("kill", "--signal", "KILL", self.container(service))

    def status(self, farm: str = "farm-a") -> Any:
        """Return the output of `rcfarm rc status`, run in the container of a farm."""
        return json.loads(self.rcfarm(farm, "rc", "status", "hello", "--output", "json"))

    def owner(self, farm: str) -> str:
        owner = self.status(farm)["rc"]["owner"]
        return owner["farm"] if owner["held"] else ""

    def pids(self) -> dict[str, int]:
        """Return the process of each pod by its node."""
        return {pod["node"]: pod["launchables"]["web"]["pid"] for pod in self.status()["pods"]}

    def ports(self) -> dict[str, int]:
        return {pod["node"]: pod["ports"]["http"] for pod in self.status()["pods"]}

    def volumes(self) -> set[str]:
        return set(self.engine.docker("volume", "ls", "--quiet").split())

    def until_whole(self) -> None:
        """Wait until all containers are healthy, and the RC is converged under one live owner."""
        until(self._states, lambda found: sum("(healthy)" in state for state in found) == len(SERVICES), "healthy")
        until(self.status, is_whole, "converged")

    def _states(self) -> list[str]:
        mine = f"label=com.docker.compose.project={PROJECT}"
        return self.engine.docker("ps", "--filter", mine, "--format", "{{.Names}} {{.Status}}").splitlines()


def is_whole(status: Any) -> bool:
    rc, pods = status["rc"], status["pods"]
    running = [pod["health"] == "passing" and pod["launchables"]["web"]["state"] == "running" for pod in pods]
    return rc["state"] == "converged" and rc["healthy"] == 3 and rc["owner"]["held"] and running == [True] * 3


@pytest.fixture(scope="module")
def running(engine: Engine) -> Iterator[Stack]:
    stack = Stack(engine)
    stack.compose("down", "--volumes", "--remove-orphans")
    before = set(engine.docker("images", "--quiet", "--filter", "dangling=true").split())
    try:
        stack.compose("up", "--build", "--detach", "--wait")
        dangling = set(engine.docker("images", "--quiet", "--filter", "dangling=true").split()) - before
        assert len(dangling) <= 1, "one image is built, once; the one that had its name before may be left"
        stack.compose("cp", "examples/hello.yaml", "farm-a:/tmp/hello.yaml")
        stack.rcfarm("farm-a", "rc", "apply", "-f", "/tmp/hello.yaml", "--yes")
        yield stack
    finally:
        with suppress(AssertionError):
            print(stack.compose("logs", "--tail", "40", *FARMS, *ENGINES, *AGENTS))  # shown when the test fails
        stack.compose("down", "--volumes", "--remove-orphans")


@pytest.fixture
def stack(running: Stack) -> Stack:
    running.until_whole()
    return running


def test_it_comes_up_as_its_comments_say(stack: Stack) -> None:
    """Ten healthy containers, a converged RC, a named user, and no anonymous volume."""
    assert "2 live" in stack.rcfarm("farm-b", "status")
    assert stack.compose("exec", "-T", "agent-1", "id").split()[:2] == ["uid=10001(rcfarm)", "gid=10001(rcfarm)"]
    assert all(name.startswith(f"{PROJECT}_") for name in stack.volumes())


def test_a_killed_farm_is_replaced(stack: Stack) -> None:
    """`docker kill` of the owner: the other farm owns the RC within its lease, and no pod is affected."""
    owner, pids = stack.owner("farm-a"), stack.pids()
    (other,) = set(FARMS) - {owner}
    stack.kill(owner)
    until(lambda: stack.owner(other), lambda found: found == other, "taken over", within=TAKEOVER)
    stack.compose("start", owner)
    stack.until_whole()
    assert stack.pids() == pids


def test_a_paused_farm_is_replaced_and_comes_back(stack: Stack) -> None:
    """`docker pause` of the owner: as above; continued, it finds its session lost and joins again."""
    owner, pids = stack.owner("farm-a"), stack.pids()
    (other,) = set(FARMS) - {owner}
    stack.compose("pause", owner)
    try:
        until(lambda: stack.owner(other), lambda found: found == other, "taken over", within=TAKEOVER)
    finally:
        stack.compose("unpause", owner)
    until(lambda: stack.rcfarm(other, "status"), lambda text: "2 live" in text, "a member again")
    assert stack.pids() == pids


def test_an_election_costs_no_session(stack: Stack) -> None:
    """The leader is killed: another one leads soon, and a farm on a living server keeps its session and its locks."""
    leader = _leader(stack, SERVERS)
    asked = {"farm-a": "consul-1", "farm-b": "consul-2"}
    safe = next(farm for farm, server in asked.items() if server != leader)
    living = tuple(server for server in SERVERS if server != leader)
    before, pids = _session(stack, safe, living[0]), stack.pids()
    stack.kill(leader)
    try:
        until(lambda: _leader(stack, living), lambda found: found in living, "elected", within=ELECTION)
        until(lambda: stack.rcfarm(safe, "ready"), lambda text: "is ready" in text, "ready again", within=ELECTION)
        assert _session(stack, safe, living[0]) == before
    finally:
        stack.compose("start", leader)
    stack.until_whole()
    assert stack.pids() == pids


def test_restarted_agents_start_their_pods_again(stack: Stack) -> None:
    """Four times, all three agents at once: a recorded pid that is now a thread's must not prevent a pod's start."""
    for restarts in range(1, 5):
        stack.compose("restart", *AGENTS)
        until(lambda: _restarts(stack.status()), partial(_at_least, restarts), f"restarted {restarts} times")
        until(stack.status, is_whole, f"whole after restart {restarts}")
    assert "The worker of a pod failed" not in stack.compose("logs", *AGENTS)


def test_down_and_up_keep_the_fleet_and_leave_nothing(stack: Stack) -> None:
    """RC, placement and ports are restored, and no volume is left behind."""
    volumes, ports = stack.volumes(), stack.ports()
    stack.compose("down")
    assert stack.volumes() == volumes
    started = time.monotonic()
    stack.compose("up", "--detach", "--wait")
    assert time.monotonic() - started < 120
    stack.until_whole()
    assert stack.volumes() == volumes
    assert stack.ports() == ports


@pytest.mark.parametrize("role", ["agent", "dev"])
def test_a_container_of_any_role_is_healthy(stack: Stack, role: str) -> None:
    """`docker run rcfarm ROLE`, without compose.yaml and without a port."""
    environment = [] if role == "dev" else ["--env", "RCFARM_STORE=consul://consul-1:8500"]
    run = ["run", "--detach", "--init", "--network", f"{PROJECT}_fleet", *environment, "rcfarm", role]
    container = stack.engine.docker(*run).strip()
    try:
        until(lambda: stack.engine.health(container), lambda found: found == "healthy", "healthy", within=60)
    finally:
        stack.engine.docker("rm", "--force", "--volumes", container)


def _at_least(number: int, restarts: list[int]) -> bool:
    return min(restarts) >= number


def _restarts(status: Any) -> list[int]:
    return [pod["launchables"]["web"]["restarts"] for pod in status["pods"]]


def _leader(stack: Stack, servers: tuple[str, ...]) -> str:
    """Return the server that leads, as the first of `servers` says; "" while there is none."""
    text = stack.compose("exec", "-T", servers[0], "consul", "operator", "raft", "list-peers", "-stale=true")
    return next((line.split()[0] for line in text.splitlines() if " leader " in line), "")


def _session(stack: Stack, farm: str, server: str) -> str:
    """Return the session of a farm's member record."""
    text = stack.compose("exec", "-T", server, "consul", "kv", "get", "-detailed", "-stale", f"rcfarm/farms/{farm}")
    return next(line.split()[1] for line in text.splitlines() if line.startswith("Session "))
