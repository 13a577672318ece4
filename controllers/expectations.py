"""What a controller has asked for and not yet seen, so that it never acts twice on a cache that lags behind it.

The model: before each call the controller registers what the call will cause: a creation by name, a deletion by UID.
The informer's handlers cross it off; a call that failed for certain crosses it off at once. While anything registered
for a job is outstanding, under whichever key, the job is not reconciled. All operations are idempotent: an event that
is seen twice, or for something never expected, changes nothing.

A key is `JOB_UID/REPLICA_TYPE/pods` or `.../services` (`controllers.naming`), so a job that was deleted and created
again under its name inherits nothing. Each entry ends by itself, because an event may be lost for good:

- after `ttl`, when the answer to the call was good;
- after `uncertain_ttl`, when no answer came. Names are deterministic and deletions carry the UID, so repeating such a
  call is refused by the API server at worst; it never doubles anything.

Source: client-go's ControllerExpectations, which counts instead of naming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from controllers.clocks import loop_time

TTL = 300.0  # seconds
UNCERTAIN_TTL = 10.0  # seconds


class Expected(NamedTuple):
    """One outstanding effect. `what`: the name of what is created, or the UID of what is deleted."""

    key: str
    verb: Literal["create", "delete"]
    what: str


class Expectations:
    """The outstanding effects of all jobs. `clock`: monotonic seconds, by default those of the running loop."""

    def __init__(
        self, *, ttl: float = TTL, uncertain_ttl: float = UNCERTAIN_TTL, clock: Callable[[], float] = loop_time
    ) -> None:
        self._ttl, self._uncertain_ttl, self._clock = ttl, uncertain_ttl, clock
        self._deadlines: dict[str, dict[Expected, float]] = {}  # by job UID

    def __len__(self) -> int:
        """Jobs that are remembered."""
        return len(self._deadlines)

    def expect_creations(self, key: str, names: Iterable[str]) -> None:
        """Register creations, before they are asked for."""
        self._expect(key, (Expected(key, "create", name) for name in names))

    def expect_deletions(self, key: str, uids: Iterable[str]) -> None:
        """Register deletions, before they are asked for."""
        self._expect(key, (Expected(key, "delete", uid) for uid in uids))

    def creation_observed(self, key: str, name: str) -> None:
        """It was created, or will not be."""
        self._cross_off(Expected(key, "create", name))

    def deletion_observed(self, key: str, uid: str) -> None:
        """It is going or gone, or will not be deleted."""
        self._cross_off(Expected(key, "delete", uid))

    def uncertain(self, expected: Expected) -> None:
        """No answer came: from now on the entry holds the job back for `uncertain_ttl` at most."""
        entries = self._deadlines.get(_job_of(expected.key), {})
        if expected in entries:
            entries[expected] = min(entries[expected], self._clock() + self._uncertain_ttl)

    def satisfied(self, job_uid: str) -> bool:
        """Whether nothing is outstanding for the job, under any key."""
        return not self.outstanding(job_uid)

    def outstanding(self, job_uid: str) -> list[Expected]:
        """What the job still waits for; entries that are past their time are dropped."""
        entries = self._deadlines.get(job_uid)
        if not entries:
            return []
        now = self._clock()
        for expired in [expected for expected, deadline in entries.items() if deadline <= now]:
            self._cross_off(expired)
        return list(entries)

    def expires_in(self, job_uid: str) -> float | None:
        """Seconds until nothing can be outstanding any more even if no event comes; None when nothing is."""
        if not self.outstanding(job_uid):
            return None
        return max(self._deadlines[job_uid].values()) - self._clock()

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._deadlines.pop(job_uid, None)

    def _expect(self, key: str, entries: Iterable[Expected]) -> None:
        deadline = self._clock() + self._ttl
        self._deadlines.setdefault(_job_of(key), {}).update((expected, deadline) for expected in entries)

    def _cross_off(self, expected: Expected) -> None:
        job_uid = _job_of(expected.key)
        entries = self._deadlines.get(job_uid)
        if entries is not None:
            entries.pop(expected, None)
            if not entries:
                del self._deadlines[job_uid]


def _job_of(key: str) -> str:
    return key.partition("/")[0]
