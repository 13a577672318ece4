"""Health: judged from processes and probes on virtual time, and limited in how often it changes."""

from __future__ import annotations

import asyncio

import pytest

from rcfarm.agent.health import CRASH_MEMORY, FlapLimiter, HealthMonitor, Verdict, judge, published_restarts
from rcfarm.agent.health import condition as pod_condition
from store.schema.manifest import ExecCheck, HealthCheck
from store.schema.records import Exit, HealthState, Process, ProcessState

PASSING, CRITICAL = Verdict("passing", "ok"), Verdict("critical", "no")
CHECK = HealthCheck(exec=ExecCheck(command=["check"]), interval=10, timeout=5)


class Pod:
    """A pod whose processes and probe results the test decides; `published` are its statuses with their times."""

    def __init__(self, *, check: bool = True, burst: int = 100) -> None:
        self.state: ProcessState = "running"
        self.found = PASSING
        self.published: list[tuple[float, HealthState]] = []
        self.verdicts: list[Verdict] = []
        self.words = ""
        self.restarts = 0
        self.probed_at: list[float] = []
        self.monitor = HealthMonitor(
            CHECK, self._probe if check else None, self._processes, self._publish, FlapLimiter(burst, 15)
        )

    async def __aenter__(self) -> Pod:
        self._start = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self.monitor.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    def _now(self) -> float:
        """Return seconds since the monitor was started."""
        return round(asyncio.get_running_loop().time() - self._start, 3)

    def becomes(self, state: ProcessState, words: str = "") -> None:
        self.state = state
        self.words = words or self.words
        self.restarts += state == "running"
        self.monitor.changed()

    def _processes(self) -> dict[str, Process]:
        words = self.words or "exited with code 1"
        code = int(words.split()[-1]) if "code" in words else None
        end = Exit("t", code=code, signal="" if code is not None else words.split()[-1])
        reason = words if self.state == "backoff" else ""
        return {"main": Process(state=self.state, reason=reason, restarts=self.restarts, last_exit=end)}

    async def _probe(self) -> Verdict:
        self.probed_at.append(self._now())
        return self.found

    def _publish(self, verdict: Verdict) -> None:
        if not self.published or self.published[-1][1] != verdict.status:
            self.published.append((self._now(), verdict.status))
        self.verdicts.append(verdict)


@pytest.mark.looptime
async def test_a_pod_that_comes_up_is_found_quickly() -> None:
    """Probes are frequent after the start, then at the interval; what still fails at first is not published."""
    async with Pod() as pod:
        pod.found = CRITICAL
        await asyncio.sleep(0.5)
        assert pod.published == []
        pod.found = PASSING
        await asyncio.sleep(40)
        assert pod.published == [(0.75, "passing")]
        assert pod.probed_at[:6] == [0.05, 0.15, 0.35, 0.75, 10.75, 20.75]


@pytest.mark.looptime
async def test_a_pod_that_never_comes_up_is_critical_after_an_interval() -> None:
    """Patience with a start ends after one interval of the check."""
    async with Pod() as pod:
        pod.found = CRITICAL
        await asyncio.sleep(60)
        assert [status for _, status in pod.published] == ["critical"]
        assert 10 <= pod.published[0][0] <= 20


@pytest.mark.looptime
async def test_a_process_that_ends_is_critical_at_once() -> None:
    """A crash is published without waiting for a probe, and stays until a probe has succeeded again."""
    async with Pod() as pod:
        await asyncio.sleep(1)
        pod.becomes("backoff")
        pod.becomes("running")
        pod.found = CRITICAL
        await asyncio.sleep(1)
        pod.found = PASSING
        await asyncio.sleep(5)
        assert [status for _, status in pod.published] == ["passing", "critical", "passing"]
        assert pod.published[1][0] == 1.0
        assert pod.published[2][0] < 5.0


@pytest.mark.looptime
async def test_without_a_check_running_is_passing() -> None:
    """A pod without a check is passing while it runs; after a crash only once it has run for an interval."""
    async with Pod(check=False) as pod:
        await asyncio.sleep(1)
        assert pod.published == [(0.0, "passing")]
        pod.becomes("backoff")
        pod.becomes("running")
        await asyncio.sleep(9)
        pod.becomes("backoff")
        pod.becomes("running")
        await asyncio.sleep(30)
        assert pod.published == [(0.0, "passing"), (1.0, "critical"), (20.0, "passing")]


@pytest.mark.looptime
async def test_a_flapping_pod_settles_without_a_probe() -> None:
    """A withheld verdict is published, without another probe, once the status was stable for the interval."""
    async with Pod(check=False, burst=1) as pod:
        await asyncio.sleep(1)
        pod.becomes("failed")
        await asyncio.sleep(30)
        assert [status for _, status in pod.published] == ["passing", "unknown", "critical"]
        assert pod.published[-1][0] == 16.0


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        (["running", "running"], CRITICAL),
        (["running", "completed"], CRITICAL),
        (["completed", "completed"], Verdict("passing", "completed")),
        (["running", "starting"], None),
        (["running", "backoff"], Verdict("critical", "p1 is in backoff")),
        (["running", "failed"], Verdict("critical", "p1 is in failed")),
        (["stopping", "running"], Verdict("critical", "p0 is in stopping")),
    ],
)
def test_a_pod_is_as_healthy_as_its_worst_process(states: list[ProcessState], verdict: Verdict | None) -> None:
    """The check counts only when all processes run or are done."""
    processes = {f"p{number}": Process(state=state) for number, state in enumerate(states)}
    assert judge(processes, CRITICAL) == verdict


