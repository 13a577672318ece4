"""The frame of every daemon: components start in groups, in order, and stop in the reverse order.

The model: each group is a TaskGroup inside the one before it. A group starts once every component of the one before is
`started`. A stop, or a failure anywhere, ends the inner groups first and waits for them, so the groups that they rely
on (the store, the listener) outlive them. A component runs until it is cancelled; one that fails or returns early is
logged by name and stops the daemon in the same order.

SIGTERM, SIGINT and SIGHUP (a terminal that closes; not under nohup) begin the stop: every component finishes its work
in flight. A second signal, or the end of the `drain_timeout`, cancels the components again, which ends them at once. A
third signal kills.

The service manager gets four notifications. READY is sent when all conditions hold for the first time; until then each
heartbeat extends the start's time limit, so a daemon may wait for its store for any time. STATUS follows the conditions
within `CHECK_INTERVAL`. WATCHDOG is sent while every component makes progress: a loop that hangs can't send it, and a
daemon that makes no progress asks to be killed at once. The manager kills by SIGABRT, upon which the daemon writes the
stack of every thread to its log. STOPPING is sent when the stop begins.

`freeze_survivors` and `freeze_all` are for processes that keep millions of objects: a full garbage collection of all of
them takes tens of milliseconds, in the middle of some call. Exempt objects (`gc.freeze`) are still freed when nothing
refers to them; only reference cycles stay. So they are for a program that creates no cycles as it works, or that
exempts objects only when many have survived (`least`), so that short-lived ones are a small part of them.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from rcfarm.daemon.health import Condition
from store.errors import RcfarmError

log = structlog.get_logger(__name__)

CHECK_INTERVAL = 1.0  # seconds between two checks of the components' conditions and progress
HEARTBEAT_INTERVAL = 5.0  # seconds between two heartbeats, unless the watchdog needs more
STALL_GRACE = 5.0  # seconds without progress, once noticed, until the service manager is asked to kill the daemon
START_EXTENSION = 30.0  # seconds by which each heartbeat extends the start's time limit
THRESHOLDS = (700, 4, 1)  # a full garbage collection after some 7,000 new objects: 3 ms
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RESTORED = {signal.SIGPIPE, signal.SIGXFSZ}  # ignored by Python itself, and restored in the processes that it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A part of the daemon that runs as long as the daemon does.

    `run` runs until cancelled; after a first cancellation it finishes its work in flight, after a second one it ends at
    once. `started` returns when components that rely on this one may start. `conditions`: the conditions of its
    readiness. `stalled`: why it makes no progress, or "".
    """

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    started: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
    conditions: Callable[[], Sequence[Condition]] = tuple
    stalled: Callable[[], str] = str


