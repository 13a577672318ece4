"""The health of a pod: probes of its check, the verdict on its processes, and a limit on how often it is published.

The model: one `HealthMonitor` task per running pod probes it at its interval, more often right after the start. A
change of a process is judged at once, without waiting for a probe. After a process has ended, the pod must pass its
check again, or without a check run for one interval. A pod that crashes repeatedly must also run for `PROBATION`,
whatever its check says: a program that answers for three seconds and dies does not serve. Verdicts go through a
`FlapLimiter`: a pod that changes all the time would write to the store all the time, so it is `unknown` until its
status is stable.

A probe (http, tcp or exec) does not raise for a failed check. It ends within its timeout, and leaves no process and no
connection behind when it is cancelled.

Beside the status, each verdict carries the pod's condition (`store.schema.records.Health`), with the cause of a crash
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp

from rcfarm.agent.errors import AgentError
from rcfarm.agent.process import LaunchSpec, spawn
from store.schema.manifest import HealthCheck
from store.schema.records import HealthState, Process
from store.timing import TokenBucket

_SHOWN = 300  # characters of output


class Verdict(NamedTuple):
    """A health status and its reason. `condition`, `cause`, `restarts`: see `store.schema.records.Health`."""

    status: HealthState
    output: str = ""
    condition: str = ""
    cause: str = ""
    restarts: int = 0


class Prober:
    """Probes pods at `address`, where clients reach them, too."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self._http = http
        self._address = address

    async def probe(self, check: HealthCheck, ports: Mapping[str, int], command: LaunchSpec | None) -> Verdict:
        """Run the check once. `command` is what an exec check starts."""
        try:
            async with asyncio.timeout(check.timeout):
                if (target := check.http or check.tcp) is None:
                    assert command is not None, "an exec check comes with its command"
                    return await _execute(command)
                port = ports[target.port] if isinstance(target.port, str) else target.port
                if check.http is not None:
                    return await self._http_get(port, check.http.path)
                return await self._connect(port)
        except TimeoutError:
            return Verdict("critical", f"no answer within {check.timeout:g} s")

    async def _http_get(self, port: int, path: str) -> Verdict:
        host = f"[{self._address}]" if ":" in self._address else self._address
        url = f"http://{host}:{port}/{path.lstrip('/')}"
        try:
            async with self._http.get(url, allow_redirects=False) as response:
                status: HealthState = "passing" if 200 <= response.status < 300 else "critical"
                return Verdict(status, f"GET {url}: {response.status} {response.reason}")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Verdict("critical", f"GET {url}: {error}")

    async def _connect(self, port: int) -> Verdict:
        try:
            _, writer = await asyncio.open_connection(self._address, port)
        except OSError as error:
            return Verdict("critical", f"connect to {self._address}:{port}: {error.strerror or error}")
        writer.close()
        with contextlib.suppress(OSError):  # a server that expected data reset it: it is up
            await writer.wait_closed()
        return Verdict("passing", f"connect to {self._address}:{port}: open")


async def _execute(command: LaunchSpec) -> Verdict:
    command.log.unlink(missing_ok=True)
    try:
        handle = spawn(command).open()
    except AgentError as error:
        return Verdict("critical", str(error))
    try:
        await handle.wait()
    finally:
        handle.signal_tree(signal.SIGKILL)
        await handle.wait()
        status = handle.reap()
    health: HealthState = "passing" if status.code == 0 else "warning" if status.code == 1 else "critical"
    end = f"ended by {status.signal}" if status.code is None else f"exited with code {status.code}"
    return Verdict(health, _output(command.log) or end)


