"""The state machine of one execution: what follows what, to the second."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, cast

import msgspec
import pytest

from controllers.tasks.api.names import TaskExecutionID
from controllers.tasks.api.phase import (
    UNKNOWN_TRANSITION,
    ErrorKind,
    ExecutionError,
    Phase,
    PhaseInfo,
    ReasonInfo,
    TaskInfo,
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_failure_with_cleanup,
    phase_info_initializing,
    phase_info_queued,
    phase_info_retryable_failure,
    phase_info_retryable_failure_with_cleanup,
    phase_info_running,
    phase_info_success,
    phase_info_system_retryable_failure,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import TaskExecutionMetadata
from controllers.tasks.outcomes import (
    Admit,
    Admitted,
    Backoff,
    CacheAnswered,
    CleanedUp,
    CleanUp,
    Declared,
    Execution,
    Handle,
    Handled,
    Held,
    LookUp,
    Outcome,
    Outputs,
    Policy,
    RoundFailed,
    Sent,
    Step,
)
from controllers.tasks.step import MAX_TASK_INFO, step
from store.schema.tasks import AbortRequest, TaskEvent, TaskSpec, TaskState, Wait
from tests.support import require

NOW = 1_000_000.0
T = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = Policy(retry_backoff=Backoff(0.0, 0.0))
FULL = Wait("LimitReached", "3 of 3 units are in use")


class Run:
    """An execution and its committed state. `now` moves only when a test moves it."""

    def __init__(self, policy: Policy = POLICY, **spec: Any) -> None:
        self.spec = TaskSpec(id="t", type="test", **spec)
        self.state: TaskState | None = None
        self.now, self.policy = NOW, policy
        self.events: list[TaskEvent] = []
        self.releases = 0
        self.dependencies: dict[str, Literal["succeeded", "failed", "pending"]] = {}

    def step(self, outcome: Outcome | None = None) -> Step:
        execution = Execution(self.spec, self.state, self.dependencies)
        done = step(execution, outcome, self.now, self.policy)
        self.state = done.state
        self.events += done.events
        self.releases += done.release
        return done

    def handle(self, info: PhaseInfo, **more: Any) -> Step:
        return self.step(Handled(do_transition(info), **more))

    def started(self) -> Run:
        assert self.step().action == Handle(0)
        return self

    def edit(self, **changes: Any) -> None:
        self.spec = msgspec.structs.replace(self.spec, generation=self.spec.generation + 1, **changes)

    @property
    def phases(self) -> list[str]:
        return [event.phase.removeprefix("Phase") for event in self.events]


def ended(run: Run) -> TaskState:
    """Confirm clean-ups until the execution has ended."""
    done = run.step()
    while isinstance(done.action, CleanUp):
        done = run.step(CleanedUp())
    assert done.state.step == "done"
    assert done.action is None
    assert done.wake is None
    return done.state


def test_a_task_is_handled_and_finalized() -> None:
    """Success is one event; finalize follows; the units go with the success."""
    run = Run(outputs={"x": "int"}).started()
    done = run.handle(phase_info_success(), outputs=Outputs(frozenset({"x"})), checkpoint="mem://c")
    assert done.action == CleanUp(0, ("finalize",), "success")
    assert done.release
    assert run.step(CleanedUp()).state.outcome == "success"
    assert run.phases == ["Queued", "Success"]
    assert require(run.events[-1].info)["checkpoint"] == "mem://c"
    assert run.releases == 1


@pytest.mark.parametrize(
    ("declared", "outputs", "code", "phase"),
    [
        ({}, None, "", "PhaseSuccess"),
        ({"x": "int"}, None, "OutputsNotGenerated", "PhaseRetryableFailure"),
        ({"x": "int"}, Outputs(), "OutputsNotFound", "PhaseRetryableFailure"),
        ({"x": "int"}, Outputs(dynamic=True), "", "PhaseSuccess"),
        ({}, Outputs(error=ExecutionError("Bad", "m"), recoverable=True), "Bad", "PhaseRetryableFailure"),
        ({}, Outputs(error=ExecutionError("Bad", "m")), "Bad", "PhasePermanentFailure"),
    ],
)
def test_a_success_needs_its_outputs(declared: dict[str, str], outputs: Outputs | None, code: str, phase: str) -> None:
    """What is declared has to exist; an error that the work reported is retried if it says so."""
    run = Run(outputs=declared, retries=1).started()
    state = run.handle(phase_info_success(), outputs=outputs).state
    assert (state.phase, state.error.code if state.error else "") == (phase, code)


def test_the_same_phase_is_no_event_and_its_state_is_saved() -> None:
    """The time and the additional reasons of a report are no news; its logs, its reason and its version are."""
    run = Run().started()
    run.handle(phase_info_running(1, TaskInfo(custom_info={"a": 1})), state_write=({"poll": 1}, 1))
    later = TaskInfo(custom_info={"a": 1}, occurred_at=T, additional_reasons=(ReasonInfo("r"),))
    done = run.handle(phase_info_running(1, later), state_write=({"poll": 2}, 1))
    assert done.events == ()
    assert done.state.plugin_state == {"poll": 2}
    assert run.handle(phase_info_running(1, TaskInfo(custom_info={"a": 2}))).events[0].version == 2
    assert run.handle(phase_info_running(0, TaskInfo(custom_info={"a": 2}))).events[0].version == 3
    assert run.handle(phase_info_running(9, TaskInfo(custom_info={"a": 2}))).events[0].version == 9
    assert run.handle(phase_info_queued(T, 0, "again")).events[0].version == 0
    assert done.state.plugin_state == {"poll": 2}
    assert run.handle(phase_info_queued(T, 0, "again"), state_write=(None, 0)).state.plugin_state is None


def test_a_failed_call_changes_nothing_and_is_repeated() -> None:
    """Delays double; a good call forgets the failures; a signal does not cut a delay short."""
    run = Run().started()
    run.handle(phase_info_running(0), state_write=(1, 1))
    for delay in (1.0, 2.0, 4.0):
        done = run.step(RoundFailed("boom"))
        assert (done.events, done.action, done.wake) == ((), None, run.now + delay)
        assert (done.state.phase, done.state.plugin_state) == ("PhaseRunning", 1)
        assert run.step().action is None
        run.now += delay
        assert run.step().action == Handle(0)
    assert run.handle(phase_info_running(0)).state.round_errors == 0
    assert run.step(RoundFailed("boom")).wake == run.now + 1


def test_failed_calls_are_bounded() -> None:
    """The eleventh in a row ends the execution, and so does the first that can't be helped by a repetition."""
    run = Run().started()
    for _ in range(10):
        run.now = run.step(RoundFailed("boom")).wake or 0.0
    done = run.step(RoundFailed("boom", code="HandleRaised"))
    assert done.action == CleanUp(
        0, ("abort", "finalize"), f"HandleRaised: {done.state.error and done.state.error.message}"
    )
    run = Run().started()
    state = run.step(RoundFailed("no such field", retryable=False, code="BadConfig", kind="USER")).state
    assert state.phase == "PhasePermanentFailure"
    assert require(state.error).kind == "USER"


