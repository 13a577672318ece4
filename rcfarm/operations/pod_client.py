"""The client of the agents' listeners: find a node's listener, read logs there, run commands.

What a client trusts: the store says where a listener is, and no more. On loopback, the token is sent only to a process
of the user who owns the token's file. Beyond loopback, the certificate must name the node. So a client that can write
to the store can't have a token sent to a listener of its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from rcfarm.config import BadSettings, token_in
from rcfarm.operations.nodes import NodeError, NodeView
from rcfarm.operations.pod_wire import (
    EXEC_PATH,
    HEARTBEAT,
    LOGS_PATH,
    SILENCE,
    FrameReader,
    LogFrame,
    loopback_id,
    owner_of_listener,
)
from store.decoding import Undecodable

if TYPE_CHECKING:  # imported by the first call: it takes longer than all the rest of a command
    from ssl import SSLContext

    import aiohttp

TOKEN_FILE = "listener.token"
_LOOPBACK = ("127.0.0.1", "::1")
_CONNECT = 5.0  # seconds
_MAX_ERROR = 4096  # bytes of an answer that is shown


class ListenerError(NodeError):
    """The listener of a node's agent can't be used; the message says why, and what to do."""


class AgentAway(ListenerError):
    """The agent, or its listener, does not answer now."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A client's own. `token_file`: None for the token of an agent on this machine, which is looked for in `homes`."""

    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    homes: Sequence[Path] = ()


class Listener(NamedTuple):
    """A node's listener, with what it is called with. `token_from`: the token's file, for messages. `options`: of
    aiohttp, for TLS."""

    node: str
    url: str
    token: str
    token_from: str
    options: dict[str, Any]


def listener_of(node: str, view: NodeView, credentials: Credentials) -> Listener:
    """Return how to call the listener of a node. Raises `ListenerError`."""
    alive = view.alive
    if alive is None:
        raise AgentAway(f"the agent of node {node} does not answer: its lease has ended; start it on {node}")
    if not alive.listener:
        raise ListenerError(
            f"the agent of node {node} serves no logs: agent.listen is off there, or its version ({alive.version}) is "
            "too old"
        )
    parts = urlsplit(alive.listener)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port:
        raise ListenerError(f"node {node}: its listener is {alive.listener!r}, which is no URL; restart its agent")
    is_local = parts.hostname in _LOOPBACK and alive.loopback == loopback_id()
    if parts.scheme == "https" and (is_local or not alive.loopback):
        token = _token(credentials.token_file) if credentials.token_file else ""
        options = {"ssl": _tls(node, credentials), "server_hostname": node}
        return Listener(node, alive.listener, token, str(credentials.token_file or ""), options)
    if not is_local:
        raise ListenerError(
            f"the agent of node {node} listens on its loopback only: run this on {node}, or set agent.listen there, "
            "with agent.listen_cert_file and agent.listen_token_file"
        )
    own = [home / TOKEN_FILE for home in credentials.homes]
    path = credentials.token_file or next((each for each in own if os.access(each, os.R_OK)), None)
    if path is None:
        raise ListenerError(
            f"no token for the agent of node {node}: give --agent-token-file FILE ({TOKEN_FILE} in the agent's state "
            f"directory, as the agent's user or root; looked for {', '.join(map(str, own))})"
        )
    owner = owner_of_listener((parts.hostname, parts.port))
    if owner is None:
        raise AgentAway(f"the agent of node {node} does not listen on {alive.listener} any more; try again in a moment")
    if owner not in (path.stat().st_uid, 0):
        raise ListenerError(
            f"{alive.listener} is not served by the owner of {path}, but by uid {owner}: the token is not sent there"
        )
    return Listener(node, alive.listener, _token(path), str(path), {})


def _token(path: Path) -> str:
    try:
        return token_in(f"--agent-token-file {path}", path)
    except BadSettings as error:
        raise ListenerError(str(error)) from error


def _tls(node: str, credentials: Credentials) -> SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=credentials.ca_file)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if credentials.cert_file:
            context.load_cert_chain(credentials.cert_file, credentials.key_file)
    except OSError as error:
        files = ", ".join(str(path) for path in (credentials.ca_file, credentials.cert_file) if path)
        raise ListenerError(f"--agent-ca or --agent-cert: {files} can't be used for node {node}: {error}") from error
    return context


@asynccontextmanager
async def _calling(listener: Listener) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session; its errors become `ListenerError`."""
    import aiohttp

    from store.http import cause_of

    timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT, sock_read=SILENCE)
    headers = {"Authorization": f"Bearer {listener.token}"} if listener.token else {}
    node, url = listener.node, listener.url
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers, auto_decompress=False) as session:
            yield session
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        raise ListenerError(
            f"the listener of node {node} at {url} has a wrong certificate: {why}; it must name the node (DNS:{node}) "
            "and come from an authority in --agent-ca FILE"
        ) from error
    except aiohttp.WSServerHandshakeError as error:
        raise _refused(listener, error.status, error.message) from error
    except aiohttp.ClientSSLError as error:
        raise ListenerError(
            f"the listener of node {node} at {url} refuses the TLS connection ({error.os_error}): it may require a "
            "certificate: --agent-cert FILE and --agent-key FILE"
        ) from error
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
        raise AgentAway(f"the agent of node {node} has closed the connection") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise AgentAway(f"the agent of node {node} does not answer at {url}: {cause_of(error)}") from error
    except (Undecodable, ValueError) as error:
        raise ListenerError(f"the listener of node {node} at {url} is not that of an agent: {error}") from error


def _refused(listener: Listener, status: int, text: str) -> ListenerError:
    """Return the error for an answer that is none."""
    node, text = listener.node, " ".join(text.split())
    if status == 401:
        given = f"that in {listener.token_from} is not accepted" if listener.token else "none was given"
        return ListenerError(f"the agent of node {node} requires its token: {given}; give --agent-token-file FILE")
    if status == 403:
        return ListenerError(
            f"the token in {listener.token_from} may read logs on node {node}, but run no commands: give that of "
            "agent.exec_token_file"
        )
    return ListenerError(f"node {node}: {text}")


@asynccontextmanager
async def read_logs(
    listener: Listener, pod_id: str, parameters: Mapping[str, str]
) -> AsyncIterator[AsyncIterator[list[tuple[LogFrame, bytes]]]]:
    """Yield the frames of a pod's logs. Raises `ListenerError`, `AgentAway` when the connection is lost."""
    url = listener.url + LOGS_PATH.format(node=listener.node, pod=pod_id)
    async with _calling(listener) as session, session.get(url, params=dict(parameters), **listener.options) as response:
        if response.status != 200:
            text = await response.content.read(_MAX_ERROR)
            raise _refused(listener, response.status, text.decode(errors="replace"))

        async def frames() -> AsyncIterator[list[tuple[LogFrame, bytes]]]:
            reader = FrameReader()
            async for chunk in response.content.iter_any():
                yield reader.feed(chunk)

        yield frames()


@asynccontextmanager
async def open_exec(
    listener: Listener, pod_id: str, request: Mapping[str, Any]
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """Yield the connection to a command that runs in a pod. Raises `ListenerError`."""
    url = listener.url + EXEC_PATH.format(node=listener.node, pod=pod_id)
    params = {"request": msgspec.json.encode(request).decode()}
    async with _calling(listener) as session:
        connecting = session.ws_connect(
            url, params=params, max_msg_size=1 << 20, heartbeat=HEARTBEAT, **listener.options
        )
        async with connecting as socket:
            yield socket
