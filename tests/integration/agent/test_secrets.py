"""Secrets of pods: variables from files of the node and from Consul, which no record shows."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from store.consul.store import ConsulSettings, ConsulStore
from store.embedded.store import EmbeddedStore
from tests.support.agent.agents import AgentHarness, harness, manifest
from tests.support.consul.server import StartConsul
from tests.support.programs.cli import run

VALUE = "hunter2/and+more"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "db").write_text(f"# of the shop\nDB_PASSWORD='{VALUE}'\nDB_USER=shop\n")
    return tmp_path / "secrets"


@pytest.fixture
async def node(files: Path, tmp_path: Path) -> AsyncIterator[AgentHarness]:
    store = EmbeddedStore()
    async with harness(store, tmp_path / "node", secret_files=(f"{files}/",)) as node:
        yield node
    await store.close()


def with_secrets(*sources: dict[str, str], command: str = "env | sort; sleep 1000", **fields: Any) -> dict[str, Any]:
    env_from = list(sources) if len(sources) > 1 else sources[0]
    return manifest(
        command=["sh", "-c", command], launchable={"env_from": env_from, "env": {"DB_USER": "own"}}, **fields
    )


async def test_a_process_gets_its_secrets_and_no_record_does(node: AgentHarness, files: Path) -> None:
    """Files and keys of Consul; `env` is stronger than both. What a check prints of them is redacted."""
    node.start()
    await node.store.put(node.keys.secret("api"), b"API_TOKEN=abc-123\nDB_PASSWORD=is overridden\n")
    check = {"exec": {"command": ["sh", "-c", "echo says $DB_PASSWORD; exit 1"]}, "interval": 0.2}
    await node.run_pod(with_secrets({"consul": "api"}, {"file": str(files / "db")}, health=check))
    await node.until_logged("DB_USER=own")
    assert {f"DB_PASSWORD={VALUE}", "API_TOKEN=abc-123"} <= set(node.log().splitlines())
    assert (await node.until_health("warning")).output == "says [redacted]"
    for entry in (await node.store.list(node.keys.root + "/")).entries:
        assert b"hunter2" not in entry.value
        assert b"abc-123" not in entry.value


async def test_a_changed_secret_restarts_nothing_and_counts_at_the_next_start(node: AgentHarness, files: Path) -> None:
    """Also across a restart of the agent, which adopts the process and reads its secrets only for the check."""
    check = {"exec": {"command": ["sh", "-c", "echo says $DB_PASSWORD; exit 1"]}, "interval": 0.2}
    node.start()
    await node.intend(with_secrets({"file": str(files / "db")}, health=check))
    pid = (await node.until_running()).pid
    await node.until_logged(f"DB_PASSWORD={VALUE}")
    (files / "db").write_text("DB_PASSWORD=changed\n")
    await node.stop()
    node.start()
    assert (await node.until_health("warning")).output == "says [redacted]"
    assert (await node.until_running()).pid == pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await node.until_logged("DB_PASSWORD=changed")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            {"file": "/etc/hostname"},
            "this node does not allow secrets from there: add its directory to agent.secret_files",
        ),
        ({"file": "{files}/../outside"}, "this node does not allow secrets from there"),
        ({"file": "{files}/link"}, "this node does not allow secrets from there"),
        ({"file": "{files}/none"}, "can't be read: No such file or directory"),
        ({"file": "{files}/fifo"}, "not a regular file"),
        ({"file": "{files}/bad"}, "line 2: write NAME=value"),
        ({"file": "{files}/huge"}, "has more than 65536 bytes"),
        ({"consul": "none"}, "there is no secret none; `rcfarm secret set none --file FILE` makes it"),
    ],
)
async def test_a_secret_that_can_not_be_had_is_named(
    node: AgentHarness, files: Path, source: dict[str, str], reason: str
) -> None:
    """The pod that runs goes on, and the message shows nothing of a file's content."""
    (files.parent / "outside").write_text("A=1\n")
    (files / "link").symlink_to(files.parent / "outside")
    os.mkfifo(files / "fifo")
    (files / "bad").write_text("A=1\nhunter2\n")
    (files / "huge").write_text(f"A={'x' * 70_000}\n")
    node.start()
    await node.intend(manifest())
    pid = (await node.until_running()).pid
    await node.intend(with_secrets({kind: place.format(files=files) for kind, place in source.items()}))
    found = await node.until(lambda it: reason in it.reason)
    assert found.reason.startswith("launchables.main.env_from[0]: ")
    assert "hunter2" not in found.reason
    assert found.launchables["main"].pid == pid
    (kind,) = source
    if kind == "consul":  # what was missing comes
        await node.store.put(node.keys.secret("none"), b"A=1\n")
        await node.until(lambda it: not it.reason and it.launchables["main"].pid != pid)
        await node.until_logged("A=1")


async def test_agents_need_the_printed_policy_for_secrets(start_consul: StartConsul, tmp_path: Path) -> None:
    """The policy of the node's agent alone does not do, and the refusal names what is missing."""
    server = start_consul(acl=True)
    environ = {"RCFARM_STORE": server.url, "CONSUL_HTTP_TOKEN": server.token or ""}

    async def rcfarm(*words: str, stdin: str = "") -> str:
        return (await asyncio.to_thread(run, *words, stdin=stdin, env=environ)).out

    assert await rcfarm("secret", "set", "api", "-f", "-", stdin="API_TOKEN=abc-123\n") == "secret api: set\n"
    of_agent = await rcfarm("node", "policy", "node-1") + 'node_prefix "" { policy = "read" }\n'
    refused = "this agent's token may not read rcfarm-secrets/api; `rcfarm secret policy api` prints the policy"
    operator = ConsulStore(ConsulSettings.from_env(server.url, environ=environ))
    await AgentHarness(operator, tmp_path / "none").intend(with_secrets({"consul": "api"}))
    for rules in (of_agent, of_agent + await rcfarm("secret", "policy", "api")):
        token = {"CONSUL_HTTP_TOKEN": server.create_token(rules)}
        store = ConsulStore(ConsulSettings.from_env(server.url, environ=token))
        async with harness(store, tmp_path / "node") as node:
            node.start()
            if rules == of_agent:
                await node.until(lambda it: refused in it.reason)
            else:
                await node.until_running()
                await node.until_logged("API_TOKEN=abc-123")
        await store.close()
    await operator.close()