@pytest.mark.parametrize("transition", [UNKNOWN_TRANSITION, do_transition(PhaseInfo(Phase.RUNNING))])
def test_a_report_without_phase_or_content_is_a_failed_call(transition: Transition) -> None:
    """Nothing is shown of it, and its state is not saved."""
    done = Run().started().step(Handled(transition, state_write=(1, 1)))
    assert done.events == ()
    assert (done.state.round_errors, done.state.plugin_state) == (1, None)


def test_too_many_versions_of_a_phase_end_the_execution() -> None:
    """The remote work still runs, so it is aborted."""
    run = Run().started()
    done = run.handle(phase_info_running(100_001))
    assert require(done.state.error).code == "TooManyPluginPhaseVersions"
    assert isinstance(done.action, CleanUp)
    assert "abort" in done.action.steps


def test_recorded_events_precede_the_transition_and_survive_a_repeated_phase() -> None:
    """Numbers have no gap; the outbox may be behind."""
    run = Run().started()
    raw = (phase_info_queued(T, 0, "one"), phase_info_queued(T, 1, "two"))
    run.handle(phase_info_running(0), raw=raw)
    run.handle(phase_info_running(0), raw=raw[:1])
    assert [(event.kind, event.reason) for event in run.events[1:]] == [
        ("raw", "one"), ("raw", "two"), ("transition", ""), ("raw", "one"),
    ]  # fmt: skip
    assert [event.n for event in run.events] == [0, 1, 2, 3, 4]
    assert run.step(Sent(3)).state.sent == 3
    assert run.step(Sent(99)).state.sent == 5


