"""What an execution's history says about it when another client has deleted its state.

The first event is written in the transaction of the first state, so an execution with events and without a state has
begun. Its plugin's state and its intent are gone: nothing knows what the attempt has created. Starting over could
create it a second time, so an attempt in which the plugin may have been called waits with `RemoteUnknown` for an
operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from store.schema.tasks import TaskEvent, TaskSpec, TaskState, Wait


def recovered(spec: TaskSpec, events: Sequence[TaskEvent], now: float) -> TaskState | None:
    """Return the state that replaces a deleted one, from the events in their order; None without events.

    The budgets of retries begin again, and all events are sent once more. `now`: seconds since the epoch.
    """
    if not events:
        return None
    last = events[-1]
    attempt = [event for event in events if event.attempt == last.attempt]
    was_called = any(event.phase == "PhaseQueued" for event in attempt)
    state = TaskState(
        generation=spec.generation,
        rerun=spec.rerun,
        phase=last.phase,
        version=last.version,
        attempt=last.attempt,
        reason=last.reason,
        info=last.info,
        error=last.error,
        created=events[0].at,
        attempt_at=attempt[0].at,
        next_event=last.n + 1,
    )
    if last.phase in ("PhaseSuccess", "PhaseAborted"):  # the work has ended
        outcome = "success" if last.phase == "PhaseSuccess" else "aborted"
        return replace(state, step="cleaning", outcome=outcome, pending=("finalize",) if was_called else ())
    if not was_called:
        return state
    why = (
        f"its state was deleted while no engine had it, so nothing knows what attempt {last.attempt + 1} has begun: "
        f"find and stop that, then `rcfarm task abort {spec.id}`, and `rcfarm task retry {spec.id}` to run it again"
    )
    queued = next(event.at for event in events if event.phase == "PhaseQueued")
    return replace(state, step="running", is_lost=True, queued_at=queued, reasons=(Wait("RemoteUnknown", why, now),))
