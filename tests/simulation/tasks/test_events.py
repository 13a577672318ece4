"""Events on their way to sinks: at least once, in order per execution, and none lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import count
from typing import Any

import pytest

from controllers.tasks.api.phase import Transition, do_transition, phase_info_running
from controllers.tasks.api.plugin import TaskExecutionContext
from controllers.tasks.engine.outbox import EventRefused, SinkError, identity_of
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Listing
from store.schema.keys import Keys
from store.schema.tasks import TaskEvent, TaskSpec
from tests.support.tasks.engines import EPOCH, JobPlugin, Remote, ScriptedPlugin, World, engine_on, running
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime(noop_cycles=0)

HOUR = 3600.0


class Sink:
    """Takes events while it is up. `got`: the numbers per execution."""

    def __init__(self, name: str, *, up_at: float = 0.0, refuses: str = "", hangs: bool = False) -> None:
        self.name = name
        self.got: dict[str, list[int]] = defaultdict(list)
        self.identities: list[str] = []
        self.last = 0.0
        self.attempts: list[float] = []
        self._up_at, self._refuses, self._hangs = up_at, refuses, hangs

    async def send(self, spec: TaskSpec, event: TaskEvent) -> None:
        self.attempts.append(loop_time())
        if loop_time() < self._up_at:
            if self._hangs:
                await asyncio.sleep(1e6)
            raise SinkError("down")
        if spec.id == self._refuses:
            raise EventRefused("malformed")
        self.got[spec.id].append(event.n)
        self.identities.append(identity_of(event, spec.id))
        self.last = loop_time()

    async def close(self) -> None:
        return


async def test_a_sink_that_is_down_for_an_hour_loses_and_delays_nothing(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    down, up = Sink("down", up_at=HOUR), Sink("up")
    ids = [f"job-{number}" for number in range(10)]
    async with running(engine_on(store, keys, JobPlugin(Remote()), sinks=[down, up])):
        for task_id in ids:
            await world.submit(task_id, "job")
        for task_id in ids:
            await world.until_state(task_id, lambda state: state.step == "done")
        assert loop_time() < 60.0
        assert up.last < 60.0
        assert not down.got
        await asyncio.sleep(HOUR + 60.0 - loop_time())
        await world.until_done(*ids)
    for task_id in ids:
        numbers = [event.n for event in await world.events(task_id)]
        assert down.got[task_id] == numbers
        assert up.got[task_id] == numbers
    assert len(set(down.identities)) == len(down.identities)


async def test_a_round_with_news_is_one_transaction(store: EmbeddedStore, keys: Keys, world: World) -> None:
    """That events were sent is noted with the next news; the plugin is not called later for it."""
    versions = count()

    async def handle(context: TaskExecutionContext) -> Transition:
        return do_transition(phase_info_running(next(versions)))

    sink = Sink("up")
    engine = engine_on(store, keys, ScriptedPlugin(handle), sinks=[sink])
    async with running(engine):
        await world.begin("job")
        await asyncio.sleep(1.0)
        assert engine.term is not None
        before, events = engine.term.commits.units, len(await world.events("job"))
        for _ in range(5):
            engine.enqueue("job")
            await asyncio.sleep(1.0)
        assert engine.term.commits.units == before + 5
    assert len(await world.events("job")) == events + 5
    state = await world.state("job")
    assert state is not None
    assert state.sent == events + 4
    assert sink.got["job"] == list(range(events + 5))


async def test_an_engine_that_takes_over_sends_what_was_not_sent(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    down = Sink("events", up_at=HOUR)
    async with running(engine_on(store, keys, JobPlugin(Remote()), name="engine-a", sinks=[down])):
        await world.submit("job", "job")
        await world.until_state("job", lambda state: state.step == "done")
    up = Sink("events")
    async with running(engine_on(store, keys, JobPlugin(Remote()), name="engine-b", sinks=[up])):
        numbers = [event.n for event in await world.events("job")]
        await world.until(lambda: up.got["job"] == numbers)
        await world.until_done("job")


async def test_an_event_that_is_refused_for_good_holds_up_nothing(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    sink = Sink("strict", refuses="odd")
    async with running(engine_on(store, keys, JobPlugin(Remote()), sinks=[sink])):
        await world.submit("odd", "job")
        await world.submit("even", "job")
        await world.until_done("odd", "even")
    assert "odd" not in sink.got
    assert sink.got["even"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_sink_that_is_down_costs_one_attempt_per_interval(
    store: EmbeddedStore, keys: Keys, world: World, hangs: bool
) -> None:
    """Neither the store nor another sink notices; then everything leaves, in order and once, at a bounded rate."""
    down, up = Sink("down", up_at=HOUR, hangs=hangs), Sink("up")
    ids = [f"job-{number:03}" for number in range(150)]
    counting = CountingStore(store)
    engine = engine_on(counting, keys, JobPlugin(Remote()), sinks=[down, up])
    async with running(engine):
        for task_id in ids:
            await world.submit(task_id, "job")
        for task_id in ids:
            await world.until_state(task_id, lambda state: state.step == "done")
        await asyncio.sleep(300.0 - loop_time())
        assert up.last < 60.0
        attempts, reads = len(down.attempts), counting.reads_of_events
        await asyncio.sleep(1800.0)
        assert len(down.attempts) - attempts <= 1800 / 60 + 1
        assert counting.reads_of_events - reads <= 1800 / 60 + 1
        [pause] = engine.membership.me.pauses
        assert (pause.kind, pause.name) == ("sink", "down")
        assert EPOCH <= pause.since < EPOCH + 60.0
        assert pause.probes > 20
        await asyncio.sleep(HOUR - loop_time())
        await world.until_done(*ids)
        assert loop_time() < HOUR + 120.0
        await world.until(lambda: not engine.membership.me.pauses)
    for task_id in ids:
        assert down.got[task_id] == [event.n for event in await world.events(task_id)]
    assert len(set(down.identities)) == len(down.identities)


async def test_one_event_that_a_sink_never_takes_delays_no_other(
    store: EmbeddedStore, keys: Keys, world: World
) -> None:
    class Odd(Sink):
        async def send(self, spec: TaskSpec, event: TaskEvent) -> None:
            if spec.id.startswith("odd"):
                raise SinkError("500")
            await super().send(spec, event)

    sink = Odd("odd")
    async with running(engine_on(store, keys, JobPlugin(Remote()), sinks=[sink])):
        for number in range(20):
            await world.submit(f"odd-{number}", "job")
            await world.submit(f"even-{number}", "job")
        await world.until_done(*(f"even-{number}" for number in range(20)))
        began = loop_time()
        await world.submit("late", "job")
        await world.until_done("late")
        assert loop_time() - began < 70.0
    assert loop_time() < 200.0


class CountingStore:
    """Counts the reads of events."""

    def __init__(self, inner: EmbeddedStore) -> None:
        self._inner = inner
        self.reads_of_events = 0

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        self.reads_of_events += "/task-events/" in prefix
        return await self._inner.list(prefix, consistent=consistent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