def test_failures_of_the_users_kind_are_retried_as_often_as_declared() -> None:
    """The code says that the retries are exhausted, and keeps the kind."""
    run = Run(retries=1).started()
    assert run.handle(phase_info_retryable_failure("Oops", "m")).action == CleanUp(0, ("abort", "finalize"), "Oops: m")
    assert run.step(CleanedUp()).action == Handle(1)
    done = run.handle(phase_info_retryable_failure("Oops", "m"))
    assert done.action == CleanUp(1, ("finalize",), "RetriesExhausted|Oops: m")
    state = ended(run)
    assert state.error is not None
    assert (state.error.code, state.error.kind) == ("RetriesExhausted|Oops", "USER")
    assert run.phases == ["Queued", "RetryableFailure", "NotReady", "Queued", "PermanentFailure"]


def test_failures_of_the_systems_kind_have_a_budget_of_their_own() -> None:
    """Three of them leave the user's retries untouched; a fourth exhausts."""
    run = Run(retries=1).started()
    for attempt in range(3):
        run.handle(phase_info_system_retryable_failure("Lost", "m"))
        assert run.step(CleanedUp()).action == Handle(attempt + 1)
    run.handle(phase_info_retryable_failure("Oops", "m"))
    assert run.step(CleanedUp()).action == Handle(4)
    state = run.handle(phase_info_system_retryable_failure("Lost", "m")).state
    assert state.error is not None
    assert (state.error.code, state.error.kind) == ("RetriesExhausted|Lost", "SYSTEM")


def test_a_retry_cleans_up_first_and_starts_empty() -> None:
    """Abort sees the state of the round before the failure; the next attempt sees none, and its back-off is exact."""
    run = Run(Policy(), retries=3, quotas={"gpu": 1})
    run.step()
    run.step(Admitted(True))
    run.handle(phase_info_running(0), state_write=({"job": 7}, 1))
    done = run.handle(phase_info_retryable_failure("Oops", "m"), state_write=({"job": None}, 1))
    assert done.state.plugin_state == {"job": 7}
    assert not done.release
    done = run.step(CleanedUp())
    assert (done.state.attempt, done.state.plugin_state, done.state.granted) == (1, None, ("gpu",))
    assert (done.action, done.wake, done.state.reasons[0].code) == (None, run.now + 1, "Backoff")
    run.now += 1
    assert run.step().action == Handle(1)


@pytest.mark.parametrize(
    ("info", "steps"),
    [
        (phase_info_failure("Oops", "m"), ("finalize",)),
        (phase_info_failure_with_cleanup("Oops", "m"), ("abort", "finalize")),
        (phase_info_retryable_failure("Oops", "m"), ("finalize",)),
        (phase_info_retryable_failure_with_cleanup("Oops", "m"), ("abort", "finalize")),
    ],
)
def test_a_failure_is_aborted_only_on_request(info: PhaseInfo, steps: tuple[str, ...]) -> None:
    """Units go at once if nothing is left to abort, else with the confirmation."""
    run = Run().started()
    done = run.handle(info)
    assert isinstance(done.action, CleanUp)
    assert done.action.steps == steps
    assert done.release == ("abort" not in steps)
    assert run.step(CleanedUp()).release == ("abort" in steps)


def test_a_request_for_clean_up_stays() -> None:
    """A plugin that asked once that its abort be called need not repeat that in the failure."""
    run = Run().started()
    run.handle(PhaseInfo(Phase.RUNNING, info=TaskInfo(), cleanup_on_failure=True))
    done = run.handle(phase_info_failure("Oops", "m"))
    assert isinstance(done.action, CleanUp)
    assert done.action.steps == ("abort", "finalize")


