"""Whatever happens to a collection and to the connection to it, an informer's views end equal to the server's, by legal
steps."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import looptime
from hypothesis import example, given, settings
from hypothesis import strategies as st

from store.kube.api.errors import Expired, ServerError, TooManyRequests, Unreachable
from store.kube.api.objects import PODS, Object, is_deleting, uid_of
from store.kube.informer.informer import Informer
from store.kube.memory.rules import too_large_version
from tests.support.kube.informers.checked import RecordingHandler, running
from tests.support.kube.informers.collection import Collection

NAMES = st.sampled_from("abcd")
LABELS = st.sampled_from([{"group": "ours"}, {"group": "others"}])
ERRORS = st.sampled_from(
    [
        Unreachable("away"),
        Expired("too old", status=410),
        too_large_version(200, 100),
        TooManyRequests("busy", retry_after=3.0),
        ServerError("oops", status=500),
    ]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, LABELS),
        st.tuples(st.just("put"), NAMES, LABELS),
        st.tuples(st.just("terminate"), NAMES),
        st.tuples(st.just("delete"), NAMES),
        st.tuples(st.just("replace"), NAMES, LABELS),
        st.tuples(st.just("sleep"), st.sampled_from([0.0, 0.2, 1.0, 5.0, 60.0])),
        st.tuples(st.just("cut"), st.one_of(st.none(), ERRORS)),
        st.tuples(st.just("fail"), st.sampled_from(["list", "watch", "get"]), ERRORS),
        st.tuples(st.just("outage"), st.booleans()),
        st.tuples(st.just("compact")),
        st.tuples(st.just("bookmark")),
        st.tuples(st.just("join")),
    ),
    max_size=40,
)


class Run:
    """An informer on a collection, with handlers that join over time."""

    def __init__(self, selector: str, **traits: Any) -> None:
        self.server = Collection()
        for trait, value in traits.items():
            setattr(self.server, trait, value)
        clock = asyncio.get_running_loop().time
        self.selector = selector
        self.informer = Informer(
            self.server, PODS, label_selector=selector, page_size=2, clock=clock, rng=random.Random(3)
        )
        self.handlers: list[RecordingHandler] = []
        self.seen: set[str] = set()
        self.join()

    def join(self) -> None:
        self.handlers.append(RecordingHandler())
        self.informer.add_handler(self.handlers[-1])

    async def step(self, step: tuple[Any, ...]) -> None:
        server = self.server
        match step:
            case ("put", name, labels):
                server.put(name, labels=labels)
            case ("terminate", name) if f"team/{name}" in server.now:
                server.put(name, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
            case ("delete", name):
                server.remove(name)
            case ("replace", name, labels):
                server.reuse(name, labels=labels)
            case ("sleep", seconds):
                await asyncio.sleep(seconds)
            case ("cut", error):
                server.cut(error)
            case ("fail", verb, error):
                server.fail(verb, error)
            case ("outage", streams):
                server.fail("watch", *[Unreachable("refused")] * 2)
                server.cut(Unreachable("broken") if streams else None)
            case ("compact",):
                server.compact()
            case ("bookmark",):
                server.bookmark()
            case ("join",):
                self.join()
        self.check()

    def check(self) -> None:
        """Check that every handler has received exactly what the cache shows, by legal steps."""
        cached = self.informer.items()
        self.seen.update(map(uid_of, cached))
        for handler in self.handlers:
            assert handler.violations == []
            assert self.selector or handler.regressions == []
            assert sorted(handler.view.values(), key=_identity) == sorted(cached, key=_identity)

    def check_end(self) -> None:
        """Check that everything that exists and is selected is shown as it is. Other objects are shown only if they
        were selected once, as they are, and all of them unless they were about to end."""
        self.check()
        shown, exists = self.handlers[0].view, self.server.now
        selected = self.server.selected(self.selector)
        assert selected == {key: obj for key, obj in shown.items() if key in selected}
        for key in shown.keys() - selected.keys():
            assert shown[key] == exists.get(key), "what does not exist, or not in this state, is shown"
        lost = {key for key, obj in exists.items() if uid_of(obj) in self.seen and not is_deleting(obj)} - shown.keys()
        assert not lost, "what has only left the selector is not shown any more"


def _identity(obj: Object) -> str:
    return uid_of(obj)


def play(steps: list[tuple[Any, ...]], selector: str, **traits: Any) -> None:
    async def main() -> None:
        run = Run(selector, **traits)
        async with running(run.informer):
            for step in steps:
                await run.step(step)
            # Long enough for every pause, every watch, and a check of every unmatched object.
            for _ in range(20):
                await asyncio.sleep(60.0)
                run.check()
            run.check_end()
            assert not run.informer.problem

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(main())


@example([("sleep", 60.0), ("cut", None), ("put", "a", {})], False, 0, 0.0)  # a bookmark is due as the watch ends
@settings(max_examples=300, deadline=None)
@given(STEPS, st.booleans(), st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_the_cache_ends_as_the_server(steps: list[Any], serves_cached_pages: bool, lag: int, latency: float) -> None:
    """Outages, cuts at any moment, expired versions and pages, stale caches: in the end the views agree with the
    server, every handler's view agrees with the cache at any time, and no handler ever gets an update across UIDs."""
    play(steps, "", serves_cached_pages=serves_cached_pages, lag=lag, latency=latency)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_with_a_selector_nothing_that_exists_is_lost(steps: list[Any], lag: int, latency: float) -> None:
    """Objects that leave and enter the selector at any moment: selected objects are shown, deleted ones are not, and
    unmatched objects are shown as they are."""
    play(steps, "group=ours", lag=lag, latency=latency)
