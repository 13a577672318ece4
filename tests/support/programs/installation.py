"""An installation of rcfarm as users run it: daemons and commands as processes of their own, on one store.

Daemons log JSON lines to a file, which `Daemon.events` reads. All started processes, the pods of the agents included,
are ended when the installation is closed; the logs stay in its directory, and a failing test shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

from store.consul.store import ConsulSettings, ConsulStore
from store.kv.protocol import Unavailable
from store.schema.keys import Keys
from tests.support.agent.agents import kill_started_under
from tests.support.consul.server import ConsulServer
from tests.support.farm.fleet import Fleet
from tests.support.programs.cli import Ran
from tests.support.programs.server_process import REPOSITORY, Program

PATIENCE = 60.0  # seconds that a condition may take on a busy machine before the test fails
TAIL = 3000  # characters of a log that a failure shows

T = TypeVar("T")


class Daemon(Program):
    """One `rcfarm farm | agent | dev` process."""

    def __init__(self, arguments: list[str], log: Path, environ: dict[str, str]) -> None:
        super().__init__(log.stem, log)
        self._command = [sys.executable, "-m", "rcfarm", *arguments]
        self._environ = environ
        self.start()

    def start(self) -> None:
        """Start it (again) with the same command line."""
        self.run(self._command, env=self._environ)

    def stop(self, timeout: float = PATIENCE) -> int:
        """Send SIGTERM. Return the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout)

    def events(self, text: str = "", **fields: Any) -> list[dict[str, Any]]:
        """Return the logged events whose message contains `text` and whose fields have these values, in order."""
        found = []
        for line in self.log().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if text in event["event"] and fields.items() <= event.items():
                    found.append(event)
        return found


