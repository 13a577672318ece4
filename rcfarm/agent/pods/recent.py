"""The last transitions of a pod, found by comparing each report with the one before. Pure.

They are kept in the pod's own report, a few of them, and are written with the change that they describe: no write is
made for them alone. `rcfarm events` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from store.schema.records import RECENT, Health, Reality, Transition

MOST_OF_TEXT = 120  # characters


def transitions(
    before: Reality | None, after: Reality, was: Health | None, health: Health | None, now: str
) -> Iterator[Transition]:
    """Yield what happened between two reports on a pod, and between two verdicts. `now`: RFC 3339.

    Of a pod that a new agent has adopted, what its processes did last is yielded again; `joined` leaves it out.
    """
    for name, process in after.launchables.items():
        former = before.launchables.get(name) if before else None
        end = process.last_exit
        if end is not None and (former is None or end != former.last_exit):
            what = process.state if process.state == "completed" or process.state == "failed" else "exited"
            yield Transition(at=end.at or now, what=what, of=name, text=_short(end.words))
        is_other = process.pid is not None and (former is None or former.pid != process.pid)
        if is_other and process.state in ("starting", "running"):
            again = f", restart {process.restarts}" if process.restarts else ""
            text = f"process {process.pid}{again}"
            yield Transition(at=process.started_at or now, what="started", of=name, text=text)
    if health is not None and (was is None or (was.status, was.condition) != (health.status, health.condition)):
        from_state = f"{_state(was)} → " if was else ""
        detail = "" if health.status == "passing" else health.cause or " ".join(health.output.split())
        text = f"{from_state}{_state(health)}{': ' if detail else ''}{detail}"
        yield Transition(at=now, what="health", text=_short(text))


def joined(known: tuple[Transition, ...], further: tuple[Transition, ...]) -> tuple[Transition, ...]:
    """Return the last of both, in the order of their times, each once."""
    return tuple(sorted(dict.fromkeys((*known, *further)), key=lambda each: each.at))[-RECENT:]


def _state(health: Health) -> str:
    return health.condition if health.condition in ("crashing", "blocked") else health.status


def _short(text: str) -> str:
    return text if len(text) <= MOST_OF_TEXT else text[: MOST_OF_TEXT - 1] + "…"
