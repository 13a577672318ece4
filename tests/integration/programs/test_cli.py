"""The command line on a real Consul: with a running farm, with a restricted token, and with a Consul that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rcfarm.operations.fleet import ensure_meta
from store.consul.store import ConsulSettings, ConsulStore
from store.kv.protocol import Unavailable
from store.schema.keys import Keys
from tests.support.consul.server import ConsulServer, StartConsul
from tests.support.farm.fleet import PATIENCE, running_farm
from tests.support.farm.simulated_agents import SimulatedAgents, running_agents
from tests.support.programs.cli import CommandLine

MANIFEST = '{"id":"hello","launchables":{"main":{"command":["true"]}}}'
FILE = "id: hello\nreplicas: 2\nnode_selector: pool=web\nmanifest: " + MANIFEST + "\n"
NODES = {"node-1": {"pool": "web"}, "node-2": {"pool": "web"}, "node-3": {"pool": "db"}}


@contextlib.asynccontextmanager
async def on_consul(server: ConsulServer, root: str) -> AsyncIterator[CommandLine]:
    """Yield a command line on a Consul, and a separate store for the test."""
    store = ConsulStore(ConsulSettings(url=f"http://{server.address}", token=server.token))
    try:
        yield CommandLine(server.url, store, await ensure_meta(store, Keys(root)), processes=True)
    finally:
        await store.close()


@pytest.fixture
async def cli(consul: ConsulServer, root: str) -> AsyncIterator[CommandLine]:
    """A command line on the shared Consul."""
    async with on_consul(consul, root) as line:
        yield line


@pytest.fixture
async def agents(cli: CommandLine) -> AsyncIterator[SimulatedAgents]:
    """A running farm and the agents of `NODES`."""
    async with running_agents(cli.store, cli.keys, NODES) as agents, running_farm(cli.store, cli.keys, "farm-1"):
        yield agents


async def test_an_rc_from_its_creation_to_its_deletion(cli: CommandLine, agents: SimulatedAgents) -> None:
    """Each command follows the RC to its end, reports the result and sets its exit code accordingly."""
    created = await cli("rc", "apply", "-f", "-", "--yes", stdin=FILE)
    assert (created.code, created.out) == (0, "rc hello created: 2 of 2 placed, 2 healthy\n")

    short = await cli("rc", "scale", "hello", "3")
    assert short.code == 2
    assert short.out.startswith(
        "rc hello scaled, but not complete: 2 of 3 placed, 2 healthy\n  1 of 3 replicas has no node"
    )

    explained = await cli("rc", "explain", "hello")
    assert "node-3  no         it has pool=db, the selector asks for pool=web" in explained.out
    assert (await cli("node", "label", "node-3", "pool=web")).code == 0
    again = await cli("rc", "apply", "-f", "-", "--yes", stdin=FILE.replace("replicas: 2", "replicas: 3"))
    assert (again.code, again.out) == (0, "rc hello unchanged: 3 of 3 placed, 3 healthy\n")

    down = await cli("rc", "scale", "hello", "1")
    assert (down.code, down.out) == (0, "rc hello scaled: 1 of 1 placed, 1 healthy\n")

    deleted = await cli("rc", "delete", "hello", "--yes")
    assert deleted.code == 0
    assert deleted.out.startswith("rc hello deleted: ")  # "no process is left", where there are control groups
    assert "`rcfarm rc restore hello` brings it back" in deleted.out
    assert await cli.store.keys(cli.keys.rc("hello")) == []
    assert await cli.store.keys(cli.keys.realities) == []
    history = (await cli("rc", "history", "hello", "-o", "json")).json
    assert [
        event["event_type"].removeprefix("REPLICATION_CONTROLLER_") for event in history if event["actor"] != "farm-1"
    ] == ["CREATED", "SCALED", "SCALED", "DELETION_REQUESTED"]


async def test_a_deleted_rc_is_restored(cli: CommandLine, agents: SimulatedAgents) -> None:
    """Two RCs are deleted by their labels, each reported for itself; one comes back with its pods. Its history goes on,
    and it is refused while the RC exists."""
    other = FILE.replace("hello", "other").replace("node_selector: pool=web\n", "rc_labels: {team: shop}\n")
    both = FILE.replace("node_selector: pool=web\n", "rc_labels: {team: shop}\n") + "---\n" + other
    assert (await cli("rc", "apply", "-f", "-", "--yes", stdin=both)).code == 0

    deleted = await cli("rc", "delete", "-l", "team=shop", "--yes")
    assert deleted.code == 0
    for rc_id in ("hello", "other"):
        assert f"rc {rc_id} deleted: " in deleted.out  # "no process is left", where there are control groups
        assert f"`rcfarm rc restore {rc_id}` brings it back" in deleted.out
    assert "delete 2 RCs:\n  hello: 2 pods, 2 desired\n  other: 2 pods, 2 desired\n" in deleted.err
    listed = await cli("rc", "restore", "--list", "-o", "json")
    assert {each["id"] for each in listed.json} == {"hello", "other"}
    assert all(each["until"] > each["deleted_at"] for each in listed.json)

    restored = await cli("rc", "restore", "hello")
    assert (restored.code, restored.out) == (0, "rc hello restored: 2 of 2 placed, 2 healthy\n")
    again = await cli("rc", "restore", "hello")
    assert (again.code, again.err[:33]) == (1, "error: rc hello exists, so there ")
    history = (await cli("rc", "history", "hello", "-o", "json")).json
    operators = [event["event_type"] for event in history if event["actor"] != "farm-1"]
    assert [each.removeprefix("REPLICATION_CONTROLLER_") for each in operators] == [
        "CREATED",
        "DELETION_REQUESTED",
        "RESTORED",
    ]


async def test_a_watch_shows_each_change_until_the_rc_is_gone(cli: CommandLine, agents: SimulatedAgents) -> None:
    """In a pipe each change is a line, as soon as it has happened; the end of the RC ends the command."""
    assert (await cli("rc", "apply", "-f", "-", "--yes", stdin=FILE)).code == 0
    env = {"PATH": os.environ["PATH"], "RCFARM_STORE": cli.url, "RCFARM_STORE_ROOT": cli.keys.root}
    watch = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rcfarm", "rc", "status", "hello", "--watch"), stdout=subprocess.PIPE, env=env
    )
    assert watch.stdout is not None

    async def until(text: str) -> None:
        assert watch.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while text not in (line := (await watch.stdout.readline()).decode()):
                assert line, f"it ended without {text}"

    await until("rc hello on node-2: running, health passing")
    assert (await cli("rc", "scale", "hello", "1")).code == 0
    await until("rc hello: converged, 1 of 1 placed, 1 healthy")
    assert (await cli("rc", "delete", "hello", "--yes")).code == 0
    await until("rc hello: gone")
    assert await watch.wait() == 0


async def test_a_watch_on_a_terminal_draws_what_differs(cli: CommandLine, agents: SimulatedAgents) -> None:
    """The rest of the screen stays. Ctrl-C is the ordinary end, and leaves the terminal as it was."""
    assert (await cli("rc", "apply", "-f", "-", "--yes", stdin=FILE)).code == 0
    leader, follower = pty.openpty()
    env = {"PATH": os.environ["PATH"], "RCFARM_STORE": cli.url, "RCFARM_STORE_ROOT": cli.keys.root, "TERM": "xterm"}
    watch = subprocess.Popen(
        [sys.executable, "-m", "rcfarm", "rc", "status", "hello", "--watch"],
        stdin=follower,
        stdout=follower,
        env=env | {"COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"},
    )
    os.close(follower)
    shown = b""

    async def until(text: bytes) -> None:
        nonlocal shown
        async with asyncio.timeout(PATIENCE):
            while text not in shown:
                shown += await asyncio.to_thread(os.read, leader, 65536)

    await until(b"node-2  running")
    shown = b""
    assert (await cli("rc", "scale", "hello", "1")).code == 0
    await until(b"1 of 1 placed, 1 healthy")
    assert b"\x1b[2Kowner: farm-1" in shown
    watch.send_signal(signal.SIGINT)
    await until(b"\x1b[?7h")
    assert await asyncio.to_thread(watch.wait, PATIENCE) == 0
    os.close(leader)


async def test_delete_waits_for_the_processes(cli: CommandLine, agents: SimulatedAgents) -> None:
    """While an agent is still stopping a pod, the deletion is incomplete and names the node."""
    await cli("rc", "apply", "-f", "-", "--yes", stdin=FILE)
    agents.stopping.clear()

    waiting = await cli("rc", "delete", "hello", "--yes", "--timeout", "2")
    agents.stopping.set()

    assert waiting.code == 2
    assert "node-1: a process may be left: still stopping" in waiting.out


async def test_doctor_on_a_real_consul(cli: CommandLine, agents: SimulatedAgents) -> None:
    """Doctor shows version, leader, limits, clock and sessions; a healthy fleet has no error."""
    await cli("rc", "apply", "-f", "-", "--yes", stdin=FILE)

    ran = await cli("doctor")

    assert ran.code == 0, ran.out
    assert "Consul 1." in ran.out
    assert "leader 127.0.0.1:" in ran.out
    assert "✓ connections  200 connections per client address" in ran.out
    assert "✓ clock " in ran.out
    assert "✓ sessions     a crashed holder is freed after 3 s" in ran.out


async def test_doctor_knows_limits_that_do_not_fit(start_consul: StartConsul) -> None:
    """A Consul that accepts fewer connections than one daemon uses is reported as an error with the setting's name."""
    server = start_consul(max_connections=40)
    async with on_consul(server, "rcfarm") as cli:
        ran = await cli("doctor")

    assert ran.code == 1
    assert "✗ connections  40 connections per client address" in ran.out
    assert "http_max_conns_per_client" in ran.out


