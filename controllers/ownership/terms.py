"""Terms: the work of a member under one session, and the loop that runs one term after the other.

The model: objects that do not depend on the session live in the `Runner`; everything else lives in a `Term`. The work
of a term runs in one TaskGroup. When the session is lost everything in it is cancelled, and the term ends before the
next one begins, so no task of the old one can act under the new one. After losing the session a term writes nothing;
the store would reject it.

Cancelling `start` stops the intake, lets the work in flight end, gives up the membership, and ends the session, which
releases every item at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from controllers.ownership.ownership import Ownership
from store.kv.protocol import StoreError
from store.kv.session import SessionKeeper

STOP_GRACE = 0.6  # seconds that work in flight gets when the process stops

O = TypeVar("O", bound=Ownership[Any, Any, Any])  # noqa: E741
T = TypeVar("T", bound="Term[Any]")
P = ParamSpec("P")

Work = Coroutine[Any, Any, None]


class Term(ABC, Generic[O]):
    """The work of a member under the session of `ownership`. Run `run()` once."""

    def __init__(self, keeper: SessionKeeper, ownership: O) -> None:
        self.ownership = ownership
        self.session = ownership.session
        self._keeper = keeper

    @abstractmethod
    def work(self) -> Iterator[Work]:
        """Yield what runs once the member has joined, `ownership.run()` included, until the session is lost."""

    @abstractmethod
    async def stop(self, grace: float) -> None:
        """Begin nothing more, and wait for the work in flight, at most `grace` seconds."""

    async def run(self) -> None:
        """Claim and work until the session is lost, or until cancelled: then stop in order."""
        ownership, session = self.ownership, self.session
        if not await ownership.join():
            return
        kind, log = ownership.kind, ownership.log
        log.info(f"{kind.title} joined; claiming {kind.item}s", session=session)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in self.work()]
            try:
                await self._keeper.lost(session)
                log.warning(f"Session lost; releasing all {kind.item}s", session=session)
            except asyncio.CancelledError:
                # Take no new work, let the work in flight end, and give up the membership; the session's end releases
                # the items.
                await self.stop(STOP_GRACE)
                try:
                    async with asyncio.timeout(STOP_GRACE):
                        await ownership.membership.leave(session)
                except (StoreError, TimeoutError) as error:
                    log.warning("Could not deregister; the lease will expire", error=str(error))
                raise
            finally:
                for task in tasks:
                    task.cancel()
        ownership.close()


class Runner(ABC, Generic[T]):
    """Runs terms, each under a session of `keeper`. Read `term` (None while no session is held) from the same event
    loop."""

    def __init__(self, keeper: SessionKeeper) -> None:
        self.keeper = keeper
        self.term: T | None = None

    @abstractmethod
    def background(self) -> Iterator[Work]:
        """Yield what runs whatever the session is: the views that all terms share. The keeper runs beside them."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until a term may begin: no decision is made before each view has been read once."""

    @abstractmethod
    def make_term(self, session: str, *, resumed: bool) -> T:
        """Make the term of a session. `resumed`: the term before it had the same session."""

    async def start(self) -> None:
        """Run terms until cancelled, then stop in order, within about a second."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in (self.keeper.run(), *self.background())]
            try:
                await self.ready()
                former = ""
                while True:
                    session = await self.keeper.held()
                    self.term, former = self.make_term(session, resumed=session == former), session
                    try:
                        await self.term.run()
                    finally:
                        self.term = None
            finally:
                for task in tasks:
                    task.cancel()

    def in_term(self, notify: Callable[Concatenate[T, P], None]) -> Callable[P, None]:
        """Return a callback that notifies the term, if there is one."""

        def notify_term(*args: P.args, **kwargs: P.kwargs) -> None:
            if self.term:
                notify(self.term, *args, **kwargs)

        return notify_term
