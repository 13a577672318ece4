"""What analyses do to a rollout: promotion, the way back, the pauses and their ends, on a virtual fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rcfarm.operations.analysis import ERRORS, Measured
from store.schema.records import Analysis, PrometheusAnalysis
from tests.support.farm.virtual_fleet import Fleet, fleet

SUCCESS, FAILURE = Measured("success", "0.001"), Measured("failure", "0.25")
NO_DATA, ERROR = Measured("no_data", "no series"), Measured("error", "Connection refused")
ASKED = PrometheusAnalysis(url="http://prometheus:9090", query="errors", condition="< 0.01")


class Rolling:
    """A fleet with an analysis, `errors`, which is answered as `says`; it began to roll out revision 2."""

    def __init__(self, says: Measured = SUCCESS, manifest: str = "good-1", replicas: int = 3, **update: Any) -> None:
        fields = {"interval": 5.0, "failure_limit": update.pop("failure_limit", 0)}
        analysis = Analysis(name="errors", prometheus=ASKED, **fields)
        self.fleet: Fleet = fleet(replicas, replicas, **{"min_healthy_time": 2.0, "analysis": (analysis,), **update})
        self.says, self.runs = says, 0
        self.fleet.answer = self._answer
        self.fleet.update(manifest)

    def _answer(self, name: str) -> Measured:
        self.runs += 1
        return self.says

    def run(self, seconds: float) -> str:
        self.fleet.run(seconds)
        return self.state

    @property
    def state(self) -> str:
        assert self.fleet.rollout is not None
        return self.fleet.rollout.state

    @property
    def changed(self) -> int:
        return sum(manifest == self.fleet.manifest for manifest in self.fleet.intents.values())

    @property
    def reason(self) -> tuple[str, str]:
        reason = self.fleet.decide().rolled.reasons[0]
        return reason.code, reason.message


def test_it_runs_only_while_the_new_manifest_runs() -> None:
    """First when the canary passes, then at its interval, and not once the rollout is done."""
    rolling = Rolling(manifest="good-4")
    rolling.run(3.9)
    assert rolling.runs == 0
    rolling.run(1.0)
    assert (rolling.runs, rolling.changed) == (1, 1)
    assert rolling.run(60.0) == "done"
    runs = rolling.runs
    rolling.run(60.0)
    assert rolling.runs == runs > 2


@pytest.mark.parametrize("replicas", [1, 3])
def test_each_must_succeed_in_the_canary_and_in_the_soak(replicas: int) -> None:
    """One error is nothing but a delay; a success of the canary does not count for the soak."""
    rolling = Rolling(ERROR, replicas=replicas)
    assert rolling.run(10.0) == "canary"
    assert rolling.reason[1].endswith("waits until its analyses succeed: errors")
    rolling.says = SUCCESS
    rolling.run(3.0)
    assert rolling.state != "canary"
    rolling.says = ERROR
    rolling.run(9.0)
    assert (rolling.state, rolling.changed) == ("soaking", replicas)
    assert rolling.reason[1].endswith("waits until its analyses succeed: errors")
    rolling.says = SUCCESS
    assert rolling.run(6.0) == "done"


def test_a_failure_takes_the_rollout_back() -> None:
    """The reason has the analysis, the value and the condition. Nothing but the canary was touched."""
    rolling = Rolling(FAILURE)
    assert rolling.run(10.0) == "reverted"
    assert rolling.reason == (
        "rollout_reverted",
        "revision 2: analysis errors: 0.25 is not < 0.01; the pods run revision 1 again",
    )
    assert rolling.fleet.touched[2] == {"node-000"}


@pytest.mark.parametrize("state", ["rolling", "soaking", "awaiting_promotion"])
def test_also_after_the_canary(state: str) -> None:
    rolling = Rolling(replicas=6, soak=30.0, auto_promote=state != "awaiting_promotion")
    while rolling.run(0.2) != state:
        pass
    rolling.says = FAILURE
    rolling.run(5.5)
    assert rolling.state == "reverting" or rolling.state == "reverted"


def test_the_failures_of_all_states_count_together() -> None:
    """With a limit of 2 the third one stops it, however many successes lie between, and another owner counts on."""
    answers: Iterator[Measured] = iter([FAILURE, SUCCESS, FAILURE, SUCCESS, FAILURE])
    rolling = Rolling(failure_limit=2, soak=60.0)
    rolling.fleet.answer = lambda name: next(answers)
    rolling.run(12.0)
    rolling.fleet.restart_farm()
    assert rolling.run(1.0) in {"rolling", "soaking"}
    assert rolling.run(15.0) == "reverted"
    assert "0.25 is not < 0.01 (3 failures, failure_limit is 2)" in rolling.reason[1]


def test_without_auto_revert_it_stays_as_it_is() -> None:
    rolling = Rolling(FAILURE, auto_revert=False)
    assert (rolling.run(10.0), rolling.changed) == ("failed", 1)
    assert rolling.reason[0] == "rollout_failed"


def test_no_data_pauses_until_data_comes() -> None:
    """The state that was left is gone on with; a success in it is needed again."""
    rolling = Rolling(NO_DATA)
    assert rolling.run(4.0) == "paused"
    code, message = rolling.reason
    assert code == "analysis_no_data"
    assert message.startswith("analysis errors has no data (no series); it goes on when data comes; ")
    rolling.run(600.0)
    assert (rolling.state, rolling.changed) == ("paused", 1)
    rolling.says = SUCCESS
    assert rolling.run(5.2) == "canary"
    assert rolling.run(60.0) == "done"


def test_an_operator_who_resumes_has_it_asked_at_once() -> None:
    """Without data it is paused again."""
    rolling = Rolling(NO_DATA)
    rolling.run(4.0)
    rolling.run(1.0)
    runs = rolling.runs
    rolling.fleet.ask("resume")
    rolling.run(0.2)
    assert (rolling.runs, rolling.state) == (runs + 1, "paused")
    rolling.says = SUCCESS
    rolling.fleet.ask("resume")
    assert rolling.run(60.0) == "done"


def test_a_failure_after_no_data_takes_it_back() -> None:
    rolling = Rolling(NO_DATA)
    rolling.run(4.0)
    rolling.says = FAILURE
    assert rolling.run(6.0) == "reverted"


def test_a_pod_that_fails_while_there_is_no_data_takes_it_back() -> None:
    """A pause for an analysis does not hide a crash loop, which may be why there is no data."""
    rolling = Rolling(NO_DATA, manifest="brief-8", healthy_deadline=20.0, progress_deadline=60.0)
    assert rolling.run(4.0) == "paused"
    rolling.run(40.0)
    assert rolling.state == "reverted"
    assert "healthy_deadline of 20 s" in rolling.reason[1]


def test_errors_in_a_row_pause_it() -> None:
    """One less is nothing. The first answer ends the pause; one more error does not."""
    rolling = Rolling(ERROR)
    rolling.run(2.0 + 5.0 * (ERRORS - 2))
    assert (rolling.runs, rolling.state) == (ERRORS - 1, "canary")
    assert rolling.run(5.0) == "paused"
    code, message = rolling.reason
    assert code == "analysis_error"
    assert "analysis errors has no answer (Connection refused)" in message
    assert rolling.run(50.0) == "paused"
    rolling.says = SUCCESS
    assert rolling.run(60.0) == "done"


def test_a_success_in_between_ends_the_row_of_errors() -> None:
    answers = iter([*[ERROR] * (ERRORS - 1), SUCCESS, *[ERROR] * (ERRORS - 1), SUCCESS] * 9)
    rolling = Rolling(soak=120.0)
    rolling.fleet.answer = lambda name: next(answers)
    rolling.run(100.0)
    assert "paused" not in rolling.fleet.states


def test_a_farm_that_takes_over_goes_on_where_it_was_paused() -> None:
    rolling = Rolling(NO_DATA)
    rolling.run(4.0)
    rolling.fleet.restart_farm()
    assert rolling.run(20.0) == "paused"
    rolling.says = SUCCESS
    assert rolling.run(60.0) == "done"


def test_removing_the_analysis_ends_the_pause() -> None:
    """`update: {analysis: []}` is how an operator goes on without it."""
    rolling = Rolling(NO_DATA)
    rolling.run(4.0)
    rolling.fleet.policy = fleet(1, 1, min_healthy_time=2.0).policy
    assert rolling.run(60.0) == "done"


def test_nothing_runs_while_an_operator_has_paused_it() -> None:
    rolling = Rolling(ERROR)
    rolling.run(3.0)
    rolling.fleet.ask("pause")
    rolling.run(1.0)
    runs = rolling.runs
    assert (rolling.run(60.0), rolling.runs) == ("paused", runs)
    rolling.says = SUCCESS
    rolling.fleet.ask("resume")
    assert rolling.run(60.0) == "done"


def test_an_operator_promotes_a_canary_without_its_success() -> None:
    """The analyses go on: without one success the rollout is not done."""
    rolling = Rolling(ERROR)
    rolling.run(4.0)
    rolling.fleet.ask("promote")
    rolling.run(9.0)
    assert rolling.changed == 3
    assert rolling.state != "done"


def test_a_canary_of_no_pod_waits_for_no_analysis() -> None:
    rolling = Rolling(canary="0")
    rolling.run(0.2)
    assert (rolling.state, rolling.changed) == ("rolling", 1)
    assert rolling.run(60.0) == "done"


def test_the_way_back_is_not_analysed() -> None:
    """What was stable is applied again after a failure: there is nothing to go back to, so that no analysis runs."""
    rolling = Rolling(FAILURE)
    rolling.run(10.0)
    rolling.fleet.update("good-0")
    runs = rolling.runs
    assert (rolling.run(30.0), rolling.runs) == ("done", runs)


def test_results_of_a_former_revision_are_none_of_the_next() -> None:
    """A new manifest in the middle of a rollout: the failure of the one before does not stop it."""
    rolling = Rolling(failure_limit=1, soak=60.0)
    rolling.run(20.0)
    rolling.says = FAILURE
    rolling.run(5.0)
    rolling.says = SUCCESS
    rolling.fleet.update("good-0.5")
    rolling.run(1.0)
    rollout = rolling.fleet.rollout
    assert rollout is not None
    assert all(result.failures == 0 for result in rollout.analysis)
