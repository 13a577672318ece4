"""Follow an RC until it has reached its desired state, by watching.

The model: TreeViews on the RC's folder and on its pods' health show the progress; after every change a pure function
(`placing`, `vanishing`) judges them. An obstacle that the owner reports ends the wait only after it has lasted for a
few seconds, because a farm that has just started may see its nodes one by one. Once a deleted RC's folder is empty,
only processes may be left: each agent's report is watched until it is gone.

Following is read-only: interrupting it leaves the RC as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from typing import NamedTuple, TypeVar

from rcfarm.cli.kit.json_views import pod_info
from rcfarm.cli.kit.output import count, placed, seconds
from rcfarm.operations import rc_snapshot
from rcfarm.operations.fleet import read_farms, why_unowned
from rcfarm.operations.rc_snapshot import ROLLOUT_CODES, PodView, RCSnapshot
from store.kv.protocol import BadRecord, Entry, Store, Unavailable
from store.kv.view import Change, TreeView
from store.schema.keys import Keys
from store.schema.records import ROLLOUT_STOPPED, Reality, decode

OBSTACLE_AFTER = 3.0  # seconds that an obstacle must last before it counts
CRASHES = 10.0  # seconds that pods must crash, or be unable to start: a first start often waits for another program
PER_POD = ("crashing", "blocked", "disk_full", "unhealthy", "failed", "starting")  # reasons that are shown pod by pod
NOTE_AFTER = 2.0  # seconds without an owner before a note says so
# of other obstacles: OBSTACLE_AFTER
COUNTS_AFTER = {"unowned": NOTE_AFTER, "crashing": CRASHES, "blocked": CRASHES, "disk_full": CRASHES}
AT_ONCE = frozenset({"replaced"})  # obstacles that do not pass
DECIDED = ROLLOUT_STOPPED | {"paused", "awaiting_promotion"}  # a rollout goes no further
STORE_RETRY = 1.0  # seconds between attempts to read while the store is unavailable
SHOWN_PODS = 5

T = TypeVar("T")
Say = Callable[[str], None]


class Progress(NamedTuple):
    """The progress of an RC. `obstacle`: a code for why the owner can't make progress for now, or ""; `wake`: when to
    judge again even if nothing changes, on the event loop's clock. `is_rolling`: a rollout goes on, which has deadlines
    of its own: the time limit begins again with every step of it."""

    text: str
    done: bool = False
    obstacle: str = ""
    reasons: tuple[str, ...] = ()
    wake: float | None = None
    is_rolling: bool = False


class Followed(NamedTuple):
    """The result of following an RC. `reasons`: why the change is not complete."""

    complete: bool
    reasons: list[str]


def placing(snap: RCSnapshot, generation: int, *, rolls: bool = True, revision: int = 0) -> Progress:
    """Judge the placement of (at least) that generation: done once every replica is placed and healthy, and no other
    pod is left. `rolls`: and once its rollout, if there is one, is done. `revision`: the manifest that is to be placed,
    which a later one takes the place of; 0: any."""
    spec, status = snap.spec, snap.status
    if spec is None or spec.deleting:
        return Progress("the RC was deleted", obstacle="deleted", reasons=("the RC was deleted",))
    if 0 < revision < spec.revision:
        by = f" of {spec.revised_by}" if spec.revised_by else ""
        text = f"revision {revision} was replaced by revision {spec.revision}{by}"
        return Progress(text, obstacle="replaced", reasons=(f"{text}; `rcfarm rollout status {spec.id}` shows that",))
    leaving = len(snap.health.keys() - snap.pods.keys())
    text = f"{placed(len(snap.pods), snap.desired)}, {snap.healthy} healthy"
    text += f", {snap.healthy_outdated} with an older manifest" if snap.healthy_outdated else ""
    text += f", {leaving} stopping" if leaving else ""
    is_met = snap.is_met and not leaving
    if not snap.owner.held:
        return Progress(text, obstacle="unowned")
    if status is None or status.generation < generation:
        return Progress(text)
    rollout = snap.present_rollout
    if rolls and spec.replicas_desired and rollout is not None and rollout.state != "done":
        text = f"{text}; rollout of revision {rollout.revision}: {rollout.state.replace('_', ' ')}"
        told = tuple(reason.message for reason in status.reasons if reason.code in ROLLOUT_CODES)
        is_decided = rollout.state in DECIDED
        return Progress(text, False, f"rollout {rollout.state}" if is_decided else "", told, is_rolling=not is_decided)
    if is_met:
        return Progress(text, done=True)
    codes = {reason.code for reason in status.reasons}
    stuck = status.state in ("short", "held", "quarantined", "disabled")
    obstacle = next((code for code in ("failed", "crashing", "blocked", "disk_full") if code in codes), "")
    messages = tuple(reason.message for reason in status.reasons if reason.code not in PER_POD)
    return Progress(text, False, status.state if stuck else obstacle, messages)


def vanishing(snap: RCSnapshot) -> Progress:
    """Judge the deletion of an RC: done once its folder is empty."""
    if snap._replace(health={}) == RCSnapshot(snap.rc_id):  # an agent deletes its verdict when the process has ended
        return Progress("its records are gone", done=True)
    text = f"{count(len(snap.pods), 'pod')} left"
    if not snap.owner.held:
        return Progress(text, obstacle="unowned")
    stuck = snap.status is not None and snap.status.state in ("held", "quarantined")
    reasons = tuple(reason.message for reason in snap.status.reasons) if snap.status else ()
    return Progress(text, False, snap.status.state if stuck and snap.status else "", reasons)


class Steadiness:
    """The time for which each pod has passed without interruption.

    A verdict present at the first look counts from its own timestamp; every later one counts from when it was seen, so
    that clock differences matter little.
    """

    def __init__(self, wanted: float) -> None:
        self._wanted = wanted
        self._since: dict[str, tuple[tuple[str, ...], float]] = {}
        self._is_first = True

    def left(self, snap: RCSnapshot, now: float) -> float:
        """Return the seconds until every placed pod has passed for long enough; a completed pod always has. `now` is a
        monotonic time."""
        for node, health in snap.health.items():
            verdict = (health.status, health.since, health.manifest)
            if node not in self._since or self._since[node][0] != verdict:
                age = 0.0
                if self._is_first:
                    with suppress(ValueError):
                        age = max(0.0, time.time() - datetime.fromisoformat(health.since).timestamp())
                self._since[node] = verdict, now - age
        self._is_first = False
        running = [node for node in snap.pods if node in snap.health and snap.health[node].condition != "completed"]
        return max((self._since[node][1] + self._wanted - now for node in running), default=0.0)


class Follower:
    """Follows one RC for at most `timeout` seconds. `say` is called with progress, `note` with remarks for the user."""

    def __init__(self, store: Store, keys: Keys, rc_id: str, *, timeout: float, say: Say, note: Say) -> None:
        self._store, self._keys, self._rc_id = store, keys, rc_id
        self._say, self._note = say, note
        self._clock = asyncio.get_running_loop().time
        self._end = self._clock() + timeout
        self._timeout = timeout

    async def until_placed(
        self, generation: int, wait_healthy: float = 0.0, *, rolls: bool = True, revision: int = 0
    ) -> Followed:
        """Follow until every replica is placed and has been healthy for `wait_healthy` seconds. `rolls`, `revision`:
        see `placing`."""
        steadiness = Steadiness(wait_healthy)

        def judge(snap: RCSnapshot) -> Progress:
            progress = placing(snap, generation, rolls=rolls, revision=revision)
            left = steadiness.left(snap, self._clock())
            if not progress.done or left <= 0:
                return progress
            reason = f"not healthy for {seconds(wait_healthy)} without interruption yet (--wait-healthy)"
            text = f"{progress.text}; waiting until healthy for {seconds(wait_healthy)}"
            return Progress(text, reasons=(reason,), wake=self._clock() + left)

        progress, snap = await self._until(judge)
        if progress.done:
            return Followed(True, [])
        if progress.obstacle in AT_ONCE:
            return Followed(False, self._reasons(progress))
        return Followed(False, self._reasons(progress) + await self._unhealthy(snap))

    async def until_gone(self, pod_id: str) -> Followed:
        """Follow until neither a key nor a process of the RC is left."""
        progress, _ = await self._until(vanishing)
        if not progress.done:
            return Followed(False, self._reasons(progress))
        left = []
        for name in await self._patiently(lambda: self._store.keys(self._keys.realities)):
            place = self._keys.parse_pod(name)
            if place.pod_id != pod_id:
                continue
            alive = await self._patiently(partial(self._store.get, self._keys.node_alive(place.node)))
            if not await self._gone(name, answers=bool(alive and alive.session)):
                why = "still stopping" if alive and alive.session else "its agent does not answer"
                left.append(f"{place.node}: a process may be left: {why}")
        return Followed(not left, left)

    async def _until(self, judge: Callable[[RCSnapshot], Progress]) -> tuple[Progress, RCSnapshot]:
        """Watch the RC's folder until it is judged done, an obstacle persists, or the time limit is reached."""
        obstacle, since, noted, last = "", 0.0, False, ""
        folder, group = self._keys.rc(self._rc_id), self._keys.health_of(self._rc_id)
        async with (
            watched(self._store, folder) as tree,
            watched(self._store, group, lambda key: key.endswith(f"/{self._rc_id}"), tree.event) as verdicts,
        ):
            while True:
                tree.event.clear()
                entries, health = await tree.entries(self._end), await verdicts.entries(self._end)
                snap = rc_snapshot.snapshot(self._keys, self._rc_id, entries, health)
                progress = judge(snap)
                self._say(progress.text)
                if progress.is_rolling and progress.text != last:
                    self._end = max(self._end, self._clock() + self._timeout)
                last = progress.text
                if progress.obstacle != obstacle:
                    obstacle, since = progress.obstacle, self._clock()
                is_final = obstacle in AT_ONCE or obstacle.startswith("rollout ")
                lasts_after = 0.0 if is_final else COUNTS_AFTER.get(obstacle, OBSTACLE_AFTER)
                due = since + lasts_after  # when the obstacle counts as lasting
                wake = due if obstacle and self._clock() < due else None
                lasts = bool(obstacle) and wake is None
                if progress.done or self._clock() >= self._end or (lasts and obstacle != "unowned"):
                    return progress, snap
                if lasts and not noted:
                    noted = True
                    farms = await self._patiently(lambda: read_farms(self._store, self._keys))
                    self._note(why_unowned(snap, farms.farms))
                await tree.changed(min(at for at in (wake, progress.wake, self._end) if at is not None))

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `read`, repeated while the store is unavailable, until the time limit."""
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
        """Return the agents' reports on the first pods that are placed but do not pass."""
        pod_id = rc_snapshot.pod_id_of(snap)
        wanted, is_rolling = snap.wanted, snap.present_rollout is not None and snap.present_rollout.state != "done"
        reasons = []
        for node in sorted(snap.pods):
            health = snap.health.get(node)
            if health and health.status == "passing" and (health.manifest == wanted or is_rolling):
                continue  # or it waits for its turn, which the rollout's reason says
            entry = await self._patiently(partial(self._store.get, self._keys.reality(node, pod_id)))
            reality = report_of(entry) if entry else None
            pod = pod_info(PodView(node, True, {}, health, reality))
            older = " with an older manifest" if health and health.manifest != wanted else ""
            words = [f"{pod.state}{older}", f"health {pod.health}", *pod.details()]
            reasons.append(f"{node}: {', '.join(words) if reality else 'its agent has not reported the pod yet'}")
        more = [f"and {len(reasons) - SHOWN_PODS} more"] if len(reasons) > SHOWN_PODS else []
        return reasons[:SHOWN_PODS] + more

    async def _gone(self, name: str, *, answers: bool) -> bool:
        """Wait until the report is gone or the time limit is reached. Return whether it is gone. With `answers` false
        (a dead agent), do not wait."""
        async with watched(self._store, name) as tree:
            while True:
                tree.event.clear()
                reports = [report_of(entry) for entry in await tree.entries(self._end) if entry.key == name]
                if not any(report and report.rc == self._rc_id for report in reports):
                    return True
                if not answers or self._clock() >= self._end:
                    return False
                place = self._keys.parse_pod(name)
                self._say(f"waiting for {place.node}/{place.pod_id} to stop")
                await tree.changed(self._end)


def report_of(entry: Entry) -> Reality | None:
    """Return an agent's report, or None if it can't be read."""
    try:
        return decode(Reality, entry.key, entry.value)
    except BadRecord:
        return None


class Watched:
    """A watched tree of the store. Deadlines are on the event loop's clock. A change sets `event`; the reader clears it
    before it reads."""

    def __init__(self, view: TreeView[bytes], watching: asyncio.Task[None], event: asyncio.Event) -> None:
        self.event = event
        self._view, self._watching = view, watching

    async def entries(self, deadline: float) -> list[Entry]:
        """Return the current entries. Raises the store's error if it has not answered at all by `deadline`."""
        if not self._view.is_synced:
            synced = asyncio.create_task(self._view.synced())
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait(
                    {synced, self._watching}, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                synced.cancel()
            if not self._view.is_synced and self._view.error:
                raise self._view.error
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
            pass  # the caller checks the clock


@asynccontextmanager
async def watched(
    store: Store, prefix: str, concerns: Callable[[str], bool] = lambda key: True, event: asyncio.Event | None = None
) -> AsyncIterator[Watched]:
    """Watch everything under `prefix` while the block runs. A change of a key for which `concerns` is true sets
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
