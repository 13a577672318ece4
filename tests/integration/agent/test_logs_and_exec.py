"""`rc logs`, `rc exec` and `task logs` as operators use them: a real Consul, real agents, real commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from rcfarm.operations.nodes import Nodes
from rcfarm.operations.pod_client import Credentials, listener_of, open_exec, read_logs
from rcfarm.operations.pod_wire import EXEC_EVENT, RESULT, ExecResult, exec_details
from store.schema.audit import event_op
from tests.support import require
from tests.support.agent.agents import alive
from tests.support.consul.server import ConsulServer
from tests.support.kube.certificates import Authority
from tests.support.programs.cli import Ran
from tests.support.programs.installation import Daemon, Installation, installation
from tests.support.programs.server_process import REPOSITORY

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOCAL = ["node-1", "node-2"]
SECURE = "node-3"
TALK = "echo out-$RCFARM_NODE; echo err-$RCFARM_NODE >&2; exec sleep 1000"
COUNT = """
import os, time
number, began = 0, time.monotonic()
while True:
    while number < 1000 * (time.monotonic() - began):
        os.write(1, b"line %07d of many that fill the log of this pod\\n" % number)
        number += 1
    time.sleep(0.01)
"""


@dataclass
class Site:
    """Two agents on loopback, of which the first runs commands, and one that listens beyond it, with TLS."""

    fleet: Installation
    directory: Path
    agents: dict[str, Daemon]

    def environ(self, **more: str) -> dict[str, str]:
        shared = {"RCFARM_STORE": self.fleet.url, "RCFARM_LISTENER_TOKEN_FILE": str(self.directory / "token")}
        return self.fleet.environ() | shared | more

    async def __call__(self, *arguments: str, stdin: str = "", **environ: str) -> Ran:
        """Run a command with the token of the agents on loopback."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rcfarm", *arguments, cwd=REPOSITORY, env=self.environ(**environ),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())

    async def apply(self, rc_id: str, command: list[str], nodes: str, replicas: int = 1, *, waits: bool = True) -> None:
        launchable = {"command": command, "stop_timeout": 1}
        manifest = {"id": rc_id, "launchables": {"main": launchable}}
        document = {"id": rc_id, "replicas": replicas, "node_selector": nodes, "manifest": manifest}
        options = ["--wait-healthy", "0"] if waits else ["--detach"]
        ran = await self("rc", "apply", "-f", "-", "--yes", *options, stdin=json.dumps(document))
        assert ran.code == 0, ran.err

    @contextlib.asynccontextmanager
    async def following(self, *arguments: str) -> AsyncIterator[Follower]:
        """Run a command that follows, and end it."""
        out, err = self.directory / "followed.out", self.directory / "followed.err"
        with out.open("wb") as output, err.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rcfarm", *arguments, cwd=REPOSITORY, env=self.environ(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            )  # fmt: skip
        try:
            yield Follower(self.fleet, process, out, err)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@dataclass
class Follower:
    """A command that follows logs."""

    fleet: Installation
    process: asyncio.subprocess.Process
    out: Path
    err: Path

    async def until(self, text: str, *, errors: bool = False) -> None:
        path = self.err if errors else self.out
        await self.fleet.until(lambda: text in path.read_text(), f"{text!r} is shown: {self.err.read_text()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("logs")
    server = ConsulServer(directory)
    server.start()
    authority = Authority(directory / "ca")
    certificate = authority.issue("agent", host=SECURE)
    for name in ("token", "logs-token", "exec-token"):
        (directory / name).write_text(f"the-{name}\n")
    sizes: dict[str, Any] = {"log_size": 64 * 1024, "log_files": 3, "log_interval": 0.2}
    try:
        async with installation(server, directory / "site") as fleet:
            fleet.farm("farm-a")
            agents = {
                node: fleet.agent(
                    node, labels=f"node={node},pool=local", listen_token_file=directory / "token", **sizes,
                    exec="on" if node == "node-1" else "off",
                )
                for node in LOCAL
            }  # fmt: skip
            agents[SECURE] = fleet.agent(
                SECURE, labels=f"node={SECURE}", listen="0.0.0.0:0", exec="on",
                listen_cert_file=certificate.certificate, listen_key_file=certificate.key,
                listen_token_file=directory / "logs-token", exec_token_file=directory / "exec-token",
            )  # fmt: skip
            await fleet.until_live("farm-a")
            await fleet.until_registered(*LOCAL, SECURE)
            yield Site(fleet, directory, agents)
    finally:
        server.stop()


async def test_logs_of_several_nodes_and_streams(site: Site) -> None:
    """Each line begins with its node; JSON has the stream; one node, a tail and a time choose; the record has the
    address; wrong names are one error and change nothing."""
    await site.apply("talk", ["sh", "-c", TALK], "pool=local", 2)
    shown = await site("rc", "logs", "talk")
    assert shown.code == 0, shown.err
    assert sorted(shown.out.splitlines()) == [f"{node} | {word}-{node}" for node in LOCAL for word in ("err", "out")]
    ran = await site("rc", "logs", "talk", "--node", "node-2", "--output", "json")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert {(line["stream"], line["line"]) for line in lines} == {("stdout", "out-node-2"), ("stderr", "err-node-2")}
    assert {(line["node"], line["pod"], line["launchable"]) for line in lines} == {("node-2", "talk", "main")}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])
    assert (await site("rc", "logs", "talk", "--node", "node-1", "--tail", "0")).out == ""
    assert (await site("rc", "logs", "talk", "--since", "2099-01-01")).out == ""
    entry = require(await site.fleet.store.get(site.fleet.keys.node_alive("node-1")))
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", json.loads(entry.value)["listener"])
    for words, error in {
        ("nothing",): "there is no rc nothing",
        ("talk", "--node", "node-9"): "rc talk has no pod on node node-9; it has pods on node-1, node-2",
        ("talk", "--launchable", "web"): "pod talk: it has no log of a launchable 'web'; it has main",
        ("talk", "--launchable", "../etc"): "the launchable's name is not a DNS label",
        ("talk", "--previous"): "it has no earlier run: its processes were started once; leave out --previous",
        ("talk", "--previous", "-f"): "a run that has ended writes nothing more",
        ("talk", "--since", "soon"): "--since 'soon': write",
    }.items():
        refused = await site("rc", "logs", *words)
        assert (refused.code, refused.out) == (1, ""), words
        assert error in refused.err
        assert "Traceback" not in refused.err


