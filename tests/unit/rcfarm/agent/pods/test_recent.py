"""The transitions of a pod: what each report adds to the one before."""

from __future__ import annotations

from rcfarm.agent.pods.recent import joined, transitions
from store.schema.records import RECENT, Exit, Health, Process, Reality, Transition

NOW = "2026-01-01T00:01:00Z"


def report(**process: object) -> Reality:
    return Reality(manifest="m", rc="web", state="running", launchables={"main": Process(**process)})  # type: ignore[arg-type]


def told(before: Reality | None, after: Reality, was: Health | None = None, health: Health | None = None) -> list[str]:
    return [
        f"{each.at[14:19]} {each.what} {each.text}".strip() for each in transitions(before, after, was, health, NOW)
    ]


def test_a_crash_is_an_end_and_a_start() -> None:
    """With the times of the process itself, and the number of the restart."""
    first = report(state="running", pid=7, started_at="2026-01-01T00:00:00Z")
    end = Exit(at="2026-01-01T00:00:20Z", code=1)
    ended = report(state="backoff", last_exit=end)
    again = report(state="running", pid=8, restarts=1, started_at="2026-01-01T00:00:25Z", last_exit=end)
    assert told(None, first) == ["00:00 started process 7"]
    assert told(first, ended) == ["00:20 exited exited with code 1"]
    assert told(ended, again) == ["00:25 started process 8, restart 1"]
    assert told(again, again) == []


def test_a_verdict_says_why() -> None:
    """The condition takes the place of the status where it says more; a passing pod needs no cause."""
    pod, passing = report(state="running", pid=7), Health("passing", "m", "GET /: 200")
    critical = Health("critical", "m", "connection\nrefused")
    crashing = Health("critical", "m", condition="crashing", cause="main exited with code 1")
    assert told(pod, pod, None, passing) == ["01:00 health passing"]
    assert told(pod, pod, passing, critical) == ["01:00 health passing → critical: connection refused"]
    assert told(pod, pod, critical, crashing) == ["01:00 health critical → crashing: main exited with code 1"]
    assert told(pod, pod, crashing, crashing) == []
    assert all(len(each.text) <= 120 for each in transitions(pod, pod, None, Health("critical", "m", "x" * 999), NOW))


def test_two_lists_are_joined_without_repetition() -> None:
    """What an agent finds again after its restart is there once; the oldest go first."""
    known = tuple(Transition(at=f"2026-01-01T00:00:{n:02}Z", what="health", text=str(n)) for n in range(RECENT))
    assert joined(known, known[-2:]) == known
    later = Transition(at="2026-01-01T00:05:00Z", what="health", text="later")
    assert joined(known, (later,)) == (*known[1:], later)