async def test_permissions_are_explained(start_consul: StartConsul, tmp_path: Path) -> None:
    """With a read-only token reading works, a change is denied in one line, and doctor names what is missing."""
    server = start_consul(acl=True)
    reader = server.create_token('key_prefix "rcfarm/" { policy = "read" } session_prefix "" { policy = "read" }')
    path = tmp_path / "token"
    path.write_text(reader + "\n")
    async with on_consul(server, "rcfarm") as cli:
        await cli.rcs.create(MANIFEST.encode(), rc_id="hello")

        refused = await cli("rc", "list")
        looked = await cli("rc", "list", "--token-file", str(path))
        changed = await cli("rc", "scale", "hello", "3", "--token-file", str(path))
        examined = await cli("doctor", "--token-file", str(path))

    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "no token is set; set CONSUL_HTTP_TOKEN" in refused.err
    assert looked.code == 0
    shortage, denied = changed.err.splitlines()
    assert (changed.code, shortage) == (1, "rc hello: 3 of 3 replicas will have no node: no node may take pods")
    assert "Permission denied" in denied
    assert examined.code == 1
    assert "✗ permissions  may not write rcfarm/rcs" in examined.out
    assert "! permissions  may not write rcfarm/reality" in examined.out
    assert reader not in changed.err + examined.out + examined.err