async def test_follow_loses_nothing_while_logs_rotate(site: Site) -> None:
    """1,000 lines per second of two pods: all of them, in order, although a log is rotated each second and one agent
    is killed and started again. A restart of the process is noted; --previous shows the run before it."""
    await site.apply("count", [sys.executable, "-c", COUNT], "pool=local", 2)
    async with site.following("rc", "logs", "count", "-f", "--since", "1h") as follower:
        await follower.until("line 0002000", errors=False)
        site.agents["node-2"].kill()
        site.agents["node-2"].start()
        await follower.until("its agent answers again", errors=True)
        rotated = site.fleet.state_dir("node-1") / "logs" / "count" / "main.log.3"
        await site.fleet.until(rotated.exists, "the log has been rotated three times")
        reality = require(await site.fleet.fleet.reality("node-1", "count"))
        pid = require(reality.launchables["main"].pid)
        os.kill(pid, signal.SIGKILL)
        await follower.until("main was started again", errors=True)
        position = len(follower.out.read_text())
        await site.fleet.until(lambda: len(follower.out.read_text()) > position + 100_000, "it goes on")
    found: dict[str, list[int]] = {node: [] for node in LOCAL}
    whole = follower.out.read_text().rpartition("\n")[0]
    for line in whole.splitlines():
        node, _, text = line.partition(" | ")
        match = re.fullmatch(r"line (\d{7}) of many that fill the log of this pod", text)
        assert match, line
        found[node].append(int(match[1]))
    assert found["node-2"] == list(range(len(found["node-2"])))
    restart = found["node-1"].index(0, 1)
    assert found["node-1"][:restart] == list(range(restart))
    assert found["node-1"][restart:] == list(range(len(found["node-1"]) - restart))
    before = await site("rc", "logs", "count", "--node", "node-1", "--previous", "--tail", "1")
    assert before.out.startswith(f"line {restart - 1:07} "), before.err
    assert (await site("rc", "delete", "count", "--yes")).code == 0


async def test_pods_join_and_leave_the_stream(site: Site) -> None:
    """A new pod's lines appear; a pod that leaves ends with a note; the end of the RC ends the command."""
    await site.apply("moves", ["sh", "-c", TALK], "node=node-1")
    async with site.following("rc", "logs", "moves", "-f") as follower:
        await follower.until("out-node-1")
        await site.apply("moves", ["sh", "-c", TALK], "pool=local", 2, waits=False)
        await follower.until("node-2 | err-node-2")
        assert (await site("rc", "delete", "moves", "--yes")).code == 0
        await follower.until("node-1: the pod is gone from this node", errors=True)
        async with asyncio.timeout(30):
            assert await follower.process.wait() == 0
    assert follower.out.read_text().count("out-node-2") == 1