def test_a_clean_up_is_repeated_until_it_succeeds() -> None:
    """Both errors are shown; both calls are repeated; the units stay. Only force ends it."""
    run = Run().started()
    run.edit(abort=AbortRequest(reason="too dear"))
    assert run.step().action == CleanUp(0, ("abort", "finalize"), "too dear")
    done = run.step(CleanedUp("no route", "no disk"))
    assert done.state.reasons[0].message == "failed 1 times in a row: abort: no route; finalize: no disk"
    assert (done.state.step, done.release, done.wake) == ("cleaning", False, run.now + 1)
    run.now += 1
    assert run.step().action == CleanUp(0, ("abort", "finalize"), "too dear")
    run.edit(abort=AbortRequest(reason="too dear", force=True))
    done = run.step(CleanedUp("no route", ""))
    assert (done.state.step, done.release) == ("done", True)


def test_an_abort_ends_with_one_event_after_the_clean_up() -> None:
    """The event names the request's reason. A second look changes nothing."""
    run = Run().started()
    run.handle(phase_info_running(0))
    run.edit(abort=AbortRequest(reason="too dear"))
    run.step()
    assert run.phases == ["Queued", "Running"]
    run.step(CleanedUp())
    assert (run.phases[-1], run.events[-1].kind, run.events[-1].reason) == (
        "Aborted",
        "abort",
        "Task Aborted: too dear",
    )
    before = run.state
    assert run.step().state == before


def test_an_abort_before_the_plugin_was_called_calls_nothing() -> None:
    """Neither abort nor finalize; tickets are released."""
    run = Run(quotas={"gpu": 1})
    run.step()
    run.step(Admitted(False, (FULL,)))
    run.edit(abort=AbortRequest(reason="no"))
    done = run.step()
    assert (done.state.step, done.state.outcome, done.action, done.release) == ("done", "aborted", None, True)


def test_an_abort_cancels_a_retry_and_no_success() -> None:
    """What was reported before the abort is seen counts."""
    run = Run(retries=1).started()
    run.handle(phase_info_retryable_failure("Oops", "m"))
    run.edit(abort=AbortRequest())
    done = run.step(CleanedUp())
    assert (done.state.outcome, done.state.attempt, done.action) == ("aborted", 0, None)
    run = Run().started()
    run.edit(abort=AbortRequest())
    assert isinstance(run.handle(phase_info_running(0)).action, CleanUp)
    run = Run().started()
    run.edit(abort=AbortRequest())
    assert run.handle(phase_info_success()).state.outcome == "success"


def test_the_execution_clock_starts_with_the_work() -> None:
    """A long wait for quota does not use it up; its end is retryable, and the work is aborted."""
    run = Run(execution_timeout=10, quotas={"gpu": 1}, retries=1)
    run.step()
    run.step(Admitted(False, (FULL,)))
    run.now += 1000
    run.step(Admitted(True))
    run.handle(phase_info_queued(T, 0, ""))
    run.now += 1000
    assert run.handle(phase_info_initializing(T, 0, "")).wake == run.now + 10
    run.now += 10
    assert run.step().action == Handle(0)
    done = run.handle(phase_info_running(0))
    assert (done.state.phase, require(done.state.error).code) == ("PhaseRetryableFailure", "TimeoutExpired")
    assert isinstance(done.action, CleanUp)
    assert "abort" in done.action.steps


def test_a_success_at_the_deadline_is_a_success() -> None:
    """The plugin is asked once more, also in a back-off; a failed call at the deadline is the end."""
    for outcome, phase in (
        (Handled(do_transition(phase_info_success())), "PhaseSuccess"),
        (RoundFailed("boom"), "PhasePermanentFailure"),
    ):
        run = Run(active_deadline=5).started()
        run.handle(phase_info_running(0))
        run.now += 4.5
        assert run.step(RoundFailed("boom")).wake == NOW + 5
        run.now += 0.5
        assert run.step().action == Handle(0)
        assert run.step(outcome).state.phase == phase


def test_the_active_deadline_is_final() -> None:
    """It spans waiting and attempts, and no retry follows."""
    run = Run(active_deadline=5, retries=9, quotas={"gpu": 1})
    run.step()
    assert run.step(Admitted(False, (FULL,))).wake == NOW + 5
    run.now += 5
    done = run.step()
    assert (done.state.step, done.state.outcome, done.release) == ("done", "timeout", True)


