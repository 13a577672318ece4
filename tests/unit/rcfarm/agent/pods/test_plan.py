"""The decisions of an agent: orders from intents, disk and reality; steps from orders and the running manifest."""

from __future__ import annotations

import pytest

from rcfarm.agent.pods.plan import Gone, Keep, Order, Step, Wanted, next_step, orders, pod_state, supersedes
from rcfarm.agent.process import ExitStatus
from rcfarm.agent.supervisor import after_exit
from store.schema.records import Intent, Process, ProcessState


def wanted(manifest: str = "m1", index: int = 1, **fields: object) -> Wanted:
    return Wanted(Intent(manifest=manifest, rc="rc-1", shard="00", **fields), index)  # type: ignore[arg-type]


def test_every_pod_that_is_known_anywhere_gets_an_order() -> None:
    """Pods with intents are wanted; those that only run, or only have a reality, are gone; undecodable ones stay."""
    assert orders(
        {"new": wanted(), "both": wanted()}, {"bad": "why"}, running=["both", "old", "bad"], realities=["seen", "both"]
    ) == {"new": wanted(), "both": wanted(), "old": Gone(), "seen": Gone(), "bad": Keep("why")}


def test_an_unreadable_intent_wins_over_its_last_good_value() -> None:
    """A view keeps the last good value of a record that was damaged; nothing new is started from it."""
    assert orders({"web": wanted()}, {"web": "why"}, [], []) == {"web": Keep("why")}


@pytest.mark.parametrize(
    ("order", "running", "lost_port", "step"),
    [
        (wanted("m1"), None, False, Step.INSTALL),
        (wanted("m1"), "m1", False, Step.NOTHING),
        (wanted("m2"), "m1", False, Step.REPLACE),
        (wanted("m2"), "m1", True, Step.REPLACE),
        (wanted("m1"), "m1", True, Step.RESTART),
        (Gone(), "m1", False, Step.REMOVE),
        (Gone(), "m1", True, Step.REMOVE),
        (Gone(), None, False, Step.FORGET),
        (Keep(), "m1", False, Step.NOTHING),
        (Keep(), "m1", True, Step.RESTART),
        (Keep(), None, False, Step.NOTHING),
        (wanted("m1"), "", False, Step.REPLACE),
    ],
)
def test_the_next_step(order: Order, running: str | None, lost_port: bool, step: Step) -> None:
    """Same digest: nothing; another one: install, then replace; no intent: remove."""
    assert next_step(order, running, lost_port=lost_port) is step


@pytest.mark.parametrize(
    ("new", "old", "pointless"),
    [
        (wanted("m2"), wanted("m1"), True),
        (wanted("m1", 2, token=5), wanted("m1", 1), False),
        (Gone(), wanted("m1"), True),
        (wanted("m1"), Gone(), True),
        (Gone(), Gone(), False),
    ],
)
def test_work_in_progress_is_given_up_only_for_another_outcome(new: Order, old: Order, pointless: bool) -> None:
    """A changed label or owner does not interrupt an installation; another manifest or no intent does."""
    assert supersedes(new, old) is pointless


@pytest.mark.parametrize(
    ("policy", "status", "outcome"),
    [
        ("always", ExitStatus(0), ""),
        ("always", ExitStatus(1), ""),
        ("on-failure", ExitStatus(0), "completed"),
        ("on-failure", ExitStatus(1), ""),
        ("on-failure", ExitStatus(None, "SIGKILL"), ""),
        ("on-failure", ExitStatus(None), ""),
        ("never", ExitStatus(0), "completed"),
        ("never", ExitStatus(1), "failed"),
        ("never", ExitStatus(None), "failed"),
    ],
)
def test_restart_policies(policy: str, status: ExitStatus, outcome: str) -> None:
    """The outcome after an exit; an unknown status counts as a failure."""
    assert after_exit(policy, status) == outcome  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["running", "running"], "running"),
        (["completed"], "running"),
        (["running", "backoff"], "starting"),
        (["running", "starting"], "starting"),
        (["failed", "backoff"], "failed"),
        (["failed", "stopping"], "stopping"),
        (["stopped"], "stopping"),
    ],
)
def test_a_pods_state_is_that_of_its_worst_launchable(states: list[ProcessState], expected: str) -> None:
    """One word for the pod, from the words for its processes."""
    assert pod_state([Process(state=state) for state in states]) == expected


def test_each_request_for_a_restart_is_obeyed_once() -> None:
    """Also when the request is gone from the intent, as after an update; a changed manifest comes first."""
    asked = wanted("m1", restart="01A")
    assert next_step(asked, "m1") is Step.RESTART
    assert next_step(asked, "m1", obeyed="01A") is Step.NOTHING
    assert next_step(wanted("m1"), "m1", obeyed="01A") is Step.NOTHING
    assert next_step(wanted("m1", restart="01B"), "m1", obeyed="01A") is Step.RESTART
    assert next_step(wanted("m2", restart="01A"), "m1") is Step.REPLACE
