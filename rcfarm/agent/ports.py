"""Ports of pods: check that one is free, name the process that has it, and choose one for a pod that asks for 0.

A pod keeps a chosen port across restarts while it is free. Claims keep two pods of this agent apart before either
listens; other programs are found by trying to bind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rcfarm.agent.errors import StartFailed
from rcfarm.agent.process import stat

_LISTEN = "0A"  # of the `st` column of /proc/net/tcp
_ATTEMPTS = 200


class PortTaken(StartFailed):
    """A port that the pod needs is used by something else. `chosen`: the agent chose it and can choose another."""

    def __init__(self, message: str, *, chosen: bool) -> None:
        self.chosen = chosen
        super().__init__(message)


class Listener(NamedTuple):
    """A process that listens on a port."""

    pid: int
    name: str


class Ports:
    """The ports of one agent's pods. `low` and `high`: the range, both included, that it chooses from."""

    def __init__(self, low: int, high: int, rng: random.Random | None = None) -> None:
        self._low, self._high = low, high
        self._rng = rng or random.Random()
        self._claims: dict[int, str] = {}

    def assign(
        self, pod_id: str, wanted: Mapping[str, int], previous: Mapping[str, int], own_groups: Collection[int] = ()
    ) -> dict[str, int]:
        """Numbers for the pod's ports: those asked for, and for 0 the previous one or a free one.

        They are claimed in addition to the pod's present ports, until `claim`. `own_groups`: process groups that will
        be stopped before the ports are needed. Raises `PortTaken`, and claims nothing then.
        """
        taken = {number for number, holder in self._claims.items() if holder != pod_id}
        taken |= {number for number in wanted.values() if number}
        assigned: dict[str, int] = {}
        for name, number in wanted.items():
            if number:
                holder = self._claims.get(number, pod_id)
                if holder != pod_id:
                    raise PortTaken(f"ports.{name}: {number} belongs to pod {holder} on this node", chosen=False)
                check_ports({name: number}, {}, own_groups)
            else:
                number = previous.get(name, 0)
                if not number or number in taken or foreign_listener(number, own_groups) is not None:
                    chosen = (self._rng.randint(self._low, self._high) for _ in range(_ATTEMPTS))
                    number = next((each for each in chosen if each not in taken and is_free(each)), 0)
                if not number:
                    range_ = f"{self._low} to {self._high}"
                    raise PortTaken(f"ports.{name}: no free port in {range_}: widen agent.port_range", chosen=True)
                taken.add(number)
            assigned[name] = number
        self._claims |= dict.fromkeys(assigned.values(), pod_id)
        return assigned

    def claim(self, pod_id: str, ports: Mapping[str, int]) -> None:
        """Claim these ports, and no others, for the pod."""
        self.release(pod_id)
        self._claims |= dict.fromkeys(ports.values(), pod_id)

    def release(self, pod_id: str) -> None:
        """Release the pod's ports."""
        self._claims = {number: holder for number, holder in self._claims.items() if holder != pod_id}


def check_ports(ports: Mapping[str, int], wanted: Mapping[str, int], own_groups: Collection[int] = ()) -> None:
    """Refuse when a process that is in none of the groups `own_groups` listens on one of the ports.

    Raises `PortTaken`; in `wanted`, 0 marks the ports that the agent had chosen.
    """
    for name, number in ports.items():
        who = foreign_listener(number, own_groups)
        if who is not None:
            raise PortTaken(f"ports.{name}: {number} is in use by {who}", chosen=wanted.get(name) == 0)


def foreign_listener(port: int, own_groups: Collection[int]) -> str | None:
    """Return a description of the processes outside of the groups that listen on the port, or None."""
    if is_free(port):
        return None
    found = list(listeners(port))
    foreign = [one for one in found if not ((seen := stat(one.pid)) and seen.group in own_groups)]
    if found and not foreign:
        return None
    return ", ".join(f"process {one.pid} ({one.name})" for one in foreign) or "a process that the agent can't see"


def is_free(port: int) -> bool:
    """Return whether a server could listen on the TCP port now, on any address."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no IPv6 on this machine
            continue
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT does not block a server
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except PermissionError:  # below 1024: the pod's start shows whether it may bind
                continue
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
    return True


def listeners(port: int) -> Iterator[Listener]:
    """Yield the processes that listen on the TCP port, if the agent may see them."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        links = set()
        with contextlib.suppress(OSError):  # it has ended, or is not readable
            for descriptor in list((process / "fd").iterdir()):
                with contextlib.suppress(OSError):  # closed in between
                    links.add(os.readlink(descriptor))
        if links & inodes:
            with contextlib.suppress(OSError):
                yield Listener(int(process.name), (process / "comm").read_text().strip())
