"""The frame of every daemon: components start in groups, in order, and stop in the reverse order.

The model: each group is a TaskGroup inside the one before it. A group starts once every component of the one before is
`started`. A stop, or a failure anywhere, ends the inner groups first and waits for them, so what others rely on (the
store, the listener) outlives them. A component runs until it is cancelled; one that fails, or that ends by itself,
is named, and stops the daemon in the same order.

SIGTERM, SIGINT and SIGHUP (a terminal that closes; not under nohup) begin the stop: every component finishes what it
has begun. A second signal, or the end of the
`drain_timeout`, hurries: components are cancelled once more, which means at once. A third one kills.

The service manager is notified of four things. READY comes with the first moment at which every condition holds; until
then each heartbeat extends the time limit of the start, so that a daemon may wait for its store as long as it must. The
status line follows the conditions within `LOOK`. The watchdog is fed while every component says that it makes
progress: a loop that hangs can't feed it, and a daemon whose work stands still asks to be ended at once. The manager
ends it by SIGABRT, upon which it writes the stack of every thread to its log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from rcfarm.config import BadSettings
from rcfarm.rc_errors import RCError
from rcfarm.sdnotify import Notifier
from rcfarm.web import Condition, Health
from store.kube.errors import KubeError
from store.kv import StoreError
from store.records import BadRecord

log = structlog.get_logger(__name__)

LOOK = 1.0  # seconds between two looks at the components' conditions and progress
HEARTBEAT = 5.0  # seconds between two signs of life, where no watchdog asks for more
STALL_GRACE = 5.0  # seconds without progress, once noticed, until the service manager is asked to end us
START_EXTENSION = 30.0  # seconds that the service manager waits for the next sign of life before we are ready
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
RESTORED = {signal.SIGPIPE, signal.SIGXFSZ}  # ignored by Python itself, and restored in whatever it starts


async def _at_once() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Something that runs as long as the daemon does.

    `run`: until cancelled; a first cancellation means to finish what was begun, a second one to end at once.
    `started`: returns when components that rely on this one may start. `conditions`: what must hold for it to be of
    use. `stalled`: why it makes no progress, or "".
    """

    name: str
    run: Callable[[], Coroutine[Any, Any, None]]
    started: Callable[[], Awaitable[None]] = _at_once
    conditions: Callable[[], Sequence[Condition]] = tuple
    stalled: Callable[[], str] = str


