"""ConsulStore against a real Consul 1.8.7."""

from __future__ import annotations

import asyncio
import os
import subprocess
import urllib.error
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from store.consul.store import ConsulSettings, ConsulStore
from store.kv import ops
from store.kv.protocol import Denied, Invalid, SessionSpec, Unavailable
from store.kv.view import TreeView
from tests.support.consul.server import ConsulServer, StartConsul, consul_binary, free_ports, opened
from tests.support.waiting import until

UNKNOWN_ID = "00000000-0000-4000-8000-000000000000"


def settings_of(server: ConsulServer) -> ConsulSettings:
    return ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": server.token or ""})


@pytest.mark.parametrize("key", ["/a", "a//b", "a/../b", ""])
async def test_keys_that_the_api_cannot_address(consul_store: ConsulStore, key: str) -> None:
    """Consul would redirect these keys to another key: the store raises an error instead of writing there."""
    with pytest.raises(Invalid):
        await consul_store.put(key, b"")


async def test_a_session_that_consul_refuses(consul_store: ConsulStore) -> None:
    """A TTL out of Consul's bounds is `Invalid` and names the bounds; nothing stays registered."""
    with pytest.raises(Invalid, match="between"):
        await consul_store.create_session(SessionSpec("short", ttl=5.0))
    services = await consul_store.api.agent.services()
    assert not [name for name in services if "short" in str(services[name])]


async def test_an_explicit_address_wins(consul: ConsulServer, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONSUL_HTTP_ADDR and friends in the environment don't redirect a store with an explicit address."""
    monkeypatch.setenv("CONSUL_HTTP_ADDR", "203.0.113.1:1")
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "")
    monkeypatch.setenv("CONSUL_HTTP_SSL_VERIFY", "false")
    async with opened(ConsulSettings.from_env(consul.url)) as store:
        await store.put(f"{root}/a", b"1")
        session = await store.create_session(SessionSpec("here"))
        await store.destroy_session(session.id)


def connections(server: ConsulServer) -> int:
    """Return the connections of this process to the server's HTTP port, in whatever state."""
    port = server.ports["http"]
    return sum(1 for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port)


async def write_under(store: ConsulStore, prefixes: Sequence[str], value: bytes) -> None:
    """Write one key under each prefix, fifty in a transaction."""
    for start in range(0, len(prefixes), 50):
        await store.txn([ops.put(f"{prefix}x", value) for prefix in prefixes[start : start + 50]])


async def test_never_more_than_64_connections(start_consul: StartConsul, root: str) -> None:
    """100 watches and 200 calls at once: at most 64 connections at any moment, every call succeeds, no watch is deaf.

    The server itself takes no more than 64 from us, as a check on our counting.
    """
    server = start_consul(max_connections=66)  # two for the calls of the test itself
    prefixes = [f"{root}/{n:03}/" for n in range(100)]
    async with opened(settings_of(server)) as store:
        await write_under(store, prefixes, b"old")
        peak = 0

        async def count() -> None:
            nonlocal peak
            while True:
                peak = max(peak, connections(server))
                await asyncio.sleep(0.02)

        counter = asyncio.create_task(count())
        seen = [(await store.list(prefix)).index for prefix in prefixes]
        watches = [
            asyncio.create_task(store.watch(prefix, index, 60)) for prefix, index in zip(prefixes, seen, strict=True)
        ]
        await until(lambda: connections(server) >= store.settings.max_watches)
        async with asyncio.timeout(30):  # calls that waited for watches would take a minute
            await asyncio.gather(*(store.put(f"{root}/call/{n}", b"x") for n in range(200)))
        assert len(await store.keys(f"{root}/call/")) == 200
        assert not any(watch.done() for watch in watches), "nothing has changed under their prefixes"
        await write_under(store, prefixes, b"new")
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*watches)
        counter.cancel()
    assert all(answer.index > index for answer, index in zip(answers, seen, strict=True))
    assert [entry.value for answer in answers for entry in answer.entries] == [b"new"] * 100
    assert store.settings.max_watches <= peak <= 64
    assert connections(server) == 0


async def test_a_cancelled_call_leaves_no_connection(consul_server: ConsulServer, root: str) -> None:
    """Cancelling a watch ends its connection at once, and the next call works."""
    async with opened(settings_of(consul_server)) as store:
        index = (await store.list(root)).index
        watches = [asyncio.create_task(store.watch(f"{root}/{n}/", index, 300)) for n in range(10)]
        await until(lambda: connections(consul_server) >= 10)
        for watch in watches:
            watch.cancel()
        await asyncio.wait(watches)
        await until(lambda: connections(consul_server) <= 1)
        await store.put(f"{root}/a", b"")
        assert len(asyncio.all_tasks()) == 1


