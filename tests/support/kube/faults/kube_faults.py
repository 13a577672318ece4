"""More faults for `tests.support.kube.faults.fault_proxy`, each against one thing that a client of Kubernetes relies
on."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from tests.support.kube.faults.fault_proxy import Fault, Way


def cuts_within_a_chunk_header(size: int) -> Fault:
    """Return a fault: after this number of bytes of a chunked answer the connection breaks in the middle of the next
    chunk's length."""

    async def cut(way: Way) -> web.StreamResponse:
        left = size
        async with way.proxy.ask(way.request) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
            response.enable_chunked_encoding()
            await response.prepare(way.request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk[:left])
                if (left := left - len(chunk)) <= 0:
                    break
            if way.request.transport is not None:
                way.request.transport.write(b"1f")
            return await way.cut(response)

    return cut


def in_pages_of(limit: int) -> Fault:
    """Return a fault: a list comes in more pages than requested."""

    async def page(way: Way) -> web.StreamResponse:
        path = re.sub(r"limit=\d+", f"limit={limit}", way.request.raw_path)
        return await Way(way.proxy, way.request.clone(rel_url=path)).pass_on()

    return page


def at_random(rng: random.Random, faults: Sequence[Fault], share: float) -> Fault:
    """Return a fault: this share of requests meets one of the faults."""

    async def draw(way: Way) -> web.StreamResponse:
        return await (rng.choice(faults)(way) if rng.random() < share else way.pass_on())

    return draw


def hangs_for(seconds: float) -> Fault:
    """Return a fault: no answer comes; the connection breaks after this time."""

    async def hang(way: Way) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return await way.cut()

    return hang


def noting(bodies: list[Any]) -> Fault:
    """Return a fault that changes nothing but adds what was sent to `bodies`."""

    async def note(way: Way) -> web.StreamResponse:
        bodies.append(json.loads(await way.request.read()))
        return await way.pass_on()

    return note
