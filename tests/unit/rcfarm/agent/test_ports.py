"""Ports: fixed ones checked, chosen ones free and kept, two pods never given the same."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rcfarm.agent.ports import Ports, PortTaken, check_ports, is_free, listeners

LISTEN = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
)


@contextmanager
def other_process() -> Iterator[tuple[int, int]]:
    """Start a process in its own group that listens. Yield its port and its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.kill()


def free_range() -> tuple[int, int]:
    """Ten ports that are free now."""
    rng = random.Random()
    while True:
        low = rng.randint(20000, 31000)
        if all(is_free(port) for port in range(low, low + 10)):
            return low, low + 9


def test_chosen_ports_are_free_and_different() -> None:
    """Pods that ask for port 0 get different numbers from the range."""
    low, high = free_range()
    ports = Ports(low, high, random.Random(1))
    chosen = [ports.assign(f"pod-{number}", {"a": 0, "b": 0}, {}) for number in range(4)]
    numbers = [number for assigned in chosen for number in assigned.values()]
    assert len(set(numbers)) == 8
    assert all(low <= number <= high for number in numbers)


def test_an_exhausted_range_says_so() -> None:
    """When no port is free the message names the range and the setting."""
    low, _ = free_range()
    ports = Ports(low, low, random.Random(1))
    ports.assign("a", {"http": 0}, {})
    with pytest.raises(PortTaken, match=f"no free port in {low} to {low}: widen agent.port_range"):
        ports.assign("b", {"http": 0}, {})


def test_a_previous_port_is_kept_while_it_is_free() -> None:
    """The port of an earlier start is assigned again, unless another process has it now."""
    low, high = free_range()
    ports = Ports(low, high, random.Random(1))
    assert ports.assign("a", {"http": 0}, {"http": low}) == {"http": low}
    with socket.create_server(("127.0.0.1", low)):
        assert ports.assign("a", {"http": 0}, {"http": low}) != {"http": low}


def test_a_fixed_port_of_another_pod_is_refused() -> None:
    """Two pods with the same fixed port: the second one's error names the first, and its own claims stay."""
    low, high = free_range()
    ports = Ports(low, high)
    ports.assign("a", {"http": low}, {})
    ports.assign("b", {"http": low + 1}, {})
    with pytest.raises(PortTaken, match=f"ports.http: {low} belongs to pod a on this node"):
        ports.assign("b", {"http": low}, {})
    with pytest.raises(PortTaken, match="belongs to pod b"):
        ports.assign("c", {"http": low + 1}, {})
    ports.release("a")
    assert ports.assign("b", {"http": low}, {}) == {"http": low}
    with pytest.raises(PortTaken, match="belongs to pod b"):
        ports.assign("c", {"http": low + 1}, {})
    ports.claim("b", {"http": low})
    assert ports.assign("c", {"http": low + 1}, {}) == {"http": low + 1}


def test_who_listens_is_named() -> None:
    """A port in use is reported with the process that has it; one's own group does not count."""
    with other_process() as (port, pid):
        assert not is_free(port)
        assert [listener.pid for listener in listeners(port)] == [pid]
        with pytest.raises(PortTaken, match=rf"ports.http: {port} is in use by process {pid} \(python") as taken:
            check_ports({"http": port}, {"http": port})
        assert not taken.value.chosen
        check_ports({"http": port}, {"http": port}, [pid])
        with pytest.raises(PortTaken) as taken:
            check_ports({"http": port}, {"http": 0}, [os.getpgrp()])
        assert taken.value.chosen


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")])
def test_a_listener_on_any_address_is_seen(family: socket.AddressFamily, address: str) -> None:
    """A port counts as used whatever address its listener is bound to."""
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert not is_free(server.getsockname()[1])


def test_a_connection_that_lingers_does_not_hinder() -> None:
    """A port whose last connection is in TIME_WAIT is free for a server, and counts as free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server's end closes first, and lingers
            assert client.recv(1) == b""
    assert is_free(port)
