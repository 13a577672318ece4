"""Following an RC until it is what was asked for, by watching.

The model: TreeViews on the RC's folder and on its pods' health show the progress; after every change a pure function
(`placing`, `vanishing`) judges them. An obstacle that the owner reports ends the wait only after it has stood for a
moment, because a farm that has just started may see its nodes one by one. Once a deleted RC's folder is empty, what is
left are processes: each agent's report is watched until it is gone.

Nothing here changes anything: whoever stops following leaves the RC as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import NamedTuple, TypeVar

from rcfarm import rc_view
from rcfarm.cli.views import pod_info
from rcfarm.cli.words import count, placed, seconds
from rcfarm.overview import read_farms, why_unowned
from rcfarm.rc_view import PodView, RCSnapshot
from store.keys import Keys
from store.kv import Entry, Store, Unavailable
from store.records import BadRecord, Reality, decode
from store.view import Change, TreeView

SETTLE = 3.0  # seconds for which an obstacle must stand before it counts
CRASHES = 10.0  # seconds for which pods must crash, or be unable to start: many a first start waits for another program
PER_POD = ("crashing", "blocked", "unhealthy", "failed", "starting")  # reasons that are shown pod by pod
NOTE_AFTER = 2.0  # seconds without an owner before that is worth a note
STORE_RETRY = 1.0  # seconds between attempts to read from a store that is away
SHOWN_PODS = 5

T = TypeVar("T")
Say = Callable[[str], None]


class Progress(NamedTuple):
    """How far an RC is. `obstacle`: a code for why the owner does no more for now, or ""; `wake`: when to judge again
    though nothing changes, on the event loop's clock."""

    text: str
    done: bool = False
    obstacle: str = ""
    reasons: tuple[str, ...] = ()
    wake: float | None = None


class Followed(NamedTuple):
    """How following ended. `reasons`: why it is not complete."""

    complete: bool
    reasons: list[str]


def placing(snap: RCSnapshot, generation: int) -> Progress:
    """Whether every replica of (at least) that generation is placed and healthy, and nothing else is left."""
    spec, status = snap.spec, snap.status
    if spec is None or spec.deleting:
        return Progress("it was deleted meanwhile", obstacle="deleted", reasons=("it was deleted meanwhile",))
    leaving = len(snap.health.keys() - snap.pods.keys())
    text = f"{placed(len(snap.pods), spec.replicas_desired)}, {snap.healthy} healthy"
    text += f", {snap.healthy_outdated} with an older manifest" if snap.healthy_outdated else ""
    text += f", {leaving} stopping" if leaving else ""
    is_met = len(snap.pods) == spec.replicas_desired == snap.healthy and not leaving
    if not snap.owner.held:
        return Progress(text, obstacle="unowned")
    if status is None or status.generation < generation:
        return Progress(text)
    if is_met:
        return Progress(text, done=True)
    codes = {reason.code for reason in status.reasons}
    stands = status.state in ("short", "held", "quarantined", "disabled")
    obstacle = next((code for code in ("failed", "crashing", "blocked") if code in codes), "")
    messages = tuple(reason.message for reason in status.reasons if reason.code not in PER_POD)
    return Progress(text, False, status.state if stands else obstacle, messages)


def vanishing(snap: RCSnapshot) -> Progress:
    """Whether nothing is left in the folder of an RC that is being deleted."""
    if snap._replace(health={}) == RCSnapshot(snap.rc_id):  # an agent takes its verdict away when the process ended
        return Progress("its records are gone", done=True)
    text = f"{count(len(snap.pods), 'pod')} left"
    if not snap.owner.held:
        return Progress(text, obstacle="unowned")
    stands = snap.status is not None and snap.status.state in ("held", "quarantined")
    reasons = tuple(reason.message for reason in snap.status.reasons) if snap.status else ()
    return Progress(text, False, snap.status.state if stands and snap.status else "", reasons)


class Steadiness:
    """How long each pod has passed without an interruption.

    A verdict that was there at the first look counts from the time that it names; every later one counts from when it
    was seen, so that it matters little when clocks differ.
    """

    def __init__(self, wanted: float) -> None:
        self._wanted = wanted
        self._since: dict[str, tuple[tuple[str, ...], float]] = {}
        self._is_first = True

    def left(self, snap: RCSnapshot, now: float) -> float:
        """Seconds until every placed pod has passed for long enough; one whose processes are done has. `now` is of a
        monotonic clock."""
        for node, health in snap.health.items():
            verdict = (health.status, health.since, health.manifest)
            if node not in self._since or self._since[node][0] != verdict:
                self._since[node] = verdict, now - (_age(health.since) if self._is_first else 0.0)
        self._is_first = False
        running = [node for node in snap.pods if node in snap.health and snap.health[node].condition != "completed"]
        return max((self._since[node][1] + self._wanted - now for node in running), default=0.0)


