"""A write that had to wait is asked once more, when there is nothing left to wait for."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from store.kube.api.objects import PODS
from store.kube.api.protocol import checked_on_send, run_check
from store.kube.client.client import KubeClient
from tests.support.kube.faults.odd_server import client_of, status_answer
from tests.support.kube.informers.real import until

POD = {"metadata": {"name": "a", "namespace": "ns"}}


class Lost(Exception):
    """Leadership, say."""


class Leader:
    """Leads until the test ends the leadership."""

    leads = True

    def check(self) -> None:
        if not self.leads:
            raise Lost

    async def create(self, client: KubeClient) -> object:
        with checked_on_send(self.check):
            return await client.create(PODS, POD, "ns")


async def test_a_write_that_waits_for_our_own_rate_is_not_sent_any_more() -> None:
    """The lease is lost while the client's own limit holds a write back."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        return web.json_response(POD)

    leader = Leader()
    async with client_of(handler, qps=20, burst=1) as client:
        writes = [asyncio.create_task(leader.create(client)) for _ in range(5)]
        await until(lambda: seen)
        leader.leads = False
        sent = len(seen)
        answers = await asyncio.gather(*writes, return_exceptions=True)
    assert len(seen) == sent
    assert [type(answer) for answer in answers[sent:]] == [Lost] * (5 - sent)


async def test_a_write_that_the_server_asked_to_come_later_is_not_sent_again() -> None:
    """The lease is lost during the pause of a 429."""
    seen: list[str] = []
    leader = Leader()

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        leader.leads = False
        return status_answer(429, "TooManyRequests", Retry_After="0")

    async with client_of(handler) as client:
        with pytest.raises(Lost):
            await leader.create(client)
    assert seen == ["POST"]


async def test_a_write_that_waits_for_a_connection_is_not_sent_any_more() -> None:
    """All connections were taken; one gets free after the lease was lost. The client goes on to work for others."""
    seen: list[str] = []
    leader, answered = Leader(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.method)
        await answered.wait()
        return web.json_response(POD)

    async with client_of(handler, max_connections=1) as client:
        first = asyncio.create_task(leader.create(client))
        await until(lambda: seen)
        second = asyncio.create_task(leader.create(client))
        await asyncio.sleep(0)
        leader.leads = False
        answered.set()
        assert await first == POD
        with pytest.raises(Lost):
            await second
        assert await client.get(PODS, "a", "ns") == POD
    assert seen == ["POST", "GET"]


def test_outside_of_a_block_nothing_is_asked() -> None:
    """A question holds for its own block only, also when that fails."""
    with pytest.raises(Lost), checked_on_send(lambda: None):
        raise Lost
    run_check()
