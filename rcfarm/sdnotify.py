"""Telling the service manager how we are: systemd's notification protocol (sd_notify(3)).

A datagram of `NAME=value` lines to the socket that `NOTIFY_SOCKET` names; nothing happens without one. The variables
are taken out of the environment, so that no process that we start speaks for us. Sending never waits and never fails
the caller: a service manager that can't be reached must not stop the work.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

import structlog

log = structlog.get_logger(__name__)


class Notifier:
    """Sends to `address`, a path or, with a leading `@`, a name in the abstract namespace; "" sends nothing.

    `watchdog_timeout`: seconds after which the manager kills us when no `watchdog` came, or None.
    """

    def __init__(self, address: str = "", watchdog_timeout: float | None = None) -> None:
        self.watchdog_timeout = watchdog_timeout
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        self._reachable = True
        if self._socket:
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Notifier:
        """What the service manager asked for; its variables are removed from `environ`."""
        address = environ.pop("NOTIFY_SOCKET", "")
        timeout = environ.pop("WATCHDOG_USEC", "")
        process = environ.pop("WATCHDOG_PID", "")
        ours = process in ("", str(os.getpid()))
        return cls(address, int(timeout) / 1e6 if timeout.isdigit() and ours else None)

    def ready(self) -> None:
        """All is there that the work needs."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={' '.join(text.split())}")

    def extend_start(self, seconds: float) -> None:
        """The start goes on: wait for `seconds` from now on, whatever the time limit of the start is."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def watchdog(self) -> None:
        """We are making progress."""
        self._send("WATCHDOG=1")

    def trigger_watchdog(self) -> None:
        """No progress is made: end us now, as if the watchdog had not been fed. systemd before 243 does not know it."""
        if self.watchdog_timeout is not None:
            self._send("WATCHDOG=trigger")

    def stopping(self) -> None:
        """The stop has begun."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Release the socket; nothing is sent any more."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError as error:
            if self._reachable:
                log.warning("The service manager can't be told our state", error=str(error))
            self._reachable = False
        else:
            self._reachable = True
