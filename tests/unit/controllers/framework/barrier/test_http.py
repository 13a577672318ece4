"""The barrier over HTTP, against a faulty server. It runs in real time, so its timeouts are shortened here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from controllers.framework.barrier import barrier as barrier_module
from controllers.framework.barrier.barrier import Config, Exit, FrameworkBarrier
from tests.support.framework.gangs import gang, task
from tests.support.kube.faults.odd_server import serving, stream

TIMEOUT = 1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier_module, "LAST_LOOK", 0.2)
    monkeypatch.setattr(barrier_module, "FIRST_PAUSE", 0.05)


async def barrier_on(handler: Handler, directory: Path) -> tuple[Exit, float, str]:
    """Return the exit code of a barrier whose server answers with `handler`, its duration in seconds, and its last
    line.
    """
    said: list[str] = []
    async with serving(handler) as url:
        config = Config("ns", "gang", kube_api_server_address=url, barrier_check_timeout_sec=TIMEOUT)
        began = time.monotonic()
        end = await FrameworkBarrier(config, output_dir=directory, say=said.append).run()
        return end, time.monotonic() - began, said[-1]


@pytest.mark.parametrize("part", ["answer", "body", "watch"])
async def test_a_server_that_hangs(part: str, tmp_path: Path) -> None:
    """Wherever the server stops answering, the barrier ends on time: without any answer as a failure, after a state was
    seen as a gang that is not complete.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        if part == "watch" and "watch" not in request.query and "fieldSelector" in request.query:
            page = {"metadata": {"resourceVersion": "5"}, "items": [gang(worker=[task("worker", 0, ip="")])]}
            return web.json_response(page)
        response = await stream(request, b"") if part != "answer" else None
        await asyncio.Event().wait()
        assert response is not None
        return response

    end, seconds, _ = await barrier_on(handler, tmp_path)
    assert end == (Exit.TRANSIENT if part == "watch" else Exit.FAILED)
    assert TIMEOUT - 0.5 < seconds < TIMEOUT + 2
