"""The verdict on a pod: its processes, its check, and how often either may change its mind in public.

The model: one `HealthMonitor` task per running pod probes it at its interval, quickly at first, so that a pod that
comes up is known to be up. A change of a process is judged at once, without waiting for a probe; after one has ended,
the pod has to prove itself again: by its check, or without one by running for an interval. What comes out goes
through a `FlapLimiter`: a pod that changes all the time would write to the store all the time, and neither state would
be true for long, so it is `unknown` until it keeps still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rcfarm.agent.probes import Verdict
from store.manifest import HealthCheck
from store.records import Process

_PASSING = Verdict("passing", "running")
_FIRST_PROBE = 0.05  # seconds after the start; doubles up to the check's interval


class FlapLimiter:
    """Admits `burst` changes at once and one more every `interval` seconds; times are monotonic seconds.

    Beyond that the pod is published as `unknown`, until its status has stayed the same for `interval`.
    """

    def __init__(self, burst: int, interval: float) -> None:
        self._burst, self._interval = float(burst), interval
        self._tokens, self._at = float(burst), 0.0
        self._status, self._since = "", 0.0
        self._published = ""
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
        if self._flapping or verdict.status == self._published:
            return None
        if self._tokens < 1.0:
            self._flapping = True
            verdict = Verdict("unknown", f"it changes too often, last to {verdict.status}: {verdict.output}")
        else:
            self._tokens -= 1.0
        changed = verdict.status != self._published
        self._published = verdict.status
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
        self._wake = asyncio.Event()

    def changed(self) -> None:
        """A process of the pod has changed."""
        if self._up and not is_up(self._processes()):
            self._up, self._probed = False, Verdict("critical", "it ended, and was started again only now")
        self._judge()
        self._wake.set()

    async def run(self) -> None:
        """Probe and publish until cancelled."""
        while True:
            self._wake.clear()
            self._up = is_up(self._processes())
            self._judge()
            if self._up and self._probe:
                await self._probe_while_up(self._probe)
            elif self._up and self._probed != _PASSING:
                await self._trust_while_up()
            else:
                await self._wait(self._limiter.due(self._now()))

    async def _probe_while_up(self, probe: Callable[[], Awaitable[Verdict]]) -> None:
        """Probe until a process changes: quickly at first, and with patience for what is still starting."""
        delay, patience = _FIRST_PROBE, self._now() + self._check.interval
        while not self._wake.is_set():
            await self._wait(delay)
            found = await probe()
            if not self._wake.is_set() and (found.status == "passing" or self._now() >= patience):
                self._probed, delay = found, self._check.interval
                self._judge()
            delay = min(2 * delay, self._check.interval)

    async def _trust_while_up(self) -> None:
        """Without a check, running is passing; after a crash only once it has run for an interval."""
        await self._wait(self._check.interval)
        if not self._wake.is_set():
            self._probed = _PASSING

    def _judge(self) -> None:
        verdict = judge(self._processes(), self._probed)
        admitted = None if verdict is None else self._limiter.admit(verdict, self._now())
        if admitted is not None:
            self._publish(admitted)

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
