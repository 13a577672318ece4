"""Circuits: a plugin, a sink or a remote system that fails for everything is paused as a whole, instead of each
execution on its own.

The model: a circuit counts faults of different executions in a row. At `FAULTS` of them it *pauses*: executions that
arrive wait in a line, and one at a time, the *probe*, is let through; after its fault the next probe follows in a pause
that doubles up to `LONGEST_PAUSE`. The first success ends the pause, and the line moves on in its order: each success
lets two more through, each fault one, as a connection that starts slowly. `FAULTS` in a row pause again, and the
intervals go on where they were, less a step for each success in between.

Some executions may fail at each call while the plugin works for the others. So a *suspect*, whose last call failed,
waits behind those that are none, and probes only if there are no others; and its next fault counts only if nothing
has succeeded for `QUIET` seconds. Fewer than `FAULTS` executions never pause anything: each is retried on its own.

A fault while paused concerns the plugin or the sink, so it is not counted for the execution, and nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from store.timing import doubled

log = structlog.get_logger(__name__)

FAULTS = 5  # different executions in a row
FIRST_PAUSE = 1.0  # seconds until the first probe
LONGEST_PAUSE = 60.0  # seconds between probes
QUIET = 10.0  # seconds without a success after which also suspects count
STEPS = 6  # doublings from the first interval to the longest one
MAX_ERROR = 500  # characters that are kept of the last fault


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause. `since`: when it began; `probe_at`: when the next probe begins, or began. Seconds since the epoch.

    `probes`: those that failed. `error`: the last fault.
    """

    since: float
    probe_at: float
    probes: int
    error: str


class Circuit:
    """Lets executions through to what it stands before, unless that is paused.

    `name`: of what is paused, for the log. `wake(execution)`: its turn has come; it must arrive again, or be forgotten.
    `on_change()`: a pause began, went on or ended. `wall()`: seconds since the epoch. `turn`: seconds after which an
    execution is forgotten that was woken and does not arrive, for callers that may not know that it is gone; 0: never.

    Each execution that `passes` ends with one of `succeeded`, `failed` and `left`.
    """

    def __init__(
        self,
        name: str,
        wake: Callable[[str], None],
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        turn: float = 0.0,
    ) -> None:
        self.name = name
        self.pause: Pause | None = None
        self._wake, self._clock, self._wall, self._on_change = wake, clock, wall, on_change
        self._faulty: set[str] = set()  # executions whose faults count, since the last success
        self._suspects: set[str] = set()
        self._line: dict[str, None] = {}  # executions that wait for their turn, in order
        self._suspect_line: dict[str, None] = {}  # behind the others
        self._through: dict[str, None] = {}  # executions whose turn it is
        self._timer: asyncio.TimerHandle | None = None
        self._turn = turn
        self._absent: dict[str, asyncio.TimerHandle] = {}  # executions whose turn it is, and that have not arrived
        self._doublings = 0
        self._last_success = float("-inf")

    def __len__(self) -> int:
        """Return the number of executions that wait."""
        return len(self._line) + len(self._suspect_line)

    def __contains__(self, execution: str) -> bool:
        """Return whether the execution waits."""
        return execution in self._line or execution in self._suspect_line

    def passes(self, execution: str) -> bool:
        """Return whether the execution may call now; if not, it waits in the line."""
        self._has_arrived(execution)
        if self.pause is not None and self._absent:
            self._enqueue(absent := next(iter(self._absent)))
            self._has_arrived(absent)
            self._remove(execution)
            self._through = {execution: None}  # it is here; the other one may be gone
        if execution in self._through or (self.pause is None and not self._line and not self._suspect_line):
            return True
        self._enqueue(execution)
        if self.pause is not None:
            self._let_through(1)
        return execution in self._through

    def succeeded(self, execution: str) -> None:
        """Note a call that shows that the plugin or the sink works: the pause ends."""
        self._last_success = self._clock()
        self._faulty.clear()
        self._suspects.discard(execution)
        self._through.pop(execution, None)
        self._remove(execution)
        if self.pause is not None:
            log.info("Resuming", paused=self.name, waiting=len(self), seconds=self._wall() - self.pause.since)
            self.pause = None
            self._stop_timer()
            self._on_change()
        else:
            self._doublings = max(0, self._doublings - 1)
        self._let_through(2)

    def failed(self, execution: str, error: str) -> bool:
        """Note a fault. Return true if it counts for the execution, false if this circuit is paused and the execution
        waits in the line."""
        is_known, was_through = execution in self._suspects, execution in self._through
        self._suspects.add(execution)
        self._through.pop(execution, None)
        if self.pause is None:
            if not is_known or self._clock() - self._last_success >= QUIET:
                self._faulty.add(execution)
            if len(self._faulty) < FAULTS:
                self._let_through(1)
                return True
            self._line = {**self._through, **self._line}
            self._through.clear()
            for absent in list(self._absent):
                self._has_arrived(absent)
            log.warning("Pausing: calls of different executions fail in a row", paused=self.name, error=error)
            self._await_probe(self._wall(), 0, error)
        elif was_through:
            self._await_probe(self.pause.since, self.pause.probes + 1, error)
        self._remove(execution)
        self._enqueue(execution)
        self._let_through(1)
        return False

    def left(self, execution: str) -> None:
        """Note that the execution is through without a call, or with one that says nothing about the plugin."""
        if execution in self._through:
            del self._through[execution]
            self._let_through(1)

    def forget(self, execution: str) -> None:
        """Drop an execution that this engine does not own any more."""
        self._has_arrived(execution)
        self._remove(execution)
        self._faulty.discard(execution)
        self._suspects.discard(execution)
        self.left(execution)

    def close(self) -> None:
        """Stop the timers."""
        for execution in list(self._absent):
            self._has_arrived(execution)
        self._stop_timer()

    def _has_arrived(self, execution: str) -> None:
        if self._absent and (timer := self._absent.pop(execution, None)) is not None:
            timer.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _enqueue(self, execution: str) -> None:
        if execution not in self._line:
            (self._suspect_line if execution in self._suspects else self._line).setdefault(execution)

    def _remove(self, execution: str) -> None:
        self._line.pop(execution, None)
        self._suspect_line.pop(execution, None)

    def _await_probe(self, since: float, probes: int, error: str) -> None:
        interval = doubled(FIRST_PAUSE, LONGEST_PAUSE, self._doublings)
        self._doublings = min(self._doublings + 1, STEPS)
        self.pause = Pause(since, self._wall() + interval, probes, error[:MAX_ERROR])
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(interval, self._probe)
        self._on_change()

    def _probe(self) -> None:
        self._timer = None
        self._let_through(1)

    def _let_through(self, number: int) -> None:
        """Let executions through that wait; while paused only one, and only when a probe is due."""
        while number and (line := self._line or self._suspect_line):
            if self.pause is not None and (self._timer is not None or self._through):
                return
            execution = next(iter(line))
            del line[execution]
            self._through[execution] = None
            number -= 1
            if self._turn:
                loop = asyncio.get_running_loop()
                self._absent[execution] = loop.call_later(self._turn, self.forget, execution)
            self._wake(execution)
