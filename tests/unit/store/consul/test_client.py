"""The client of Consul: its settings, the errors that refusals become, and servers that no real Consul behaves like."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from store.consul.client import CHECK_EVERY, CheckNotReady, ConsulSettings, ConsulTransport, error_of, seconds
from store.consul.store import ConsulStore, txn_error
from store.kv import ops
from store.kv.protocol import Denied, Invalid, Op, OpFailure, SessionSpec, StoreError, TooLarge, Unavailable
from store.tls import TlsContexts
from tests.support.consul.server import opened
from tests.support.kube.faults.odd_server import Handler, hang_up, serving

SETTINGS = ConsulSettings(token="secret", token_source="CONSUL_HTTP_TOKEN")


@pytest.mark.parametrize(
    ("address", "environ", "url"),
    [
        (None, {}, "http://127.0.0.1:8500"),
        (None, {"CONSUL_HTTP_ADDR": "consul.example:8501"}, "http://consul.example:8501"),
        (None, {"CONSUL_HTTP_ADDR": "consul.example"}, "http://consul.example:8500"),
        (None, {"CONSUL_HTTP_ADDR": "https://consul.example:8501"}, "https://consul.example:8501"),
        (None, {"CONSUL_HTTP_ADDR": "a:1", "CONSUL_HTTP_SSL": "true"}, "https://a:1"),
        ("consul://a:1", {"CONSUL_HTTP_ADDR": "b:2"}, "http://a:1"),
        ("consul://a:1", {"CONSUL_HTTP_SSL": "1"}, "https://a:1"),
        ("consuls://a:1", {}, "https://a:1"),
        ("http://a:1", {"CONSUL_HTTP_SSL": "true"}, "http://a:1"),
        ("consul://[::1]:8500/", {}, "http://[::1]:8500"),
    ],
)
def test_the_address(address: str | None, environ: dict[str, str], url: str) -> None:
    """An explicit address wins; the variables and the local agent follow, in this order."""
    assert ConsulSettings.from_env(address, environ=environ).url == url


def test_a_unix_socket() -> None:
    """unix:///PATH names a socket, which is also how messages call it."""
    settings = ConsulSettings.from_env(environ={"CONSUL_HTTP_ADDR": "unix:///run/consul.sock"})
    assert settings.socket == settings.place == "/run/consul.sock"


@pytest.mark.parametrize(
    ("address", "environ", "complaint"),
    [
        ("ftp://a:1", {}, "the store address 'ftp://a:1': unknown scheme 'ftp'"),
        (None, {"CONSUL_HTTP_ADDR": "a:port"}, "CONSUL_HTTP_ADDR 'a:port': .*port"),
        (None, {"CONSUL_HTTP_ADDR": "http://"}, "expected HOST:PORT"),
        ("consul://a:1/path", {}, "expected HOST:PORT"),
        (None, {"CONSUL_HTTP_SSL": "yes please"}, "CONSUL_HTTP_SSL=yes please: expected true or false"),
        (None, {"CONSUL_HTTP_TOKEN_FILE": "/does/not/exist"}, "CONSUL_HTTP_TOKEN_FILE: .*/does/not/exist"),
    ],
)
def test_mistakes_are_named(address: str | None, environ: dict[str, str], complaint: str) -> None:
    """A setting that makes no sense is an error that names where it was made."""
    with pytest.raises(Invalid, match=complaint):
        ConsulSettings.from_env(address, environ=environ)


def test_the_token_and_where_it_came_from(tmp_path: Path) -> None:
    """The variable wins over the file; the token itself is never shown."""
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environ = {"CONSUL_HTTP_TOKEN_FILE": str(file)}
    settings = ConsulSettings.from_env(environ=environ)
    assert (settings.token, settings.token_source) == ("from-file", f"CONSUL_HTTP_TOKEN_FILE ({file})")
    settings = ConsulSettings.from_env(environ=environ | {"CONSUL_HTTP_TOKEN": "from-variable"})
    assert (settings.token, settings.token_source) == ("from-variable", "CONSUL_HTTP_TOKEN")
    assert "from-variable" not in repr(settings)