async def test_a_reader_of_the_output_may_go(site: Site) -> None:
    """`| head` ends the command at the next line, without an error; also that in a pod."""
    await site.apply("chat", ["sh", "-c", "while echo line; do sleep 0.05; done"], "node=node-1")
    for words in (("logs", "chat", "-f"), ("exec", "chat", "--node", "node-1", "--", "yes")):
        command = [sys.executable, "-m", "rcfarm", "rc", *words]
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=site.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert await asyncio.to_thread(process.stdout.readline) in (b"node-1 | line\n", b"y\n")
            process.stdout.close()
            assert await asyncio.to_thread(process.wait, 30) == (0 if words[0] == "logs" else 141)
            assert process.stderr.read() == b""
    assert (await site("rc", "delete", "chat", "--yes")).code == 0


async def test_a_failed_process_shows_its_last_lines(site: Site) -> None:
    """Status and explain have the last five lines on stderr, bounded and harmless, and the log's path."""
    script = "for n in 1 2 3 4 5 6; do echo trace $n >&2; done; printf '\\033[31m%0300d\\n' 0 >&2; echo out; exit 3"
    await site.apply("fails", ["sh", "-c", script], "node=node-1", waits=False)
    log = site.fleet.state_dir("node-1") / "logs" / "fails" / "main.stderr.log"

    async def shown() -> str | None:
        ran = await site("rc", "status", "fails")
        return ran.out if "last lines of main" in ran.out else None

    status = await site.fleet.until(shown, "status has the last lines")
    explained = (await site("explain", "pod/node-1/fails")).out
    for text in (status, explained):
        assert f"last lines of main on node-1, of {log}:\n  trace 3\n  trace 4\n  trace 5\n  trace 6\n" in text
        (last,) = (line for line in text.splitlines() if "x1b[31m" in line)
        assert len(last.strip()) == 200
    assert (await site("rc", "delete", "fails", "--yes")).code == 0


async def test_commands_in_pods(site: Site) -> None:
    """A command has its process's environment and directory, streams and exit code; it is in the audit log; it ends
    with its client, and what is refused is one error."""
    await site.apply("talk", ["sh", "-c", TALK], "pool=local", 2)
    script = "pwd; echo $RCFARM_POD_ID >&2; cat; exit 7"
    ran = await site("rc", "exec", "talk", "--node", "node-1", "-i", "--", "sh", "-c", script, stdin="given\n")
    assert (ran.code, ran.err) == (7, "talk\n")
    assert ran.out == f"{site.fleet.state_dir('node-1')}/pods/talk/main\ngiven\n"
    assert (await site("rc", "exec", "talk", "--node", "node-1", "--", "sh", "-c", "kill -9 $$")).code == 137
    assert (await site("rc", "exec", "talk", "--node", "node-1", "--", "no-such-program")).code == 127
    events = [json.loads(line) for line in (await site("audit", "export")).out.splitlines()]
    recorded = {event["event_details"].get("command"): event for event in events if event["event_type"] == "POD_EXEC"}
    event = recorded[shlex.join(["sh", "-c", script])]
    assert (event["event_details"]["rc"], event["uid"]) == ("talk", os.geteuid())
    assert "given" not in json.dumps(events)

    async with site.following("rc", "exec", "talk", "--node", "node-1", "--", "sh", "-c", "echo $$; sleep 1000") as run:
        await run.until("\n")
        pid = int(run.out.read_text())
        assert alive(pid)
        run.process.kill()
        await site.fleet.until(lambda: not alive(pid), "the command is killed with its client")
    for words, error in {
        ("talk", "--node", "node-2"): 'node node-2: it runs no commands for clients; set agent.exec = "on" there',
        ("talk", "--node", "node-1", "--launchable", "web"): "it has no launchable 'web'; it has main",
        ("talk", "--node", "node-1", "-t"): "--tty: standard input and output are not a terminal",
    }.items():
        refused = await site("rc", "exec", *words, "--", "true")
        assert (refused.code, refused.out) == (1, "")
        assert error in refused.err


async def test_only_what_is_in_the_audit_log_is_run(site: Site) -> None:
    """A client with the token that records nothing, another command, or the same one twice, runs nothing."""
    await site.apply("talk", ["sh", "-c", TALK], "pool=local", 2)
    fleet = site.fleet
    listener = listener_of(
        "node-1", await Nodes(fleet.store, fleet.keys).get("node-1"), Credentials(site.directory / "token")
    )

    async def run(event: str, *argv: str) -> ExecResult:
        async with open_exec(listener, "talk", {"argv": argv, "event": event}) as socket:
            async for message in socket:
                if message.data[0] == RESULT:
                    return msgspec.json.decode(message.data[1:], type=ExecResult)
        raise AssertionError("no result")

    event = event_op(fleet.keys, EXEC_EVENT, exec_details("node-1", "talk", "", ["true"]), actor="eve")
    for key in ("", event.key, fleet.keys.node_alive("node-1")):
        assert "the command is not in the audit log" in (await run(key, "true")).error
    await fleet.store.txn([event])
    assert "the command is not in the audit log" in (await run(event.key, "false")).error
    assert (await run(event.key, "true")) == ExecResult(code=0)
    assert "the command is not in the audit log" in (await run(event.key, "true")).error


