"""Notify the service manager of the daemon's state: systemd's notification protocol (sd_notify(3)).

Sends a datagram of `NAME=value` lines to the socket that `NOTIFY_SOCKET` names, if it is set. The variables are removed
from the environment, so that child processes can't send notifications for the daemon. Sending never blocks and never
raises: an unreachable service manager must not stop the work.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

import structlog

log = structlog.get_logger(__name__)


class Notifier:
    """Sends to `address`, a path or, with a leading `@`, a name in the abstract namespace; "" sends nothing.

    `watchdog_timeout`: seconds without `watchdog` after which the manager kills the daemon, or None.
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
        """Return a notifier for the service manager's variables, which are removed from `environ`."""
        address = environ.pop("NOTIFY_SOCKET", "")
        timeout = environ.pop("WATCHDOG_USEC", "")
        process = environ.pop("WATCHDOG_PID", "")
        ours = process in ("", str(os.getpid()))
        return cls(address, int(timeout) / 1e6 if timeout.isdigit() and ours else None)

    def ready(self) -> None:
        """Notify that the daemon is ready."""
        self._send("READY=1")

    def status(self, text: str) -> None:
        """Set the line shown by `systemctl status`."""
        self._send(f"STATUS={' '.join(text.split())}")

    def extend_start(self, seconds: float) -> None:
        """Extend the time limit of the start to `seconds` from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def watchdog(self) -> None:
        """Notify that the daemon makes progress."""
        self._send("WATCHDOG=1")

    def trigger_watchdog(self) -> None:
        """Ask to be killed now, as after a watchdog timeout. systemd before 243 ignores it."""
        if self.watchdog_timeout is not None:
            self._send("WATCHDOG=trigger")

    def stopping(self) -> None:
        """Notify that the stop has begun."""
        self._send("STOPPING=1")

    def close(self) -> None:
        """Close the socket; later calls send nothing."""
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
                log.warning("The service manager can't be notified", error=str(error))
            self._reachable = False
        else:
            self._reachable = True
