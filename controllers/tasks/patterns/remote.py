"""Calls to a remote system: their errors, the limits of their rate, and the settings of a plugin that makes them.

A `RemoteError` classifies what a call's failure means, because the same failure is handled the same way for every API:

RemoteError
├── RemoteTransient  try again; the call may have been applied, unless `sent` is false
├── RemoteThrottled  try again after `retry_after` seconds; the call was not applied, unless `sent`
├── RemoteRefused    the request is at fault, and repeating it can't help; the call was not applied
└── RemoteGone       what the call is about does not exist

Other exceptions of a plugin's call are defects of the plugin, except `OSError` and `TimeoutError`, which are transient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.plugin import SignalAsync
from controllers.tasks.circuit import Circuit
from store.timing import TokenBucket

DEFAULT_RETRY_AFTER = 5.0  # seconds, of a remote system that names none
RESOLUTION = 0.001  # seconds that a call may begin early: shorter sleeps than the clock can tell apart never end
TURN = 5.0  # seconds in which an execution must come whose turn it is
LONGEST_RETRY_AFTER = 3600.0  # seconds that are believed


class RemoteError(TaskError):
    """A call to the remote system failed."""


class RemoteTransient(RemoteError):
    """The remote system could not answer now. `sent`: the request may have reached it."""

    is_outage = True

    def __init__(self, message: str, *, sent: bool = True) -> None:
        self.sent = sent
        super().__init__(message)


class RemoteThrottled(RemoteError):
    """The remote system takes no more calls for `retry_after` seconds. `sent`: the call may have been applied."""

    def __init__(self, message: str, *, retry_after: float | None = None, sent: bool = False) -> None:
        self.sent = sent
        self.retry_after = min(DEFAULT_RETRY_AFTER if retry_after is None else max(retry_after, 0), LONGEST_RETRY_AFTER)
        super().__init__(message)


class RemoteRefused(RemoteError):
    """The remote system refuses the request itself. `code`: that of the failure that results."""

    retryable = False

    def __init__(self, message: str, *, code: str = "RemoteRefused") -> None:
        self.code = code
        super().__init__(message)


class RemoteGone(RemoteError):
    """The remote work does not exist, or no longer."""


TRANSIENT = (RemoteTransient, OSError, TimeoutError)

# the range of each setting, as in Flyte's web-API plugins
_RANGES = {
    "cache_size": (10, 500_000),
    "workers": (1, 100),
    "resync_seconds": (5, 3600),
    "read_qps": (1, 100_000),
    "read_burst": (5, 10_000),
    "write_qps": (1, 100_000),
    "write_burst": (5, 10_000),
}


class WebApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a web-API plugin.

    - `cache_size`: jobs that one engine follows. `workers`: concurrent reads. `resync_seconds`: between two reads of a
      job that nothing is known to have happened to; young jobs are read more often.
    - `max_system_failures`: consecutive failed reads, or creations, of a job that are borne.
    - `read_qps`, `read_burst`, `write_qps`, `write_burst`: of the calls to one remote system; creations and deletions
      are writes.
    - `batch_size`: jobs that one call reads, for a plugin with `get_many`. `call_timeout`: seconds; 0: no limit.
    - `resource_quotas`: units by resource, declared when the plugin is loaded.
    """

    cache_size: int = 100_000
    workers: int = 10
    resync_seconds: float = 30.0
    max_system_failures: int = 5
    read_qps: float = 30.0
    read_burst: int = 300
    write_qps: float = 20.0
    write_burst: int = 200
    batch_size: int = 1
    call_timeout: float = 30.0
    resource_quotas: dict[str, int] = {}

    def check(self) -> None:
        """Raise `BadConfig`, which lists every setting outside of its range."""
        wrong = [
            f"{name} is {value:g}, not {low} to {high}"
            for name, (low, high) in _RANGES.items()
            if not low <= (value := getattr(self, name)) <= high
        ]
        wrong += [
            f"{name} is {value:g}, not 0 or more"
            for name in ("max_system_failures", "batch_size", "call_timeout")
            if not 0 <= (value := getattr(self, name)) < float("inf")
        ]
        if wrong:
            raise BadConfig("; ".join(wrong))


class CallLimiter:
    """The rate of one kind of calls to one remote system: `burst` at once, then `qps` a second, and none while paused.
    Times are those of the event loop."""

    def __init__(self, qps: float, burst: int) -> None:
        self._bucket = TokenBucket(qps, burst)
        self._paused_until = 0.0

    def delay(self) -> float:
        """Return the seconds for which a call would have to wait now."""
        now = asyncio.get_running_loop().time()
        return max(self._bucket.delay(now), self._paused_until - now, 0.0)

    def pause(self, seconds: float) -> None:
        """Let no call begin for that time: the remote system asked for it."""
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + seconds)

    async def acquire(self) -> None:
        """Wait until one call may begin; calls that wait begin in their order."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._bucket.take(loop.time())
        try:
            while (left := max(due, self._paused_until) - loop.time()) > RESOLUTION:  # noqa: ASYNC110 - a pause may begin at any time
                await asyncio.sleep(left)
        except asyncio.CancelledError:
            self._bucket.put_back()
            raise


class Gate:
    """Lets executions through to one remote system; while it fails for all of them, one at a time tries.

    `name`: of the remote system, for the log. `wall()`: seconds since the epoch.
    """

    def __init__(self, name: str, wall: Callable[[], float]) -> None:
        self.circuit = Circuit(name, self._wake, clock=lambda: asyncio.get_running_loop().time(), wall=wall, turn=TURN)
        self._signals: dict[str, SignalAsync] = {}

    def passes(self, execution: str, signal: SignalAsync) -> bool:
        """Return whether the execution may call now; if not, `signal` is called when its turn has come."""
        self._signals[execution] = signal
        return self.circuit.passes(execution)

    def left(self, execution: str) -> None:
        """Note that the call has ended; its signal is kept only if the execution waits."""
        self.circuit.left(execution)
        if execution not in self.circuit:
            self._signals.pop(execution, None)

    def forget(self, execution: str) -> None:
        """Drop an execution that makes no more calls."""
        self._signals.pop(execution, None)
        self.circuit.forget(execution)

    def _wake(self, execution: str) -> None:
        if (signal := self._signals.get(execution)) is not None:
            signal()


class Limits:
    """The limiters and gates of a plugin, by remote system. `plugin`: its id."""

    def __init__(self, config: WebApiConfig, plugin: str, wall: Callable[[], float]) -> None:
        self.gates: dict[str, Gate] = {}
        self._config, self._plugin, self._wall = config, plugin, wall
        self._reads: dict[str, CallLimiter] = {}
        self._writes: dict[str, CallLimiter] = {}

    def gate(self, remote: str) -> Gate:
        """Return the gate of creations."""
        if remote not in self.gates:
            self.gates[remote] = Gate(f"creations of plugin {self._plugin} {remote}".rstrip(), self._wall)
        return self.gates[remote]

    def read(self, remote: str) -> CallLimiter:
        """Return the limiter of reads."""
        if remote not in self._reads:
            self._reads[remote] = CallLimiter(self._config.read_qps, self._config.read_burst)
        return self._reads[remote]

    def write(self, remote: str) -> CallLimiter:
        """Return the limiter of creations and deletions."""
        if remote not in self._writes:
            self._writes[remote] = CallLimiter(self._config.write_qps, self._config.write_burst)
        return self._writes[remote]
