"""The network of the fleet: a namespace for each machine, and the switch that joins them.

Rules for the links are kept here, and sent to the switch as a whole after each change. The harness itself works in the
namespace of the operators, whose links no fault touches.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "chaos-"
DEVICE = "net0"
MTU = 9000
OPERATORS = "ops"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


class Rule(NamedTuple):
    """The fate of packets from one machine to another. `delay` and `jitter` in seconds; `loss` from 0 to 1."""

    source: str
    target: str
    loss: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0


def missing() -> str:
    """Return what this machine lacks for namespaces and the switch, or ""."""
    if os.geteuid() != 0:
        return "root is needed for network namespaces"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    lacking = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    return f"no {' and no '.join(lacking)} on the PATH" if lacking else ""


def enter(namespace: str) -> None:
    """Move the calling thread, and what it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open() as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"the namespace {namespace} can't be entered")


def sweep() -> None:
    """Remove the namespaces, and end the processes, of earlier runs that were killed."""
    for path in _NAMESPACES.glob(f"{PREFIX}*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):  # one that has just ended
            if int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", namespace)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Network:
    """The machines by name; `address` is the address of each. Use `start` and `close`."""

    def __init__(self, machines: Iterable[str]) -> None:
        self.machines = [*machines, OPERATORS]
        self._numbers = {name: number for number, name in enumerate(self.machines, start=1)}
        self._rules: list[Rule] = []
        self._switch: asyncio.subprocess.Process | None = None

    def address(self, machine: str) -> str:
        return f"10.77.0.{self._numbers[machine]}"

    def namespace(self, machine: str) -> str:
        return f"{PREFIX}{os.getpid()}-{machine}"

    def inside(self, machine: str, command: Iterable[str]) -> list[str]:
        """Return the command line that runs `command` on a machine; the process keeps its pid."""
        return ["nsenter", f"--net={_NAMESPACES / self.namespace(machine)}", *command]

    async def start(self) -> None:
        """Make the namespaces, start the switch, and move this thread to the operators' machine."""
        for machine in self.machines:
            namespace = self.namespace(machine)
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "tuntap", "add", "mode", "tun", "dev", DEVICE)
            _ip("-n", namespace, "addr", "add", f"{self.address(machine)}/24", "dev", DEVICE)
            _ip("-n", namespace, "link", "set", DEVICE, "mtu", str(MTU), "up")
        machines = [f"{self.namespace(machine)}={self.address(machine)}" for machine in self.machines]
        self._switch = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.chaos.switch", *machines),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._send()
        enter(self.namespace(OPERATORS))

    async def add(self, rules: Iterable[Rule]) -> None:
        """Add rules to links, in addition to the present ones."""
        self._rules += rules
        await self._send()

    async def heal(self) -> None:
        """Remove every rule."""
        self._rules = []
        await self._send()

    async def close(self) -> None:
        """End the switch and what still runs on any machine, and remove the namespaces."""
        if self._switch is not None:
            self._switch.kill()
            await self._switch.wait()
        for machine in self.machines:
            if (_NAMESPACES / self.namespace(machine)).exists():
                _remove(self.namespace(machine))

    async def _send(self) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        links: list[dict[str, Any]] = [
            rule._replace(source=self.address(rule.source), target=self.address(rule.target))._asdict()
            for rule in self._rules
        ]
        self._switch.stdin.write(json.dumps(links).encode() + b"\n")
        if not await self._switch.stdout.readline():
            raise RuntimeError("the switch has ended")


def cut(sources: Iterable[str], targets: Iterable[str]) -> list[Rule]:
    """Return rules that lose every packet in one direction."""
    targets = list(targets)
    return [Rule(source, target, loss=1.0) for source in sources for target in targets if source != target]


def partition(some: Iterable[str], others: Iterable[str]) -> list[Rule]:
    """Return rules that lose every packet between two groups."""
    some, others = list(some), list(others)
    return cut(some, others) + cut(others, some)
