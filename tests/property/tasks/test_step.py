"""The state machine of an execution against a second one, which is a table and a few clocks.

The inputs are random: reports of the plugin, failed calls, refusals, aborts, further runs, time, and crashes, after
which the machine has nothing but what was committed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from controllers.tasks.api.phase import (
    ErrorKind,
    ExecutionError,
    Phase,
    PhaseInfo,
    TaskInfo,
    do_transition,
    phase_info_initializing,
    phase_info_queued,
    phase_info_running,
    phase_info_success,
)
from controllers.tasks.outcomes import (
    Action,
    Admit,
    Admitted,
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
    RoundFailed,
    Sent,
    Step,
)
from controllers.tasks.step import step
from store.schema.tasks import AbortRequest, TaskEvent, TaskSpec, TaskState, Wait

BEGIN = 1_000_000.0
T = datetime(2026, 1, 1, tzinfo=UTC)


class Row(NamedTuple):
    """The end of an attempt. `abort` None: only if the plugin asked for that. `units`: they go with the decision."""

    abort: bool | None
    finalize: bool
    outcome: str


ENDS = {
    "success": Row(False, True, "success"),
    "hit": Row(False, False, "success"),
    "failure": Row(None, True, "failure"),
    "failure of live work": Row(True, True, "failure"),
    "too late": Row(True, True, "timeout"),
    "aborted": Row(True, True, "aborted"),
    "aborted remotely": Row(None, True, "aborted"),
    "again": Row(True, True, "retry"),
}
REPORTS = {  # of a plugin: the end that follows if any, and the budget that has to be left for another attempt
    "queued": ("", ""),
    "initializing": ("", ""),
    "running": ("", ""),
    "flood": ("failure of live work", ""),
    "success": ("success", ""),
    "no outputs": ("failure", "USER"),
    "user retryable": ("failure", "USER"),
    "system retryable": ("failure", "SYSTEM"),
    "unknown retryable": ("failure", "USER"),
    "permanent": ("failure", ""),
    "aborted": ("aborted remotely", ""),
    "raises": ("", ""),
    "raises for good": ("failure of live work", ""),
    "held": ("", ""),
}


def report(name: str, flag: bool) -> Outcome:
    """Return what the engine passes on for a report."""

    def failure(phase: Phase, kind: ErrorKind) -> Outcome:
        error = ExecutionError("Oops", "m", kind)
        return Handled(do_transition(PhaseInfo(phase, info=TaskInfo(), err=error, cleanup_on_failure=flag)))

    match name:
        case "queued":
            return Handled(do_transition(phase_info_queued(T, 0, "")), state_write=("q", 1))
        case "initializing":
            return Handled(do_transition(phase_info_initializing(T, 0, "")))
        case "running":
            running = PhaseInfo(Phase.RUNNING, info=TaskInfo(), cleanup_on_failure=flag)
            return Handled(do_transition(running), raw=(phase_info_running(7),))
        case "flood":
            return Handled(do_transition(phase_info_running(100_001)))
        case "success" | "no outputs":
            names = frozenset({"x"}) if name == "success" else frozenset[str]()
            return Handled(do_transition(phase_info_success()), outputs=Outputs(names))
        case "aborted":
            return Handled(do_transition(PhaseInfo(Phase.ABORTED, info=TaskInfo(), cleanup_on_failure=flag)))
        case "raises" | "raises for good":
            return RoundFailed("boom", retryable=name == "raises")
        case "held":
            return Held(Wait("RemoteUnknown", "m"))
        case "permanent":
            return failure(Phase.PERMANENT_FAILURE, ErrorKind.USER)
        case _:
            return failure(Phase.RETRYABLE_FAILURE, ErrorKind(name.split()[0].upper()))


class Model:
    """Where an execution is, in the words of the table above. `pause`: no call before this time."""

    def __init__(self, spec: TaskSpec) -> None:
        self.limits = {"active": spec.active_deadline, "execution": spec.execution_timeout, "queue": spec.queue_timeout}
        self.quotas, self.cached, self.retries = bool(spec.quotas), bool(spec.cache_version), spec.retries
        self.attempt = -1
        self.begin()

    def begin(self) -> None:
        """Begin a run: budgets are full, nothing is held."""
        self.budget = {"USER": self.retries, "SYSTEM": 3}
        self.held, self.looked_up, self.end = False, False, ""
        self.clocks: dict[str, float] = {}
        self.next_attempt(0.0)

    def next_attempt(self, pause: float) -> None:
        self.attempt += 1
        self.where, self.pause, self.errors, self.flag = "wait", pause, 0, False
        self.steps: tuple[str, ...] = ()
        self.clocks = {name: at for name, at in self.clocks.items() if name == "active"}

    def late(self, now: float) -> str:
        """Return the first deadline that has passed, in the order in which they count."""
        passed = [
            name
            for name in ("active", "execution", "queue")
            if self.limits[name] and name in self.clocks and now >= self.clocks[name] + self.limits[name]
        ]
        return passed[0] if passed else ""

    def finish(self, end: str) -> None:
        row = ENDS[end]
        called = self.where == "call"
        abort = self.flag if row.abort is None else row.abort
        self.steps = tuple(n for n, wanted in (("abort", abort), ("finalize", row.finalize)) if wanted and called)
        self.end, self.errors, self.pause = row.outcome, 0, 0.0
        self.where = "clean" if self.steps else "end"
        self.held = self.held and (end == "again" or "abort" in self.steps)

    def fail(self, end: str, budget: str) -> None:
        if budget and self.budget[budget]:
            self.budget[budget] -= 1
            self.finish("again")
        else:
            self.finish(end)

    def judge(self, now: float) -> None:
        if self.where in ("wait", "call") and (late := self.late(now)):
            if late == "execution":
                self.fail("failure of live work", "USER")
            else:
                self.finish("too late")

    def reported(self, name: str, flag: bool, now: float) -> None:
        end, budget = REPORTS[name]
        if not name.startswith(("raises", "held")):
            self.errors, self.pause = 0, 0.0
            self.flag |= flag and name.endswith(("running", "retryable", "permanent", "aborted"))
        if name == "raises":
            self.errors += 1
            if self.errors > 10:
                end = "failure of live work"
            else:
                self.pause = now + min(30.0, 2.0 ** (self.errors - 1))
        if name == "queued":
            self.clocks.setdefault("queue", now)
        if name in ("running", "initializing"):
            self.clocks.pop("queue", None)
            self.clocks.setdefault("execution", now)
        if end:
            self.fail(end, budget)
        self.judge(now)

    def cleaned(self, problem: bool, now: float, aborting: bool) -> None:
        if problem:
            self.errors += 1
            self.pause = now + min(60.0, 2.0 ** (self.errors - 1))
        elif self.end == "retry" and not aborting:
            used = self.retries - self.budget["USER"] + 3 - self.budget["SYSTEM"]
            self.end = ""
            self.next_attempt(now + min(60.0, 2.0 ** (used - 1)))
        else:
            self.end = "aborted" if self.end == "retry" else self.end
            self.where, self.held = "end", False

    def settle(self, now: float, aborting: bool, due: bool) -> type | None:
        """Follow the request to abort and the clocks. Returns the type of action that is expected."""
        if aborting and self.where in ("wait", "call"):
            self.finish("aborted")
        elif aborting and self.where == "clean" and self.end == "retry":
            self.end = "aborted"
        if self.where == "wait":
            self.judge(now)
        if self.where == "wait" and now >= self.pause:
            for name in ("active", "queue"):
                self.clocks.setdefault(name, now)
            if due and self.cached and not self.looked_up:
                return LookUp
            if due and self.quotas and not self.held:
                return Admit
            if due:
                self.where, self.pause = "call", 0.0
        if self.where == "call":
            return Handle if due and (now >= self.pause or self.late(now)) else None
        return CleanUp if self.where == "clean" and now >= self.pause else None


Input = tuple[str, Any, Any]
INPUTS = st.one_of(
    st.tuples(st.just("answer"), st.sampled_from(sorted(REPORTS)), st.booleans()),
    st.tuples(st.just("answer"), st.sampled_from(sorted(REPORTS)), st.booleans()),
    st.tuples(st.sampled_from(["crash", "wake"]), st.none(), st.none()),
    st.tuples(st.just("sleep"), st.sampled_from([0.5, 1.0, 7.0, 40.0]), st.none()),
    st.tuples(st.sampled_from(["abort", "rerun", "intent", "sent"]), st.none(), st.none()),
)
LIMITS = st.sampled_from([0.0, 3.0, 50.0])
SPECS = st.builds(
    TaskSpec,
    id=st.just("t"),
    type=st.just("test"),
    retries=st.integers(0, 2),
    outputs=st.just({"x": "int"}),
    quotas=st.sampled_from([{}, {"gpu": 1}]),
    cache_version=st.sampled_from(["", "1"]),
    cache_serialize=st.booleans(),
    queue_timeout=LIMITS,
    execution_timeout=LIMITS,
    active_deadline=LIMITS,
)
REFUSED = ("queued", "raises", "held", "initializing")


class Machine:
    """The real one, with the model beside it. Every call is checked; `flight` is the action whose outcome is due."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec, self.model = spec, Model(spec)
        self.now, self.state, self.flight = BEGIN, None, None
        self.wake: float | None = None
        self.count = self.releases = self.runs = 0

    state: TaskState | None
    flight: Action | None

    def call(self, outcome: Outcome | None) -> Step:
        before = self.state
        done = step(Execution(self.spec, before), outcome, self.now)
        again = step(Execution(self.spec, done.state), None, self.now)
        assert (again.events, again.release) == ((), False) or not isinstance(outcome, (type(None), CleanedUp))
        assert outcome is not None or again.action == done.action, "a crash after the commit asks for the same"
        assert outcome is not None or again.state == done.state
        self.numbers(done.events, done.state)
        self.kept(before, done)
        self.state, self.flight, self.wake = done.state, done.action, done.wake
        return done

    def numbers(self, events: tuple[TaskEvent, ...], state: TaskState) -> None:
        """Events have no gap, and the state knows the next number."""
        for event in events:
            assert event.n == self.count
            self.count += 1
        assert state.next_event == self.count
        assert state.sent <= state.next_event

    def kept(self, before: TaskState | None, done: Step) -> None:
        """What holds after every call, whatever the call was."""
        state = done.state
        ended = state.step == "done"
        assert ended or state.phase == "PhaseRunning" or state.reasons, "every wait has a reason"
        assert done.wake is None or done.wake > self.now
        if before is not None and before.step == "done" and before.rerun == self.spec.rerun:
            assert msgspec.structs.replace(state, sent=0, token=0) == msgspec.structs.replace(before, sent=0, token=0)
            assert not done.events
        self.releases += done.release
        self.runs += ended and (before is None or before.step != "done" or before.rerun != state.rerun)
        assert not (done.release and state.granted)
        assert not ended or not state.granted

    def agree(self, done: Step, expected: type | None) -> None:
        """The two machines are at the same place."""
        model, state = self.model, done.state
        words = {"wait": "admitting", "call": "running", "clean": "cleaning", "end": "done"}
        if state.step == "cleaning" and not {"abort", "finalize"} & set(state.pending):
            # Only the reservation is left: the model has no catalog.
            assert model.where == "end"
            assert isinstance(done.action, CleanUp)
            done = self.call(CleanedUp())
            state, expected = done.state, None
        assert done.action or done.wake or state.step in ("running", "done") or state.phase.startswith("PhaseWaiting")
        assert state.step == words[model.where]
        assert state.outcome == model.end
        assert state.attempt == model.attempt
        calls = tuple(each for each in state.pending if each in ("abort", "finalize"))
        assert calls == (model.steps if state.step == "cleaning" else ())
        assert bool(state.granted) == model.held
        assert type(done.action) is (expected or type(None)), (done.action, expected)
        left = {"USER": self.spec.retries - state.user_failures, "SYSTEM": 3 - state.system_failures}
        assert left == model.budget
        late = [at + model.limits[name] for name, at in model.clocks.items() if model.limits[name]]
        if done.action is None and model.where in ("wait", "call") and late:
            assert done.wake is not None
            assert done.wake <= min(late)

    def feed(self, what: str, detail: Any, flag: Any) -> None:
        if what == "sleep":
            self.now += detail
            return
        if what in ("abort", "rerun"):
            if what == "abort":
                self.spec = msgspec.structs.replace(self.spec, abort=AbortRequest(reason="no"))
            elif self.state is not None and self.state.step == "done":
                self.spec = msgspec.structs.replace(self.spec, abort=None, rerun=self.spec.rerun + 1)
            return
        if what in ("intent", "sent"):
            running = self.state is not None and self.state.step == "running"
            if self.state is not None and self.state.rerun == self.spec.rerun and (running or what == "sent"):
                flight, wake = self.flight, self.wake
                before = self.state.step, self.state.phase
                self.call(Declared("k") if what == "intent" else Sent(3))
                assert (self.state.step, self.state.phase) == before
                self.flight, self.wake = flight, wake
            return
        if what == "wake" and self.wake is not None:
            self.now = max(self.now, self.wake)
        outcome = self.answer(detail, flag) if what == "answer" else None
        if self.state is not None and self.state.step == "done" and self.spec.rerun > self.state.rerun:
            self.model.begin()
        due = outcome is None or self.tell_model(outcome, detail, flag)
        done = self.call(outcome)
        self.agree(done, self.model.settle(self.now, self.spec.abort is not None, due))

    def answer(self, name: str, flag: bool) -> Outcome | None:
        """Return an outcome of the action in flight; the report's name also chooses the answers of the others."""
        match self.flight:
            case LookUp():
                status: Literal["HIT", "MISS", "LOOKUP_FAILURE"] = (
                    "HIT" if name == "success" else "MISS" if name != "aborted" else "LOOKUP_FAILURE"
                )
                return CacheAnswered(status, held_by="other" if name in REFUSED else "")
            case Admit():
                if name == "permanent":
                    return Admitted(False, (Wait("Infeasible", "m"),))
                return Admitted(name not in REFUSED, (Wait("LimitReached", "m"),) if name in REFUSED else ())
            case Handle():
                return report(name, flag)
            case CleanUp():
                bad = name in REFUSED
                return CleanedUp("e" if bad and flag else "", "e" if bad and not flag else "")
        return None

    def tell_model(self, outcome: Outcome, name: str, flag: bool) -> bool:
        """Feed the model. Returns true if the next action is due at once."""
        model = self.model
        match outcome:
            case CacheAnswered():
                if name == "success":
                    model.finish("hit")
                elif name not in REFUSED:
                    model.looked_up = True
                return name not in REFUSED
            case Admitted():
                if name == "permanent":
                    model.finish("failure")
                elif name not in REFUSED:
                    model.held = True
                return name not in REFUSED
            case CleanedUp():
                model.cleaned(name in REFUSED, self.now, self.spec.abort is not None)
                return name not in REFUSED
        model.reported(name, flag, self.now)
        return False


@settings(max_examples=400, deadline=None)
@given(spec=SPECS, inputs=st.lists(INPUTS, max_size=30))
def test_an_execution_ends_as_the_table_says(spec: TaskSpec, inputs: list[Input]) -> None:
    """Steps, clean-ups, budgets, deadlines, units and reasons are those of the model after every input. When the plugin
    has no more trouble, the execution ends, and has released its units once per run."""
    machine = Machine(spec)
    machine.feed("crash", None, None)
    for what, detail, flag in inputs:
        machine.feed(what, detail, flag)
    for _ in range(12):
        machine.feed("wake", None, None)
        for _ in range(4):
            machine.feed("answer", "success", False)
    assert machine.state is not None
    assert machine.state.step == "done"
    assert machine.releases == machine.runs