def test_changes_within_the_burst_are_published() -> None:
    """Only changes are published, each at once."""
    limiter = FlapLimiter(3, 15)
    admitted = [limiter.admit(verdict, 0.0) for verdict in (PASSING, PASSING, CRITICAL, CRITICAL, PASSING)]
    assert admitted == [PASSING, None, CRITICAL, None, PASSING]


def test_a_flapping_pod_becomes_unknown_until_it_keeps_still() -> None:
    """Beyond the burst the pod is unknown, with its last status, until that was stable for an interval."""
    limiter = FlapLimiter(2, 15)
    for verdict in (PASSING, CRITICAL):
        assert limiter.admit(verdict, 0.0) == verdict
    flapping = limiter.admit(PASSING, 1.0)
    assert flapping is not None
    assert flapping.status == "unknown"
    assert "changes too often, last to passing" in flapping.output
    assert [limiter.admit(verdict, 2.0) for verdict in (CRITICAL, PASSING)] == [None, None]
    assert limiter.due(10.0) == 7.0
    assert limiter.admit(PASSING, 16.9) is None
    assert limiter.admit(PASSING, 17.0) == PASSING
    assert limiter.due(17.0) is None


def test_a_new_condition_alone_is_published_while_changes_are_allowed() -> None:
    """Beyond the burst it is left out, without calling the pod unknown, until a change is allowed again."""
    limiter = FlapLimiter(2, 15)
    first, second = (PASSING._replace(condition="restarted", cause=f"web exited with code {n}") for n in (1, 2))
    assert [limiter.admit(verdict, 0.0) for verdict in (PASSING, first, second)] == [PASSING, first, None]
    assert [limiter.admit(second, at) for at in (14.0, 15.0, 15.0)] == [None, second, None]


def test_slow_changes_are_never_limited() -> None:
    """Fewer changes than one per interval go through for ever."""
    limiter = FlapLimiter(1, 15)
    for number in range(100):
        verdict = CRITICAL if number % 2 else PASSING
        assert limiter.admit(verdict, 15.1 * number) == verdict


@pytest.mark.looptime
async def test_a_crash_loop_never_passes_though_its_check_does() -> None:
    """A program that answers for three seconds and dies passes at first and after its first crash, then no more."""
    async with Pod() as pod:
        for _ in range(20):
            await asyncio.sleep(3)
            pod.becomes("backoff", "exited with code 3")
            await asyncio.sleep(0.2)
            pod.becomes("running")
        assert [status for _, status in pod.published] == ["passing", "critical", "passing", "critical"]
        assert pod.verdicts[-1].condition == "crashing"
        assert pod.verdicts[-1].cause == "main exited with code 3"
        assert pod.verdicts[-1].restarts == 20
        await asyncio.sleep(12)
        assert pod.verdicts[-1] == Verdict("passing", "ok", "restarted", "main exited with code 3", 20)
        restarts = [verdict.restarts for verdict in pod.verdicts if verdict.condition == "crashing"]
        assert restarts == [0, 1, 1, 2, 3, 5, 10, 20]


@pytest.mark.looptime
@pytest.mark.parametrize("check", [True, False])
async def test_crashes_are_forgotten_after_a_while(check: bool) -> None:
    """After ten minutes without a crash the pod's condition is cleared, without another probe."""
    async with Pod(check=check) as pod:
        for _ in range(2):
            await asyncio.sleep(40)
            pod.becomes("backoff", "ended by SIGSEGV")
            pod.becomes("running")
        await asyncio.sleep(20)
        assert pod.verdicts[-1].condition == "restarted"
        await asyncio.sleep(CRASH_MEMORY)
        assert pod.verdicts[-1].condition == ""
        assert pod.verdicts[-1].status == "passing"


@pytest.mark.parametrize(
    ("process", "condition"),
    [
        (Process(state="running"), ("", "", 0)),
        (Process(state="running", restarts=1, last_exit=Exit("t", code=1)), ("", "", 1)),
        (Process(state="completed", last_exit=Exit("t", code=0)), ("completed", "", 0)),
        (
            Process(state="failed", last_exit=Exit("t", code=4), reason="exited with code 4"),
            ("failed", "main exited with code 4", 0),
        ),
        (
            Process(state="backoff", restarts=7, last_exit=Exit("t", signal="SIGKILL"), reason="ended by SIGKILL"),
            ("crashing", "main ended by SIGKILL", 7),
        ),
        (Process(state="backoff", reason="port 80 is in use"), ("blocked", "main: port 80 is in use", 0)),
        (
            Process(state="backoff", last_exit=Exit("t", code=1), reason="port 80 is in use"),
            ("blocked", "main: port 80 is in use", 0),
        ),
    ],
)
def test_a_pod_that_does_not_run_says_why(process: Process, condition: tuple[str, str, int]) -> None:
    """Processes that crashed, that can't be started and that have completed get different conditions."""
    passes = process.state in ("running", "completed")
    assert pod_condition({"main": process}, passes=passes, proving=False, crashes=1) == condition


def test_restarts_are_published_ever_more_seldom() -> None:
    """A hundred thousand restarts are written about twenty times."""
    steps = sorted({published_restarts(count) for count in range(100_001)})
    assert steps[:9] == [0, 1, 2, 3, 5, 10, 20, 30, 50]
    assert len(steps) == 22