async def test_a_slow_reader_slows_nobody(site: Site) -> None:
    """A client that stops reading keeps neither the process nor another reader from going on; it gets a note of what it
    has missed, and the end."""
    burst = "while [ ! -e go ]; do sleep 0.05; done; yes 'a line of a burst' | head -c 4000000; echo over; sleep 1000"
    await site.apply("burst", ["sh", "-c", burst], "node=node-1")
    fleet = site.fleet
    listener = listener_of(
        "node-1", await Nodes(fleet.store, fleet.keys).get("node-1"), Credentials(site.directory / "token")
    )
    async with read_logs(listener, "burst", {"follow": "1"}) as frames:
        (fleet.state_dir("node-1") / "pods" / "burst" / "main" / "go").touch()

        async def is_over() -> bool:
            return (await site("rc", "logs", "burst", "--tail", "1")).out.endswith("over\n")

        await fleet.until(is_over, "another reader sees the end")
        events, data = [], b""
        async with asyncio.timeout(30):
            async for several in frames:
                events += [frame for frame, _ in several if frame.event == "skipped"]
                data += b"".join(part for _, part in several)
                if data.endswith(b"over\n"):
                    break
    assert events
    skipped = sum(int(event.text.partition(" ")[0]) for event in events)
    assert len(data) + skipped == 4000000 + len("over\n")


async def test_a_command_on_a_terminal(site: Site) -> None:
    """`exec -it`: a controlling terminal of the client's size, and keys that reach the command."""
    await site.apply("talk", ["sh", "-c", TALK], "pool=local", 2)
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", "33", "cols", "101"], stdin=theirs, check=True)
    command = [sys.executable, "-m", "rcfarm", "rc", "exec", "talk", "--node", "node-1", "-it", "--"]
    script = "stty size </dev/tty; read line; echo [$line]; exec sleep 1000"
    environ = site.environ(TERM="xterm")
    process = subprocess.Popen([*command, "sh", "-c", script], cwd=REPOSITORY, env=environ, stdin=theirs, stdout=theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = b""

    def shows(text: bytes) -> bool:
        nonlocal seen
        with contextlib.suppress(OSError):
            seen += os.read(ours, 4096)
        return text in seen

    try:
        await site.fleet.until(lambda: shows(b"33 101"), "the terminal has its size")
        os.write(ours, b"typed\r")
        await site.fleet.until(lambda: shows(b"[typed]"), "the command has read a line")
        os.write(ours, b"\x03")  # Ctrl-C goes to the command, not to the client
        assert await asyncio.to_thread(process.wait, 30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


async def test_a_listener_beyond_loopback(site: Site) -> None:
    """TLS with a certificate that names the node, and a token for each right; anything else is refused by name."""
    await site.apply("far", ["sh", "-c", TALK], f"node={SECURE}")
    directory = site.directory
    ca, logs, run = str(directory / "ca" / "ca.crt"), str(directory / "logs-token"), str(directory / "exec-token")
    other = Authority(directory / "other").own.certificate
    given = {"RCFARM_LISTENER_CA_FILE": ca, "RCFARM_LISTENER_TOKEN_FILE": logs}
    shown = await site("rc", "logs", "far", **given)
    assert sorted(shown.out.splitlines()) == [f"err-{SECURE}", f"out-{SECURE}"], shown.err
    assert (await site("rc", "exec", "far", "--agent-token-file", run, "--", "echo", "hi", **given)).out == "hi\n"
    refused = await site("rc", "exec", "far", "--", "echo", "hi", **given)
    assert (refused.code, refused.out) == (1, "")
    assert f"the token in {logs} may read logs on node {SECURE}, but run no commands" in refused.err
    for options, error in {
        ("--agent-ca", str(other)): f"the listener of node {SECURE} at https://127.0.0.1:",
        ("--agent-token-file", str(directory / "token")): f"that in {directory / 'token'} is not accepted",
        ("--agent-token-file", str(directory / "none")): "can't be read: ",
    }.items():
        refused = await site("rc", "logs", "far", *options, **given)
        assert (refused.code, refused.out) == (1, ""), options
        assert error in refused.err
        assert len(refused.err.splitlines()) == 1


async def test_an_agent_that_is_away(site: Site) -> None:
    """The other nodes' lines are shown, and one error names the agent; the exit code is 1."""
    await site.apply("talk", ["sh", "-c", TALK], "pool=local", 2)
    site.agents["node-2"].kill()
    ran = await site("rc", "logs", "talk", "--tail", "1")
    assert ran.code == 1
    assert "out-node-1" in ran.out
    assert re.search(r"error: the agent of node node-2 does not (answer|listen)", ran.err), ran.err
    site.agents["node-2"].start()
