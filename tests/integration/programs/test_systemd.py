"""The units of deploy/systemd/ under Debian's systemd, booted in a container with one Consul server.

The tests share one boot. They measure what the documentation promises: when units count as started, how they wait for
Consul, how fast the watchdog is, what the journal shows, and that pods outlive their agent.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.support.programs.runtime import BUILD, LAB, Engine, until

pytestmark = pytest.mark.timeout(BUILD + 300)

NAME = "rcfarm-test-systemd"
UNITS = ("rcfarm-farm", "rcfarm-agent", "rcfarm-tasks")
PROMISED = 30.0  # seconds: a daemon that hangs is ended within this time
SLACK = 20.0  # seconds for a busy machine to write the stacks, to end and to start again
LIMIT = 32.0  # seconds: more than the units' TimeoutStartSec
RC = """
id: hello
replicas: 1
manifest:
  id: hello
  launchables: {web: {command: [sh, -c, 'exec python3 -m http.server "$RCFARM_PORT_HTTP"']}}
  ports: {http: 0}
  health: {http: {port: http}, interval: 1}
"""
TASK = """
task: long
process: {command: [sh, -c, "echo begun >>/tmp/begun; until [ -e /tmp/go-on ]; do sleep 0.2; done"]}
"""
HANG = """
import asyncio
from rcfarm.farm.replication_controller import ReplicationController

async def meet_desires(self, *_, **__):
    await asyncio.Event().wait()