def test_tls_verification_can_be_switched_off() -> None:
    """CONSUL_HTTP_SSL_VERIFY=false accepts any certificate; without TLS there is nothing to verify."""
    settings = ConsulSettings.from_env("consuls://a:1", environ={"CONSUL_HTTP_SSL_VERIFY": "false"})
    context = settings.ssl_context(TlsContexts())
    assert context is not None
    assert context.verify_mode == ssl.CERT_NONE
    assert ConsulSettings.from_env("consul://a:1", environ={}).ssl_context(TlsContexts()) is None


def test_a_missing_certificate_is_named() -> None:
    """A certificate file that can't be read is an error with its name."""
    settings = ConsulSettings.from_env("consuls://a:1", environ={"CONSUL_CACERT": "/does/not/exist.pem"})
    with pytest.raises(Invalid, match=r"/does/not/exist\.pem"):
        settings.ssl_context(TlsContexts())


def test_watches_may_not_take_every_connection() -> None:
    """Settings that would let watches starve calls are refused."""
    with pytest.raises(Invalid, match=r"max_watches \(64\) must be above 0 and below max_connections \(64\)"):
        ConsulSettings(max_watches=64)


@pytest.mark.parametrize(
    ("method", "path", "status", "text", "error", "message"),
    [
        ("GET", "/v1/kv/a b", 403, "Permission denied", Denied, "denied GET kv/a b: .*needs key:read on a b"),
        ("PUT", "/v1/kv/a", 403, "Permission denied", Denied, "check the policies of the token from CONSUL_HTTP_TOKEN"),
        ("PUT", "/v1/session/create", 403, "Permission denied", Denied, "needs session:write"),
        (
            "PUT",
            "/v1/agent/service/register",
            403,
            "Permission denied: Missing service:write on x",
            Denied,
            "write on x",
        ),
        ("GET", "/v1/kv/a", 403, "ACL not found", Denied, "does not know the token from CONSUL_HTTP_TOKEN"),
        ("PUT", "/v1/kv/a", 413, "Request body too large", TooLarge, "too large"),
        ("PUT", "/v1/kv/a", 400, "Missing key name", Invalid, "Missing key name"),
        ("PUT", "/v1/kv/a//b", 301, "", Invalid, "kv/a//b: .*can't address"),
        ("PUT", "/v1/session/create", 500, "Invalid Session TTL '1000000000', must be", Invalid, "Invalid Session TTL"),
        ("PUT", "/v1/session/create", 500, "Missing check 'x' registration", CheckNotReady, "Missing check"),
        ("PUT", "/v1/session/create", 500, "Check 'x' is in critical state", CheckNotReady, "critical"),
        ("PUT", "/v1/txn", 500, "No cluster leader", Unavailable, "No cluster leader .*it was not applied"),
        ("PUT", "/v1/txn", 500, "rpc error making call: EOF", Unavailable, "it may have been applied"),
        ("PUT", "/v1/txn", 429, "Your IP is issuing too many connections", Unavailable, "it was not applied"),
        ("GET", "/v1/kv/a", 500, "rpc error", Unavailable, r"\(GET kv/a\)"),
        ("PUT", "/v1/txn", 500, "store.db: disk is full; nothing was changed", Unavailable, r"changed \(PUT txn\)$"),
        ("GET", "/v1/kv/a", 503, "", Unavailable, "status 503, no reason"),
    ],
)
def test_http_refusals(method: str, path: str, status: int, text: str, error: type[StoreError], message: str) -> None:
    """Each status and text has its error, with the call, the cause and what to do; never the token."""
    found = error_of(SETTINGS, method, path, status, text)
    assert type(found) is error
    with pytest.raises(error, match=message):
        raise found
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("operation", "access"),
    [
        (ops.put("rcfarm/x", b""), "write"),
        (ops.delete("rcfarm/x"), "write"),
        (ops.check_not_exists("rcfarm/x"), "write"),
        (ops.check_index("rcfarm/x", 1), "read"),
        (ops.check_session("rcfarm/x", "s"), "read"),
        (ops.get_tree("rcfarm/x"), "read"),
    ],
)
def test_a_denied_operation_names_its_key(operation: Op, access: str) -> None:
    """Consul only says the number of the operation; the message adds its key and what it needs."""
    error = txn_error(SETTINGS, [ops.get("a"), operation], [OpFailure(1, "Permission denied")])
    assert isinstance(error, Denied)
    assert f"operation 1 of a transaction ({operation.verb} rcfarm/x)" in str(error)
    assert f"key:{access} on rcfarm/x" in str(error)


