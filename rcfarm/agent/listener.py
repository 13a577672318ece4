"""The agent's listener: the logs of this node's pods, and commands in them.

    GET /v1/nodes/<node>/pods/<pod>/logs    a stream of frames (`rcfarm.operations.pod_wire`)
    GET /v1/nodes/<node>/pods/<pod>/exec    a WebSocket with the streams of a command

By default it listens on loopback. Any user of the machine can connect there, so it requires a token that only the
agent's user can read. Beyond loopback it requires TLS and a token, or the certificates of its clients. Running commands
is a right of its own (`agent.exec`, `agent.exec_token_file`); the client also has to write the command to the audit
log, with its own rights in the store, and the agent runs only what it finds there.

A path names the node, so that a client with an old address is not answered by the agent of another. Names are looked up
and never become parts of a path before they were found valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from aiohttp import web

from rcfarm.agent.errors import AgentError, ExecRefused, NoSuchLog, StateError, describe_os_error
from rcfarm.agent.exec import ExecRequest, run_command
from rcfarm.agent.log_files import LogRecords
from rcfarm.agent.log_streams import LogQuery, LogStream, LogWatch
from rcfarm.agent.pods.worker import PodWorker
from rcfarm.config import BadSettings, token_in
from rcfarm.config.agent import AgentSettings
from rcfarm.daemon.health_server import serving
from rcfarm.daemon.listener import Address, parse_address
from rcfarm.operations.pod_wire import (
    EXEC_EVENT,
    EXEC_PATH,
    HEARTBEAT,
    LOGS_PATH,
    RESULT,
    ExecResult,
    LogFrame,
    exec_details,
    loopback_id,
)
from store.http_server import Bounds, RequestRefused
from store.kv.protocol import BadRecord, Denied, Store, StoreError
from store.schema.keys import Keys, is_dns_label
from store.schema.records import AuditEvent, decode
from store.tls import TlsFiles

log = structlog.get_logger(__name__)

TOKEN_FILE = "listener.token"
_SEND_TIMEOUT = 60.0  # seconds for which a client may accept nothing
_SEND_BUFFER = 128 * 1024  # bytes
_INEXACT = 1.0  # seconds between two looks where the kernel gives no notice of changes
_RECORDED_SECONDS = 120.0  # that an event in the audit log allows its command to run
_SEEN_EVENTS = 4096
_BOUNDS = Bounds(request_seconds=math.inf, connections=64, drop_after=None)


class Access(NamedTuple):
    """Where the agent listens, and what it requires. `log_token`, `exec_token`: "" where a certificate is enough, and
    that of `exec` while that is off."""

    address: Address
    tls: TlsFiles | None
    log_token: str
    exec_token: str
    exec: bool

    def url(self, where: str, own_address: str) -> str:
        """Return the URL at which clients reach `where`, HOST:PORT."""
        host, _, port = where.rpartition(":")
        if host in ("0.0.0.0", "[::]"):
            host = f"[{own_address}]" if ":" in own_address else own_address
        elif not self.address.is_loopback:
            host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        return f"{'https' if self.tls else 'http'}://{host}:{port}"


def check_access(settings: AgentSettings) -> Address | None:
    """Return the address to listen on; None for `off`. Raises `BadSettings` for one that other machines reach without
    TLS, or without a way to know the clients."""
    address = parse_address(settings.listen, 0, "agent.listen")
    if address is None or address.is_loopback:
        return address
    reachable = f"agent.listen: {address.host} is reachable from other machines, so"
    back = "or listen on 127.0.0.1"
    if not settings.listen_cert_file:
        raise BadSettings(f"{reachable} TLS is required: set agent.listen_cert_file and agent.listen_key_file, {back}")
    if not (settings.listen_token_file or settings.listen_client_ca_file):
        raise BadSettings(
            f"{reachable} clients must be known: set agent.listen_token_file or agent.listen_client_ca_file, {back}"
        )
    if settings.exec == "on" and not settings.exec_token_file:
        raise BadSettings(
            "agent.exec: running commands beyond loopback needs a token of its own: set agent.exec_token_file, or "
            "agent.exec to off"
        )
    return address


def read_access(settings: AgentSettings, state_dir: Path) -> Access | None:
    """Return how the agent listens; None for not at all. Creates the token for loopback. Raises `BadSettings`."""
    address = check_access(settings)
    if address is None:
        return None
    tls = None
    if settings.listen_cert_file:
        ca = Path(settings.listen_client_ca_file) if settings.listen_client_ca_file else None
        tls = TlsFiles(Path(settings.listen_cert_file), Path(settings.listen_key_file), ca)
        try:
            tls.context()
        except OSError as error:
            raise BadSettings(f"agent.listen_cert_file, agent.listen_key_file: can't be used: {error}") from error
    if settings.listen_token_file:
        log_token = token_in("agent.listen_token_file", settings.listen_token_file)
    else:
        log_token = own_token(state_dir) if address.is_loopback else ""
    exec_token = token_in("agent.exec_token_file", settings.exec_token_file) if settings.exec_token_file else ""
    allows_exec = settings.exec == "on" or (not settings.exec and address.is_loopback)
    if allows_exec and exec_token == log_token and not address.is_loopback:
        raise BadSettings("agent.exec_token_file: has the same token as agent.listen_token_file; make another one")
    return Access(address, tls, log_token, exec_token or log_token, allows_exec)


def own_token(state_dir: Path) -> str:
    """Return the token in the state directory; the first call creates it. Raises `StateError`."""
    path = state_dir / TOKEN_FILE
    try:
        with contextlib.suppress(FileExistsError):
            temporary = state_dir / f"{TOKEN_FILE}.new"
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(24) + "\n")
            try:
                os.link(temporary, path)  # whole, or not at all
            finally:
                temporary.unlink()
        path.chmod(0o600)
        return token_in("agent.state_dir", str(path))
    except OSError as error:
        raise StateError(f"the listener's token can't be made: {describe_os_error(error, path)}") from error


class PodListener:
    """Serves the pods of one node. `worker_of`: returns the worker of a pod that the node has."""

    def __init__(
        self,
        settings: AgentSettings,
        access: Access,
        store: Store,
        keys: Keys,
        records: LogRecords,
        logs: Path,
        worker_of: Callable[[str], PodWorker | None],
    ) -> None:
        self._settings, self._access = settings, access
        self._store, self._keys = store, keys
        self._records, self._logs = records, logs
        self._worker_of = worker_of
        self._watch = LogWatch()
        self._seen: dict[str, None] = {}  # events of commands that were run
        self._thread = ThreadPoolExecutor(4, "log-readers")

    @asynccontextmanager
    async def serving(self, own_address: str) -> AsyncIterator[tuple[str, str]]:
        """Serve while the context lasts. Yield the URL, and the id of the loopback, "" beyond it."""
        app = web.Application()
        app.add_routes(
            [
                web.get(LOGS_PATH, self._guarded(self._serve_logs)),
                web.get(EXEC_PATH, self._guarded(self._serve_exec)),
            ]
        )
        access = self._access
        try:
            async with serving(app, access.address, setting="agent.listen", bounds=_BOUNDS, tls=access.tls) as where:
                url = access.url(where, own_address)
                log.info("Listening for logs and exec", address=url, exec=access.exec, node=self._settings.node)
                yield url, loopback_id() if access.address.is_loopback else ""
        finally:
            self._watch.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    def gone(self, pod_id: str) -> None:
        """End the streams that follow a pod which the node no longer has."""
        self._watch.notify(self._logs / pod_id)

    def _guarded(
        self, handler: Callable[[web.Request, str], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Check the token and the names of a request."""
        runs = handler == self._serve_exec

        async def guarded(request: web.Request) -> web.StreamResponse:
            access = self._access
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip().encode(errors="replace")
            accepted = [access.exec_token] if runs else [access.log_token, access.exec_token]
            if all(accepted) and not any(hmac.compare_digest(given, token.encode()) for token in accepted):
                if runs and hmac.compare_digest(given, access.log_token.encode()):
                    raise RequestRefused(403, "this token is for logs only")
                raise RequestRefused(401, "wrong token")
            node, pod = request.match_info["node"], request.match_info["pod"]
            if node != self._settings.node:
                raise RequestRefused(404, f"this is the agent of {self._settings.node}, not of {node}")
            if not is_dns_label(pod):
                raise RequestRefused(400, "the pod's id is not a DNS label")
            return await handler(request, pod)

        return guarded

    async def _serve_logs(self, request: web.Request, pod_id: str) -> web.StreamResponse:
        query = _log_query(request.query)
        directory = self._logs / pod_id
        if query.follow and self._worker_of(pod_id) is not None:
            directory.mkdir(mode=0o750, exist_ok=True)  # its processes have not been started yet
        if not directory.is_dir():
            raise RequestRefused(404, f"there is no log of pod {pod_id} on this node")
        stream, loop = LogStream(lambda: self._records.sources(pod_id), query), asyncio.get_running_loop()

        def read() -> asyncio.Future[bytes]:
            return loop.run_in_executor(self._thread, stream.batch)

        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Cache-Control": "no-store"})
        if request.transport is not None:  # what waits for a slow client stays in the files, not in the kernel
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        async with self._watch.watch(directory) as changed:
            try:
                data = await read()
            except NoSuchLog as error:
                raise RequestRefused(404, f"pod {pod_id}: {error}") from None
            except OSError as error:
                raise RequestRefused(500, describe_os_error(error, directory)) from None
            await response.prepare(request)
            while True:
                while data:
                    await self._send(response, data)
                    changed.clear()
                    data = await read()
                is_gone = self._worker_of(pod_id) is None
                if not query.follow or is_gone:
                    text = "the pod is gone from this node" if query.follow else ""
                    await self._send(response, LogFrame(event="end", text=text).encoded())
                    return response
                try:
                    async with asyncio.timeout(HEARTBEAT if self._watch.is_exact(directory) else _INEXACT):
                        await changed.wait()
                except TimeoutError:
                    await self._send(response, LogFrame(event="alive").encoded())
                changed.clear()
                data = await read()

    async def _send(self, response: web.StreamResponse, data: bytes) -> None:
        """Send data; it waits while the client reads slowly. Raises `ConnectionError` for one that has stopped to."""
        try:
            async with asyncio.timeout(_SEND_TIMEOUT):
                await response.write(data)
        except TimeoutError:
            raise ConnectionResetError(f"the client read nothing for {_SEND_TIMEOUT:g} s") from None

    async def _serve_exec(self, request: web.Request, pod_id: str) -> web.StreamResponse:
        answer = web.WebSocketResponse(heartbeat=HEARTBEAT, compress=False, max_msg_size=1 << 20)
        if not answer.can_prepare(request):
            raise RequestRefused(426, "a command needs a WebSocket")
        await answer.prepare(request)
        try:
            try:
                asked = msgspec.json.decode(request.query.get("request", ""), type=ExecRequest)
            except (msgspec.DecodeError, UnicodeEncodeError) as error:
                raise RequestRefused(400, f"the request is malformed: {error}") from None
            if not asked.argv or not asked.argv[0] or any("\0" in word for word in asked.argv):
                raise RequestRefused(400, "the command is empty, or has a NUL character")
            if asked.launchable and not is_dns_label(asked.launchable):
                raise RequestRefused(400, "the launchable's name is not a DNS label")
            worker = self._worker_of(pod_id)
            pod = worker.pod if worker else None
            if not self._access.exec:
                raise ExecRefused('it runs no commands for clients; set agent.exec = "on" there')
            if pod is None:
                raise ExecRefused(f"pod {pod_id} does not run there")
            await self._check_recorded(request, pod_id, asked)
            spec = await pod.command(asked.launchable, asked.argv, asked.term)
            result = await run_command(answer, pod.guests, spec, asked)
        except (RequestRefused, AgentError, StoreError) as error:
            result = ExecResult(error=str(error))
        except OSError as error:
            result = ExecResult(error=describe_os_error(error, pod_id))
        with contextlib.suppress(ConnectionError):
            await answer.send_bytes(bytes([RESULT]) + msgspec.json.encode(result))
            await answer.close()
        return answer

    async def _check_recorded(self, request: web.Request, pod_id: str, asked: ExecRequest) -> None:
        """Find the command in the audit log, where its client has written it with its own rights: what is not recorded
        does not run, and an event allows one run. Raises `ExecRefused`."""
        try:
            is_event = asked.event.startswith(self._keys.audit) and asked.event not in self._seen
            entry = await self._store.get(asked.event, consistent=True) if is_event else None
            event = decode(AuditEvent, asked.event, entry.value) if entry else None
            age = abs(time.time() - datetime.fromisoformat(event.timestamp).timestamp()) if event else 0.0
        except Denied as error:
            raise ExecRefused(
                "its agent may not read the audit log, so it runs no commands: create its policy with `rcfarm node "
                f"policy {self._settings.node} --exec` ({error})"
            ) from None
        except (BadRecord, ValueError, StoreError) as error:
            raise ExecRefused(f"its agent can't read the command in the audit log, so it is not run: {error}") from None
        expected = exec_details(self._settings.node, pod_id, asked.launchable, asked.argv)
        found = event.event_details if event and event.event_type == EXEC_EVENT else {}
        if not expected.items() <= found.items() or age > _RECORDED_SECONDS:
            why = f"; it was written {age:.0f} s ago: check both machines' clocks" if age > _RECORDED_SECONDS else ""
            raise ExecRefused(f"the command is not in the audit log, so it is not run{why}")
        self._seen[asked.event] = None
        while len(self._seen) > _SEEN_EVENTS:
            del self._seen[next(iter(self._seen))]
        peer = request.transport.get_extra_info("peername") if request.transport else None
        certificate = (request.transport.get_extra_info("peercert") if request.transport else None) or {}
        subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
        log.info(
            "Running a command in a pod",
            pod=pod_id,
            command=asked.argv[0],
            event_key=asked.event,
            client=peer[0] if peer else "",
            certificate=next((value for name, value in subject if name == "commonName"), ""),
        )


def _log_query(given: Mapping[str, str]) -> LogQuery:
    """Read a request's parameters. Raises `RequestRefused`."""
    launchable = given.get("launchable", "")
    if launchable and not is_dns_label(launchable):
        raise RequestRefused(400, "the launchable's name is not a DNS label")
    positions = {}
    for part in filter(None, given.get("from", "").split(",")):
        name, _, position = part.partition(":")
        positions[name] = _number("from", position) or 0
    return LogQuery(
        launchable,
        given.get("follow") == "1",
        given.get("previous") == "1",
        _number("since", given.get("since")),
        _number("tail", given.get("tail")),
        positions,
    )


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise RequestRefused(400, f"{name}: {text!r} is not a number")
    return int(text)
