"""`rcfarm ready` against the listeners that daemons serve."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rcfarm.cli.main import app
from rcfarm.daemon import readiness as module
from rcfarm.daemon.health import Condition, Health
from rcfarm.daemon.health_server import serving, web_app
from rcfarm.daemon.listener import Address
from rcfarm.telemetry.prometheus import new_registry
from tests.support.programs.cli import Ran

LOOPBACK = Address("127.0.0.1", 0)
READY = [Condition("running", True), Condition("farm session", True)]
WAITING = [Condition("running", True), Condition("farm session", False, "seeking: no leader")]


def listener(conditions: list[Condition], token: str = "") -> object:
    return serving(web_app(Health(str, lambda: conditions), new_registry("1"), token=token), LOOPBACK)


async def rcfarm(*arguments: str, **environ: str) -> Ran:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["ready", *arguments], env=environ)
    return Ran(result.exit_code, result.stdout, result.stderr)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.fixture
def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def test_it_says_whether_the_daemon_is_ready_and_why_not() -> None:
    """The exit code is 0 if every condition holds; otherwise 1, with each failing condition and its reason."""
    conditions = list(READY)
    async with listener(conditions) as address:  # type: ignore[attr-defined]
        assert await rcfarm("--listen", address) == Ran(0, f"the daemon on {address} is ready\n", "")
        conditions[:] = WAITING
        ran = await rcfarm("--listen", address)
    assert ran.code == 1
    assert ran.out == f"the daemon on {address} is not ready:\n  [-] farm session: seeking: no leader\n"


async def test_a_container_needs_no_port(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """Without arguments, each role's default port is checked, which finds the role that runs there."""
    async with listener(READY) as address:  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "PORTS", {"farm": free_port, "agent": port_of(address)})
        assert await rcfarm() == Ran(0, f"agent on {address} is ready\n", "")
        assert (await rcfarm("agent")).code == 0
        assert (await rcfarm("farm")).code == 1


async def test_all_that_run_here_must_be_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a farm and an agent on one machine, one that is not ready makes the exit code 1."""
    async with listener(READY) as one, listener(WAITING) as other:  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "PORTS", {"farm": port_of(one), "agent": port_of(other)})
        ran = await rcfarm()
    assert ran.code == 1
    assert ran.out.splitlines()[:2] == [f"farm on {one} is ready", f"agent on {other} is not ready:"]


async def test_the_configured_listener_is_checked(tmp_path: Path) -> None:
    """The daemon's variable or file names the address (also a wildcard), and the token for the reasons."""
    async with listener(WAITING, token="hunter2") as address:  # type: ignore[attr-defined]
        everywhere = f"0.0.0.0:{port_of(address)}"
        assert "[-]" not in (await rcfarm(RCFARM_WEB_LISTEN=everywhere)).out
        config = tmp_path / "farm.toml"
        config.write_text(f'[web]\nlisten = "{everywhere}"\ntoken = "hunter2"\n')
        assert "[-] farm session: seeking: no leader" in (await rcfarm("--config", str(config))).out
        config.write_text('[web]\nlisten = "127.0.0.1:1"\ntoken = "hunter2"\n')
        ran = await rcfarm("--config", str(config), "--listen", address)
        assert "[-] farm session: seeking: no leader" in ran.out, "the option takes precedence over the file"


async def test_no_daemon_listens(free_port: int) -> None:
    """A missing daemon is not ready, and the message names the address that was tried."""
    ran = await rcfarm("--listen", f"127.0.0.1:{free_port}")
    assert ran.code == 1
    assert f"no daemon listens on 127.0.0.1:{free_port}; name its web.listen" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["barrier"], "barrier has no listener; write one of dev, farm"), (["--listen", "off"], "'off' is not HOST:PORT")],
)
async def test_what_can_t_be_asked(arguments: list[str], message: str) -> None:
    """A role without a listener, and a disabled listener, are errors."""
    ran = await rcfarm(*arguments)
    assert ran.code != 0
    assert message in ran.err


async def test_the_health_check_of_a_container_is_quick() -> None:
    """Without arguments, neither the command line nor the settings are imported; the result is the same."""
    async with listener(WAITING) as address:  # type: ignore[attr-defined]
        code = (
            "import sys; sys.argv = ['rcfarm', 'ready']\nfrom rcfarm.__main__ import main\ntry:\n    main()\nfinally:\n"
        )
        code += "    print([name for name in ('typer', 'msgspec', 'aiohttp') if name in sys.modules])"
        environ = {**os.environ, "RCFARM_WEB_LISTEN": address}
        command = [sys.executable, "-c", code]
        ran = await asyncio.to_thread(subprocess.run, command, env=environ, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert ran.stdout.splitlines()[1:] == ["  [-] farm session: seeking: no leader", "[]"]


async def test_a_program_that_does_not_answer_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon whose loop hangs accepts the connection but does not answer."""
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        ran = await rcfarm("--listen", f"127.0.0.1:{server.getsockname()[1]}")
    assert ran.code == 1
    assert "no answer within 0.2 s" in ran.out