def test_the_queue_timeout_covers_all_waiting() -> None:
    """By quota or by the plugin; the reasons are in the error."""
    run = Run(queue_timeout=5, quotas={"gpu": 1})
    run.step()
    run.step(Admitted(False, (FULL,)))
    run.now += 3
    run.step(Admitted(True))
    assert run.handle(phase_info_waiting_for_resources(T, 0, "cluster is full")).wake == NOW + 5
    run.now += 2
    state = run.handle(phase_info_waiting_for_resources(T, 0, "cluster is full")).state
    assert state.error is not None
    assert state.error.code == "QueueTimeoutExpired"
    assert "cluster is full" in state.error.message


def test_a_request_above_the_limit_fails_at_once() -> None:
    run = Run(quotas={"gpu": 9})
    assert run.step().action == Admit({"gpu": 9})
    done = run.step(Admitted(False, (Wait("Infeasible", "9 units of a limit of 3"),)))
    assert (done.state.step, done.state.phase, done.release) == ("done", "PhasePermanentFailure", True)


def test_a_wait_that_only_moves_up_is_no_write() -> None:
    """The position in the queue changes often; the reason keeps its beginning, and the clock of a rate limit wakes."""
    run = Run(quotas={"gpu": 1})
    run.step()
    run.step(Admitted(False, (FULL,)))
    before = run.state
    run.now += 1
    assert run.step(Admitted(False, (Wait("LimitReached", "2 of 3"),))).state == before
    done = run.step(Admitted(False, (Wait("RateLimited", "", until=run.now + 3),)))
    assert (done.wake, done.state.reasons[0].since) == (run.now + 3, run.now)


def test_dependencies_are_waited_for() -> None:
    """The clocks start when they have succeeded; a failed one is a failure without a call."""
    run = Run(depends_on=("a", "b"), active_deadline=5)
    run.dependencies = {"a": "succeeded"}
    done = run.step()
    assert (done.action, done.wake, done.state.reasons[0].code) == (None, None, "Dependency")
    run.now += 100
    run.dependencies = {"a": "succeeded", "b": "succeeded"}
    assert run.step().wake == run.now + 5
    run = Run(depends_on=("a",))
    run.dependencies = {"a": "failed"}
    done = run.step()
    assert (done.state.step, require(done.state.error).code) == ("done", "DependencyFailed")


def test_a_cached_result_needs_no_plugin() -> None:
    run = Run(cache_version="1")
    assert run.step().action == LookUp(False)
    done = run.step(CacheAnswered("HIT"))
    assert (done.state.step, done.state.outcome, done.state.cache, run.phases) == (
        "done",
        "success",
        "HIT",
        ["Success"],
    )


def test_a_reservation_is_held_until_the_end() -> None:
    """One that is held elsewhere is waited for; a result is put, and the reservation released, before finalize."""
    run = Run(cache_version="1", cache_serialize=True)
    assert run.step().action == LookUp(True)
    done = run.step(CacheAnswered("MISS", held_by="other"))
    assert (done.state.phase, done.wake) == ("PhaseWaitingForCache", run.now + 10)
    assert run.step().action == LookUp(True)
    assert run.step(CacheAnswered("MISS")).action == Handle(0)
    done = run.handle(phase_info_success())
    assert isinstance(done.action, CleanUp)
    assert done.action.steps == ("put_cache", "release_reservation", "finalize")
    assert run.step(CleanedUp(cache="POPULATED")).state.cache == "POPULATED"


def test_a_reservation_outlives_a_retry() -> None:
    """The next attempt computes the same result; every other end of the execution gives the reservation up."""
    run = Run(cache_version="1", cache_serialize=True, retries=1)
    run.step()
    run.step(CacheAnswered("MISS"))
    run.handle(phase_info_retryable_failure("Oops", "m"))
    assert require(run.state).pending == ("abort", "finalize")
    assert run.step(CleanedUp()).action == Handle(1)
    run.edit(abort=AbortRequest())
    assert run.step().state.pending == ("abort", "release_reservation", "finalize")


def test_a_reason_keeps_its_beginning() -> None:
    """People see since when it has waited, also when the words change."""
    run = Run().started()
    run.handle(phase_info_queued(T, 0, "3 jobs before this one"))
    run.now += 60
    reason = run.handle(phase_info_queued(T, 0, "2 jobs before this one")).state.reasons[0]
    assert (reason.code, reason.message, reason.since) == ("Plugin", "2 jobs before this one", NOW)
    run.now += 60
    assert run.step(Held(Wait("PluginPaused", "m"))).state.reasons[0].since == run.now


