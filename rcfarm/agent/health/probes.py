"""Health checks of a pod: one probe each for http, tcp and exec.

A probe does not raise for a failed check. It ends within its timeout, and leaves no process and no connection behind
when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp

from rcfarm.agent.errors import AgentError
from rcfarm.agent.processes.process import LaunchSpec, spawn
from store.schema.manifest import HealthCheck
from store.schema.records import HealthState

_SHOWN = 300  # characters of output


class Verdict(NamedTuple):
    """A health status and its reason. `condition`, `cause`, `restarts`: see `store.schema.records.Health`."""

    status: HealthState
    output: str = ""
    condition: str = ""
    cause: str = ""
    restarts: int = 0


class Prober:
    """Probes pods at `address`, where clients reach them, too."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self._http = http
        self._address = address

    async def probe(self, check: HealthCheck, ports: Mapping[str, int], command: LaunchSpec | None) -> Verdict:
        """Run the check once. `command` is what an exec check starts."""
        try:
            async with asyncio.timeout(check.timeout):
                if check.http is not None:
                    return await self._http_get(_number(check.http.port, ports), check.http.path)
                if check.tcp is not None:
                    return await self._connect(_number(check.tcp.port, ports))
                assert command is not None, "an exec check comes with its command"
                return await _execute(command)
        except TimeoutError:
            return Verdict("critical", f"no answer within {check.timeout:g} s")

    async def _http_get(self, port: int, path: str) -> Verdict:
        host = f"[{self._address}]" if ":" in self._address else self._address
        url = f"http://{host}:{port}/{path.lstrip('/')}"
        try:
            async with self._http.get(url, allow_redirects=False) as response:
                status: HealthState = "passing" if 200 <= response.status < 300 else "critical"
                return Verdict(status, f"GET {url}: {response.status} {response.reason}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Verdict("critical", f"GET {url}: {error}")

    async def _connect(self, port: int) -> Verdict:
        try:
            _, writer = await asyncio.open_connection(self._address, port)
        except OSError as error:
            return Verdict("critical", f"connect to {self._address}:{port}: {error.strerror or error}")
        writer.close()
        with contextlib.suppress(OSError):  # a server that expected data reset it: it is up
            await writer.wait_closed()
        return Verdict("passing", f"connect to {self._address}:{port}: open")


async def _execute(command: LaunchSpec) -> Verdict:
    command.log.unlink(missing_ok=True)
    try:
        handle = spawn(command).open()
    except AgentError as error:
        return Verdict("critical", str(error))
    try:
        await handle.wait()
    finally:
        handle.signal_group(signal.SIGKILL)
        await handle.wait()
        status = handle.reap()
    health: HealthState = "passing" if status.code == 0 else "warning" if status.code == 1 else "critical"
    end = f"ended by {status.signal}" if status.code is None else f"exited with code {status.code}"
    return Verdict(health, _output(command.log) or end)


def _output(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            return file.read(4 * _SHOWN).decode(errors="replace").strip()[:_SHOWN]
    except OSError:
        return ""


def _number(port: str | int, ports: Mapping[str, int]) -> int:
    return ports[port] if isinstance(port, str) else port
