"""Running the command line inside a test, against a store of the test.

A command runs in a thread, with its own event loop, as it would in a process; it reaches the test's embedded store
through the Consul API on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog
from typer.testing import CliRunner

from rcfarm.cli.main import app
from rcfarm.operations.fleet import ensure_meta
from rcfarm.operations.rcs import ReplicationControllers
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Store
from store.schema.keys import Keys


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`await cli("rc", "list")`. `store` is the same store, to inspect and to play other programs.

    `processes`: run each command in its own process, so that the log of the test's own farm is not in its output.
    """

    url: str
    store: Store
    keys: Keys
    processes: bool = False

    @property
    def rcs(self) -> ReplicationControllers:
        return ReplicationControllers(self.store, self.keys, actor="test")

    async def __call__(self, *arguments: str, stdin: str = "", store: str = "", **environ: str) -> Ran:
        """Run one command to its end."""
        env = {"RCFARM_STORE": store or self.url, "RCFARM_STORE_ROOT": self.keys.root, "RCFARM_WAIT_HEALTHY": "0"}
        env |= environ
        return await asyncio.to_thread(run_process if self.processes else run, *arguments, stdin=stdin, env=env)


def run(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> Ran:
    """Run one command. Raises any error that the command does not explain to the user."""
    result = CliRunner(env=env or {}).invoke(app, arguments, input=stdin)
    structlog.reset_defaults()
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def run_process(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> Ran:
    """Run one command in its own process."""
    ran = subprocess.run(
        [sys.executable, "-m", "rcfarm", *arguments],
        input=stdin,
        env={"PATH": os.environ["PATH"], **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@contextlib.asynccontextmanager
async def command_line() -> AsyncIterator[CommandLine]:
    """Yield a command line on a fresh embedded store."""
    store = EmbeddedStore()
    keys = await ensure_meta(store, Keys("fleet", shards=4))
    async with serve_consul_api(store) as address:
        yield CommandLine(f"consul://{address}", store, keys)
