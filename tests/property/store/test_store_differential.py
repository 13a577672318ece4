"""The embedded store against a real Consul: the same random operations, and every answer compared.

Indexes differ in value but must correspond: one index of the one is always the same index of the other, in the same
order. Reasons of refusals are compared as well, word by word, with the indexes in them left out.

`RCFARM_DIFFERENTIAL_RUNS` sets how many random runs are tried (2,000 take some minutes).
"""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from store.consul.client import ConsulSettings
from store.consul.store import ConsulStore
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Entry, Op, SessionSpec, Store, StoreError, TxnConflict, Verb
from tests.support.consul.server import ConsulServer

RUNS = int(os.environ.get("RCFARM_DIFFERENTIAL_RUNS", "150"))
STEPS = 25
LONG = 86_400.0  # seconds; no session of a run expires
SESSION_NAMES = "abcdefghijkl"
WAIT = 0.03  # seconds that a watch may block
NAMES = ["a", "a/", "a/b", "a/b/c", "ab", "b", "é"]
PREFIXES = ["", "a", "a/", "a/b", "a/b/", "b", "none/"]
VERBS: list[Verb] = [
    "set", "cas", "lock", "unlock", "get", "get-tree", "check-index", "check-session", "check-not-exists",
    "delete", "delete-tree", "delete-cas",
]  # fmt: skip

names = st.sampled_from(["a", "a", "a/b", "a/b", *NAMES])  # mostly two, so that operations meet
prefixes = st.sampled_from(PREFIXES)
values = st.sampled_from([b"", b"x", b"y", b"\x00\xff"])
flags = st.sampled_from([0, 0, 7, 2**64 - 1])
session_numbers = st.integers(0, 3)


class Draw(msgspec.Struct, frozen=True):
    """One operation before its index and session are resolved for each of the stores."""

    verb: Verb
    name: str
    value: bytes
    flags: int
    index: Literal["current", "current", "none", "stale"]
    session: int  # number of the session, or -1: unknown, -2: none


draws = st.builds(
    Draw,
    verb=st.sampled_from(VERBS),
    name=names,
    value=values,
    flags=flags,
    index=st.sampled_from(["current", "current", "none", "stale"]),
    session=st.sampled_from([0, 0, 0, 1, 1, 2, 3, -1, -2]),
)
UNKNOWN = "00000000-0000-0000-0000-000000000000"


class Pair(msgspec.Struct, frozen=True):
    """Corresponding values: first the embedded store's, then Consul's."""

    embedded: Any
    consul: Any


