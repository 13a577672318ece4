"""The verdict on a pod: its processes, its check, and how often either may change its mind in public.

The model: one `HealthMonitor` task per running pod probes it at its interval, quickly at first, so that a pod that
comes up is known to be up. A change of a process is judged at once, without waiting for a probe; after one has ended,
the pod has to prove itself again: by its check, or without one by running for an interval. A pod that crashes again
soon also has to run for `PROBATION`, whatever its check says: a program that answers for three seconds and dies does
not serve. What comes out goes through a `FlapLimiter`: a pod that changes all the time would write to the store all the
time, and neither state would be true for long, so it is `unknown` until it keeps still.

Beside the status, each verdict carries the pod's condition (`store.records.Health`), so that the cause of a crash loop
is known wherever the health is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from rcfarm.agent.probes import Verdict
from store.manifest import HealthCheck
from store.records import Process

_PASSING = Verdict("passing", "running")
_FIRST_PROBE = 0.05  # seconds after the start; doubles up to the check's interval

PROBATION = 10.0  # seconds that a pod must run after it crashed again soon, before it can pass
SHORT_LIFE = 30.0  # seconds: a process that ended within them has crashed soon
CRASH_MEMORY = 600.0  # seconds for which a crash counts
CRASHES_SHOWN = 2  # crashes within that time, from which on a pod that passes is called restarted


class FlapLimiter:
    """Admits `burst` changes at once and one more every `interval` seconds; times are monotonic seconds.

    Beyond that the pod is published as `unknown`, until its status has stayed the same for `interval`. A change of
    the condition alone is left out then.
    """

    def __init__(self, burst: int, interval: float) -> None:
        self._burst, self._interval = float(burst), interval
        self._tokens, self._at = float(burst), 0.0
        self._status, self._since = "", 0.0
        self._published = ""
        self._detail: tuple[str, str, int] = ("", "", 0)
        self._flapping = False

    def admit(self, verdict: Verdict, now: float) -> Verdict | None:
        """What to publish for this verdict, or None when nothing changes."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) / self._interval)
        self._at = now
        if verdict.status != self._status:
            self._status, self._since = verdict.status, now
        if self._flapping:
            self._flapping = now - self._since < self._interval
            self._tokens = max(1.0, self._tokens)
        detail = (verdict.condition, verdict.cause, published_restarts(verdict.restarts))
        if self._flapping or (verdict.status == self._published and (detail == self._detail or self._tokens < 1.0)):
            return None
        if self._tokens < 1.0:
            self._flapping = True
            output = f"it changes too often, last to {verdict.status}: {verdict.output}"
            verdict = verdict._replace(status="unknown", output=output)
        else:
            self._tokens -= 1.0
        changed = (verdict.status, detail) != (self._published, self._detail)
        self._published, self._detail = verdict.status, detail
        return verdict if changed else None

    def forget(self) -> None:
        """Publish the next verdict even if it is like the last one: it is about another process."""
        self._published = ""

    def due(self, now: float) -> float | None:
        """Seconds until a verdict that was held back may be published, or None when none is."""
        return max(0.0, self._since + self._interval - now) if self._flapping else None


def judge(processes: Mapping[str, Process], probed: Verdict | None) -> Verdict | None:
    """The pod's health: that of its worst process, else what its check found. None while nothing can be said yet."""
    for name, process in processes.items():
        if process.state == "starting":
            return None
        if process.state not in ("running", "completed"):
            return Verdict(
                "critical", f"{name} is in {process.state}" + (f": {process.reason}" if process.reason else "")
            )
    return probed if is_up(processes) else _PASSING._replace(output="completed")


class Condition(NamedTuple):
    """See `store.records.Health`."""

    code: str
    cause: str
    restarts: int


def published_restarts(count: int) -> int:
    """The largest of 1, 2, 3, 5, 10, 20, 30, 50, 100, … that `count` has reached: a crash loop writes few of them."""
    reached, decade = 0, 1
    while decade <= count:
        reached = max(step * decade for step in (1, 2, 3, 5) if step * decade <= count)
        decade *= 10
    return reached


def condition(processes: Mapping[str, Process], *, passes: bool, proving: bool, crashes: int) -> Condition:
    """The pod's condition. `proving`: it has crashed and not passed since. `crashes`: how many of them count."""
    restarts = sum(process.restarts for process in processes.values())
    for name, process in processes.items():
        if process.state == "failed":
            return Condition("failed", f"{name} {process.reason}", restarts)
        if process.state == "backoff" and (process.last_exit is None or process.reason != process.last_exit.words):
            return Condition("blocked", f"{name}: {process.reason}", restarts)
    last = max(
        ((process.last_exit.at, name, process.last_exit) for name, process in processes.items() if process.last_exit),
        default=None,
        key=lambda end: end[0],
    )
    cause = f"{last[1]} {last[2].words}" if last else ""
    if any(process.state == "backoff" for process in processes.values()) or (proving and not passes):
        return Condition("crashing", cause, restarts)
    if processes and all(process.state == "completed" for process in processes.values()):
        return Condition("completed", "", restarts)
    if passes and crashes >= CRASHES_SHOWN:
        return Condition("restarted", cause, restarts)
    return Condition("", "", restarts)


