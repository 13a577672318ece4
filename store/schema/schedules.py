"""The records of schedules: when executions of a task begin, and how far that has come.

Only operators write `spec`. The engine that leads writes `state`, and so does an operator who triggers a run, both by
CAS. Moments are seconds since the epoch.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from store.schema.records import Count, Quantity, StoredRecord
from store.schema.tasks import Moment, Seconds, TaskSpec

Overlap = Literal["allow", "forbid", "replace"]
Missed = Literal["none", "last", "all"]
SkipCode = Literal["Overlap", "Missed", "DeadlinePassed", "Replaced", "IdTaken"]
CatchUp = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Expressions = Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)]

MAX_SCHEDULE_NAME = 50  # characters: the id of an execution is the name, "-" and up to 10 digits


class ScheduleSpec(StoredRecord, frozen=True, kw_only=True):
    """`schedules/<name>/spec`: when to submit which task. Only operators write it.

    - `cron`: expressions of five fields; a moment that fits one of them is a run. `time_zone`: a name of IANA's.
    - `task`: what each run submits; its `id` is ignored.
    - `overlap`: a run that is due while an execution of the schedule has not ended: begins beside it, is skipped, or
      waits until that is aborted.
    - `missed`: which runs are made up for that no engine was there to begin: none, the last, or all, but at most the
      last `max_missed`. `start_deadline`: no run begins
      later than this after its moment, in seconds; 0: none.
    - `keep_succeeded`, `keep_failed`: how many ended executions stay that succeeded, and that ended otherwise; None: as
      many as the engine's retention leaves.
    - `since`: runs up to this moment are not due: that of the creation, or when the schedule was resumed.
    """

    name: str
    cron: Expressions
    task: TaskSpec
    time_zone: str = "UTC"
    overlap: Overlap = "forbid"
    missed: Missed = "last"
    max_missed: CatchUp = 10
    start_deadline: Seconds = 0.0
    keep_succeeded: Count | None = 3
    keep_failed: Count | None = 10
    paused: bool = False
    since: Moment = 0.0
    generation: Quantity = 1
    created_at: str = ""
    submitted_by: str = ""


class Skip(StoredRecord, frozen=True):
    """The reason why the run of `moment` did not begin, or at least `count` runs up to then."""

    code: SkipCode
    message: str
    moment: Moment
    count: Count = 1


class ScheduleState(StoredRecord, frozen=True, kw_only=True):
    """`schedules/<name>/state`: how far the schedule has come.

    - `decided`: runs up to this moment have begun or were skipped. `pending`: the moment of a run that begins when the
      execution that it replaces has ended; 0: none. `requested`: the id of its execution, if an operator triggered it.
    - `last`, `last_moment`: the newest execution and the moment that it belongs to.
    - `active`: executions, triggered ones as well, that had not ended when the record was written. `skips`: the newest
      ones, oldest first.
    """

    decided: Moment = 0.0
    pending: Moment = 0.0
    requested: str = ""
    last: str = ""
    last_moment: Moment = 0.0
    active: tuple[str, ...] = ()
    skips: tuple[Skip, ...] = ()
