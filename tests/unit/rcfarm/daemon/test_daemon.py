"""The frame of a daemon: order, failures, signals, heartbeat; on virtual time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from rcfarm.daemon.daemon import (
    CHECK_INTERVAL,
    HEARTBEAT_INTERVAL,
    STALL_GRACE,
    Component,
    Daemon,
    Notifier,
    catch_ignored_signals,
)
from rcfarm.daemon.health import Condition

pytestmark = pytest.mark.looptime


class RecordingNotifier(Notifier):
    """A notifier that records its messages."""

    def __init__(self, watchdog_timeout: float | None = None) -> None:
        super().__init__("", watchdog_timeout)
        self.messages: list[str] = []

    def send(self, state: str) -> None:
        self.messages.append(state)


def recorded(name: str, diary: list[str], *, takes: float = 0.0, starts_after: float = 0.0) -> Component:
    """Return a component that notes its start and its end, and needs `takes` seconds for an orderly one."""

    async def run() -> None:
        diary.append(f"{name} runs")
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await asyncio.sleep(takes)
                diary.append(f"{name} ended")
            except asyncio.CancelledError:
                diary.append(f"{name} hurried")
                raise

    async def started() -> None:
        await asyncio.sleep(starts_after)

    return Component(name=name, run=run, started=started)


def failing(name: str, error: Exception | None, after: float = 1.0) -> Component:
    async def run() -> None:
        await asyncio.sleep(after)
        if error:
            raise error

    return Component(name=name, run=run)


async def run_for(daemon: Daemon, seconds: float, *actions: Callable[[], None]) -> int:
    """Run the daemon; after every `seconds` the next action happens. Return the exit code."""
    task = asyncio.create_task(daemon.run())
    for action in actions:
        await asyncio.sleep(seconds)
        action()
    return await task


async def test_groups_start_in_order_and_stop_in_reverse() -> None:
    """A group starts once the one before is started, and ends before the one before is cancelled."""
    diary: list[str] = []
    groups = [[recorded("store", diary, starts_after=5)], [recorded("farm", diary, takes=2), recorded("agent", diary)]]
    daemon = Daemon(groups)
    task = asyncio.create_task(daemon.run())
    await asyncio.sleep(4)
    assert diary == ["store runs"]
    await asyncio.sleep(2)
    daemon.stop()

    assert await task == 0
    assert diary == ["store runs", "farm runs", "agent runs", "agent ended", "farm ended", "store ended"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_begins_an_orderly_stop(number: signal.Signals) -> None:
    """SIGTERM, ^C and a closed terminal alike let components finish, and the exit code is 0."""
    diary: list[str] = []
    code = await run_for(Daemon([[recorded("farm", diary, takes=3)]]), 1, lambda: os.kill(os.getpid(), number))

    assert code == 0
    assert diary == ["farm runs", "farm ended"]


async def test_under_nohup_a_hangup_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup lets programs ignore SIGHUP; after `catch_ignored_signals` it must not become a stop."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        catch_ignored_signals()
        diary: list[str] = []
        daemon = Daemon([[recorded("farm", diary)]])
        assert await run_for(daemon, 1, lambda: os.kill(os.getpid(), signal.SIGHUP), daemon.stop) == 0
        assert diary == ["farm runs", "farm ended"]
    finally:
        signal.signal(signal.SIGHUP, former)


async def test_a_second_signal_hurries() -> None:
    """A second signal does not wait for the work in flight; the exit code shows that it was cut short."""
    diary: list[str] = []
    daemon = Daemon([[recorded("store", diary)], [recorded("farm", diary, takes=15)]])
    start = asyncio.get_running_loop().time()

    assert await run_for(daemon, 1, daemon.stop, daemon.stop) == 1
    assert asyncio.get_running_loop().time() - start == pytest.approx(2)
    assert diary == ["store runs", "farm runs", "farm hurried", "store ended"]


async def test_an_orderly_stop_has_an_end() -> None:
    """A component that needs longer than the drain timeout is hurried."""
    diary: list[str] = []
    daemon = Daemon([[recorded("farm", diary, takes=100)]], drain_timeout=10)
    start = asyncio.get_running_loop().time()

    assert await run_for(daemon, 1, daemon.stop) == 1
    assert asyncio.get_running_loop().time() - start == pytest.approx(11)
    assert diary == ["farm runs", "farm hurried"]


@pytest.mark.parametrize(("error", "reason"), [(ValueError("no luck"), "no luck"), (None, "it ended unexpectedly")])
async def test_a_failing_component_stops_the_daemon_and_is_named(error: Exception | None, reason: str) -> None:
    """The others end in order, the failure is logged with the component's name, and the exit code is 1."""
    diary: list[str] = []
    with capture_logs() as logs:
        code = await Daemon([[recorded("store", diary)], [failing("farm", error)], [recorded("web", diary)]]).run()

    assert code == 1
    assert diary == ["store runs", "web runs", "web ended", "store ended"]
    (failure,) = [event for event in logs if event["log_level"] == "error"]
    assert (failure["component"], failure["error"]) == ("farm", reason)