@pytest.mark.parametrize(
    ("text", "value"), [("0s", 0), ("10s", 10), ("1m30s", 90), ("1h0m0s", 3600), ("250ms", 0.25), ("1.5s", 1.5)]
)
def test_go_durations_are_seconds(text: str, value: float) -> None:
    """As Go prints them, in whatever units."""
    assert seconds(text) == pytest.approx(value)


@asynccontextmanager
async def served_by(handler: Handler) -> AsyncIterator[ConsulStore]:
    """A store on a server that answers every request with `handler`."""
    async with serving(handler) as address, opened(ConsulSettings.from_env(address, environ={})) as store:
        yield store


async def test_a_write_is_sent_once() -> None:
    """The kept-alive connection ends under a transaction: it may have been applied, so it is not sent again. A read
    without an answer has changed nothing."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        await request.read()
        return hang_up(request) if len(seen) > 1 else web.json_response(True)

    async with served_by(handler) as store:
        await store.put("a", b"1")  # the connection is in the pool now
        with pytest.raises(Unavailable, match="it may have been applied"):
            await store.txn([ops.create("b", b"1")])
        with pytest.raises(Unavailable, match="it may have been applied"):
            await store.delete("b")
        assert seen == ["PUT", "PUT", "DELETE"]
        with pytest.raises(Unavailable) as caught:
            await store.get("a")
    assert "applied" not in str(caught.value)


async def test_a_server_without_a_leader_is_not_believed() -> None:
    """A stale answer of a server that knows no leader may be arbitrarily old: no answer is better."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response([], headers={"X-Consul-Index": "7", "X-Consul-KnownLeader": "false"})

    async with served_by(handler) as store:
        with pytest.raises(Unavailable, match="No cluster leader"):
            await store.watch("a/", 7, 1.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (web.Response(status=404, text="nginx"), "the server there is not Consul"),
        (web.Response(text="<html>", headers={"X-Consul-Index": "7"}), "an answer that Consul would not give"),
    ],
)
async def test_something_else_answers(answer: web.Response, message: str) -> None:
    """Not Consul at that address: said so, and above all not taken for an empty tree."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async with served_by(handler) as store:
        with pytest.raises(Unavailable, match=message):
            await store.list("rcfarm/")


async def test_the_token_travels_with_every_call() -> None:
    """Also with the calls that go through python-consul2; and answers are asked for uncompressed."""
    tokens: set[str | None] = set()

    async def handler(request: web.Request) -> web.Response:
        tokens.add(request.headers.get("X-Consul-Token"))
        assert request.headers["Accept-Encoding"] == "identity"
        return web.json_response({"ID": "s"}, headers={"X-Consul-Index": "7"})

    async with serving(handler) as address, opened(ConsulSettings(url=address, token="secret")) as store:
        await store.create_session(SessionSpec("x"))
        await store.put("a", b"")
    assert tokens == {"secret"}


async def test_a_replaced_token_is_used_by_the_next_call(tmp_path: Path) -> None:
    """A replaced file counts after `CHECK_EVERY`, or at once when Consul does not know the token; a write that was
    refused for it is sent again, once. A file that is gone leaves the token in use."""
    seen: list[str] = []
    known = {"one", "two", "three"}

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers["X-Consul-Token"])
        if seen[-1] not in known:
            return web.Response(status=403, text="ACL not found")
        return web.json_response(True)

    now = 0.0
    file = tmp_path / "token"
    file.write_text("one")
    async with serving(handler) as address:
        settings = ConsulSettings.from_env(address, environ={"CONSUL_HTTP_TOKEN_FILE": str(file)})
        transport = ConsulTransport(settings, lambda: now)
        await transport.call("PUT", "/v1/kv/a", body=b"")
        file.write_text("two")
        await transport.call("PUT", "/v1/kv/a", body=b"")
        now = CHECK_EVERY
        await transport.call("PUT", "/v1/kv/a", body=b"")
        file.write_text("three")
        known.remove("two")
        await transport.call("PUT", "/v1/kv/a", body=b"")
        file.unlink()
        now = 2 * CHECK_EVERY
        await transport.call("PUT", "/v1/kv/a", body=b"")
        known.clear()
        with pytest.raises(Denied, match="does not know the token"):
            await transport.call("PUT", "/v1/kv/a", body=b"")
        await transport.close()
    assert seen == ["one", "one", "two", "two", "three", "three", "three"]