def _output(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            return file.read(4 * _SHOWN).decode(errors="replace").strip()[:_SHOWN]
    except OSError:
        return ""


_PASSING = Verdict("passing", "running")
_FIRST_PROBE = 0.05  # seconds after the start; doubles up to the check's interval

PROBATION = 10.0  # seconds that a pod must run after a repeated crash, before it can pass
SHORT_LIFE = 30.0  # seconds: a process that ended within them counts towards a repeated crash
CRASH_MEMORY = 600.0  # seconds for which a crash counts
CRASHES_SHOWN = 2  # crashes within that time from which a passing pod has the condition `restarted`


class FlapLimiter:
    """Admits `burst` changes at once and one more every `interval` seconds; times are monotonic seconds.

    Beyond that the pod is published as `unknown`, until its status has been the same for `interval`; a change of the
    condition alone is then not published.
    """

    def __init__(self, burst: int, interval: float) -> None:
        self._interval = interval
        self._changes = TokenBucket(1.0 / interval, burst)
        self._status, self._since = "", 0.0
        self._published = ""
        self._detail: tuple[str, str, int] = ("", "", 0)
        self._flapping = False

    def admit(self, verdict: Verdict, now: float) -> Verdict | None:
        """Return the verdict to publish for this one, or None when nothing changes."""
        may_change = self._changes.has_token(now)
        if verdict.status != self._status:
            self._status, self._since = verdict.status, now
        if self._flapping:
            self._flapping = now - self._since < self._interval
            self._changes.grant()
            may_change = True
        detail = (verdict.condition, verdict.cause, published_restarts(verdict.restarts))
        if self._flapping or (verdict.status == self._published and (detail == self._detail or not may_change)):
            return None
        if not may_change:
            self._flapping = True
            output = f"it changes too often, last to {verdict.status}: {verdict.output}"
            verdict = verdict._replace(status="unknown", output=output)
        else:
            self._changes.try_take(now)
        changed = (verdict.status, detail) != (self._published, self._detail)
        self._published, self._detail = verdict.status, detail
        return verdict if changed else None

    def forget(self) -> None:
        """Publish the next verdict even if it equals the last one: it is about another process."""
        self._published = ""

    def due(self, now: float) -> float | None:
        """Return the seconds until a withheld verdict may be published, or None without one."""
        return max(0.0, self._since + self._interval - now) if self._flapping else None


def judge(processes: Mapping[str, Process], probed: Verdict | None) -> Verdict | None:
    """Return the pod's health: that of its worst process, else its check's result; None while it is not known yet."""
    for name, process in processes.items():
        if process.state == "starting":
            return None
        if process.state not in ("running", "completed"):
            return Verdict(
                "critical", f"{name} is in {process.state}" + (f": {process.reason}" if process.reason else "")
            )
    return probed if is_up(processes) else _PASSING._replace(output="completed")


class PodCondition(NamedTuple):
    """See `store.schema.records.Health`."""

    code: str
    cause: str
    restarts: int


def published_restarts(count: int) -> int:
    """Return the largest of 1, 2, 3, 5, 10, 20, 30, 50, 100, … up to `count`, so that a crash loop writes seldom."""
    reached, decade = 0, 1
    while decade <= count:
        reached = max(step * decade for step in (1, 2, 3, 5) if step * decade <= count)
        decade *= 10
    return reached


def condition(processes: Mapping[str, Process], *, passes: bool, proving: bool, crashes: int) -> PodCondition:
    """Return the pod's condition. `proving`: it has crashed and not passed since. `crashes`: how many of them count."""
    restarts = sum(process.restarts for process in processes.values())
    for name, process in processes.items():
        if process.state == "failed":
            return PodCondition("failed", f"{name} {process.reason}", restarts)
        if process.state == "backoff" and (process.last_exit is None or process.reason != process.last_exit.words):
            return PodCondition("blocked", f"{name}: {process.reason}", restarts)
    last = max(
        ((process.last_exit.at, name, process.last_exit) for name, process in processes.items() if process.last_exit),
        default=None,
        key=lambda end: end[0],
    )
    cause = f"{last[1]} {last[2].words}" if last else ""
    if any(process.state == "backoff" for process in processes.values()) or (proving and not passes):
        return PodCondition("crashing", cause, restarts)
    if processes and all(process.state == "completed" for process in processes.values()):
        return PodCondition("completed", "", restarts)
    if passes and crashes >= CRASHES_SHOWN:
        return PodCondition("restarted", cause, restarts)
    return PodCondition("", "", restarts)


def is_up(processes: Mapping[str, Process]) -> bool:
    """Return whether the pod can be probed: a process runs, and the others run or have completed."""
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
        """Judge again after a change of one of the pod's processes."""
        if self._up and not is_up(self._processes()):
            # a process has ended: the pod does not pass until it has run, or passed its check, again
            self._up, self._probed = False, Verdict("critical", "it ended and was only just restarted")
            if any(process.state == "backoff" for process in self._processes().values()):
                now = self._now()
                again_soon = bool(self._recent_crashes(now)) and now - self._up_since < SHORT_LIFE
                self._probation = PROBATION if again_soon else 0.0
                self._crashes.append(now)
                self._proving = True
        self._judge()
        self._wake.set()

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
                # without a check, running is passing; after a crash only once it has run for an interval
                await self._wait(max(self._check.interval, self._up_since + self._probation - self._now()))
                if not self._wake.is_set():
                    self._trust(_PASSING)
            else:  # the verdict changes once a crash is forgotten, or the limiter admits it
                now = self._now()
                forgotten = self._crashes[0] + CRASH_MEMORY - now if self._crashes else None
                waits = [wait for wait in (self._limiter.due(now), forgotten) if wait is not None]
                await self._wait(min(waits, default=None))

    async def _probe_while_up(self, probe: Callable[[], Awaitable[Verdict]]) -> None:
        """Probe until a process changes: quickly at first; failures right after the start are not published."""
        delay, trusted_from = _FIRST_PROBE, self._now() + self._check.interval
        proven = self._up_since + self._probation
        while not self._wake.is_set():
            left = proven - self._now()
            await self._wait(min(delay, left) if left > 0 else delay)
            found = await probe()
            known = found.status == "passing" or self._now() >= trusted_from
            if not self._wake.is_set() and known and self._now() >= proven:
                self._trust(found)
                delay = self._check.interval
            delay = min(2 * delay, self._check.interval)

    def _trust(self, found: Verdict) -> None:
        """Use the result of a check from now on."""
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
            verdict = verdict._replace(output=f"{found.cause}, and was only just restarted")
        verdict = verdict._replace(condition=found.code, cause=found.cause, restarts=found.restarts)
        if (admitted := self._limiter.admit(verdict, now)) is not None:
            self._publish(admitted)

    async def _wait(self, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
