"""The barrier over HTTP, against a faulty server. It runs in real time, so its timeouts are shortened here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from controllers.framework.barrier import barrier as barrier_module
from controllers.framework.barrier.barrier import Exit, FrameworkBarrier
from controllers.framework.barrier.config import Config
from tests.support.framework.gangs import gang, task
from tests.support.kube.faults.odd_server import event, serving, status_answer, stream

TIMEOUT = 1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier_module, "LAST_LOOK", 0.2)
    monkeypatch.setattr(barrier_module, "REFUSAL_GRACE", 0.3)
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


def listed(framework: dict[str, object]) -> web.Response:
    return web.json_response({"metadata": {"resourceVersion": "5"}, "items": [framework]})


async def test_500_throughout(tmp_path: Path) -> None:
    """The state is unknown at the deadline; the server's message is in the last line."""

    async def handler(request: web.Request) -> web.Response:
        return status_answer(500, "InternalError", "etcd is on fire")

    end, seconds, last = await barrier_on(handler, tmp_path)
    assert end == Exit.FAILED
    assert TIMEOUT - 0.5 < seconds < TIMEOUT + 2
    assert "etcd is on fire" in last


async def test_500_at_the_end(tmp_path: Path) -> None:
    """The gang was seen to lack one task; later errors are not in the last line."""
    answers = iter([listed(gang(worker=[task("worker", 0, ip=None)]))])

    async def handler(request: web.Request) -> web.Response:
        return next(answers, status_answer(500, "InternalError"))

    end, _, last = await barrier_on(handler, tmp_path)
    assert end == Exit.TRANSIENT
    assert "0/1 ready" in last


async def test_403(tmp_path: Path) -> None:
    """The grace ends it, not the deadline."""

    async def handler(request: web.Request) -> web.Response:
        return status_answer(403, "Forbidden", 'User "x" cannot get resource "frameworks"')

    end, _, last = await barrier_on(handler, tmp_path)
    assert end == Exit.FAILED
    assert "refused for 0.3 s" in last
    assert 'cannot get resource "frameworks"' in last


@pytest.mark.parametrize("part", ["answer", "body", "watch"])
async def test_a_server_that_hangs(part: str, tmp_path: Path) -> None:
    """Wherever the server stops answering, the barrier ends on time: without any answer as a failure, after a state was
    seen as a gang that is not complete.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        if part == "watch" and "watch" not in request.query and "fieldSelector" in request.query:
            return listed(gang(worker=[task("worker", 0, ip="")]))
        response = await stream(request, b"") if part != "answer" else None
        await asyncio.Event().wait()
        assert response is not None
        return response

    end, seconds, _ = await barrier_on(handler, tmp_path)
    assert end == (Exit.TRANSIENT if part == "watch" else Exit.FAILED)
    assert TIMEOUT - 0.5 < seconds < TIMEOUT + 2


async def test_410(tmp_path: Path) -> None:
    """A watch that is answered with 410, as status or in the stream, leads to a new list."""
    lists = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal lists
        if "watch" not in request.query:
            lists += 1
            return listed(gang(worker=1) if lists == 3 else gang(worker=[task("worker", 0, ip=None)]))
        if lists == 1:
            return status_answer(410, "Expired")
        return await stream(request, event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))

    end, _, _ = await barrier_on(handler, tmp_path)
    assert end == Exit.PASSED
    assert lists == 3