def is_up(processes: Mapping[str, Process]) -> bool:
    """Whether the pod can be probed: something runs, and nothing is missing."""
    states = {process.state for process in processes.values()}
    return "running" in states and states <= {"running", "completed"}


class HealthMonitor:
    """Watches one running pod. `probe` is None for a pod without a check."""

    def __init__(
        self,
        check: HealthCheck,
        probe: Callable[[], Awaitable[Verdict]] | None,
        processes: Callable[[], Mapping[str, Process]],
        publish: Callable[[Verdict], None],
        limiter: FlapLimiter,
    ) -> None:
        self._check = check
        self._probe = probe
        self._processes = processes
        self._publish = publish
        self._limiter = limiter
        self._probed = None if probe else _PASSING
        self._up = False
        self._up_since = 0.0
        self._proving = False  # it has crashed, and has not passed since
        self._probation = 0.0  # seconds that it must have run before it passes
        self._crashes: deque[float] = deque()
        self._wake = asyncio.Event()

    def changed(self) -> None:
        """A process of the pod has changed."""
        if self._up and not is_up(self._processes()):
            self._up = False
            self._note_end()
        self._judge()
        self._wake.set()

    def _note_end(self) -> None:
        """What ran has ended: the pod passes no more before it has proved that it stays."""
        self._probed = Verdict("critical", "it ended, and was started again only now")
        if any(process.state == "backoff" for process in self._processes().values()):
            now = self._now()
            again_soon = bool(self._recent_crashes(now)) and now - self._up_since < SHORT_LIFE
            self._probation = PROBATION if again_soon else 0.0
            self._crashes.append(now)
            self._proving = True

    def _recent_crashes(self, now: float) -> int:
        while self._crashes and self._crashes[0] <= now - CRASH_MEMORY:
            self._crashes.popleft()
        return len(self._crashes)

    async def run(self) -> None:
        """Probe and publish until cancelled."""
        while True:
            self._wake.clear()
            up = is_up(self._processes())
            if up and not self._up:
                self._up_since = self._now()
            self._up = up
            self._judge()
            if self._up and self._probe:
                await self._probe_while_up(self._probe)
            elif self._up and self._probed != _PASSING:
                await self._trust_while_up()
            else:
                await self._wait(self._next_look(self._now()))

    async def _probe_while_up(self, probe: Callable[[], Awaitable[Verdict]]) -> None:
        """Probe until a process changes: quickly at first, and with patience for what is still starting."""
        delay, patience = _FIRST_PROBE, self._now() + self._check.interval
        proven = self._up_since + self._probation
        while not self._wake.is_set():
            left = proven - self._now()
            await self._wait(min(delay, left) if left > 0 else delay)
            found = await probe()
            known = found.status == "passing" or self._now() >= patience
            if not self._wake.is_set() and known and self._now() >= proven:
                self._trust(found)
                delay = self._check.interval
            delay = min(2 * delay, self._check.interval)

    async def _trust_while_up(self) -> None:
        """Without a check, running is passing; after a crash only once it has run for an interval."""
        await self._wait(max(self._check.interval, self._up_since + self._probation - self._now()))
        if not self._wake.is_set():
            self._trust(_PASSING)

    def _trust(self, found: Verdict) -> None:
        """What a check found counts from now on."""
        self._probed = found
        if found.status == "passing":
            self._proving = False
        self._judge()

    def _judge(self) -> None:
        processes, now = self._processes(), self._now()
        verdict = judge(processes, self._probed)
        if verdict is None:
            return
        passes = verdict.status == "passing"
        found = condition(processes, passes=passes, proving=self._proving, crashes=self._recent_crashes(now))
        if found.code == "crashing" and is_up(processes):
            verdict = verdict._replace(output=f"{found.cause}, and was started again only now")
        verdict = verdict._replace(condition=found.code, cause=found.cause, restarts=found.restarts)
        if (admitted := self._limiter.admit(verdict, now)) is not None:
            self._publish(admitted)

    def _next_look(self, now: float) -> float | None:
        """Seconds until the verdict may be another one though no process changes, or None."""
        forgotten = self._crashes[0] + CRASH_MEMORY - now if self._crashes else None
        return min((wait for wait in (self._limiter.due(now), forgotten) if wait is not None), default=None)

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
