"""The guard around each call of a plugin: a time limit, any exception as a typed error, and held loops by name.

The model: a call runs in a task of its own, so that no plugin can catch what is meant for the engine. When its time is
up the task is cancelled. A plugin that does not end then is left running: the error carries its task, and the execution
is not called again before the task has ended, because the calls of one execution never overlap.

Each turn that the plugin takes on the event loop is timed. A turn above the limit is logged and counted under the
plugin's id; while it lasts, a watchdog thread logs the plugin's name and the line on which it stands, since a plugin
that never returns to the loop could not be named afterwards.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import structlog

from controllers.tasks.api.errors import TaskError
from store.errors import RcfarmError, text_of
from store.kv.protocol import StoreError

log = structlog.get_logger(__name__)

T = TypeVar("T")

CALL_TIMEOUT = 60.0  # seconds that one call may take, by default
HOLD_LIMIT = 0.25  # seconds for which a plugin may hold the event loop in one turn without being logged
STUCK_AFTER = 2.0  # seconds in one turn after which the watchdog logs where the plugin stands
KNOWN_ERRORS = 1000  # places at which plugins raised, and which were logged with a traceback
MAX_MESSAGE = 4096  # characters of an exception's message
CANCEL_GRACE = 1.0  # seconds that a cancelled call gets to end

Verb = Literal["handle", "abort", "finalize"]


class PluginError(RcfarmError):
    """The root of the errors of a plugin's call. `code` is stable, for programs."""

    code = "PluginError"

    @property
    def is_fault(self) -> bool:
        """Return whether the plugin, or the system that it drives, is at fault, rather than the execution."""
        cause = self.__cause__
        if isinstance(cause, TaskError):
            return cause.is_outage
        return not isinstance(cause, StoreError)


class PluginRaised(PluginError):
    """The plugin raised an exception."""

    code = "PluginRaised"


class PluginTimedOut(PluginError):
    """The call was not finished within its time limit, and has ended since."""

    code = "PluginTimedOut"


class PluginHung(PluginError):
    """The call neither finished nor reacted to its cancellation; `task` still runs it."""

    code = "PluginHung"

    def __init__(self, message: str, task: asyncio.Task[Any]) -> None:
        self.task = task
        super().__init__(message)


class BadAnswer(PluginError):
    """The plugin returned something that the contract does not allow."""

    code = "BadAnswer"


class GuardMetrics(Protocol):
    """What the guard counts. Durations in seconds. What is not overridden is not counted."""

    def called(self, plugin: str, verb: Verb, seconds: float, outcome: str) -> None:
        """Count a call. `outcome`: "ok", or the code of a `PluginError`."""
        return

    def held(self, plugin: str, seconds: float) -> None:
        """Count a turn in which the plugin held the event loop above the limit."""
        return


class NoGuardMetrics(GuardMetrics):
    """Counts nothing."""


@dataclass(slots=True)
class _Turn:
    """What runs on the event loop now: the call, since when, and by which thread."""

    call: str
    began: float
    thread: int
    is_reported: bool = False