class Daemon:
    """Runs `groups` of components. `drain_timeout`: seconds that an orderly stop may take before it is hurried.

    `about`: fields of the log event "Started", such as the version.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Component]],
        *,
        notifier: Notifier | None = None,
        drain_timeout: float = 20.0,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._groups = [[Component(name="heartbeat", run=self._heartbeat)], *groups]
        self._components = [component for group in groups for component in group]
        self._notifier = notifier or Notifier()
        self._drain_timeout = drain_timeout
        self._about = about or {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._started = False
        self._failed = False

    def stop(self) -> None:
        """Begin an orderly stop; on a second call, stop at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def stalled(self) -> str:
        """Return which components make no progress, and why; "" when all do."""
        reasons = [(component.name, component.stalled()) for component in self._components]
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def conditions(self) -> list[Condition]:
        """Return the conditions of every component, and those of the daemon: running, and making progress."""
        phase = "the daemon is stopping" if self._stop.is_set() else "" if self._started else "the daemon is starting"
        found = [
            condition._replace(name=f"{component.name} {condition.name}")
            for component in self._components
            for condition in component.conditions()
        ]
        stalled = self.stalled()
        return [Condition("running", not phase, phase), Condition("progress", not stalled, stalled), *found]

    async def run(self) -> int:
        """Run until stopped. Return the exit code: 0 after an orderly stop, 1 after a failure or a hurried stop."""
        main = asyncio.create_task(self._run_groups(self._groups))
        watcher = asyncio.create_task(self._enforce_drain_timeout(main))
        with self._signals():
            try:
                await asyncio.wait([main])
            finally:
                watcher.cancel()
                main.cancel()
                await asyncio.wait([main, watcher])
        self._notifier.close()
        if not main.cancelled():
            main.result()
        return 1 if self._failed or self._hurry.is_set() else 0

    async def _enforce_drain_timeout(self, main: asyncio.Task[None]) -> None:
        """After the stop has begun: cancel everything again at the end of the time limit, or on a second `stop`."""
        await self._stop.wait()
        log.info("Stopping", timeout=self._drain_timeout)
        self._notifier.send("STOPPING=1")
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._hurry.wait()
        except TimeoutError:
            self._hurry.set()
        log.warning("No longer waiting for work in flight")
        main.cancel()

    async def _run_groups(self, groups: Sequence[Sequence[Component]]) -> None:
        if not groups:
            if not self._started and not self._stop.is_set():
                self._started = True
                log.info("Started", **self._about, components=[component.name for component in self._components])
            await self._stop.wait()
            return
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._supervise(component), name=component.name) for component in groups[0]]
            if await self._all_started(groups[0]):
                await self._run_groups(groups[1:])
            for task in tasks:
                task.cancel()

    async def _all_started(self, components: Sequence[Component]) -> bool:
        """Wait until the components have started. Return False when the stop begins before."""
        stop = asyncio.create_task(self._stop.wait())
        started = asyncio.create_task(_each_started(components))
        try:
            await asyncio.wait([stop, started], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            started.cancel()
            await asyncio.wait([stop, started])
        if started.cancelled():
            return False
        if error := started.exception():
            self._fail("start", error)
        return not self._stop.is_set()

    async def _supervise(self, component: Component) -> None:
        try:
            await component.run()
        except Exception as error:  # whatever the error, the other components must end in order
            self._fail(component.name, error)
            return
        task = asyncio.current_task()
        if not self._stop.is_set() and not (task and task.cancelling()):
            self._fail(component.name, RuntimeError("it ended unexpectedly"))

    def _fail(self, name: str, error: BaseException) -> None:
        """Log the failure at once, since the other components may take a while to stop, and begin the stop."""
        expected = isinstance(error, RcfarmError | OSError)
        reason = str(error) or type(error).__name__
        log.error(
            "Component failed; stopping the daemon", component=name, error=reason, exc_info=None if expected else error
        )
        self._failed = True
        self._stop.set()

    async def _heartbeat(self) -> None:
        """Notify the service manager until cancelled."""
        timeout = self._notifier.watchdog_timeout
        interval = min(HEARTBEAT_INTERVAL, timeout / 3) if timeout else HEARTBEAT_INTERVAL
        clock = asyncio.get_running_loop().time
        is_ready, status, alive_at = False, "", -interval
        stalled_at: float | None = None
        while True:
            stalled = self.stalled()
            failing = [condition for condition in self.conditions() if not condition.holds]
            if not stalled:
                if stalled_at is not None:
                    log.info("Progress resumed")
                stalled_at = None
            elif stalled_at is None:
                stalled_at = clock()
                log.error("No progress; no longer notifying the watchdog", reason=stalled)
            elif timeout is not None and clock() - stalled_at >= STALL_GRACE:
                self._notifier.send("WATCHDOG=trigger")  # ask to be killed now; systemd before 243 ignores it
            reasons = "; ".join(f"{condition.name}: {condition.reason}" for condition in failing)
            current = f"Stalled: {stalled}" if stalled else reasons or "Ready"  # one line for `systemctl status`
            if current != status:
                status = current
                self._notifier.send(f"STATUS={status}")
            if not failing and not is_ready:
                is_ready = True
                self._notifier.send("READY=1")
                log.info("Ready")
            if not stalled and clock() - alive_at >= interval - CHECK_INTERVAL / 2:
                alive_at = clock()
                self._notifier.send("WATCHDOG=1")
                if not is_ready and not self._stop.is_set():
                    self._notifier.send(f"EXTEND_TIMEOUT_USEC={round(START_EXTENSION * 1e6)}")
            await asyncio.sleep(min(CHECK_INTERVAL, interval))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = SIGNALS if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else SIGNALS[:2]

        def received(number: signal.Signals) -> None:
            log.info("Signal received", signal=number.name)
            if self._stop.is_set():
                for each in numbers:  # the next one kills
                    loop.remove_signal_handler(each)
            self.stop()

        for number in numbers:
            loop.add_signal_handler(number, received, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def _each_started(components: Sequence[Component]) -> None:
    for component in components:
        await component.started()


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a daemon's main coroutine to its exit code, on uvloop where that is installed."""
    catch_ignored_signals()
    faulthandler.enable()
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def catch_ignored_signals() -> None:
    """Install no-op handlers for the signals that this process was started to ignore. Call it in the main thread.

    nohup, and shells for background jobs, start programs with SIGHUP, or SIGINT and SIGQUIT, ignored. Processes that an
    agent starts inherit ignored signals, and could not be stopped by them; handlers are not inherited.
    """
    for number in signal.valid_signals() - RESTORED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


class Notifier:
    """Sends states to the service manager, by systemd's notification protocol. An unreachable one stops no work.

    `address`: a path or, with a leading `@`, a name in the abstract namespace; "" sends nothing. `watchdog_timeout`:
    seconds without WATCHDOG after which the manager kills the daemon, or None.
    """

    def __init__(self, address: str = "", watchdog_timeout: float | None = None) -> None:
        self.watchdog_timeout = watchdog_timeout
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        self._reachable = True
        if self._socket:
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Return a notifier for the service manager's variables, which are removed from `environ`, so that child
        processes can't send notifications for the daemon."""
        address = environ.pop("NOTIFY_SOCKET", "")
        timeout = environ.pop("WATCHDOG_USEC", "")
        process = environ.pop("WATCHDOG_PID", "")
        ours = process in ("", str(os.getpid()))
        return cls(address, int(timeout) / 1e6 if timeout.isdigit() and ours else None)

    def close(self) -> None:
        """Close the socket; later calls send nothing."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def send(self, state: str) -> None:
        """Send a state of sd_notify(3), such as `READY=1`, as one line. It never blocks and never raises."""
        if self._socket is None:
            return
        try:
            self._socket.sendto(" ".join(state.split()).encode(), self._address)
        except OSError as error:
            if self._reachable:
                log.warning("The service manager can't be notified", error=str(error))
            self._reachable = False
        else:
            self._reachable = True


def freeze_survivors(*, thresholds: tuple[int, int, int] = THRESHOLDS, least: int = 0) -> None:
    """Exempt the survivors of each later full collection, if they are at least `least` objects, from the next ones,
    which can then be frequent and short."""

    def freeze(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2 and (not least or len(gc.get_objects(2)) >= least):
            gc.freeze()

    gc.set_threshold(*thresholds)
    gc.callbacks.append(freeze)


def freeze_all(*, collect_before: bool = True) -> None:
    """Exempt all objects, except the garbage that a collection finds before, if `collect_before`."""
    if collect_before:
        gc.collect()
    gc.freeze()
    gc.collect()  # resets the count of survivors: else the next full one waits for a quarter as many new objects
