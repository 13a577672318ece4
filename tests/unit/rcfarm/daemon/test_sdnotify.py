"""systemd's notification protocol, against a real datagram socket."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rcfarm.daemon.daemon import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Yield a service manager's socket, and how NOTIFY_SOCKET names it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@rcfarm-test-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0", 1))
        receiver.settimeout(5)
        yield receiver, name


def test_each_state_is_one_datagram(manager: tuple[socket.socket, str]) -> None:
    """Each state arrives as one line, by path or abstract name; after `close` nothing is sent."""
    receiver, name = manager
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000"})
    notifier.send("READY=1")
    notifier.send("STATUS=waiting for\nthe store")
    assert [receiver.recv(1024) for _ in range(2)] == [b"READY=1", b"STATUS=waiting for the store"]
    notifier.close()
    notifier.send("READY=1")


def test_children_do_not_inherit_the_variables() -> None:
    """Child processes can't send notifications for the daemon."""
    environ = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    notifier = Notifier.from_environment(environ)
    notifier.close()

    assert environ == {"PATH": "/bin"}
    assert notifier.watchdog_timeout == 30.0


@pytest.mark.parametrize("environ", [{}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_a_watchdog_that_is_not_for_us_is_none(environ: dict[str, str]) -> None:
    """No variable, another process's variable, or one that is not a number: no heartbeat is expected."""
    assert Notifier.from_environment(dict(environ)).watchdog_timeout is None


def test_an_unreachable_manager_does_not_stop_the_caller(tmp_path: Path) -> None:
    """Without a receiver the caller goes on."""
    notifier = Notifier(str(tmp_path / "nowhere"))
    notifier.send("READY=1")
    notifier.close()


def test_a_full_socket_never_blocks(tmp_path: Path) -> None:
    """A manager that reads nothing can't hold up the event loop."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"))
        for _ in range(5000):
            notifier.send("WATCHDOG=1")
        notifier.close()