async def test_following_survives_a_consul_that_goes_away(start_consul: StartConsul) -> None:
    """Consul restarts while a command follows: the command goes on waiting and sees the end."""
    server = start_consul(durable=True)
    async with on_consul(server, "rcfarm") as cli:
        await cli.rcs.create(MANIFEST.encode(), rc_id="hello")
        terminal = Terminal(cli, "rc", "scale", "hello", "1")
        await terminal.until("0 of 1 placed")
        await asyncio.to_thread(server.restart)
        async with running_agents(cli.store, cli.keys, NODES), running_farm(cli.store, cli.keys, "farm-1"):
            assert await terminal.ended() == 0, terminal.text

    assert "rc hello scaled: 1 of 1 placed, 1 healthy" in terminal.text


async def test_a_consul_that_does_not_answer_is_one_line(consul_server: ConsulServer) -> None:
    """When Consul is stopped, every command names the address and the cause."""
    async with on_consul(consul_server, "rcfarm") as cli:
        consul_server.stop()
        with pytest.raises(Unavailable):
            await cli.rcs.list()
        for command in (
            ["rc", "list"],
            ["rc", "scale", "hello", "3"],
            ["status"],
            ["node", "list"],
            ["brake", "release"],
        ):
            ran = await cli(*command)
            assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
            assert ran.err.startswith(f"error: Consul at {consul_server.address} is unavailable: ")