ReplicationController.meet_desires = meet_desires
"""


class Machine:
    """The booted container."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def sh(self, script: str, stdin: str = "") -> str:
        """Run a script as root, with rcfarm on the path and the store named."""
        environ = "export PATH=/opt/rcfarm/bin:$PATH CONSUL_HTTP_ADDR=127.0.0.1:8500"
        done = subprocess.run(
            ["docker", "exec", "-i", NAME, "bash", "-c", f"set -e; {environ}; cd /root; {script}"],
            env=self.engine.environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def show(self, unit: str, field: str) -> str:
        return self.sh(f"systemctl show --property {field} --value {unit}").strip()

    def write(self, path: str, text: str) -> None:
        self.sh(f"mkdir -p $(dirname {path}); cat >{path}", text)

    @contextmanager
    def drop_in(self, unit: str, text: str) -> Iterator[None]:
        """Apply settings to a unit for the duration of the block."""
        path = f"/run/systemd/system/{unit}.service.d/test.conf"
        self.write(path, text)
        self.sh("systemctl daemon-reload")
        try:
            yield
        finally:
            self.sh(f"rm {path}; systemctl daemon-reload")

    def journal(self, unit: str, options: str = "") -> list[str]:
        return self.sh(f"journalctl --unit {unit} --no-pager --output cat {options}").splitlines()

    def pid_of_the_pod(self) -> int:
        (pod,) = json.loads(self.sh("rcfarm rc status hello --output json"))["pods"]
        assert pod["health"] == "passing"
        return int(pod["launchables"]["web"]["pid"])

    def until_active(self) -> None:
        for unit in UNITS:
            until(partial(self.show, unit, "ActiveState"), "active".__eq__, f"{unit} active")

    def restarts(self, unit: str) -> int:
        """Return how often systemd has restarted the unit automatically."""
        return int(self.show(unit, "NRestarts"))


@pytest.fixture(scope="module")
def booted(engine: Engine) -> Iterator[Machine]:
    machine = Machine(engine)
    engine.script("systemd-boot.sh", "build", BASE=str(LAB / "base"))
    subprocess.run(["docker", "rm", "--force", "--volumes", NAME], env=engine.environ, capture_output=True, check=False)
    try:
        engine.script("systemd-boot.sh", "up", NAME=NAME)
        machine.write("/etc/rcfarm/tasks.toml", '[store]\nurl = "consul://127.0.0.1:8500"\n')
        machine.sh("systemctl enable --now rcfarm-tasks")
        machine.until_active()
        machine.sh("cat >hello.yaml; rcfarm rc apply -f hello.yaml --yes", RC)
        until(machine.pid_of_the_pod, bool, "running")
        yield machine
    finally:
        engine.script("systemd-boot.sh", "down", NAME=NAME)


@pytest.fixture
def machine(booted: Machine) -> Machine:
    """Both units are active and the pod passes before each test."""
    booted.until_active()
    until(booted.pid_of_the_pod, bool, "passing")
    return booted


def test_active_means_ready(machine: Machine) -> None:
    """The status line and `rcfarm ready` say so, and systemd logs no complaint."""
    for unit in UNITS:
        until(partial(machine.show, unit, "StatusText"), "Ready".__eq__, f"{unit} says Ready")
    assert machine.sh("rcfarm ready").splitlines() == [
        "farm on 127.0.0.1:9701 is ready",
        "agent on 127.0.0.1:9702 is ready",
        "tasks on 127.0.0.1:9705 is ready",
    ]
    machine.sh("systemd-analyze verify rcfarm-farm.service rcfarm-agent.service rcfarm-tasks.service")


def test_an_engine_is_replaced_while_a_task_runs(machine: Machine) -> None:
    """A restart of the unit and a kill: the program runs once, and its outputs are in the unit's own directory."""
    machine.sh("cat >task.yaml; rcfarm task submit -f task.yaml", TASK)

    def state() -> str:
        return str(json.loads(machine.sh("rcfarm task status long --output json"))["state"])

    until(state, "running".__eq__, "running")
    machine.sh("systemctl restart rcfarm-tasks")
    restarts = machine.restarts("rcfarm-tasks")
    machine.sh("systemctl kill --signal KILL --kill-whom main rcfarm-tasks")
    until(partial(machine.restarts, "rcfarm-tasks"), restarts.__lt__, "restarted")
    machine.sh("touch /tmp/go-on")
    until(state, "succeeded".__eq__, "succeeded")
    assert machine.sh("cat /tmp/begun") == "begun\n"
    assert machine.sh("rcfarm task run --timeout 60 -- echo hi") != ""
    assert machine.sh("stat --format %a /var/lib/private/rcfarm-tasks") == "700\n"


def test_pods_outlive_their_agent(machine: Machine) -> None:
    """The process stays the same when the agent is restarted and when it is killed."""
    pid = machine.pid_of_the_pod()
    machine.sh("systemctl restart rcfarm-agent")
    assert machine.show("rcfarm-agent", "ActiveState") == "active", "restart returns once it is ready"
    until(machine.pid_of_the_pod, lambda found: found == pid, "adopted")
    restarts = machine.restarts("rcfarm-agent")
    machine.sh("systemctl kill --signal KILL --kill-whom main rcfarm-agent")
    until(partial(machine.restarts, "rcfarm-agent"), restarts.__lt__, "restarted")
    until(machine.pid_of_the_pod, lambda found: found == pid, "adopted")


def test_a_hung_daemon_is_restarted_and_leaves_its_stacks(machine: Machine) -> None:
    """SIGSTOP of both: ended within the promised time, stacks in the journal, and the pod goes on."""
    pid = machine.pid_of_the_pod()
    before = {unit: machine.restarts(unit) for unit in UNITS}
    started = time.monotonic()
    for unit in UNITS:
        machine.sh(f"kill -STOP {machine.show(unit, 'MainPID')}")
    for unit in UNITS:
        within = PROMISED + SLACK - (time.monotonic() - started)
        until(partial(machine.restarts, unit), before[unit].__lt__, f"{unit} restarted", within=within)
        assert "Fatal Python error: Aborted" in machine.journal(unit, "--since=-2min")
    machine.until_active()
    until(machine.pid_of_the_pod, lambda found: found == pid, "adopted")


def test_a_farm_that_reconciles_nothing_is_restarted(machine: Machine) -> None:
    """The loop runs, but no reconciliation ever finishes: logged once, and the farm is ended within the same time."""
    machine.write("/opt/hang/sitecustomize.py", HANG)
    with machine.drop_in("rcfarm-farm", "[Service]\nEnvironment=PYTHONPATH=/opt/hang\n"):
        machine.sh("systemctl restart rcfarm-farm")
        begun = time.monotonic()
        restarts = machine.restarts("rcfarm-farm")
        until(partial(machine.restarts, "rcfarm-farm"), restarts.__lt__, "restarted")
        assert time.monotonic() - begun < PROMISED + SLACK
    machine.sh("systemctl restart rcfarm-farm")
    said = [line for line in machine.journal("rcfarm-farm", "--since=-3min") if "No progress;" in line]
    assert 1 <= len(said) <= 2, "once per life"
    assert "Fatal Python error: Aborted" in machine.journal("rcfarm-farm", "--since=-3min")


def test_a_unit_waits_for_consul_as_long_as_it_must(machine: Machine) -> None:
    """Without Consul the unit stays activating beyond its start limit and logs why; with Consul it becomes active."""
    pid = machine.pid_of_the_pod()
    machine.sh("systemctl stop consul")
    machine.sh("systemctl restart --no-block rcfarm-farm rcfarm-agent")
    status = partial(machine.show, "rcfarm-farm", "StatusText")
    until(status, lambda text: "Connection refused" in text, "explained")
    restarts = machine.restarts("rcfarm-farm")
    time.sleep(LIMIT)  # the test can only wait for the limit to pass
    assert machine.show("rcfarm-farm", "ActiveState") == "activating"
    assert "Connection refused" in status()
    assert machine.sh("curl -s -o /dev/null -w '%{http_code}' localhost:9701/livez") == "200"
    warnings = machine.journal("rcfarm-farm", "--priority warning --since=-2min")
    assert any("The store" in line and line.startswith("{") for line in warnings), "priorities reach the journal"
    assert not any('"level":"info"' in line for line in warnings)
    machine.sh("systemctl start consul")
    machine.until_active()
    assert machine.restarts("rcfarm-farm") == restarts, "started once"
    until(machine.pid_of_the_pod, lambda found: found == pid, "the same process")


def test_a_boot_brings_everything_back(machine: Machine) -> None:
    """The machine is rebooted: both units are active, and the pod runs again."""
    before = machine.sh("cat /proc/1/stat").split()[21]
    machine.engine.docker("restart", NAME)
    until(lambda: machine.sh("cat /proc/1/stat").split()[21], lambda found: found != before, "booted")
    machine.until_active()
    until(machine.pid_of_the_pod, bool, "passing")