class Daemon:
    """Runs `groups` of components. `drain_timeout`: seconds that an orderly stop may take before it is hurried.

    `about`: what the log says of the daemon when it has started, such as its version.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Component]],
        *,
        notifier: Notifier | None = None,
        drain_timeout: float = 20.0,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._groups = groups
        self._components = [component for group in groups for component in group]
        self._notifier = notifier or Notifier()
        self._drain_timeout = drain_timeout
        self._about = about or {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._started = False
        self._failed = False

    def stop(self) -> None:
        """Begin an orderly stop; called again, hurry."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def health(self) -> Health:
        """What the listener asks."""
        return Health(self.stalled, self.conditions)

    def stalled(self) -> str:
        """Which components make no progress, and why; "" when all do."""
        reasons = [(component.name, component.stalled()) for component in self._components]
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def conditions(self) -> list[Condition]:
        """Those of every component, and that the daemon has started, makes progress and is not stopping."""
        phase = "the daemon is stopping" if self._stop.is_set() else "" if self._started else "the daemon is starting"
        found = [
            condition._replace(name=f"{component.name} {condition.name}")
            for component in self._components
            for condition in component.conditions()
        ]
        stalled = self.stalled()
        return [Condition("running", not phase, phase), Condition("progress", not stalled, stalled), *found]

    async def run(self) -> int:
        """Run until stopped. Answers the exit code: 0 after an orderly stop, 1 after a failure or a hurried stop."""
        main = asyncio.create_task(self._run_all())
        watcher = asyncio.create_task(self._hurry_up(main))
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

    async def _hurry_up(self, main: asyncio.Task[None]) -> None:
        """After the stop has begun: cancel everything once more when time is up, or on request."""
        await self._stop.wait()
        log.info("Stopping", timeout=self._drain_timeout)
        self._notifier.stopping()
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._hurry.wait()
        except TimeoutError:
            self._hurry.set()
        log.warning("Not waiting any longer for work in flight")
        main.cancel()

    async def _run_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            heartbeat = group.create_task(self._heartbeat(), name="heartbeat")
            await self._run_groups(list(self._groups))
            heartbeat.cancel()

    async def _run_groups(self, groups: list[Sequence[Component]]) -> None:
        if not groups:
            self._announce_start()
            await self._stop.wait()
            return
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._supervise(component), name=component.name) for component in groups[0]]
            if await self._all_started(groups[0]):
                await self._run_groups(groups[1:])
            for task in tasks:
                task.cancel()

    async def _all_started(self, components: Sequence[Component]) -> bool:
        """Wait until they are; False when the stop begins before."""
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
        except Exception as error:  # whatever it is, the others end in order before the daemon does
            self._fail(component.name, error)
            return
        task = asyncio.current_task()
        if not self._stop.is_set() and not (task and task.cancelling()):
            self._fail(component.name, RuntimeError("it ended by itself"))

    def _fail(self, name: str, error: BaseException) -> None:
        """Report it at once, for the others may take a while to stop, and begin the stop."""
        expected = isinstance(error, StoreError | KubeError | BadSettings | BadRecord | RCError | OSError)
        reason = str(error) or type(error).__name__
        log.error(
            "A component failed; the daemon stops", component=name, error=reason, exc_info=None if expected else error
        )
        self._failed = True
        self._stop.set()

    def _announce_start(self) -> None:
        if not self._started and not self._stop.is_set():
            self._started = True
            log.info("Started", **self._about, components=[component.name for component in self._components])

    async def _heartbeat(self) -> None:
        """Notify the service manager until cancelled."""
        timeout = self._notifier.watchdog_timeout
        interval = min(HEARTBEAT, timeout / 3) if timeout else HEARTBEAT
        clock = asyncio.get_running_loop().time
        is_ready, status, alive_at = False, "", -interval
        stalled_at: float | None = None
        while True:
            stalled = self.stalled()
            failing = [condition for condition in self.conditions() if not condition.holds]
            if not stalled:
                if stalled_at is not None:
                    log.info("Progress is made again")
                stalled_at = None
            elif stalled_at is None:
                stalled_at = clock()
                log.error("No progress is made; the watchdog is not fed any more", reason=stalled)
            elif clock() - stalled_at >= STALL_GRACE:
                self._notifier.trigger_watchdog()
            if status != (status := _status(stalled, failing)):
                self._notifier.status(status)
            if not failing and not is_ready:
                is_ready = True
                self._notifier.ready()
                log.info("Ready")
            if not stalled and clock() - alive_at >= interval - LOOK / 2:
                alive_at = clock()
                self._notifier.watchdog()
                if not is_ready and not self._stop.is_set():
                    self._notifier.extend_start(START_EXTENSION)
            await asyncio.sleep(min(LOOK, interval))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        hangup_is_meant = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        numbers = SIGNALS if hangup_is_meant else SIGNALS[:2]

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


def _status(stalled: str, failing: Sequence[Condition]) -> str:
    """One line for `systemctl status`."""
    if stalled:
        return f"Stalled: {stalled}"
    return "; ".join(f"{condition.name}: {condition.reason}" for condition in failing) or "Ready"


async def _each_started(components: Sequence[Component]) -> None:
    for component in components:
        await component.started()


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a daemon's main coroutine to its exit code, on uvloop where that is installed."""
    catch_ignored_signals()
    faulthandler.enable()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def catch_ignored_signals() -> None:
    """Catch the signals that this process was started to ignore, and go on. Of the main thread only.

    nohup, and scripts for what they run in the background, let programs ignore SIGHUP, or SIGINT and SIGQUIT. What is
    ignored stays so in all that an agent starts, and then nothing can be stopped by it; what is caught does not.
    """
    for number in signal.valid_signals() - RESTORED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