def _age(timestamp: str) -> float:
    try:
        return max(0.0, time.time() - datetime.fromisoformat(timestamp).timestamp())
    except ValueError:
        return 0.0


class Follower:
    """Follows one RC, for `timeout` seconds. `say` hears of progress, `note` of what people should know meanwhile."""

    def __init__(self, store: Store, keys: Keys, rc_id: str, *, timeout: float, say: Say, note: Say) -> None:
        self._store, self._keys, self._rc_id = store, keys, rc_id
        self._say, self._note = say, note
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + timeout
        self._timeout = timeout

    async def until_placed(self, generation: int, wait_healthy: float = 0.0) -> Followed:
        """Until every replica is placed, and has been healthy for `wait_healthy` seconds."""
        steadiness = Steadiness(wait_healthy)

        def judge(snap: RCSnapshot) -> Progress:
            progress, left = placing(snap, generation), steadiness.left(snap, self._clock())
            if not progress.done or left <= 0:
                return progress
            reason = f"not healthy for {seconds(wait_healthy)} in a row yet, as --wait-healthy asks"
            text = f"{progress.text}; waiting until it has been so for {seconds(wait_healthy)}"
            return Progress(text, reasons=(reason,), wake=self._clock() + left)

        progress, snap = await self._until(judge)
        if progress.done:
            return Followed(True, [])
        return Followed(False, self._reasons(progress) + await self._unhealthy(snap))

    async def until_gone(self, pod_id: str) -> Followed:
        """Until neither a key nor a process of the RC is left."""
        progress, _ = await self._until(vanishing)
        if not progress.done:
            return Followed(False, self._reasons(progress))
        left = await self._until_stopped(pod_id)
        return Followed(not left, left)

    async def _until(self, judge: Callable[[RCSnapshot], Progress]) -> tuple[Progress, RCSnapshot]:
        """Watch the RC's folder until it is judged done, an obstacle stands, or the time is over."""
        obstacle, since, noted = "", 0.0, False
        folder, group = self._keys.rc(self._rc_id), self._keys.health_of(self._rc_id)
        async with (
            watched(self._store, folder) as tree,
            watched(self._store, group, lambda key: key.endswith(f"/{self._rc_id}"), tree.event) as verdicts,
        ):
            while True:
                tree.event.clear()
                entries, health = await tree.entries(self._end), await verdicts.entries(self._end)
                snap = rc_view.snapshot(self._keys, self._rc_id, entries, health)
                progress = judge(snap)
                self._say(progress.text)
                if progress.obstacle != obstacle:
                    obstacle, since = progress.obstacle, self._clock()
                wake = self._wake_at(obstacle, since)
                stands = bool(obstacle) and wake is None
                if progress.done or self._clock() >= self._end or (stands and obstacle != "unowned"):
                    return progress, snap
                if stands and not noted:
                    noted = True
                    farms = await self._patiently(lambda: read_farms(self._store, self._keys))
                    self._note(why_unowned(snap, farms.farms))
                await tree.changed(min(at for at in (wake, progress.wake, self._end) if at is not None))

    def _wake_at(self, obstacle: str, since: float) -> float | None:
        """When the obstacle has stood for long enough; None: it has already, or there is none."""
        patience = {"unowned": NOTE_AFTER, "crashing": CRASHES, "blocked": CRASHES}
        at = since + patience.get(obstacle, SETTLE)
        return at if obstacle and self._clock() < at else None

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """What `read` answers; a store that is away is asked again until our time is over."""
        while True:
            try:
                return await read()
            except Unavailable:
                if self._clock() >= self._end:
                    raise
            await asyncio.sleep(STORE_RETRY)

    def _reasons(self, progress: Progress) -> list[str]:
        if progress.reasons:
            return list(progress.reasons)
        if progress.obstacle:
            return ["no farm owns it"] if progress.obstacle == "unowned" else []
        return [f"{progress.text} after {self._timeout:g} seconds"]

    async def _unhealthy(self, snap: RCSnapshot) -> list[str]:
        """What the agents say of the first pods that are placed but do not pass."""
        pod_id = rc_view.pod_id_of(snap)
        wanted = snap.spec.manifest if snap.spec else ""
        reasons = []
        for node in sorted(snap.pods):
            health = snap.health.get(node)
            if health and health.status == "passing" and health.manifest == wanted:
                continue
            reality = await self._reality(node, pod_id)
            pod = pod_info(PodView(node, True, {}, health, reality))
            older = " with an older manifest" if health and health.manifest != wanted else ""
            words = [f"{pod.state}{older}", f"health {pod.health}", *pod.details()]
            reasons.append(f"{node}: {', '.join(words) if reality else 'its agent has not reported the pod yet'}")
        more = [f"and {len(reasons) - SHOWN_PODS} more"] if len(reasons) > SHOWN_PODS else []
        return reasons[:SHOWN_PODS] + more

    async def _reality(self, node: str, pod_id: str) -> Reality | None:
        entry = await self._patiently(lambda: self._store.get(self._keys.reality(node, pod_id)))
        try:
            return decode(Reality, entry.key, entry.value) if entry else None
        except BadRecord:
            return None

    async def _until_stopped(self, pod_id: str) -> list[str]:
        """Wait for the agents to report nothing more of the RC; what is left when the time is over."""
        left = []
        names = await self._patiently(lambda: self._store.keys(self._keys.realities))
        for name in [name for name in names if name.rpartition("/")[2] == pod_id]:
            node = name.removeprefix(self._keys.realities).partition("/")[0]
            alive = await self._patiently(partial(self._store.get, self._keys.node_alive(node)))
            if not await self._gone(name, answers=bool(alive and alive.session)):
                why = "still stopping" if alive and alive.session else "its agent does not answer"
                left.append(f"{node}: a process may be left: {why}")
        return left

    async def _gone(self, name: str, *, answers: bool) -> bool:
        """Whether the report is gone, at the latest at the end of our time; a dead agent is not waited for."""
        async with watched(self._store, name) as tree:
            while True:
                tree.event.clear()
                entries = [entry for entry in await tree.entries(self._end) if entry.key == name]
                if not any(_is_of(entry, self._rc_id) for entry in entries):
                    return True
                if not answers or self._clock() >= self._end:
                    return False
                self._say(f"waiting for {name.removeprefix(self._keys.realities)} to stop")
                await tree.changed(self._end)


