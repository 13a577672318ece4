"""Ask the daemons of this machine, or of this container, whether they are ready.

Health checks do so every few seconds in each container. So this module imports neither the settings nor the command
line, which cost five times the rest, and `rcfarm.__main__` calls it directly for `rcfarm ready` without arguments.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from store.errors import RcfarmError

PORTS: Mapping[str, int] = {"dev": 9700, "farm": 9701, "agent": 9702, "jobs": 9703, "extender": 9704, "tasks": 9705}
"""The port on loopback by role, unless `web.listen` says otherwise."""

VARIABLE = "RCFARM_WEB_LISTEN"  # the daemons' own setting
TIMEOUT = 3.0  # seconds for the answer; a slower daemon counts as not ready


class BadListener(RcfarmError, ValueError):
    """The given listener is not an address to connect to."""


class Listener(NamedTuple):
    role: str
    host: str
    port: int
    token: str = ""


def check(role: str = "", listen: str | None = None, token: str = "") -> int:
    """Print the readiness of each daemon that runs here. Return 0 when all of them are ready, else 1.

    `role`: only that one. `listen`: its `web.listen`, by default the value of `VARIABLE`, else each role's own port.
    Raises `BadListener`.
    """
    listen = os.environ.get(VARIABLE, "") if listen is None else listen
    listeners = [Listener(name, "127.0.0.1", port, token) for name, port in PORTS.items() if role in ("", name)]
    if listen:
        host, _, number = listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not number.isdigit():
            raise BadListener(f"web.listen: {listen!r} is not HOST:PORT")
        listeners = [Listener(role, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(number), token)]
    answers = [(listener, answer) for listener in listeners if (answer := _ask(listener)) is not None]
    for listener, failing in answers:
        who = f"{listener.role or 'the daemon'} on {listener.host}:{listener.port}"
        print(f"{who} is not ready:" if failing else f"{who} is ready", *failing, sep="\n  ")
    if not answers:
        tried = ", ".join(f"{listener.host}:{listener.port}" for listener in listeners)
        print(f"error: no daemon listens on {tried}; name its web.listen with --listen or --config", file=sys.stderr)
    return int(not answers or any(failing for _, failing in answers))


def _ask(listener: Listener) -> list[str] | None:
    """Return the reasons why the daemon is not ready, empty if it is, or None when nothing listens there."""
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