class Terminal:
    """`rcfarm …` in its own process, on a terminal of 100 columns."""

    def __init__(self, cli: CommandLine, *arguments: str, **environ: str) -> None:
        self._screen, side = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rcfarm", *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "TERM": "xterm",
                "COLUMNS": "100",
                "RCFARM_STORE": cli.url,
                "RCFARM_STORE_ROOT": cli.keys.root,
                **environ,
            },
            start_new_session=True,
        )
        os.close(side)

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    async def until(self, text: str) -> None:
        """Read the screen until it shows `text`."""
        async with asyncio.timeout(PATIENCE):
            while text not in self.text:
                self.text += (await asyncio.to_thread(os.read, self._screen, 4096)).decode(errors="replace")

    async def ended(self) -> int:
        """Read the screen to its end. Return the exit code."""
        try:
            async with asyncio.timeout(PATIENCE):
                with contextlib.suppress(OSError):  # how Linux reports that the other side is closed
                    while chunk := await asyncio.to_thread(os.read, self._screen, 4096):
                        self.text += chunk.decode(errors="replace")
        except TimeoutError:
            self.process.kill()  # so that the thread that reads ends, too
            raise
        os.close(self._screen)
        return await asyncio.to_thread(self.process.wait, PATIENCE)


async def test_what_changed_since_the_difference_was_shown_is_not_overwritten(cli: CommandLine, tmp_path: Path) -> None:
    """Another operator scales the RC while the first reads the difference: exit code 3, and nothing is changed."""
    await cli.rcs.create(MANIFEST.encode(), rc_id="hello")
    path = tmp_path / "hello.yaml"
    path.write_text(FILE)

    terminal = Terminal(cli, "rc", "apply", "-f", str(path))
    await terminal.until("Apply 1 change? [y/N]")
    await cli.rcs.set_replicas("hello", 7)
    terminal.type("y\n")

    assert await terminal.ended() == 3
    assert "rc hello was changed in the meantime; review the difference again" in terminal.text
    assert (await cli.rcs.get("hello")).replicas_desired == 7


@pytest.mark.parametrize("command", [["rc", "delete", "hello"], ["rc", "apply", "-f"]], ids=["delete", "apply"])
async def test_ctrl_c_at_a_question_ends_the_command(cli: CommandLine, tmp_path: Path, command: list[str]) -> None:
    """The first Ctrl-C ends the command with the exit code of an interruption; nothing is changed."""
    await cli.rcs.create(MANIFEST.encode(), rc_id="hello", replicas=1)
    path = tmp_path / "hello.yaml"
    path.write_text(FILE)

    terminal = Terminal(cli, *command, *([str(path)] if "apply" in command else []), NO_COLOR="1")
    await terminal.until("[y/N]: ")
    terminal.process.send_signal(signal.SIGINT)

    assert await terminal.ended() == 130
    assert terminal.text.endswith("[y/N]: \r\nerror: interrupted\r\n")
    assert (await cli.rcs.get("hello")).generation == 1


@pytest.mark.parametrize(("reply", "code"), [("\n", 1), ("rcfarm rc list\n", 1), ("Yes\n", 0)])
async def test_only_a_yes_is_a_yes(cli: CommandLine, reply: str, code: int) -> None:
    """The default is no; text typed ahead for the shell counts as a no, and the question is asked once."""
    await cli.rcs.create(MANIFEST.encode(), rc_id="hello", replicas=1)

    terminal = Terminal(cli, "rc", "delete", "hello", "--detach")
    await terminal.until("[y/N]: ")
    terminal.type(reply)

    assert await terminal.ended() == code
    assert terminal.text.count("[y/N]") == 1
    assert (await cli.rcs.get("hello")).deleting is (code == 0)


async def test_ctrl_c_ends_following_and_says_what_stands(cli: CommandLine) -> None:
    """After Ctrl-C the command says that the change stays in effect; there is no traceback."""
    await cli.rcs.create(MANIFEST.encode(), rc_id="hello")

    terminal = Terminal(cli, "rc", "scale", "hello", "2")
    await terminal.until("0 of 2 placed")
    terminal.process.send_signal(signal.SIGINT)

    assert await terminal.ended() == 130
    assert "the change to rc hello stays" in terminal.text
    assert "Traceback" not in terminal.text


async def test_colour_is_for_terminals_that_want_it(cli: CommandLine) -> None:
    """States are coloured on a terminal, and plain with NO_COLOR."""
    await cli.rcs.create(MANIFEST.encode(), rc_id="hello")

    coloured = Terminal(cli, "rc", "list")
    assert await coloured.ended() == 0
    assert "\x1b[33munowned" in coloured.text

    plain = Terminal(cli, "rc", "list", NO_COLOR="1")
    assert await plain.ended() == 0
    assert "\x1b[" not in plain.text
