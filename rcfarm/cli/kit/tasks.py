"""What is shown of executions: the JSON views, whose fields are a contract, and the words for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.text import Text

from rcfarm.cli.kit.command import Cli
from rcfarm.cli.kit.output import Output, ago, ahead, one_line, timestamp
from rcfarm.operations.tasks import Engine, Tasks, TaskView, reasons
from store.schema.tasks import TaskError


class WaitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One reason for waiting. `code` is of a closed list; the times are RFC 3339 in UTC, or ""."""

    code: str
    message: str
    since: str = ""
    until: str = ""


class TaskInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One execution.

    `state`: waiting, starting, running, stopping, succeeded, failed, timed-out, aborted or unreadable; `phase`: what
    its plugin reports. `attempt` counts from 1; 0: none has begun. `engine`: the owner, if `held`. `details`: what the
    plugin reported last.
    """

    id: str
    type: str
    state: str
    phase: str = ""
    project: str = ""
    domain: str = ""
    attempt: int = 0
    reason: str = ""
    reasons: list[WaitInfo] = []
    error: TaskError | None = None
    engine: str = ""
    held: bool = False
    schedule: str = ""
    labels: dict[str, str] = {}
    priority: int = 0
    quotas: dict[str, int] = {}
    cache: str = ""
    created_at: str = ""
    queued_at: str = ""
    running_at: str = ""
    ended_at: str = ""
    submitted_by: str = ""
    abort_requested: bool = False
    details: dict[str, Any] = {}

    @property
    def where(self) -> str:
        """Return where the work is, such as node-1/hello-0, or ""."""
        found = self.details.get("external_resources")
        first = found[-1] if isinstance(found, list) and found else {}
        return str(first.get("external_id") or "") if isinstance(first, dict) else ""

    @property
    def output(self) -> str:
        """Return the last lines that the program wrote, as far as its plugin reports them."""
        custom = self.details.get("custom_info")
        return str(custom.get("output") or "") if isinstance(custom, dict) else ""


def tasks_of(cli: Cli) -> Tasks:
    """Return the operations on executions, for this command."""
    return Tasks(cli.store, cli.keys, actor=cli.actor)


def task_info(view: TaskView, engines: Sequence[Engine] = ()) -> TaskInfo:
    """Return an execution as it is shown."""
    spec, state = view.spec, view.state
    if spec is None or view.bad:
        return TaskInfo(
            id=view.id,
            type=spec.type if spec else "",
            state=view.word,
            reason="; ".join(map(str, view.bad.values() or [view.defect]))
            + (f"; to release what it holds: {view.remedy}" if view.remedy else ""),
            held=view.is_held,
        )
    info = TaskInfo(
        id=spec.id,
        type=spec.type,
        state=view.word,
        project=spec.project,
        domain=spec.domain,
        reasons=[
            WaitInfo(code=wait.code, message=wait.message, since=timestamp(wait.since), until=timestamp(wait.until))
            for wait in reasons(view, engines)
        ],
        engine=view.owner.engine if view.owner else "",
        held=view.is_held,
        schedule=spec.schedule,
        labels=dict(spec.labels),
        priority=spec.priority,
        quotas=dict(spec.quotas),
        created_at=spec.created_at,
        submitted_by=spec.submitted_by,
        abort_requested=spec.abort is not None,
    )
    if state is None:
        return info
    return msgspec.structs.replace(
        info,
        phase=state.phase,
        attempt=state.attempt + 1,
        reason=state.reason,
        error=state.error,
        cache=state.cache,
        queued_at=timestamp(state.queued_at),
        running_at=timestamp(state.running_at),
        ended_at=timestamp(state.ended_at),
        details=state.info or {},
    )


def summary(info: TaskInfo) -> str:
    """Return what the execution does now, in a line that changes only when that does."""
    attempt = f" (attempt {info.attempt})" if info.attempt > 1 else ""
    where = f" on {info.where}" if info.where and info.state in ("starting", "running", "stopping") else ""
    own = ("Plugin", "CleaningUp")  # the state says it already
    why = "; ".join(("" if wait.code in own else f"{wait.code}: ") + wait.message for wait in info.reasons)
    if not why and info.state in ("waiting", "starting"):
        why = info.reason
    if not why and info.error is not None and info.state not in ("running", "starting"):
        why = f"{info.error.code}: {info.error.message}"
    return f"{info.state}{where}{attempt}{': ' + one_line(why) if why else ''}"


def print_reasons(out: Output, waits: Sequence[WaitInfo]) -> None:
    """Print one line for each reason."""
    for wait in waits:
        times = [f"since {ago(wait.since)}"] if wait.since else []
        times += [f"changes {left}"] if (left := ahead(wait.until)) else []
        words = wait.message + (f" ({', '.join(times)})" if times else "")
        out.hanging(Text.assemble("  ", (f"{wait.code}: ", "yellow")), words)