def _is_of(entry: Entry, rc_id: str) -> bool:
    try:
        return decode(Reality, entry.key, entry.value).rc == rc_id
    except BadRecord:
        return False


class Watched:
    """A tree of the store that is being watched. Deadlines are of the event loop's clock. `event` is set by a change;
    the reader clears it before it reads."""

    def __init__(self, view: TreeView[bytes], watching: asyncio.Task[None], event: asyncio.Event) -> None:
        self.event = event
        self._view, self._watching = view, watching

    async def entries(self, deadline: float) -> list[Entry]:
        """What is there now. Raises the store's error when it has not answered at all until `deadline`."""
        if not self._view.is_synced:
            await self._first(deadline)
        if self._watching.done():
            self._watching.result()
        return [
            Entry(key, record.value, 0, record.modify_index, record.lock_index, session=record.session)
            for key, record in sorted(self._view.records.items())
        ]

    async def changed(self, deadline: float) -> None:
        """Wait until the event is set, or until `deadline`."""
        try:
            async with asyncio.timeout_at(deadline):
                await self.event.wait()
        except TimeoutError:
            pass  # the caller looks at the clock itself

    async def _first(self, deadline: float) -> None:
        """Wait for the first listing, for the view's failure, or until `deadline`."""
        synced = asyncio.create_task(self._view.synced())
        left = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({synced, self._watching}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            synced.cancel()
        if not self._view.is_synced and self._view.error:
            raise self._view.error


@asynccontextmanager
async def watched(
    store: Store, prefix: str, concerns: Callable[[str], bool] = lambda key: True, event: asyncio.Event | None = None
) -> AsyncIterator[Watched]:
    """Watch everything under `prefix` for as long as the block lasts; a change of a key that it `concerns` sets
    `event`."""
    event = event or asyncio.Event()

    def note(changes: list[Change[bytes]]) -> None:
        if any(concerns(change.key) for change in changes):
            event.set()

    view: TreeView[bytes] = TreeView(store, prefix, lambda _, value: value, on_change=note)
    watching = asyncio.create_task(view.run())
    watching.add_done_callback(lambda _: event.set())
    try:
        yield Watched(view, watching, event)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
