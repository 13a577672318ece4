"""Who may use an agent's listener, and where it may listen."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rcfarm.agent.listener import TOKEN_FILE, check_access, own_token, read_access
from rcfarm.config import BadSettings
from rcfarm.config.agent import AgentSettings
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.pod_client import Credentials, ListenerError, listener_of
from rcfarm.operations.pod_wire import loopback_id, owner_of_listener
from store.schema.records import NodeAlive, NodeSpec
from tests.support import require
from tests.support.kube.certificates import Authority

TLS = {"listen_cert_file": "/x.crt", "listen_key_file": "/x.key"}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "agent.listen: 10.0.0.7 is reachable from other machines, so TLS is required: set agent.listen_cert_file"),
        (TLS, "so clients must be known: set agent.listen_token_file or agent.listen_client_ca_file"),
        ({**TLS, "listen_token_file": "/t", "exec": "on"}, "agent.exec: .* needs a token of its own"),
        ({"listen": "nowhere"}, "agent.listen: 'nowhere' is not HOST:PORT"),
    ],
)
def test_a_listener_that_is_open_to_others_is_refused(fields: dict[str, Any], error: str) -> None:
    """At the start, with the setting to change."""
    with pytest.raises(BadSettings, match=error):
        check_access(AgentSettings(node="n", **{"listen": "10.0.0.7:8605", **fields}))


@pytest.mark.parametrize("fields", [{"listen_cert_file": "/x"}, {"listen_client_ca_file": "/x"}])
def test_half_of_tls_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(BadSettings, match=r"agent\.listen_"):
        AgentSettings(node="n", **fields).checked()  # type: ignore[arg-type]


def test_the_token_is_made_once_and_is_private(tmp_path: Path) -> None:
    """On loopback, a token guards the listener without a setting; the next agent has the same."""
    access = require(read_access(AgentSettings(node="n"), tmp_path))
    assert access.exec
    assert access.log_token == access.exec_token == own_token(tmp_path)
    assert len(access.log_token) >= 32
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [TOKEN_FILE]
    assert read_access(AgentSettings(node="n", listen="off"), tmp_path) is None
    (tmp_path / TOKEN_FILE).write_text("")
    with pytest.raises(BadSettings, match="holds no token"):
        own_token(tmp_path)


def test_exec_has_a_right_of_its_own_beyond_loopback(tmp_path: Path) -> None:
    """It is off unless it is turned on, and its token is another one."""
    issued = Authority(tmp_path / "ca").issue("agent")
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("secret\n")
    other.write_text("more secret\n")
    fields: dict[str, Any] = {
        "node": "n", "listen": "0.0.0.0:0", "listen_token_file": str(token),
        "listen_cert_file": str(issued.certificate), "listen_key_file": str(issued.key),
    }  # fmt: skip
    access = require(read_access(AgentSettings(**fields), tmp_path))
    assert not access.exec
    assert access.url("0.0.0.0:8605", "10.0.0.7") == "https://10.0.0.7:8605"
    both = require(read_access(AgentSettings(**fields, exec="on", exec_token_file=str(other)), tmp_path))
    assert (both.log_token, both.exec_token, both.exec) == ("secret", "more secret", True)
    with pytest.raises(BadSettings, match=r"has the same token as agent\.listen_token_file"):
        read_access(AgentSettings(**fields, exec="on", exec_token_file=str(token)), tmp_path)
    with pytest.raises(BadSettings, match=r"agent\.listen_cert_file, agent\.listen_key_file: can't be used"):
        read_access(AgentSettings(**{**fields, "listen_cert_file": str(token)}), tmp_path)


def node(**fields: Any) -> NodeView:
    alive = NodeAlive("host:1", "2026-01-01T00:00:00Z", version="1", **fields)
    return NodeView(NodeSpec(name="n"), alive, alive)


@pytest.mark.parametrize(
    ("view", "error"),
    [
        (NodeView(NodeSpec(name="n"), None, None), "does not answer: its lease has ended"),
        (node(), r"serves no logs: agent\.listen is off there, or its version"),
        (
            node(listener="http://127.0.0.1:1", loopback="another"),
            "listens on its loopback only: run this on n, or set",
        ),
        (node(listener="http://10.0.0.7:80", loopback=loopback_id()), "listens on its loopback only"),
        (node(listener="ftp://127.0.0.1", loopback=loopback_id()), "which is no URL"),
        (
            node(listener="http://127.0.0.1:1", loopback=loopback_id()),
            r"does not listen on http://127\.0\.0\.1:1 any more",
        ),
    ],
)
def test_a_listener_that_can_not_be_called_is_named(view: NodeView, error: str, tmp_path: Path) -> None:
    """And no token is sent anywhere."""
    own_token(tmp_path)
    with pytest.raises(ListenerError, match=error):
        listener_of("n", view, Credentials(homes=[tmp_path]))


def test_without_a_token_the_error_says_where_it_was_looked_for(tmp_path: Path) -> None:
    view = node(listener="http://127.0.0.1:1", loopback=loopback_id())
    with pytest.raises(ListenerError, match=rf"--agent-token-file FILE .* looked for {tmp_path}/listener\.token"):
        listener_of("n", view, Credentials(homes=[tmp_path]))


async def test_the_owner_of_a_socket_is_known() -> None:
    """A token is sent to nobody else's."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    assert owner_of_listener(address) == os.geteuid()
    assert owner_of_listener(("127.0.0.1", 1)) is None
    server.close()
