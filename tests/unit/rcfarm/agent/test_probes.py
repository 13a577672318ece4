"""Probes against real servers and real commands."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rcfarm.agent.health import Prober, Verdict
from rcfarm.agent.process import LaunchSpec
from store.schema.manifest import ExecCheck, HealthCheck, HttpCheck, TcpCheck
from tests.support.agent.agents import kill_started_under, started_under
from tests.support.waiting import until

EXEC = HealthCheck(exec=ExecCheck(command=["unused"]), timeout=5)


@pytest.fixture
async def prober() -> AsyncIterator[Prober]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        yield Prober(http, "127.0.0.1")


@pytest.mark.parametrize(
    ("path", "status", "output"),
    [("/204", "passing", "204 No Content"), ("/503", "critical", "503"), ("/302", "critical", "302 Found")],
)
async def test_http_passes_on_2xx(prober: Prober, path: str, status: str, output: str) -> None:
    """Any 2xx is passing; anything else, a redirection too, is critical; the answer is the output."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.path[1:]), headers={"Location": "/204"})

    app = web.Application()
    app.router.add_get("/{status}", answer)
    server = TestServer(app)
    await server.start_server()
    check = HealthCheck(http=HttpCheck(path=path, port="http"))
    verdict = await prober.probe(check, {"http": server.port or 0}, None)
    await server.close()
    assert verdict.status == status
    assert output in verdict.output


@pytest.mark.parametrize("check", [HealthCheck(http=HttpCheck(port=1)), HealthCheck(tcp=TcpCheck(port=1))])
async def test_nobody_there_is_critical(prober: Prober, check: HealthCheck) -> None:
    """A refused connection is critical and says where to."""
    verdict = await prober.probe(check, {}, None)
    assert verdict.status == "critical"
    assert "127.0.0.1" in verdict.output


async def test_tcp_passes_when_a_connection_opens(prober: Prober) -> None:
    """A server that accepts is passing, whatever it says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = HealthCheck(tcp=TcpCheck(port="db"))
        assert (await prober.probe(check, {"db": server.getsockname()[1]}, None)).status == "passing"


async def test_silence_is_critical_after_the_timeout(prober: Prober) -> None:
    """A server that accepts and never answers is given up on in time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = HealthCheck(http=HttpCheck(port=server.getsockname()[1]), timeout=0.1)
        assert await prober.probe(check, {}, None) == Verdict("critical", "no answer within 0.1 s")


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("echo fine", Verdict("passing", "fine")),
        ("exit 1", Verdict("warning", "exited with code 1")),
        ("echo broken >&2; exit 2", Verdict("critical", "broken")),
        ("kill -9 $$", Verdict("critical", "ended by SIGKILL")),
    ],
)
async def test_exec_follows_consuls_convention(prober: Prober, tmp_path: Path, script: str, verdict: Verdict) -> None:
    """Exit code 0 passes, 1 warns, others are critical; the command's output is shown."""
    for _ in range(2):  # the second time the output is not the first one's, too
        assert await prober.probe(EXEC, {}, command(tmp_path, script)) == verdict


async def test_an_endless_output_is_cut(prober: Prober, tmp_path: Path) -> None:
    """Only the beginning of the output is kept."""
    verdict = await prober.probe(EXEC, {}, command(tmp_path, "head -c 100000 /dev/zero | tr '\\0' x"))
    assert verdict == Verdict("passing", "x" * 300)


async def test_a_command_that_hangs_is_killed_with_its_children(prober: Prober, tmp_path: Path) -> None:
    """After the timeout nothing of the check is left."""
    check = HealthCheck(exec=EXEC.exec, timeout=0.1)
    verdict = await prober.probe(check, {}, command(tmp_path, "sleep 1000 & sleep 1000"))
    assert verdict.status == "critical"
    await until_nothing_runs(tmp_path)


async def test_a_command_that_is_not_there_is_critical(prober: Prober, tmp_path: Path) -> None:
    """A check that can't be started fails; it does not raise."""
    missing = command(tmp_path, "")._replace(cwd=tmp_path / "nowhere")
    verdict = await prober.probe(EXEC, {}, missing)
    assert verdict.status == "critical"
    assert "No such file" in verdict.output


async def test_a_cancelled_probe_leaves_no_process(prober: Prober, tmp_path: Path) -> None:
    """An agent that stops in the middle of a check leaves nothing behind."""
    probing = asyncio.create_task(prober.probe(EXEC, {}, command(tmp_path, "sleep 1000")))
    while not started_under(tmp_path):
        await asyncio.sleep(0.01)
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    await until_nothing_runs(tmp_path)


async def until_nothing_runs(directory: Path) -> None:
    """Wait for the death of what was killed: each process of a group dies when the kernel next runs it."""
    try:
        await until(lambda: not started_under(directory))
    finally:
        kill_started_under(directory)


def command(directory: Path, script: str) -> LaunchSpec:
    env = {"PATH": os.environ["PATH"], "RCFARM_DIR": f"{directory}/", "PYTHON": sys.executable}
    return LaunchSpec(["sh", "-c", script], env, directory, directory / "check.out")
