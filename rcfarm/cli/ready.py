"""`rcfarm ready`: the health check of containers and scripts.

It runs every few seconds beside the daemon, so it imports neither the settings nor an HTTP client of our own.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from rcfarm.role_ports import PORTS
from rcfarm.visible import visible

TIMEOUT = 3.0  # seconds for the answer; a daemon that needs longer is not well

app = typer.Typer(rich_markup_mode=None)


class _Listener(NamedTuple):
    role: str
    host: str
    port: int
    token: str = ""

    def __str__(self) -> str:
        where = f"{self.host}:{self.port}"
        return f"{self.role} on {where}" if self.role else f"the daemon on {where}"


@app.command("ready")
def ready(
    role: Annotated[
        str | None,
        typer.Argument(metavar="[ROLE]", help=f"Only this one: {', '.join(PORTS)}. Default: each one that runs here."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", envvar="RCFARM_WEB_LISTEN", metavar="HOST:PORT", help="Where it listens; else the role's port."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The daemon's settings, as TOML.")
    ] = None,
) -> None:
    """Tell whether the daemons of this machine, or of this container, are ready.

    Exits with 0 when each one that runs here is ready, and with 1 otherwise.
    """
    if role is not None and role not in PORTS:
        raise typer.BadParameter(f"{role} has no listener; write one of {', '.join(PORTS)}", param_hint="ROLE")
    listeners = list(_listeners(role, listen, config))
    answers = [(listener, answer) for listener in listeners if (answer := _ask(listener)) is not None]
    for listener, failing in answers:
        typer.echo(f"{listener} is not ready:" if failing else f"{listener} is ready")
        for line in failing:
            typer.echo(visible(f"  {line}"))
    if not answers:
        tried = ", ".join(f"{listener.host}:{listener.port}" for listener in listeners)
        typer.echo(f"error: no daemon listens on {tried}; name its web.listen with --listen or --config", err=True)
    raise typer.Exit(int(not answers or any(failing for _, failing in answers)))


def _listeners(role: str | None, listen: str | None, config: Path | None) -> Iterator[_Listener]:
    token = ""
    if config is not None:
        listen, token = _configured(config, listen)
    if listen:
        yield _listener(role or "", listen, token)
        return
    for name, port in PORTS.items():
        if role in (None, name):
            yield _Listener(name, "127.0.0.1", port, token)


def _configured(config: Path, listen: str | None) -> tuple[str, str]:
    """What a settings file says of the listener, and its token."""
    from rcfarm.config_sources import load
    from rcfarm.web import read_token

    settings = load(config)
    return listen or settings.web.listen, read_token(settings.web)


def _listener(role: str, listen: str, token: str) -> _Listener:
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdigit():
        raise typer.BadParameter(f"{listen!r} is not HOST:PORT, so there is nobody to ask", param_hint="web.listen")
    return _Listener(role, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port), token)


def _ask(listener: _Listener) -> list[str] | None:
    """What keeps the daemon from being ready: nothing when it is. None when nobody listens there."""
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