@pytest.mark.parametrize(
    ("spec", "answer", "puts"),
    [({"cache_overwrite": True}, None, True), ({}, "LOOKUP_FAILURE", True), ({}, "DISABLED", False)],
)
def test_a_result_is_put_unless_the_plugin_disables_that(spec: dict[str, Any], answer: Any, puts: bool) -> None:
    """A failed look-up does not stop the execution; overwriting skips it."""
    run = Run(cache_version="1", **spec)
    done = run.step()
    assert (done if answer is None else run.step(CacheAnswered(answer))).action == Handle(0)
    done = run.handle(phase_info_success())
    assert isinstance(done.action, CleanUp)
    assert ("put_cache" in done.action.steps) == puts


def test_a_held_execution_says_why_and_costs_no_budget() -> None:
    run = Run(active_deadline=60).started()
    done = run.step(Held(Wait("RemoteUnknown", "no look-up by key")))
    assert (done.state.round_errors, done.state.reasons[0].code, done.wake) == (0, "RemoteUnknown", NOW + 60)
    run.now += 60
    assert run.step(Held(Wait("RemoteUnknown", "no look-up by key"))).state.outcome == "timeout"


def test_an_intent_is_recorded_in_the_middle_of_a_call() -> None:
    """Also while an abort is requested, which is decided after the call; the next attempt has no intent."""
    run = Run(retries=1).started()
    run.edit(abort=AbortRequest())
    done = run.step(Declared("t-0"))
    assert (done.action, done.state.step, done.state.intent and done.state.intent.key) == (None, "running", "t-0")
    run.edit(abort=None)
    run.handle(phase_info_retryable_failure("Oops", "m"))
    assert run.step(CleanedUp()).state.intent is None


def test_another_run_starts_over_under_new_names() -> None:
    """Only a request that grew does it; budgets are full again, and the history goes on."""
    run = Run(retries=1).started()
    run.handle(phase_info_failure("Oops", "m"))
    last = ended(run)
    run.edit(labels={"a": "b"})
    assert run.step().state == last
    run.edit(rerun=1)
    done = run.step()
    assert (done.action, done.state.rerun, done.state.user_failures) == (Handle(1), 1, 0)
    assert [event.n for event in run.events] == list(range(len(run.events)))
    assert run.phases[-2:] == ["NotReady", "Queued"]


def test_a_plugin_may_report_that_the_work_was_aborted() -> None:
    run = Run().started()
    error = ExecutionError("Gone", "m", ErrorKind.USER)
    done = run.handle(PhaseInfo(Phase.ABORTED, info=TaskInfo(), err=error))
    assert isinstance(done.action, CleanUp)
    assert done.action.steps == ("finalize",)
    assert ended(run).phase == "PhaseAborted"
    assert run.phases == ["Queued", "Aborted"]


def test_poll_after_is_a_wake_and_no_state() -> None:
    run = Run().started()
    done = run.step(Handled(do_transition(phase_info_running(0), poll_after=7.0)))
    assert (done.action, done.wake) == (None, run.now + 7)


def test_long_reports_are_cut() -> None:
    """A plugin that reports megabytes can't make a record that the store refuses."""
    run = Run().started()
    info = TaskInfo(custom_info={"x": "y" * MAX_TASK_INFO}, occurred_at=T)
    run.handle(phase_info_initializing(T, 0, "r" * 10**6, info))
    state = run.handle(phase_info_failure("c" * 10**6, "m" * 10**6)).state
    assert len(msgspec.json.encode(state)) < 64 * 1024
    assert require(run.events[1].info)["dropped"] == ["custom_info"]


def test_an_interruptible_task_loses_that_after_a_failure_of_the_system() -> None:
    run = Run(interruptible=True).started()
    run.handle(phase_info_system_retryable_failure("Lost", "m"))
    for state, expected in ((run.step(CleanedUp()).state, False), (TaskState(user_failures=1), True)):
        shown = TaskExecutionMetadata(run.spec, state, cast("TaskExecutionID", None), POLICY.interruptible_failures)
        assert shown.is_interruptible() is expected


def test_an_outcome_of_another_action_is_refused() -> None:
    with pytest.raises(ValueError, match="task t: CleanedUp while running"):
        Run().started().step(CleanedUp())