async def test_a_component_that_can_t_start_stops_the_daemon() -> None:
    """An error in `started` is no reason to go on without it, nor to end with exit code 0."""
    diary: list[str] = []

    async def started() -> None:
        raise OSError("address in use")

    broken = Component(name="web", run=recorded("web", diary).run, started=started)
    assert await Daemon([[broken], [recorded("farm", diary)]]).run() == 1
    assert diary == ["web runs", "web ended"]


async def test_a_stop_during_the_start_is_heeded() -> None:
    """A daemon that still waits for its store ends at once, without starting the rest."""
    diary: list[str] = []
    daemon = Daemon([[recorded("store", diary, starts_after=1000)], [recorded("farm", diary)]])

    assert await run_for(daemon, 1, daemon.stop) == 0
    assert diary == ["store runs", "store ended"]


async def test_a_failure_while_stopping_is_reported() -> None:
    """An error on the way out is not lost, and the rest still ends."""
    diary: list[str] = []

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("can't release")

    daemon = Daemon([[recorded("store", diary)], [Component(name="farm", run=run)]])
    with capture_logs() as logs:
        assert await run_for(daemon, 1, daemon.stop) == 1
    assert [event["error"] for event in logs if event["log_level"] == "error"] == ["can't release"]
    assert diary[-1] == "store ended"


async def test_cancelling_a_daemon_stops_its_components() -> None:
    """Inside another program a daemon is a task like any other."""
    diary: list[str] = []
    task = asyncio.create_task(Daemon([[recorded("farm", diary)]]).run())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert diary == ["farm runs", "farm ended"]


async def test_the_service_manager_is_notified_of_each_state() -> None:
    """STATUS with the failing conditions, READY once there are none, WATCHDOG on progress, STOPPING at the end."""
    notifier = RecordingNotifier(watchdog_timeout=30.0)
    ready = [Condition("session", False, "no leader")]
    farm = Component(name="farm", run=asyncio.Event().wait, conditions=lambda: ready)  # type: ignore[arg-type]
    daemon = Daemon([[farm]], notifier=notifier)
    task = asyncio.create_task(daemon.run())
    await asyncio.sleep(6)
    assert "READY=1" not in notifier.messages
    ready[0] = Condition("session", True)
    await asyncio.sleep(CHECK_INTERVAL)
    assert notifier.messages[-2:] == ["STATUS=Ready", "READY=1"], "within one look, not one heartbeat"
    ready[0] = Condition("session", False, "no leader")
    await asyncio.sleep(CHECK_INTERVAL)
    assert notifier.messages[-1] == "STATUS=farm session: no leader"
    await asyncio.sleep(HEARTBEAT_INTERVAL)
    daemon.stop()
    await task

    assert notifier.messages.count("READY=1") == 1
    assert notifier.messages.count("WATCHDOG=1") == 3
    assert notifier.messages.count("STATUS=farm session: no leader") == 2, "only what is new"
    assert notifier.messages[-1] == "STOPPING=1"


