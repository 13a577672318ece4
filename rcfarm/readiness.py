"""Asking the daemons of this machine, or of this container, whether they are ready.

Health checks do so every few seconds in each container. So this imports neither the settings nor the command line,
which cost five times the rest, and `rcfarm ready` without arguments comes here straight from `rcfarm.__main__`.
"""

from __future__ import annotations

import http.client
import os
import sys
from typing import NamedTuple

from rcfarm.role_ports import PORTS

VARIABLE = "RCFARM_WEB_LISTEN"  # the daemons' own
TIMEOUT = 3.0  # seconds for the answer; a daemon that needs longer is not well


class BadListener(ValueError):
    """What is named is no address to connect to."""


class Listener(NamedTuple):
    role: str
    host: str
    port: int
    token: str = ""

    def __str__(self) -> str:
        where = f"{self.host}:{self.port}"
        return f"{self.role} on {where}" if self.role else f"the daemon on {where}"


def check(role: str = "", listen: str | None = None, token: str = "") -> int:
    """Print what each daemon that runs here says; returns 0 when all of them are ready, else 1.

    `role`: only that one. `listen`: its `web.listen`, by default what `VARIABLE` says, else each role's own port.
    Raises `BadListener`.
    """
    listeners = _listeners(role, os.environ.get(VARIABLE, "") if listen is None else listen, token)
    answers = [(listener, answer) for listener in listeners if (answer := _ask(listener)) is not None]
    for listener, failing in answers:
        print(f"{listener} is not ready:" if failing else f"{listener} is ready", *failing, sep="\n  ")
    if not answers:
        tried = ", ".join(f"{listener.host}:{listener.port}" for listener in listeners)
        print(f"error: no daemon listens on {tried}; name its web.listen with --listen or --config", file=sys.stderr)
    return int(not answers or any(failing for _, failing in answers))


def _listeners(role: str, listen: str, token: str) -> list[Listener]:
    if not listen:
        return [Listener(name, "127.0.0.1", port, token) for name, port in PORTS.items() if role in ("", name)]
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdigit():
        raise BadListener(f"web.listen: {listen!r} is not HOST:PORT, so no daemon can be asked there")
    return [Listener(role, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port), token)]


def _ask(listener: Listener) -> list[str] | None:
    """What keeps the daemon from being ready: nothing when it is. None when nothing listens there."""
    connection = http.client.HTTPConnection(listener.host, listener.port, timeout=TIMEOUT)
    headers = {"Authorization": f"Bearer {listener.token}"} if listener.token else {}
    try:
        connection.request("GET", "/readyz", headers=headers)
        answer = connection.getresponse()
        lines = answer.read(65536).decode(errors="replace").splitlines()
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return [f"no answer within {TIMEOUT:g} s"]
    except (OSError, http.client.HTTPException) as error:
        return [f"no answer: {error}"]
    finally:
        connection.close()
    if answer.status == 200:
        return []
    return [line for line in lines if line.startswith("[-]")] or [f"it answers with status {answer.status}"]