class Differential(RuleBasedStateMachine):
    """Two stores that must answer alike. `runner` and `consul` are shared by all runs; `root` is each run's own."""

    def __init__(self, runner: asyncio.Runner, consul: ConsulStore) -> None:
        super().__init__()
        self.runner, self.consul = runner, consul
        self.root = f"differential/{secrets.token_hex(6)}/"
        self.embedded = EmbeddedStore()
        self.sessions: list[Pair] = []
        self.indexes: dict[int, int] = {}
        self.current: dict[str, Pair] = {}

    @initialize()
    def begin(self) -> None:
        """Write once, so that both have a last change, and create two sessions to lock with."""
        self.both(lambda store: store.put(self.root + "z", b""))
        self.open_session("release", 0.0)
        self.open_session("delete", 0.0)

    @rule(name=names, value=values, flags=flags)
    def put(self, name: str, value: bytes, flags: int) -> None:
        self.both(lambda store: store.put(self.root + name, value, flags=flags))

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.both(lambda store: store.delete(self.root + name))

    @rule(name=names, consistent=st.booleans())
    def get(self, name: str, consistent: bool) -> None:
        self.both(lambda store: store.get(self.root + name, consistent=consistent))

    @rule(prefix=prefixes)
    def list(self, prefix: str) -> None:
        self.both(lambda store: store.list(self.root + prefix))

    @rule(prefix=prefixes)
    def keys(self, prefix: str) -> None:
        self.both(lambda store: store.keys(self.root + prefix))

    @rule(drawn=st.lists(draws, max_size=6))
    def transact(self, drawn: builtins.list[Draw]) -> None:
        pairs = [self.op(draw) for draw in drawn]
        self.both(lambda store: store.txn([self.of(store, pair) for pair in pairs]))

    @rule(drawn=draws)
    def transact_one(self, drawn: Draw) -> None:
        self.transact([drawn])

    @rule(name=names, value=values, number=st.integers(0, 1))
    def lock(self, name: str, value: bytes, number: int) -> None:
        self.transact([Draw("lock", name, value, 0, "none", number)])

    @rule(name=names, value=values, number=st.integers(0, 1))
    def unlock(self, name: str, value: bytes, number: int) -> None:
        self.transact([Draw("unlock", name, value, 0, "none", number)])

    @rule(prefix=st.sampled_from(["a", "a/", "b"]))
    def delete_tree(self, prefix: str) -> None:
        self.transact([Draw("delete-tree", prefix, b"", 0, "none", -2)])

    @rule(name=names)
    def create_and_delete(self, name: str) -> None:
        """Create and delete within one transaction, which leaves nothing but an index."""
        self.transact([Draw("set", name, b"x", 0, "none", -2), Draw("delete", name, b"", 0, "none", -2)])

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(behavior=st.sampled_from(["release", "release", "delete"]), lock_delay=st.sampled_from([0.0, 0.0, 60.0]))
    def open_session(self, behavior: Literal["release", "delete"], lock_delay: float) -> None:
        spec = SessionSpec("differential", ttl=LONG, check_ttl=None, lock_delay=lock_delay, behavior=behavior)
        self.sessions.append(Pair(*(self.run(store.create_session(spec)).id for store in (self.embedded, self.consul))))

    @rule(name=names, behavior=st.sampled_from(["release", "delete"]), lock_delay=st.sampled_from([0.0, 60.0]))
    def hold_for_a_while(self, name: str, behavior: Literal["release", "delete"], lock_delay: float) -> None:
        """A session locks a key (or fails to), ends, and another one tries to lock the key."""
        if len(self.sessions) < len(SESSION_NAMES):
            self.open_session(behavior, lock_delay)
            held = len(self.sessions) - 1
            self.transact([Draw("lock", name, b"x", 0, "none", held)])
            self.destroy_session(held)
            self.transact([Draw("lock", name, b"y", 0, "none", 0)])

    @rule(number=session_numbers)
    def destroy_session(self, number: int) -> None:
        pair = self.session(number)
        self.both(lambda store: store.destroy_session(self.of(store, pair)))

    @rule(number=session_numbers)
    def renew_session(self, number: int) -> None:
        pair = self.session(number)
        self.both(lambda store: store.renew_session(self.of(store, pair)))

    @rule(number=session_numbers)
    def session_info(self, number: int) -> None:
        pair = self.session(number)
        self.both(lambda store: store.session_info(self.of(store, pair)))

    @rule(prefix=prefixes, name=names, value=values, remove=st.booleans())
    def watch(self, prefix: str, name: str, value: bytes, remove: bool) -> None:
        """Change a key while both stores are watched, under the prefix or not."""

        async def watch(store: Store) -> Any:
            index = (await store.list(self.root + prefix)).index
            watch = asyncio.create_task(store.watch(self.root + prefix, index, WAIT))
            await asyncio.sleep(0)
            await (store.delete(self.root + name) if remove else store.put(self.root + name, value))
            await watch
            return await store.list(self.root + prefix)

        self.both(watch)

    @rule(prefix=prefixes, number=st.integers(0, 30))
    def watch_from_before(self, prefix: str, number: int) -> None:
        """Watch from an index that was seen earlier."""
        seen = sorted(self.indexes.items())
        pair = Pair(*seen[number % len(seen)]) if seen else Pair(0, 0)
        self.both(lambda store: store.watch(self.root + prefix, self.of(store, pair), WAIT))

    @invariant()
    def hold_the_same(self) -> None:
        """Check that both hold the same entries after every step."""
        here, there = self.both(lambda store: store.list(self.root))
        self.current = {
            mine.key: Pair(mine.modify_index, theirs.modify_index)
            for mine, theirs in zip(here.entries, there.entries, strict=True)
        }

    def teardown(self) -> None:
        for pair in self.sessions:
            self.run(self.consul.destroy_session(pair.consul))
        self.run(self.consul.txn([Op("delete-tree", self.root)]))
        self.run(self.embedded.close())

    def run(self, call: Awaitable[Any]) -> Any:
        async def answer() -> Any:
            return await call

        return self.runner.run(answer())

    def both(self, call: Callable[[Store], Awaitable[Any]]) -> tuple[Any, Any]:
        """Call both, compare, and return both answers."""
        here, there = (self.answer(call, store) for store in (self.embedded, self.consul))
        self.compare(here, there)
        return here, there

    def of(self, store: Store, pair: Pair) -> Any:
        return pair.embedded if store is self.embedded else pair.consul

    def answer(self, call: Callable[[Store], Awaitable[Any]], store: Store) -> Any:
        try:
            return self.run(call(store))
        except StoreError as error:
            return error

    def compare(self, here: Any, there: Any) -> None:
        if isinstance(here, StoreError) or isinstance(there, StoreError):
            assert type(here) is type(there), (here, there)
            if isinstance(here, TxnConflict):
                ours, theirs = ([self.failure(*each) for each in answer.failures] for answer in (here, there))
                assert ours == theirs
        elif isinstance(here, Entry):
            assert self.plain(here) == self.plain(there)
            self.match(here.create_index, there.create_index)
            self.match(here.modify_index, there.modify_index)
        elif hasattr(here, "entries"):
            assert len(here.entries) == len(there.entries), (here, there)
            for mine, theirs in zip(here.entries, there.entries, strict=True):
                self.compare(mine, theirs)
            self.match(here.index, there.index)
        elif hasattr(here, "behavior"):
            assert there is not None
            assert here[1:] == there[1:]
        else:
            assert here == there

    def match(self, here: int, there: int) -> None:
        """Check that the two indexes mean the same moment."""
        if not here or not there:
            assert here == there
            return
        assert self.indexes.setdefault(here, there) == there, (here, there, self.indexes)
        seen = sorted(self.indexes.items())
        assert [pair[1] for pair in seen] == sorted({pair[1] for pair in seen}), seen

    def plain(self, entry: Entry) -> Entry:
        return msgspec.structs.replace(entry, create_index=0, modify_index=0, session=self.named(entry.session or ""))

    def failure(self, op_index: int, reason: str) -> tuple[int, str]:
        return op_index, re.sub(r"\d+", "N", self.named(reason.replace(self.root, "")))

    def named(self, text: str) -> str:
        for number, pair in enumerate(self.sessions):
            for session_id in (pair.embedded, pair.consul):
                text = text.replace(session_id, f"session {SESSION_NAMES[number]}")
        return text

    def session(self, number: int) -> Pair:
        return self.sessions[number] if 0 <= number < len(self.sessions) else Pair(UNKNOWN, UNKNOWN)

    def op(self, draw: Draw) -> Pair:
        key = self.root + draw.name
        indexes = {"none": Pair(0, 0), "stale": Pair(2**40, 2**40), "current": self.current.get(key, Pair(0, 0))}[
            draw.index
        ]
        session = Pair("", "") if draw.session == -2 else self.session(draw.session)

        def op(index: int, session_id: str) -> Op:
            return Op(draw.verb, key, draw.value, index=index, session=session_id, flags=draw.flags)

        return Pair(op(indexes.embedded, session.embedded), op(indexes.consul, session.consul))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.timeout(3600)
def test_the_embedded_store_answers_as_consul_does(consul_server: ConsulServer, runner: asyncio.Runner) -> None:
    """No answer differs, whatever the calls and their order.

    Consul is this test's own: an absent key has the index of the last change anywhere, by any client.
    """

    async def connect() -> ConsulStore:
        return ConsulStore(ConsulSettings.from_env(consul_server.url, environ={}))

    store = runner.run(connect())

    class OnThese(Differential):
        def __init__(self) -> None:
            super().__init__(runner, store)

    try:
        run_state_machine_as_test(
            OnThese,
            settings=settings(
                max_examples=RUNS,
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    finally:
        runner.run(store.close())
