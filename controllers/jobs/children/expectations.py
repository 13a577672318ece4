"""Calls whose effects the cache does not show yet, so that a controller never acts twice on a stale cache.

The model: before each call the controller registers its effect: a creation by name, a deletion by UID. The informer's
handlers remove the entry when they see the effect; a call that certainly failed removes it at once. While any entry of
a job is outstanding, under any key, the job is not reconciled. All operations are idempotent: an event that is seen
twice, or that was never expected, changes nothing.

A key is `JOB_UID/REPLICA_TYPE/pods` or `.../services` (`controllers.jobs.api.names`), so a job that was deleted and
created again under its name inherits nothing. Each entry expires, because an event may be lost:

- after `ttl`, when the call succeeded;
- after `uncertain_ttl`, when no answer came. Names are deterministic and deletions carry the UID, so at worst the API
  server rejects a repeated call; nothing is created or deleted twice.

Source: client-go's ControllerExpectations, which counts instead of naming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from controllers.loop.workqueue import loop_time

TTL = 300.0  # seconds
UNCERTAIN_TTL = 10.0  # seconds


class Expected(NamedTuple):
    """One outstanding effect. `what`: the name of the object to create, or the UID of the object to delete."""

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
        """Return the number of jobs with entries."""
        return len(self._deadlines)

    def expect_creations(self, key: str, names: Iterable[str]) -> None:
        """Register creations, before the calls are made."""
        self._expect(key, (Expected(key, "create", name) for name in names))

    def expect_deletions(self, key: str, uids: Iterable[str]) -> None:
        """Register deletions, before the calls are made."""
        self._expect(key, (Expected(key, "delete", uid) for uid in uids))

    def creation_observed(self, key: str, name: str) -> None:
        """Remove the entry: the object was created, or will not be."""
        self._cross_off(Expected(key, "create", name))

    def deletion_observed(self, key: str, uid: str) -> None:
        """Remove the entry: the object is being deleted, is gone, or will not be deleted."""
        self._cross_off(Expected(key, "delete", uid))

    def uncertain(self, expected: Expected) -> None:
        """Let the entry expire within `uncertain_ttl`, because the call got no answer."""
        entries = self._deadlines.get(_job_of(expected.key), {})
        if expected in entries:
            entries[expected] = min(entries[expected], self._clock() + self._uncertain_ttl)

    def satisfied(self, job_uid: str) -> bool:
        """Return whether nothing is outstanding for the job, under any key."""
        return not self.outstanding(job_uid)

    def outstanding(self, job_uid: str) -> list[Expected]:
        """Return the job's outstanding entries. Expired ones are dropped."""
        entries = self._deadlines.get(job_uid)
        if not entries:
            return []
        now = self._clock()
        for expired in [expected for expected, deadline in entries.items() if deadline <= now]:
            self._cross_off(expired)
        return list(entries)

    def expires_in(self, job_uid: str) -> float | None:
        """Return the seconds until the job's last entry expires, or None when nothing is outstanding."""
        if not self.outstanding(job_uid):
            return None
        return max(self._deadlines[job_uid].values()) - self._clock()

    def forget(self, job_uid: str) -> None:
        """Drop all entries of a job that is gone."""
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
