"""`rcfarm dev` and its store's API: open to its user's programs, closed to every other user of the machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.open import ENDPOINT_FILE, TOKEN_FILE, Endpoint, read_endpoint
from tests.support.consul.server import consul_binary
from tests.support.programs.installation import PATIENCE, Daemon
from tests.support.raw_http import exchange, request, status_of

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


class Dev:
    """A running `rcfarm dev`. `environ` is that of its user's programs."""

    def __init__(self, directory: Path, environ: dict[str, str], endpoint: Endpoint) -> None:
        self.directory, self.environ, self.endpoint = directory, environ, endpoint
        self.address = endpoint.url.removeprefix("consul://")

    def run(
        self, *command: str, user: int | None = None, environ: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the same machine."""
        return subprocess.run(
            command, env=self.environ | (environ or {}), user=user, group=user, extra_groups=[] if user else None,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
async def dev(tmp_path: Path) -> AsyncIterator[Dev]:
    tmp_path.chmod(0o755)
    directory = tmp_path / "state" / "rcfarm" / "dev"
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "XDG_STATE_HOME": str(tmp_path / "state")}
    daemon = Daemon(["dev", "--nodes", "1", "--listen", "off"], tmp_path / "log", environ)
    try:
        async with asyncio.timeout(PATIENCE):
            while (endpoint := read_endpoint(directory)) is None:
                assert daemon.is_running, daemon.log()
                await asyncio.sleep(0.05)
        yield Dev(directory, environ, endpoint)
    finally:
        daemon.stop()


async def test_the_token_is_random_and_private(dev: Dev) -> None:
    """Only the daemon's user can read the file with the address and token."""
    for name in (ENDPOINT_FILE, TOKEN_FILE):
        assert (dev.directory / name).stat().st_mode & 0o777 == 0o600


async def test_its_users_commands_find_the_token(dev: Dev) -> None:
    """No setting is needed, whether the store is found by default, by its directory or by its address."""
    for store in ("", f"embedded:{dev.directory}", dev.endpoint.url):
        ran = dev.run(sys.executable, "-m", "rcfarm", "rc", "list", "-o", "json", environ={"RCFARM_STORE": store})
        assert (ran.returncode, json.loads(ran.stdout)) == (0, []), ran.stderr


async def test_consuls_program_works_with_the_tokens_file(dev: Dev) -> None:
    """`consul kv` takes CONSUL_HTTP_TOKEN_FILE or CONSUL_HTTP_TOKEN, and is refused without them."""
    consul = str(consul_binary())
    token = (dev.directory / TOKEN_FILE).read_text().strip()
    for given in ({"CONSUL_HTTP_TOKEN_FILE": str(dev.directory / TOKEN_FILE)}, {"CONSUL_HTTP_TOKEN": token}):
        ran = dev.run(consul, "kv", "get", "-keys", "rcfarm/", environ={"CONSUL_HTTP_ADDR": dev.address} | given)
        assert "rcfarm/meta" in ran.stdout, ran.stderr
    ran = dev.run(consul, "kv", "get", "rcfarm/meta", environ={"CONSUL_HTTP_ADDR": dev.address})
    assert ran.returncode == 1
    assert "403" in ran.stderr


@as_root
async def test_another_user_of_the_machine_is_refused(dev: Dev) -> None:
    """A user without the token can neither read nor write, nor read the token."""
    write = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-X", "PUT", "-d", "x")
    ran = dev.run(*write, f"http://{dev.address}/v1/kv/rcfarm/intent/node-1/evil", user=NOBODY)
    assert ran.stdout == "403"
    assert dev.run("cat", str(dev.directory / TOKEN_FILE), user=NOBODY).returncode != 0
    assert dev.run("cat", str(dev.directory / ENDPOINT_FILE), user=NOBODY).returncode != 0


@pytest.mark.parametrize("header", ["Host: evil.example", "Origin: http://evil.example", "Origin: null"])
async def test_a_web_page_is_refused_even_with_the_token(dev: Dev, header: str) -> None:
    """A request that a web page may have made a browser send is refused, with or without the token."""
    token = (dev.directory / TOKEN_FILE).read_text().strip()
    sent = request("/v1/kv/rcfarm/meta", header, f"X-Consul-Token: {token}")
    assert status_of(await exchange(dev.address, sent)) == 403
    sent = request("/v1/kv/rcfarm/meta", f"X-Consul-Token: {token}")
    assert status_of(await exchange(dev.address, sent)) == 200