class Installation:
    """Starts daemons and runs commands under one root of one store. `fleet` reads and writes the same root."""

    def __init__(self, url: str, directory: Path, *, root: str, token: str = "") -> None:
        self.url, self.directory, self.root = url, directory, root
        self.store = ConsulStore(ConsulSettings.from_env(url, environ=_token(token)))
        self.keys = Keys(root)
        self.fleet = Fleet(self.store, self.keys)
        self.token = token
        self.daemons: list[Daemon] = []
        directory.mkdir(parents=True, exist_ok=True)

    def farm(self, name: str, *, url: str = "", token: str = "", listen: str = "off", **settings: object) -> Daemon:
        """Start a farm. `settings` are those of the section `farm`; `url`: another way to the store; `listen`: where it
        serves its metrics."""
        options = [f"--set=farm.{field}={value}" for field, value in settings.items()]
        return self.daemon(name, "farm", "--name", name, *options, url=url, token=token, listen=listen)

    def agent(self, node: str, *, token: str = "", **settings: object) -> Daemon:
        """Start the agent of a node; `settings` are those of the section `agent`."""
        fields = {"address": "127.0.0.1", "default_user": os.geteuid(), **settings}
        options = [f"--set=agent.{field}={value}" for field, value in fields.items()]
        return self.daemon(
            node, "agent", "--node", node, "--state-dir", str(self.state_dir(node)), *options, token=token
        )

    def daemon(
        self, name: str, role: str, *options: str, url: str = "", token: str = "", listen: str = "off"
    ) -> Daemon:
        """Start any role on our store. `name` names its log."""
        arguments = [role, "--store", url or self.url, "--root", self.root, "--listen", listen, *options]
        daemon = Daemon(arguments, self.directory / f"{name}.log", self.environ(token))
        self.daemons.append(daemon)
        return daemon

    def state_dir(self, node: str) -> Path:
        """Return where the agent of a node keeps its pods."""
        return self.directory / "nodes" / node

    async def cli(self, *arguments: str, stdin: str = "", url: str = "", token: str = "") -> Ran:
        """Run one command to its end."""
        environ = self.environ(token)
        environ |= {"RCFARM_STORE": url or self.url, "RCFARM_STORE_ROOT": self.root}
        command = [sys.executable, "-m", "rcfarm", *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=REPOSITORY, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(2 * PATIENCE):
                out, err = await process.communicate(stdin.encode())
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())

    @overload
    async def until(self, look: Callable[[], Awaitable[T | None]], what: str, *, within: float = PATIENCE) -> T: ...

    @overload
    async def until(self, look: Callable[[], T | None], what: str, *, within: float = PATIENCE) -> T: ...

    async def until(self, look: Callable[[], Any], what: str, *, within: float = PATIENCE) -> Any:
        """Call `look` until it returns something true, and return that. Fails with `what` and the logs.

        An unreachable store counts as no result.
        """
        deadline = time.monotonic() + within
        while True:
            try:
                answer = look()
                found = await answer if isinstance(answer, Awaitable) else answer
            except Unavailable:
                found = None
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within:g} s: {what}; last seen: {found!r}\n{self.logs()}")
            await asyncio.sleep(0.05)

    async def until_not(self, look: Callable[[], Awaitable[object]], what: str) -> None:
        """Call `look` until it returns nothing any more. Fails with its last result."""
        left: object = None

        async def is_done() -> bool:
            nonlocal left
            left = await look()
            return not left

        try:
            await self.until(is_done, what)
        except AssertionError as error:
            raise AssertionError(f"{left!r} is left: {error}") from error

    async def until_logged(self, daemon: Daemon, text: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event in a daemon's log. Return the first one."""
        found = await self.until(lambda: daemon.events(text, **fields), f"{daemon.name} logs {text!r}")
        return found[0]

    async def until_live(self, *farms: str) -> None:
        """Wait until exactly these farms are members."""
        await self.until(lambda: self._are_live(set(farms)), f"the live farms are {', '.join(farms)}")

    async def live_farms(self) -> set[str]:
        """Return the farms whose member record carries a session."""
        entries = (await self.store.list(self.keys.farms, consistent=True)).entries
        return {entry.key.removeprefix(self.keys.farms) for entry in entries if entry.session}

    async def _are_live(self, farms: set[str]) -> bool:
        return await self.live_farms() == farms

    async def start_agents(self, *nodes: str) -> None:
        """Start the agents of these nodes, and wait until they are registered."""
        for node in nodes:
            self.agent(node)
        await self.until_registered(*nodes)

    async def until_registered(self, *nodes: str) -> None:
        """Wait until the agents of these nodes hold them."""
        await self.until(lambda: self._are_registered(nodes), f"{', '.join(nodes)} are registered")

    async def _are_registered(self, nodes: Iterable[str]) -> bool:
        entries = [await self.store.get(self.keys.node_alive(node)) for node in nodes]
        return all(entry is not None and entry.session is not None for entry in entries)

    def logs(self) -> str:
        """Return the ends of all logs."""
        tails = [f"--- {log.stem}\n{log.read_text(errors='replace')[-TAIL:]}" for log in self.directory.glob("*.log")]
        return "\n".join(sorted(tails))

    async def close(self) -> None:
        """End every process that was started here."""
        for daemon in self.daemons:
            daemon.kill()
        kill_started_under(self.directory)
        await self.store.close()

    def environ(self, token: str = "") -> dict[str, str]:
        """Return the variables of our programs, with the store's token."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RCFARM_", "CONSUL_"))}
        return kept | _token(token or self.token)


def _token(token: str) -> dict[str, str]:
    return {"CONSUL_HTTP_TOKEN": token} if token else {}


@contextlib.asynccontextmanager
async def installation(
    server: ConsulServer | str, directory: Path, *, root: str = "rcfarm", token: str = ""
) -> AsyncIterator[Installation]:
    """Yield an installation on a Consul, or at a URL; the tail of every log is shown when the block fails."""
    url = server if isinstance(server, str) else server.url
    own_token = token or ("" if isinstance(server, str) else server.token or "")
    built = Installation(url, directory, root=root, token=own_token)
    try:
        yield built
    except BaseException:
        print(built.logs(), file=sys.stderr)
        raise
    finally:
        await built.close()