class PluginGuard:
    """Calls plugins. `timeout`: seconds that one call may take; 0 turns the limit off."""

    def __init__(
        self,
        *,
        timeout: float,
        hold_limit: float = HOLD_LIMIT,
        metrics: GuardMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout, self._hold_limit = timeout or None, hold_limit
        self._metrics = metrics or NoGuardMetrics()
        self._clock = clock
        self._turn: _Turn | None = None
        self._known: set[tuple[object, ...]] = set()

    async def call(
        self, plugin: str, verb: Verb, execution: str, call: Callable[[], Coroutine[Any, Any, T]], expected: type[T]
    ) -> T:
        """Return what the call returns. Raises a `PluginError`; never lets another exception of the plugin out."""
        what, began, outcome = f"{plugin}.{verb} of {execution}", self._clock(), "ok"
        task = asyncio.create_task(self._body(what, plugin, call))
        try:
            try:
                await asyncio.wait({task}, timeout=self._timeout)
            except asyncio.CancelledError:  # the engine stops: the remote work goes on, and another engine follows it
                await _end(task)
                raise
            if not task.done():
                await _end(task)
                message = f"{what} was not finished after {self._timeout:g} s"
                if not task.done():
                    raise PluginHung(f"{message}, and ignores its cancellation; it must end before the next call", task)
                with suppress(asyncio.CancelledError):
                    task.exception()
                raise PluginTimedOut(f"{message}; it was cancelled")
            if task.cancelled():
                raise PluginRaised(f"{what} raised CancelledError of its own accord")
            error = task.exception()
            if isinstance(error, PluginError):
                raise error
            if error is not None:
                self._log(what, plugin, error)
                raise PluginRaised(f"{what}: {_named(error)}") from error
            answer = task.result()
            if not isinstance(answer, expected):
                raise BadAnswer(f"{what} returned {type(answer).__name__} instead of {expected.__name__}")
            return answer
        except PluginError as failure:
            outcome = failure.code
            raise
        finally:
            self._metrics.called(plugin, verb, self._clock() - began, outcome)

    async def _body(self, what: str, plugin: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        coroutine = call()
        if not asyncio.iscoroutine(coroutine):
            raise BadAnswer(f"{what} is not a coroutine function; declare it with `async def`")
        try:
            return await self._timed(coroutine, what, plugin)
        except (KeyboardInterrupt, SystemExit) as error:  # asyncio would end the process with it
            raise PluginRaised(f"{what}: {_named(error)}; a plugin can't stop the engine") from error

    @types.coroutine
    def _timed(self, coroutine: Coroutine[Any, Any, T], what: str, plugin: str) -> Generator[Any, Any, T]:
        """Run the coroutine, timing each turn that it takes."""
        resume: Callable[[], Any] = partial(coroutine.send, None)
        while True:
            turn = self._turn = _Turn(what, time.perf_counter(), threading.get_ident())
            try:
                waits_for = resume()
            except StopIteration as stop:
                answer: T = stop.value
                return answer
            finally:
                self._turn = None
                took = time.perf_counter() - turn.began
                if took > self._hold_limit:
                    log.error(
                        "A plugin held the event loop, or this process was stopped; move slow work to a thread",
                        call=what,
                        seconds=took,
                    )
                    self._metrics.held(plugin, took)
            try:
                value = yield waits_for
            except BaseException as error:
                resume = partial(coroutine.throw, error)
            else:
                resume = partial(coroutine.send, value)

    def _log(self, what: str, plugin: str, error: BaseException) -> None:
        """Log an exception, with its traceback if it is a new one: thousands of executions may meet the same defect."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        origin = plugin, type(error), place.filename, place.lineno
        is_new = not isinstance(error, RcfarmError) and origin not in self._known
        if is_new and len(self._known) < KNOWN_ERRORS:
            self._known.add(origin)
        details = {"exception": "".join(traceback.format_exception(error))} if is_new else {}  # survives any `__str__`
        log.warning("Plugin raised", call=what, error=_named(error), **details)

    @contextmanager
    def watchdog(self, *, after: float = STUCK_AFTER) -> Iterator[None]:
        """Report, from a thread, a plugin that holds the event loop for `after` seconds, and the place where it
        stands."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(after / 2):
                turn = self._turn
                if turn is None or turn.is_reported or time.perf_counter() - turn.began < after:
                    continue
                frame = sys._current_frames().get(turn.thread)
                place = "".join(traceback.format_stack(frame, 8)) if frame else ""
                log.error("A plugin holds the event loop; the engine stands still", call=turn.call, at=place)
                turn.is_reported = True

        threading.Thread(target=watch, name="plugin-watchdog", daemon=True).start()
        try:
            yield
        finally:
            stop.set()


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)[:MAX_MESSAGE]}"


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel the task, and wait shortly for its end."""
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE)
