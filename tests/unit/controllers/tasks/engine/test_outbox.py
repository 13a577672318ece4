"""The outbox over a real HTTP receiver: identity, retries, refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from controllers.tasks.engine import outbox as outbox_module
from controllers.tasks.engine.outbox import LogSink, Outbox, SinkError, WebhookSink
from store.schema.tasks import TaskEvent, TaskSpec
from tests.support.waiting import background, loop_time, until

SPEC = TaskSpec(id="nightly", type="http", project="data", labels={"team": "a"})
EVENTS = [TaskEvent(n=number, at=1.0, attempt=0, phase="PhaseRunning", version=number) for number in range(3)]


class Receiver:
    """Answers with the statuses in turn, the last one forever. `got`: identity and body of each request."""

    def __init__(self) -> None:
        self.statuses = [200]
        self.got: list[tuple[str, Any]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.got.append((request.headers["Idempotency-Key"], await request.json()))
        return web.Response(status=self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/events", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/events"
    yield receiver
    await runner.cleanup()


async def read(execution: str, first: int, end: int) -> Sequence[TaskEvent]:
    return EVENTS[first:end]


@pytest.mark.parametrize(
    ("statuses", "requests"),
    [
        ([200], ["0", "1", "2"]),
        ([503, 200], ["0", "0", "1", "2"]),
        ([409], ["0", "1", "2"]),
        ([422, 200], ["0", "1", "2"]),
    ],
)
async def test_events_arrive_in_order_with_their_identity(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, statuses: list[int], requests: str
) -> None:
    """An error is retried; "has it already" and "never" are not."""
    monkeypatch.setattr(outbox_module, "FIRST_RETRY", 0.01)
    receiver.statuses = statuses
    progress: list[tuple[str, int]] = []
    sent = Outbox([WebhookSink(receiver.url)], read, lambda *args: progress.append(args), clock=loop_time)
    async with background(sent.run()):
        sent.add(SPEC, 0, 3)
        await until(lambda: progress == [("nightly", 3)])
    assert [identity for identity, _ in receiver.got] == [f"nightly/0/{number}" for number in requests]
    _, body = receiver.got[-1]
    assert body["execution"]["project"] == "data"
    assert body["event"]["version"] == 2
    assert len(sent) == 0


async def test_a_receiver_that_is_not_there_is_an_error_of_the_sink() -> None:
    sink = WebhookSink("http://127.0.0.1:9/events")
    with pytest.raises(SinkError, match=r"127\.0\.0\.1:9"):
        await sink.send(SPEC, EVENTS[0])
    await sink.close()


async def test_the_log_has_each_event() -> None:
    with capture_logs() as logs:
        await LogSink().send(SPEC, EVENTS[1])
    assert [(entry["execution"], entry["n"]) for entry in logs] == [("nightly", 1)]


async def test_memory_is_bounded_while_a_sink_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest events are kept; the others are read from the store when the sink is back."""
    monkeypatch.setattr(outbox_module, "KEPT", 2)
    outbox = Outbox([LogSink()], read, lambda *args: None, clock=loop_time)
    outbox.add(SPEC, 0, 3, EVENTS)
    assert len(outbox._recent) == 2
    assert list(await outbox._events("nightly", 0, 3)) == EVENTS
