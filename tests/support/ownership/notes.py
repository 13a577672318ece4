"""A tiny kind of owned items: notes, which clerks sign. Nothing of it is about RCs.

A note is a spec with labels, an owner key, and a signature, which its owner writes once per round of work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec
import structlog

from controllers.loop.workqueue import ShutDown, WorkQueue
from controllers.ownership import terms
from controllers.ownership.claims import Kind
from controllers.ownership.membership import Membership
from controllers.ownership.ownership import Ownership
from store.kv import ops
from store.kv.group_commit import GroupCommit
from store.kv.protocol import BadRecord, OwnershipLost, SessionSpec, Store
from store.kv.session import SessionKeeper
from store.kv.view import Change, Record, TreeView, Watched
from store.schema.keys import all_shards, shard_of
from store.schema.records import Labels, decode, encode
from store.schema.selectors import Selector
from tests.support.waiting import background, loop_time

SHARDS = 4
CLAIM_GRACE = 5.0
CLERKS = "office/clerks/"


class Clerk(msgspec.Struct, frozen=True):
    name: str
    selector: str = ""


class Text(msgspec.Struct, frozen=True):
    labels: Labels = {}


class Signature(msgspec.Struct, frozen=True):
    clerk: str


def folder(note_id: str) -> str:
    return f"office/notes/{shard_of(note_id, SHARDS)}/{note_id}/"


def spec_key(note_id: str) -> str:
    return folder(note_id) + "spec"


def owner_key(note_id: str) -> str:
    return folder(note_id) + "owner"


def signed_key(note_id: str) -> str:
    return folder(note_id) + "signed"


class Note:
    """One note, as the view of its shard shows it."""

    def __init__(self, note_id: str, shard: Drawer) -> None:
        self.id, self.shard = note_id, shard
        self.spec: Record[Text] | None = None
        self.bad_spec: BadRecord | None = None
        self.owner: Record[Signature] | None = None
        self.signed: Record[Signature] | None = None

    @property
    def session(self) -> str | None:
        return self.owner.session if self.owner else None

    @property
    def labels(self) -> Labels:
        return self.spec.value.labels if self.spec else {}

    @property
    def is_husk(self) -> bool:
        return self.spec is None and self.owner is not None


class Drawer:
    """One shard of notes. `clerk` is notified of changes; None for a shard that is read once."""

    def __init__(self, name: str, store: Store, desk: Desk | None) -> None:
        self.name, self._desk = name, desk
        self.claiming = asyncio.Lock()
        self.notes: dict[str, Note] = {}
        self.view: TreeView[Text | Signature] = TreeView(
            store,
            f"office/notes/{name}/",
            lambda key, value: decode(Text, key, value) if key.endswith("/spec") else decode(Signature, key, value),
            on_change=self._fold,
            watched=Watched.INDEX,
            busy=lambda: desk is not None and desk.is_busy(name),
            name=f"drawer {name}",
            clock=loop_time,
        )

    def __iter__(self) -> Iterator[Note]:
        return iter(self.notes.values())

    async def run(self) -> None:
        await self.view.run()

    def close(self) -> None:
        self.notes.clear()
        self.view.records.clear()

    def _fold(self, changes: list[Change[Text | Signature]]) -> None:
        for key, _, new, origin in changes:
            note_id, leaf = key.removeprefix(self.view.prefix).split("/")
            note = self.notes.setdefault(note_id, Note(note_id, self))
            setattr(note, leaf, new)
            if self._desk and self._desk.follow(note) and origin != note_id and leaf == "spec":
                self._desk.enqueue(note_id)


class Work:
    """What works on a held note."""

    def __init__(self, state: Note) -> None:
        self.state = state
        self.lock = asyncio.Lock()


class Desk(Ownership[Note, Drawer, Work]):
    """The notes that a clerk owns under one session."""

    def __init__(self, office: Office, session: str, queue: WorkQueue[str], *, resumed: bool) -> None:
        me = office.membership.me
        super().__init__(
            office.store,
            Kind("note", "clerk", all_shards(SHARDS), spec_key, owner_key, lambda: Signature(me.name)),
            office.membership,
            session,
            lambda: office.keeper.session_id == session,
            selector=Selector.parse(me.selector),
            claim_grace=CLAIM_GRACE,
            handover_interval=0.1,
            log=structlog.get_logger("clerk").bind(clerk=me.name),
            clock=loop_time,
            resumed=resumed,
        )
        self._store, self._queue = office.store, queue

    def make_shard(self, name: str, group: asyncio.TaskGroup | None) -> Drawer:
        return Drawer(name, self._store, self if group else None)

    def take(self, item: Note) -> Work:
        return Work(item)

    def enqueue(self, item_id: str) -> None:
        self._queue.add(item_id)

    def has_work(self) -> bool:
        return len(self._queue) > 0

    def dropped(self, held: Work) -> None:
        self._queue.forget(held.state.id)


class Term(terms.Term[Desk]):
    """A clerk's work under one session: each held note is signed, fenced by its lock."""

    def __init__(self, office: Office, session: str, *, resumed: bool) -> None:
        self.queue: WorkQueue[str] = WorkQueue()
        self.commits = GroupCommit(office.store)
        super().__init__(office.keeper, Desk(office, session, self.queue, resumed=resumed))
        self._office = office
        self._worker: asyncio.Task[None] | None = None

    def work(self) -> Iterator[terms.Work]:
        yield self.commits.run()
        yield self.ownership.run()
        yield self._sign()

    async def stop(self, grace: float) -> None:
        self.queue.shut_down()
        if self._worker:
            await asyncio.wait([self._worker], timeout=grace)

    async def _sign(self) -> None:
        self._worker = asyncio.current_task()
        with contextlib.suppress(ShutDown):
            while True:
                note_id = await self.queue.get()
                work = self.ownership.held.get(note_id)
                if work is not None:
                    async with work.lock:
                        if self.ownership.held.get(note_id) is work:
                            await self._sign_one(work.state)
                self.queue.done(note_id)

    async def _sign_one(self, note: Note) -> None:
        if gate := self._office.gates.get(note.id):
            self._office.waiting.add(note.id)
            await gate.wait()
        me = Signature(self._office.membership.me.name)
        fence = ops.check_session(owner_key(note.id), self.session)
        unit = [fence, ops.put(signed_key(note.id), encode(me))]
        try:
            result = await self.commits.commit(unit)
        except OwnershipLost as error:
            self._office.refused.append(note.id)
            if await self.ownership.confirm(note, str(error)):
                self.queue.add_rate_limited(note.id)
        else:
            note.shard.view.apply(result, unit, origin=note.id)


class Office(terms.Runner[Term]):
    """One clerk. `gates`: work on these notes waits; `waiting`: for which it does; `refused`: whose write was fenced
    off."""

    def __init__(self, store: Store, name: str, selector: str = "") -> None:
        super().__init__(SessionKeeper(store, SessionSpec(name, ttl=10.0, check_ttl=None), clock=loop_time))
        self.store = store
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: set[str] = set()
        self.refused: list[str] = []
        changed = self.in_term(lambda term: term.ownership.members_changed())
        self.membership = Membership(store, CLERKS, Clerk(name, selector), changed, kind="clerk", clock=loop_time)

    @property
    def owned(self) -> set[str]:
        """The notes that the clerk holds."""
        return set(self.term.ownership.held) if self.term else set()

    def background(self) -> Iterator[terms.Work]:
        yield self.membership.view.run()

    async def ready(self) -> None:
        await self.membership.view.synced()

    def make_term(self, session: str, *, resumed: bool) -> Term:
        return Term(self, session, resumed=resumed)


@contextlib.asynccontextmanager
async def at_work(office: Office) -> AsyncIterator[Office]:
    """Let the clerk work; it is stopped in order at the end."""
    async with background(office.start()):
        yield office