async def test_a_daemon_may_wait_for_its_store_as_long_as_it_must() -> None:
    """Until it is ready, each heartbeat extends the time limit of the start; one that hangs is ended by that limit."""
    notifier = RecordingNotifier()
    waiting = [Condition("store", False, "connection refused")]
    stalled = ""
    farm = Component(
        name="farm",
        run=asyncio.Event().wait,  # type: ignore[arg-type]
        conditions=lambda: waiting,
        stalled=lambda: stalled,
    )
    task = asyncio.create_task((daemon := Daemon([[farm]], notifier=notifier)).run())
    await asyncio.sleep(3600)
    assert notifier.messages.count("EXTEND_TIMEOUT_USEC=30000000") == pytest.approx(3600 / HEARTBEAT_INTERVAL, abs=1)
    stalled = "stuck"
    notifier.messages.clear()
    await asyncio.sleep(60)
    assert not [message for message in notifier.messages if message.startswith(("EXTEND", "READY", "WATCHDOG"))]
    stalled = ""
    waiting[0] = Condition("store", True)
    await asyncio.sleep(HEARTBEAT_INTERVAL)
    notifier.messages.clear()
    await asyncio.sleep(60)
    assert set(notifier.messages) == {"WATCHDOG=1"}, "once it is ready, its stop must not take longer for it"
    daemon.stop()
    await task


async def test_the_watchdog_is_not_fed_while_work_stands_still() -> None:
    """A component without progress silences the heartbeat until it moves again; it is logged once, not every second."""
    notifier = RecordingNotifier(watchdog_timeout=30.0)
    begun = asyncio.get_running_loop().time()
    stuck = True

    def stalled() -> str:
        silent = asyncio.get_running_loop().time() - begun
        return f"no RC was finished for {silent:.0f} s" if stuck else ""

    farm = Component(name="farm", run=asyncio.Event().wait, stalled=stalled)  # type: ignore[arg-type]
    daemon = Daemon([[farm]], notifier=notifier)
    task = asyncio.create_task(daemon.run())
    with capture_logs() as logs:
        await asyncio.sleep(STALL_GRACE - CHECK_INTERVAL / 2)
        assert "WATCHDOG=1" not in notifier.messages
        assert "WATCHDOG=trigger" not in notifier.messages
        await asyncio.sleep(CHECK_INTERVAL)
        assert "WATCHDOG=trigger" in notifier.messages, "the manager need not wait for its own timeout"
        await asyncio.sleep(20)
        assert notifier.messages[-2].startswith("WATCHDOG=trigger")
        assert notifier.messages[-1].startswith("STATUS=Stalled: farm: no RC was finished for 2")
        errors = [event["reason"] for event in logs if event["log_level"] == "error"]
        assert errors == ["farm: no RC was finished for 0 s"]
        assert daemon.stalled().startswith("farm: no RC was finished")
        assert [condition.name for condition in daemon.conditions() if not condition.holds] == ["progress"]
        stuck = False
        await asyncio.sleep(CHECK_INTERVAL)
        assert "WATCHDOG=1" in notifier.messages
        assert "Progress resumed" in [event["event"] for event in logs]
    daemon.stop()
    await task


async def test_readiness_shows_the_phase() -> None:
    """While starting and while stopping the daemon is not ready, whatever its components say."""
    daemon = Daemon([[recorded("store", [], starts_after=5)], [recorded("farm", [], takes=5)]])
    task = asyncio.create_task(daemon.run())
    phases = []
    for seconds in (1, 5, 1):
        await asyncio.sleep(seconds)
        phases.append(daemon.conditions()[0].reason)
        if seconds == 5:
            daemon.stop()
    await task
    assert phases == ["the daemon is starting", "", "the daemon is stopping"]
