"""The notifier of real farms against a real receiver: what is sent, once each, whatever the receiver does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rcfarm.farm import notifier
from rcfarm.operations.fleet import engage_brake, release_brake
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Denied
from store.schema.keys import Keys
from store.schema.records import Incident, decode
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.stage import KEYS
from tests.support.kube.certificates import Authority
from tests.support.waiting import until

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """Takes events. `answers` are given first, one for each request; then everything is accepted."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.answers: list[Answer] = []
        self.asked = 0
        application = web.Application()
        application.router.add_post("/v2/enqueue", self._receive)
        self._server = TestServer(application)

    async def start(self, tls: ssl.SSLContext | None = None) -> str:
        await self._server.start_server(ssl=tls)
        return str(self._server.make_url("/v2/enqueue"))

    async def close(self) -> None:
        await self._server.close()

    async def _receive(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.answers:
            return await self.answers.pop(0)(request)
        self.events.append(await request.json())
        self.headers.append(request.headers)
        return web.json_response({"status": "success"}, status=202)

    def seen(self) -> list[tuple[str, str]]:
        """Return what was done to which incident."""
        return [(event["event_action"], event["dedup_key"]) for event in self.events]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(notifier, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(notifier, "STORE_PAUSE", 0.02)
    monkeypatch.setattr(notifier, "TIME_LIMIT", 0.3)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    yield found
    await found.close()


@pytest.fixture
async def settings(receiver: Receiver, tmp_path: Path) -> dict[str, Any]:
    key = tmp_path / "key"
    key.write_text("r0uting\n")
    return {
        "notify_url": await receiver.start(),
        "notify_key_file": key,
        "notify_name": "plant",
        "notify_after": 0.05,
        "node_lost_after": 0.05,
    }


async def records(fleet: Fleet) -> list[Incident]:
    entries = (await fleet.store.list(fleet.keys.incidents)).entries
    return [decode(Incident, entry.key, entry.value) for entry in entries]


async def test_the_five_incidents_begin_and_end(store: ScriptedStore, receiver: Receiver, settings: Any) -> None:
    """Brake, failing RC, lost node: one event for each beginning and each end, in PagerDuty's format."""
    fleet = Fleet(store.inner, KEYS)
    await fleet.add_nodes(["node-1", "node-2"])
    await fleet.create("web", 2)
    async with running_farm(store, KEYS, **settings):
        await fleet.until_placed("web", ["node-1", "node-2"])
        await fleet.set_health("web", {"node-1": "passing", "node-2": "critical"})
        await until(lambda: ("trigger", "plant/rc/web") in receiver.seen())
        await fleet.set_health("web", {"node-2": "passing"})
        await until(lambda: ("resolve", "plant/rc/web") in receiver.seen())

        await engage_brake(store.inner, KEYS, "Consul is upgraded", actor="ada@ops")
        await until(lambda: ("trigger", "plant/brake/fleet") in receiver.seen())
        await release_brake(store.inner, KEYS, actor="ada@ops")
        await until(lambda: ("resolve", "plant/brake/fleet") in receiver.seen())

        await fleet.kill_node("node-2")
        await until(lambda: ("trigger", "plant/node/node-2") in receiver.seen())
        await fleet.until(lambda: _all_sent(fleet))

    first, brake = receiver.events[0], receiver.events[2]
    assert first["routing_key"] == "r0uting"
    assert first["payload"]["summary"].startswith("rc web is unhealthy: 1 of 2 pods does not pass: node-2")
    assert (first["payload"]["severity"], first["payload"]["source"]) == ("error", "plant")
    assert first["payload"]["custom_details"]["command"] == "rcfarm explain rc/web"
    assert "engaged by ada@ops: Consul is upgraded" in brake["payload"]["summary"]
    assert len(receiver.seen()) == len(set(receiver.seen()))
    assert {each.kind for each in await records(fleet)} <= {"node", "rc"}


async def _all_sent(fleet: Fleet) -> bool:
    found = await records(fleet)
    return bool(found) and all(each.sent and not each.resolved for each in found)


async def _fails(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="no")


async def _hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(5)
    return web.Response(status=202)


async def _slow(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(status=503)
    await answer.prepare(request)
    with contextlib.suppress(ConnectionResetError):
        for _ in range(20):
            await answer.write(b".")
            await asyncio.sleep(0.05)
    return answer


async def _redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/elsewhere")


@pytest.mark.parametrize("answer", [_fails, _hangs, _slow, _redirects])
async def test_a_bad_receiver_is_tried_again(
    answer: Answer, store: ScriptedStore, receiver: Receiver, settings: Any
) -> None:
    """An event is tried until it is accepted, and then not again; the farm works on at the same time."""
    fleet = Fleet(store.inner, KEYS)
    await fleet.add_nodes(["node-1"])
    receiver.answers = [answer] * 2
    await engage_brake(store.inner, KEYS, "why", actor="ada@ops")
    async with running_farm(store, KEYS, **settings):
        await until(lambda: receiver.asked > 0)
        await fleet.create("web", 1)
        await fleet.until_placed("web", ["node-1"])
        await until(lambda: receiver.events)
        await fleet.until(lambda: _all_sent(fleet))
    assert receiver.seen() == [("trigger", "plant/brake/fleet")]


async def test_what_was_resolved_before_it_was_sent_is_not_sent(
    store: ScriptedStore, receiver: Receiver, settings: Any
) -> None:
    """The receiver is away while an incident comes and goes: it never learns of it."""
    fleet = Fleet(store.inner, KEYS)
    receiver.answers = [_fails] * 1000
    async with running_farm(store, KEYS, **settings):
        await engage_brake(store.inner, KEYS, "why", actor="ada@ops")
        await until(lambda: receiver.asked > 2)
        assert "500" in (await records(fleet))[0].problem
        await release_brake(store.inner, KEYS, actor="ada@ops")
        await fleet.until(lambda: _none(fleet))
        receiver.answers = []
        await engage_brake(store.inner, KEYS, "again", actor="ada@ops")
        await until(lambda: receiver.events)
    assert [
        event["payload"]["summary"].endswith("again. Nothing is removed or moved.") for event in receiver.events
    ] == [True]


async def _none(fleet: Fleet) -> bool:
    return not await records(fleet)


async def test_one_farm_sends_and_its_successor_does_not_repeat(
    store: ScriptedStore, receiver: Receiver, settings: Any
) -> None:
    """With two farms an event is sent once; after both are replaced the beginning is not sent again, the end is."""
    fleet = Fleet(store.inner, KEYS)
    async with (
        running_farm(store, KEYS, "farm-a", **settings) as one,
        running_farm(ScriptedStore(store.inner), KEYS, "farm-b", **settings) as other,
    ):
        await until(lambda: len(one.membership.live()) == len(other.membership.live()) == 2)
        await engage_brake(store.inner, KEYS, "why", actor="ada@ops")
        await until(lambda: receiver.events)
        await fleet.until(lambda: _all_sent(fleet))
    async with running_farm(store, KEYS, "farm-c", **settings) as farm:
        await until(lambda: farm.term is not None and farm.notifier is not None and farm.notifier.view.is_synced)
        await release_brake(store.inner, KEYS, actor="ada@ops")
        await until(lambda: len(receiver.events) > 1)
        await fleet.until(lambda: _none(fleet))
    assert [action for action, _ in receiver.seen()] == ["trigger", "resolve"]


async def test_many_failures_are_few_incidents(
    store: ScriptedStore, receiver: Receiver, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a bound, one incident stands for the rest."""
    monkeypatch.setattr(notifier, "MOST", 3)
    fleet, nodes = Fleet(store.inner, KEYS), [f"node-{number}" for number in range(10)]
    await fleet.add_nodes(nodes)
    async with running_farm(store, KEYS, **settings) as farm:
        await until(lambda: farm.term is not None)
        await asyncio.gather(*map(fleet.kill_node, nodes))
        await until(lambda: any("others-of-farm-a" in key for _, key in receiver.seen()))
        await fleet.until(lambda: _all_sent(fleet))
    assert 4 <= len(receiver.events) <= 8
    assert any("further nodes are lost" in event["payload"]["summary"] for event in receiver.events)


async def test_an_audit_log_that_cant_be_written(store: ScriptedStore, receiver: Receiver, settings: Any) -> None:
    """The token may write everything but the audit log, and then not even incidents: a person learns of it."""

    class Refusing(EmbeddedStore):
        denied: tuple[str, ...] = ()

        async def txn(self, ops: Any) -> Any:
            if any(op.key.startswith(self.denied) for op in ops if self.denied):
                raise Denied("Permission denied")
            return await super().txn(ops)

    refusing, keys = Refusing(), Keys(shards=4)
    fleet = Fleet(refusing, keys)
    refusing.denied = (keys.audit,)
    async with running_farm(refusing, keys, **settings):
        await until(lambda: ("trigger", "plant/audit/farm-a") in receiver.seen())
        refusing.denied = ()
        await until(lambda: ("resolve", "plant/audit/farm-a") in receiver.seen())
        await fleet.until(lambda: _none(fleet))
    refusing.denied = (keys.audit, keys.incidents)
    receiver.events.clear()
    async with running_farm(refusing, keys, **settings):
        await until(lambda: ("trigger", "plant/audit/farm-a") in receiver.seen())
    assert len(receiver.events) == 1


async def test_the_generic_format_carries_a_token(store: ScriptedStore, receiver: Receiver, settings: Any) -> None:
    """One JSON object per event, and the token as a header."""
    async with running_farm(store, KEYS, **settings | {"notify_format": "json"}):
        await engage_brake(store.inner, KEYS, "why", actor="ada@ops")
        await until(lambda: receiver.events)
    (event,) = receiver.events
    assert receiver.headers[0]["Authorization"] == "Bearer r0uting"
    assert (event["action"], event["key"], event["kind"]) == ("trigger", "plant/brake/fleet", "brake")
    assert event["runbook"] == "runbook.md#the-brake-is-on"


async def test_the_receiver_is_verified(store: ScriptedStore, settings: Any, tmp_path: Path) -> None:
    """Over TLS, nothing is sent to a receiver that the authorities do not vouch for."""
    authority = Authority(tmp_path / "ca")
    issued = authority.issue("receiver")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certificate, issued.key)
    receiver, fleet = Receiver(), Fleet(store.inner, KEYS)
    url = await receiver.start(context)
    assert url.startswith("https://")
    await engage_brake(store.inner, KEYS, "why", actor="ada@ops")
    try:
        async with running_farm(store, KEYS, **settings | {"notify_url": url}):
            await fleet.until(lambda: _refused(fleet, "certificate"))
        assert receiver.asked == 0
        wrong = {"notify_url": url, "notify_ca_file": tmp_path / "missing"}
        async with running_farm(store, KEYS, **settings | wrong):
            await fleet.until(lambda: _refused(fleet, "farm.notify_ca_file: "))
        right = {"notify_url": url, "notify_ca_file": authority.own.certificate}
        async with running_farm(store, KEYS, **settings | right):
            await until(lambda: receiver.events)
    finally:
        await receiver.close()


async def _refused(fleet: Fleet, why: str) -> bool:
    return any(why in each.problem for each in await records(fleet))
