"""Requests to the façade that no client of Consul would send: each is refused in words, and the next one is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from tests.support.raw_http import exchange, request, status_of

DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
HUGE = b"9" * 4000


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    store = EmbeddedStore(tmp_path / "store.db")
    async with serve_consul_api(store) as address:
        yield address
    await store.close()


async def refused(address: str, sent: bytes, status: int = 400) -> None:
    """The request is refused without an error in the log, and an innocent write is made."""
    with capture_logs() as logs:
        answer = await exchange(address, sent)
    assert status_of(answer) == status, answer
    assert not [entry for entry in logs if entry["log_level"] not in ("debug", "info")]
    answer = await exchange(address, request("/v1/kv/innocent", method="PUT", body=b"x"))
    assert answer.endswith(b"true"), answer


@pytest.mark.parametrize("wait", ["1" * 2000, "1" * 65, "1" * 64, "1.1.s", "s", "٣s", "1" * 30 + "."])
async def test_a_duration_is_read_in_no_time(address: str, wait: str) -> None:
    """The time that a pattern takes does not grow with what is given to it."""
    await refused(address, request(f"/v1/kv/x?wait={wait}"))


@pytest.mark.parametrize("number", ["461168601842738790400000", str(1 << 64), "-1", "x", "9" * 5000, "٣"])
@pytest.mark.parametrize("name", ["flags", "cas"])
async def test_numbers_fit_into_64_bits(address: str, name: str, number: str) -> None:
    """A number that SQLite could not store is refused before anything is written."""
    await refused(address, request(f"/v1/kv/p?{name}={number}", method="PUT", body=b"x"))


async def test_the_largest_flags_are_kept(address: str) -> None:
    """All of the 64 bits count."""
    largest = (1 << 64) - 1
    await exchange(address, request(f"/v1/kv/p?flags={largest}", method="PUT", body=b"x"))
    assert f'"Flags":{largest}'.encode() in await exchange(address, request("/v1/kv/p"))


MALFORMED: dict[str, list[bytes]] = {
    "/v1/session/create": [
        b"{", b"[]", b"1", b'"a"', b"\xff", b'{"a":"\xff"}', b'"\\ud800"', DEEP, HUGE,
        b'{"Name":1}', b'{"TTL":1}', b'{"TTL":"1"}', b'{"Behavior":[]}', b'{"LockDelay":[]}', b'{"LockDelay":"x"}',
        b'{"LockDelay":%s}' % HUGE, b'{"NodeChecks":1}', b'{"NodeChecks":[1]}', b'{"NodeChecks":{"a":1}}',
        b'{"ServiceChecks":[1]}', b'{"ServiceChecks":[[]]}', b'{"Checks":[null]}', b'{"Checks":["missing"]}',
        b'{"Node":{}}', b'{"LockDelay":1e999}',
    ],
    "/v1/agent/check/register": [
        b"", b"[]", b'{"Name":1}', b'{"Name":"a","TTL":[]}', b'{"Name":"a","TTL":%s}' % HUGE,
        b'{"Name":"a","TTL":"-1s"}', b'{"Name":"a","TTL":"%sh"}' % (b"9" * 60), b'{"Name":"a","Status":1}',
        b'{"Name":"a","Status":"odd"}', b'{"Name":"a","ServiceID":"missing"}', b'{"Name":"a","Notes":1}', DEEP,
    ],
    "/v1/agent/service/register": [
        b"{}", b'{"Name":{}}', b'{"Name":"a","Port":"1"}', b'{"Name":"a","Port":%s}' % HUGE, b'{"Name":"a","Tags":1}',
        b'{"Name":"a","Meta":[]}', b'{"Name":"a","Check":1}', b'{"Name":"a","Checks":{"a":1}}',
        b'{"Name":"a","Checks":[1]}', b'{"Name":"a","Check":{"TTL":%s}}' % HUGE, b'{"Name":["a"]}', DEEP,
    ],
    "/v1/txn": [
        b"", b"{}", b"[1]", b"[{}]", b'[{"KV":1}]', b'[{"KV":{"Verb":"set","Key":"a","Flags":%s}}]' % HUGE,
        b'[{"KV":{"Verb":"set","Key":"a","Flags":-1}}]', b'[{"KV":{"Verb":"cas","Key":"a","Index":%s}}]' % HUGE,
        b'[{"KV":{"Verb":"set","Key":"a","Value":"?"}}]', b'[{"KV":{"Verb":"set","Key":"\xff"}}]', DEEP,
        b"[" * 5000 + b"]" * 5000,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "body"), [(target, body) for target, bodies in MALFORMED.items() for body in bodies]
)
async def test_bodies_of_the_wrong_form(address: str, target: str, body: bytes) -> None:
    """A body that is not a session, check, service or transaction is answered as the client's error; the list of
    services can still be read."""
    await refused(address, request(target, method="PUT", body=body))
    assert status_of(await exchange(address, request("/v1/agent/services"))) == 200


@pytest.mark.parametrize("target", ["/v1/kv/\udcff", "/v1/kv/%ff", "/v1/kv/%ff?recurse", "/v1/kv/a%c3("])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_keys_that_are_no_text(address: str, method: str, target: str) -> None:
    """A key is UTF-8."""
    await refused(address, request(target, method=method))


@pytest.mark.parametrize("authorization", ["Bearer \udcff", "Bearer", "Basic \udcff\udcfe", "Bearer ß"])
async def test_a_token_of_any_bytes_is_only_wrong(tmp_path: Path, authorization: str) -> None:
    """Whatever is sent as a token is refused as a wrong token, and before the body is read."""
    store = EmbeddedStore(tmp_path / "store.db")
    async with serve_consul_api(store, token="right") as address:
        for header in (f"Authorization: {authorization}", f"X-Consul-Token: {authorization}"):
            assert status_of(await exchange(address, request("/v1/kv/a", header))) == 403
            unsent = request("/v1/kv/a", header, "Content-Length: 100", method="PUT")
            assert status_of(await exchange(address, unsent)) == 403
    await store.close()


async def test_the_names_of_a_services_meta_are_its_own(address: str) -> None:
    """Names in `Meta` keep their case; all other names have none."""
    body = b'{"nAmE":"web","META":{"Team":"A"},"Tags":null}'
    await exchange(address, request("/v1/agent/service/register", method="PUT", body=body))
    assert b'"Team":"A"' in await exchange(address, request("/v1/agent/services"))
