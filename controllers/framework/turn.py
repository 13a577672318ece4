"""One step in progress: what it is given, and what it collects on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from random import Random
from typing import Literal
from uuid import UUID

from controllers.framework.actions import HistoryTrigger, Note, Snapshot
from controllers.framework.config import FrameworkConfig
from controllers.framework.observed import Observed
from controllers.framework.types import Framework, FrameworkStatus, TaskStatus


@dataclass(slots=True)
class Turn:
    """`now` in whole seconds. `urgent`: something changed that must not be lost, or that somebody waits for.
    `addressed`: a pod got its address."""

    framework: Framework
    observed: Observed
    now: datetime
    rng: Random
    config: FrameworkConfig
    history: list[Snapshot] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    urgent: bool = False
    addressed: bool = False

    def new_uid(self) -> str:
        return str(UUID(int=self.rng.getrandbits(128), version=4))

    def note(self, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self.notes.append(Note(kind, reason, message))

    def remember(self, trigger: HistoryTrigger, status: FrameworkStatus | TaskStatus, role: str = "") -> None:
        self.history.append(Snapshot(trigger, status, role))