async def test_consul_is_not_there() -> None:
    """Connection refused: the error names the address and the cause, and says that a write was not applied."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with opened(ConsulSettings.from_env(address)) as store:
        with pytest.raises(Unavailable, match=rf"Consul at {address} .*Connection refused .*GET kv/a"):
            await store.get("a")
        with pytest.raises(Unavailable, match="it was not applied"):
            await store.txn([ops.put("a", b"")])
        with pytest.raises(Unavailable, match="Connection refused"):
            await store.create_session(SessionSpec("early"))


async def test_consul_does_not_answer(consul_server: ConsulServer, root: str) -> None:
    """A server that hangs: every call gives up in time, and reports that a write may have been applied."""
    settings = replace(settings_of(consul_server), call_timeout=0.3)
    async with opened(settings) as store:
        await store.put(f"{root}/a", b"1")
        consul_server.pause()
        with pytest.raises(Unavailable, match=r"no answer within 0\.3 s .*it may have been applied"):
            await store.put(f"{root}/a", b"2")
        with pytest.raises(Unavailable, match=r"no answer within 0\.3 s \(GET"):
            await store.list(root)
        consul_server.resume()
        assert await store.get(f"{root}/a") is not None


async def test_consul_dies_under_a_watch(consul_server: ConsulServer, root: str) -> None:
    """A watch in flight ends with `Unavailable` as soon as the server is gone."""
    async with opened(settings_of(consul_server)) as store:
        index = (await store.list(root)).index
        watch = asyncio.create_task(store.watch(root, index, 300))
        await until(lambda: connections(consul_server) > 0)
        consul_server.kill()
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable):
                await watch


async def test_no_leader_is_unavailable(start_consul: StartConsul, root: str) -> None:
    """A server without a leader: reads, also stale ones, and writes raise instead of answering from the past."""
    server = start_consul(leaderless=True)
    async with opened(settings_of(server)) as store:
        with pytest.raises(Unavailable, match=r"No cluster leader.*it was not applied"):
            await store.txn([ops.put(f"{root}/a", b"")])
        with pytest.raises(Unavailable, match="No cluster leader"):
            await store.get(f"{root}/a")
        with pytest.raises(Unavailable, match="No cluster leader"):
            await store.watch(root, 0, 1.0)


RULES = 'key_prefix "{root}/mine/" {{ policy = "write" }} key_prefix "{root}/seen/" {{ policy = "read" }}'


async def test_permissions(start_consul: StartConsul, root: str) -> None:
    """A denied request is `Denied`: the message names the key, the permission needed and where the token came from, but
    never the token."""
    server = start_consul(acl=True)
    token = server.create_token(RULES.format(root=root))
    settings = ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": token})
    async with opened(settings) as store:
        await store.txn([ops.put(f"{root}/mine/a", b"1")])
        denials: Sequence[tuple[Callable[[], object], str]] = [
            (lambda: store.get(f"{root}/other"), f"needs key:read on {root}/other"),
            (lambda: store.put(f"{root}/seen/a", b""), f"needs key:write on {root}/seen/a"),
            (
                lambda: store.txn([ops.put(f"{root}/mine/a", b""), ops.put(f"{root}/seen/a", b"")]),
                "operation 1 of a tran",
            ),
            (lambda: store.create_session(SessionSpec("denied")), "needs session:write"),
        ]
        for call, expected in denials:
            with pytest.raises(Denied, match=expected) as denied:
                await call()  # type: ignore[misc]
            assert "CONSUL_HTTP_TOKEN" in str(denied.value)
            assert token not in str(denied.value)
        assert await store.keys("") == [f"{root}/mine/a"], "a listing leaves out what may not be read"
    async with opened(ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": UNKNOWN_ID})) as store:
        with pytest.raises(Denied, match="does not know the token from CONSUL_HTTP_TOKEN"):
            await store.get(root)
    async with opened(ConsulSettings.from_env(server.url, environ={})) as store:
        with pytest.raises(Denied, match="no token is set; set CONSUL_HTTP_TOKEN"):
            await store.get(root)


async def test_the_accessor_of_a_token(start_consul: StartConsul, root: str) -> None:
    """The accessor distinguishes tokens in an audit without revealing them; without a token, or with an unknown one, it
    is absent."""
    server = start_consul(acl=True)
    token = server.create_token(RULES.format(root=root))
    expected = server.request("GET", "/v1/acl/token/self", token=token)["AccessorID"]
    for given, accessor in ((token, expected), (UNKNOWN_ID, ""), ("", "")):
        async with opened(ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": given})) as store:
            assert await store.token_accessor() == accessor


async def test_a_rotated_token_is_followed(start_consul: StartConsul, tmp_path: Path, root: str) -> None:
    """The token's file is replaced and the old token is deleted: the next write and a waiting watch both work with the
    new token, and the old one is not used again."""
    server = start_consul(acl=True)
    first, second = (server.create_token(RULES.format(root=root)) for _ in range(2))
    file = tmp_path / "token"
    file.write_text(first)
    async with opened(ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN_FILE": str(file)})) as store:
        await store.put(f"{root}/mine/a", b"1")
        listing = await store.list(f"{root}/mine/")
        file.write_text(second)
        accessor = server.request("GET", "/v1/acl/token/self", token=first)["AccessorID"]
        await asyncio.to_thread(server.request, "DELETE", f"/v1/acl/token/{accessor}")
        await until(lambda: is_refused(server, first))
        await store.txn([ops.put(f"{root}/mine/a", b"2")])
        changed = await store.watch(f"{root}/mine/", listing.index, 5.0)
        assert [entry.value for entry in changed.entries] == [b"2"]
        file.write_text("junk")
        assert await store.get(f"{root}/mine/a") is not None


def is_refused(server: ConsulServer, token: str) -> bool:
    try:
        server.request("GET", "/v1/acl/token/self", token=token)
    except urllib.error.HTTPError:
        return True
    return False


async def test_a_view_is_not_deaf_after_consul_lost_its_data(consul_server: ConsulServer, root: str) -> None:
    """Consul came back empty, its index far below the last one seen: the view shows the new tree without waiting."""
    async with opened(settings_of(consul_server)) as store:
        for n in range(30):
            await store.put(f"{root}/a", str(n).encode())
        view = TreeView(store, f"{root}/", lambda key, value: value)
        task = asyncio.create_task(view.run())
        await view.synced()
        before = view.index
        await asyncio.to_thread(consul_server.restart)
        await store.put(f"{root}/b", b"new")
        assert (await store.list(f"{root}/")).index < before
        await until(lambda: list(view.records) == [f"{root}/b"])
        task.cancel()
        await asyncio.wait([task])


async def test_tls_with_client_certificates(start_consul: StartConsul, tmp_path: Path, root: str) -> None:
    """https with the authority, certificate and key from the usual variables; without them a clear refusal."""
    for command in (["ca", "create"], ["cert", "create", "-server"], ["cert", "create", "-client"]):
        subprocess.run([consul_binary(), "tls", *command], cwd=tmp_path, check=True, capture_output=True)
    ca, cert, key = tmp_path / "consul-agent-ca.pem", "dc1-server-consul-0.pem", "dc1-server-consul-0-key.pem"
    (port,) = free_ports(1)
    config = {
        "ports": {"https": port},
        "ca_file": str(ca),
        "cert_file": str(tmp_path / cert),
        "key_file": str(tmp_path / key),
        "verify_incoming": True,
    }
    start_consul(config=config)
    environ = {
        "CONSUL_HTTP_SSL": "true",
        "CONSUL_CACERT": str(ca),
        "CONSUL_CLIENT_CERT": str(tmp_path / "dc1-client-consul-0.pem"),
        "CONSUL_CLIENT_KEY": str(tmp_path / "dc1-client-consul-0-key.pem"),
        "CONSUL_TLS_SERVER_NAME": "server.dc1.consul",
    }
    async with opened(ConsulSettings.from_env(f"127.0.0.1:{port}", environ=environ)) as store:
        await store.put(f"{root}/a", b"1")
        session = await store.create_session(SessionSpec("tls"))
        await store.destroy_session(session.id)
    for missing in ("CONSUL_CACERT", "CONSUL_CLIENT_CERT"):
        partial = {name: value for name, value in environ.items() if name != missing}
        async with opened(ConsulSettings.from_env(f"127.0.0.1:{port}", environ=partial)) as store:
            with pytest.raises(Unavailable, match="certificate"):
                await store.get(root)


async def test_a_unix_socket(start_consul: StartConsul, tmp_path: Path, root: str) -> None:
    """CONSUL_HTTP_ADDR=unix:///… works as for Consul's own programs."""
    socket = tmp_path / "c.sock"
    start_consul(config={"addresses": {"http": f"127.0.0.1 unix://{socket}"}})
    await until(lambda: os.path.exists(socket))
    async with opened(ConsulSettings.from_env(environ={"CONSUL_HTTP_ADDR": f"unix://{socket}"})) as store:
        await store.put(f"{root}/a", b"1")
        assert (await store.list(f"{root}/")).entries[0].value == b"1"
