"""The state machine of one execution: what was committed and what happened go in, what to commit and to do come out.

An execution passes four steps; each arrow is one transaction:

    admitting ──► running ──► cleaning ──► done
        ▲  │                     │  ▲        │
        │  └── ends uncalled ────┼──┼──────► │
        └──── another attempt ◄──┘  └ rerun ─┘ (starts at admitting)

- *admitting*: waits for dependencies, a retry's back-off, the cache and quotas. The plugin is not called.
- *running*: the plugin may have been called, and remote work may exist. Only the plugin's report, a deadline or an
  operator's request ends it; that an engine stops does not.
- *cleaning*: the end of the attempt is decided and never changes again, except that an abort cancels a retry. The
  plugin is called until it confirms.
- *done*: nothing changes, unless an operator asks for another run.

`step` is called with an outcome after each action, and with None whenever something may have changed: a claim after a
crash, a signal, a timer. It is pure; a crash at any point means that it is called with None and the committed state.
What happened counts before what is due: a success that is reported at a deadline is a success.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from controllers.tasks.api.phase import ExecutionError, Phase, PhaseInfo, TaskInfo
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
    Policy,
    RoundFailed,
    Sent,
    Step,
)
from store.schema.tasks import (
    CleanupStep,
    RemoteIntent,
    TaskError,
    TaskEvent,
    TaskOutcome,
    TaskPhase,
    TaskSpec,
    TaskState,
    Wait,
    WaitCode,
)

MAX_TASK_INFO = 16 * 1024  # bytes of JSON that an event shows of a `TaskInfo`
MAX_TEXT = 4096  # characters of a reason or a message

_WAITING = {Phase.NOT_READY, Phase.WAITING_FOR_RESOURCES, Phase.QUEUED, Phase.WAITING_FOR_CACHE}
_CACHED_NOT = ("MISS", "LOOKUP_FAILURE", "SKIPPED")  # a success is put into the catalog


def step(
    execution: Execution, outcome: Outcome | None, now: float, policy: Policy | None = None, jitter: float = 0.0
) -> Step:
    """Return what follows. `now`: seconds since the epoch. `jitter`: 0 to 1, random; it shortens back-offs.

    Raises `ValueError` for an outcome of an action that the committed state does not ask for.
    """
    draft = _Draft(execution, now, policy or Policy(), jitter)
    if isinstance(outcome, Declared | Sent):
        draft.note(outcome)
        return draft.finished(None)
    due = draft.take(outcome)
    return draft.finished(draft.advance(due=due))


def next_wake(spec: TaskSpec, state: TaskState, now: float) -> float | None:
    """Return the next moment, after `now`, at which the stored state alone has its engine look at the execution.

    It is a deadline, the end of a wait or of a back-off; None: there is none. A plugin that polls looks sooner.
    """
    if state.step == "done":
        return None
    times = [state.retry_at, *(each.until for each in state.reasons), *(at for at, _ in _deadlines(spec, state))]
    return min((at for at in times if at > now), default=None)


def _deadlines(spec: TaskSpec, state: TaskState) -> Iterator[tuple[float, Literal["active", "execution", "queue"]]]:
    """Yield the deadlines of an attempt whose end is not decided."""
    if state.step in ("cleaning", "done"):
        return
    if spec.active_deadline and state.queued_at:
        yield state.queued_at + spec.active_deadline, "active"
    if spec.execution_timeout and state.running_at:
        yield state.running_at + spec.execution_timeout, "execution"
    if spec.queue_timeout and state.waiting_at:
        yield state.waiting_at + spec.queue_timeout, "queue"


class _Draft:
    """The state while it is being changed, and what goes with it."""

    def __init__(self, execution: Execution, now: float, policy: Policy, jitter: float) -> None:
        self.execution, self.spec = execution, execution.spec
        self.now, self.policy, self.jitter = now, policy, jitter
        self.release = False
        self.events: list[TaskEvent] = []
        self.timers: list[float] = []
        spec, former = self.spec, execution.state
        if former is None:
            self.state = TaskState(generation=spec.generation, rerun=spec.rerun, created=now, attempt_at=now)
        elif former.step != "done":
            self.state = msgspec.structs.replace(former, generation=spec.generation, rerun=spec.rerun)
        elif spec.rerun <= former.rerun:
            self.state = former
        else:
            self.state = TaskState(
                generation=spec.generation,
                rerun=spec.rerun,
                created=former.created,
                attempt_at=now,
                attempt=former.attempt + 1,  # names and keys of remote work are made of it, and must be new
                next_event=former.next_event,
                sent=former.sent,
            )
            self._enter("PhaseNotReady", "the execution runs again", kind="retry")

    def set(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    # What happened

    def note(self, outcome: Declared | Sent) -> None:
        """Record what may happen while an action is in flight, and decide nothing."""
        if isinstance(outcome, Declared):
            if self.state.step != "running":
                raise ValueError(f"task {self.spec.id}: Declared while {self.state.step}")
            self.set(intent=RemoteIntent(outcome.key, self.now))
        else:
            self.set(sent=max(self.state.sent, min(outcome.up_to, self.state.next_event)))

    def take(self, outcome: Outcome | None) -> bool:
        """Apply the outcome. Returns true if the next action is due, false if the execution waits for something."""
        where: str = self.state.step
        match outcome, where:
            case None, _:
                return True
            case CacheAnswered(status="HIT"), "admitting":
                self.set(cache="HIT")
                self._decide("success", "PhaseSuccess", abort=False, reason="the result was cached")
                return True
            case CacheAnswered(status=status, held_by=""), "admitting":
                self.set(cache=status, reserved=self.spec.cache_serialize and status == "MISS")
                return True
            case CacheAnswered(held_by=other), "admitting":
                self._enter("PhaseWaitingForCache", "another execution computes the same result")
                self._wait(Wait("Dependency", f"execution {other} computes the same result"))
                self.timers.append(self.now + self.policy.cache_poll)
                return False
            case Admitted(granted=True), "admitting":
                self.set(granted=tuple(self.spec.quotas))
                return True
            case Admitted(waits=waits), "admitting":
                if never := [wait for wait in waits if wait.code == "Infeasible"]:
                    error = TaskError("Infeasible", never[0].message, "USER")
                    self._decide("failure", "PhasePermanentFailure", error, abort=False)
                    return True
                self._enter("PhaseWaitingForResources", "; ".join(wait.message for wait in waits))
                if [(each.code, each.until) for each in waits] != [(w.code, w.until) for w in self.state.reasons]:
                    self._wait(*waits)  # otherwise only a position or a count changed, which is not worth a write
                return False
            case CleanedUp(), "cleaning":
                return self._cleaned_up(outcome)
            case Handled(), "running":
                self._handled(outcome)
            case RoundFailed(), "running":
                self._round_failed(outcome)
            case Held(), "running":
                self._wait(outcome.wait)
            case _:
                raise ValueError(f"task {self.spec.id}: {type(outcome).__name__} while {where}")
        self._judge()
        return False

    def _handled(self, outcome: Handled) -> None:
        """Take over what the plugin returned: another phase, or the end of the attempt."""
        info = outcome.transition.info
        if info.phase is Phase.UNDEFINED or (info.info is None and info.err is None):
            return self._round_failed(RoundFailed("handle returned no phase, or one with neither info nor error"))
        for raw in outcome.raw:
            self._event("raw", _name(raw.phase), raw.version, raw.reason, _error(raw.err), _bounded(raw.info))
        self.set(
            plugin=outcome.plugin or self.state.plugin,
            cleanup=self.state.cleanup or info.cleanup_on_failure,
            round_errors=0,
            round_error="",
            retry_at=0.0,
        )
        shown = _bounded(info.info)
        if info.phase.is_terminal() and outcome.checkpoint:
            shown = {**(shown or {}), "checkpoint": outcome.checkpoint}
        failure, retryable = None, info.phase is Phase.RETRYABLE_FAILURE
        if info.phase.is_failure():
            failure = _error(info.err) or TaskError("Unknown", info.reason[:MAX_TEXT] or "the plugin gave no error")
        elif info.phase.is_success():
            failure, retryable = self._output_problem(outcome.outputs)
        if outcome.state_write is not None and not retryable:  # otherwise abort sees the state of the round before
            value, version = outcome.state_write
            self.set(plugin_state=value, plugin_state_version=version)
        if failure is not None:
            return self._fail(failure, retryable=retryable, info=shown)
        if info.phase.is_success():
            return self._decide("success", "PhaseSuccess", abort=False, reason=info.reason, info=shown)
        if info.phase is Phase.ABORTED:
            return self._decide(
                "aborted", "PhaseAborted", _error(info.err), abort=self.state.cleanup, reason=info.reason, info=shown
            )
        return self._report(info, shown, outcome)

    def _report(self, info: PhaseInfo, shown: dict[str, Any] | None, outcome: Handled) -> None:
        """Take over a phase that goes on. An event results if the phase, its version or its content is another."""
        phase, identity = _name(info.phase), {} if info.info is None else info.info.to_json()
        for name in ("occurred_at", "reported_at", "additional_reasons"):
            identity.pop(name, None)
        content = msgspec.json.encode([info.version, info.reason, identity], order="deterministic")
        digest = hashlib.sha256(content).hexdigest()[:16]
        same_phase = phase == self.state.phase
        if not same_phase or digest != self.state.digest:
            version = max(info.version, self.state.version + 1) if same_phase else info.version
            if version > self.policy.max_phase_versions:
                message = f"{phase} has more than {self.policy.max_phase_versions} versions"
                return self._fail(
                    TaskError("TooManyPluginPhaseVersions", message, "SYSTEM"), retryable=False, live=True
                )
            self.set(phase=phase, version=version, digest=digest, reason=info.reason[:MAX_TEXT], info=shown)
            self._event("transition", phase, version, info.reason, None, shown)
        if info.phase in _WAITING:
            self.set(waiting_at=self.state.waiting_at or self.now)
        else:
            self.set(waiting_at=0.0, running_at=self.state.running_at or self.now)
        if info.phase is Phase.RUNNING:
            self.set(reasons=())
        else:
            self._wait(*(outcome.waits or (Wait("Plugin", info.reason[:MAX_TEXT] or f"the plugin reports {phase}"),)))
        if outcome.transition.poll_after is not None:
            self.timers.append(self.now + max(outcome.transition.poll_after, 0.001))
        return None

    def _output_problem(self, outputs: Outputs | None) -> tuple[TaskError | None, bool]:
        """Return why the outputs of a success can't be used, if so, and if another attempt may help."""
        declared = self.spec.outputs
        if outputs is None and declared:
            text = f"no outputs; declared: {', '.join(sorted(declared))}"
            return TaskError("OutputsNotGenerated", text[:MAX_TEXT], "USER"), True
        if outputs is None or outputs.dynamic:
            return None, False
        if outputs.error is not None:
            return _error(outputs.error), outputs.recoverable
        if absent := sorted(declared.keys() - outputs.names):
            text = f"declared outputs are missing: {', '.join(absent)}"
            return TaskError("OutputsNotFound", text[:MAX_TEXT], "USER"), True
        return None, False

    def _round_failed(self, outcome: RoundFailed) -> None:
        failures = self.state.round_errors + 1
        message = outcome.message[:MAX_TEXT]
        if not outcome.retryable or failures > self.policy.max_round_errors:
            text = (
                message if not outcome.retryable else f"{failures} calls failed in a row, the last one with: {message}"
            )
            return self._fail(TaskError(outcome.code, text, outcome.kind), retryable=False, live=True)
        return self._back_off(failures, message, self.policy.round_backoff.delay(failures, self.jitter))

    def _back_off(self, failures: int, message: str, delay: float) -> None:
        self.set(round_errors=failures, round_error=message, retry_at=self.now + delay)
        self._wait(Wait("Backoff", f"failed {failures} times in a row: {message}", until=self.now + delay))

    def _cleaned_up(self, outcome: CleanedUp) -> bool:
        state = self.state
        self.set(cache=outcome.cache or state.cache)
        errors = [("abort", outcome.abort_error), ("finalize", outcome.finalize_error)]
        failed = "; ".join(f"{name}: {error}" for name, error in errors if error)[:MAX_TEXT]
        forced = self.spec.abort is not None and self.spec.abort.force
        if failed and not forced:
            failures = state.round_errors + 1
            self._back_off(failures, failed, self.policy.cleanup_backoff.delay(failures, self.jitter))
            return False
        if state.outcome != "retry" or self.spec.abort is not None:
            self._end()
            return True
        failures = state.user_failures + state.system_failures
        self.set(
            step="admitting",
            outcome="",
            pending=(),
            attempt=state.attempt + 1,
            plugin_state=None,
            plugin_state_version=0,
            cleanup=False,
            intent=None,
            info=None,
            reasons=(),
            attempt_at=self.now,
            waiting_at=0.0,
            running_at=0.0,
            round_errors=0,
            round_error="",
            retry_at=self.now + self.policy.retry_backoff.delay(failures, self.jitter),
        )
        self._enter("PhaseNotReady", f"attempt {state.attempt + 1} follows", kind="retry")
        return True

    # How it ends

    def _fail(
        self, error: TaskError, *, retryable: bool, live: bool = False, info: dict[str, Any] | None = None
    ) -> None:
        """Decide for another attempt or a failure. `live`: the remote work may still run, and has to be aborted."""
        state = self.state
        if retryable:
            system = error.kind == "SYSTEM"
            used, budget = (
                (state.system_failures, self.policy.max_system_failures)
                if system
                else (state.user_failures, self.spec.retries)
            )
            if used < budget:
                self.set(**{"system_failures" if system else "user_failures": used + 1})
                return self._decide("retry", "PhaseRetryableFailure", error, abort=True, info=info)
            error = TaskError(f"RetriesExhausted|{error.code}", error.message, error.kind)
        return self._decide("failure", "PhasePermanentFailure", error, abort=live or state.cleanup, info=info)

    def _decide(
        self,
        outcome: TaskOutcome,
        phase: TaskPhase | None,
        error: TaskError | None = None,
        *,
        abort: bool,
        reason: str = "",
        info: dict[str, Any] | None = None,
    ) -> None:
        """Fix the end of the attempt, and what is left to clean up. `phase` None: it is shown after the clean-up.

        `abort`: remote work may be left. A plugin that was not called in this attempt has nothing to clean up.
        """
        state = self.state
        called = state.step == "running"
        wanted: tuple[tuple[CleanupStep, bool], ...] = (
            ("abort", called and abort),
            ("put_cache", called and outcome == "success" and state.cache in _CACHED_NOT),
            ("release_reservation", state.reserved and outcome != "retry"),
            ("finalize", called),
        )
        pending = tuple(name for name, needed in wanted if needed)
        self.set(step="cleaning", outcome=outcome, pending=pending, error=error, reasons=(), waiting_at=0.0)
        self.set(retry_at=0.0, round_errors=0, round_error="")
        if phase is not None:
            self.set(phase=phase, version=0, digest="", reason=reason[:MAX_TEXT], info=info or state.info)
            self._event("transition", phase, 0, reason, error, info)
        self.release = "abort" not in pending
        if not pending:
            self._end()

    def _end(self) -> None:
        """End the execution. Its units were released with the decision, or are released now if an abort had to
        confirm that the work ended."""
        state = self.state
        if state.outcome in ("aborted", "retry") and state.phase != "PhaseAborted":
            request = self.spec.abort
            reason = f"Task Aborted: {request.reason}" if request else "Task Aborted"
            self.set(phase="PhaseAborted", version=0, digest="", reason=reason[:MAX_TEXT], outcome="aborted")
            self._event("abort", "PhaseAborted", 0, reason, None, None)
        self.release = self.release or "abort" in state.pending
        self.set(step="done", pending=(), reasons=(), retry_at=0.0, round_errors=0, round_error="", ended_at=self.now)

    def _judge(self) -> bool:
        """End an attempt that is past a deadline. Returns true if it was."""
        expired = next((name for at, name in _deadlines(self.spec, self.state) if at <= self.now), None)
        spec = self.spec
        if expired == "execution":
            message = f"ran for {spec.execution_timeout:g} s, its time limit"
            self._fail(TaskError("TimeoutExpired", message, "USER"), retryable=True, live=True)
        elif expired == "active":
            error = TaskError("ActiveDeadlineExceeded", f"{spec.active_deadline:g} s since it was queued", "USER")
            self._decide("timeout", "PhasePermanentFailure", error, abort=True)
        elif expired == "queue":
            reasons = "; ".join(each.message for each in self.state.reasons)
            error = TaskError(
                "QueueTimeoutExpired", f"waited for {spec.queue_timeout:g} s; {reasons}"[:MAX_TEXT], "USER"
            )
            self._decide("timeout", "PhasePermanentFailure", error, abort=True)
        return expired is not None

    # What is next

    def advance(self, *, due: bool) -> Action | None:
        """Go on as far as possible without the outside. Returns the action that is then needed.

        Unless `due`, the execution waits for something; only a clean-up does not wait.
        """
        policy = self.policy
        longest = max(each.cap for each in (policy.round_backoff, policy.retry_backoff, policy.cleanup_backoff))
        if self.state.retry_at > self.now + longest:
            self.set(retry_at=self.now)  # the clock was set back since
        if self.spec.abort is not None:
            if self.state.step in ("admitting", "running"):
                self._decide("aborted", None, abort=True)
            elif self.state.step == "cleaning" and self.state.outcome == "retry":
                self.set(outcome="aborted")
        if self.state.step == "admitting":
            due = self._admit(due=due) and due
        elif self.state.is_lost and self.state.step == "running":
            due = self._judge()
        state = self.state
        called_for = state.retry_at <= self.now or any(at <= self.now for at, _ in _deadlines(self.spec, self.state))
        match state.step:
            case "admitting" if due:
                uncached = self.spec.cache_version and not state.cache
                return LookUp(self.spec.cache_serialize) if uncached else Admit(self.spec.quotas)
            case "running" if due and called_for:
                return Handle(state.attempt)
            case "cleaning" if called_for:
                return CleanUp(state.attempt, state.pending, self._why())
        return None

    def _admit(self, *, due: bool) -> bool:
        """Go on towards the first call of the plugin as far as no action is needed. Return false if the execution
        waits."""
        state, known = self.state, self.execution.dependencies
        if not state.queued_at:
            if self.spec.id in self.spec.depends_on:
                error = TaskError("DependencyFailed", "depends on itself, so it would never begin", "USER")
                self._decide("failure", "PhasePermanentFailure", error, abort=False)
                return True
            unmet = [each for each in self.spec.depends_on if known.get(each) != "succeeded"]
            if failed := [each for each in unmet if known.get(each) == "failed"]:
                error = TaskError("DependencyFailed", f"failed: {', '.join(failed)}"[:MAX_TEXT], "USER")
                self._decide("failure", "PhasePermanentFailure", error, abort=False)
                return True
            if unmet:
                return self._stay("Dependency", f"waits for {', '.join(unmet)}")
        if self._judge():
            return True
        if state.retry_at > self.now:
            error_text = f": {state.error.message}" if state.error else ""
            return self._stay("Backoff", f"attempt {state.attempt} begins later{error_text}", state.retry_at)
        self.set(queued_at=state.queued_at or self.now, waiting_at=state.waiting_at or self.now, retry_at=0.0)
        if self.spec.cache_version and not state.cache:
            if not self.spec.cache_overwrite:
                return True
            self.set(cache="SKIPPED")
        if not due or self.spec.quotas.keys() - set(state.granted):
            return True
        self.set(step="running")
        self._enter("PhaseQueued", "admitted")
        self._wait(Wait("Plugin", "the plugin has not reported yet"))
        return True

    def _stay(self, code: WaitCode, message: str, until: float = 0.0) -> bool:
        self._enter("PhaseNotReady", message)
        self._wait(Wait(code, message[:MAX_TEXT], until=until))
        return False

    def _why(self) -> str:
        if self.state.outcome == "aborted" and self.spec.abort:
            return self.spec.abort.reason
        return f"{self.state.error.code}: {self.state.error.message}" if self.state.error else self.state.outcome

    # What is shown

    def _enter(self, phase: TaskPhase, reason: str, kind: Literal["transition", "retry"] = "transition") -> None:
        """Show a phase of the engine's own; the same phase again is no event."""
        if phase != self.state.phase:
            self.set(phase=phase, version=0, digest="", reason=reason[:MAX_TEXT])
            self._event(kind, phase, 0, reason, None, None)

    def _event(
        self,
        kind: Literal["transition", "raw", "abort", "retry"],
        phase: TaskPhase,
        version: int,
        reason: str,
        error: TaskError | None,
        info: dict[str, Any] | None,
    ) -> None:
        number, attempt = self.state.next_event, self.state.attempt
        self.events.append(
            TaskEvent(
                n=number,
                at=self.now,
                attempt=attempt,
                phase=phase,
                version=version,
                kind=kind,
                reason=reason[:MAX_TEXT],
                error=error,
                info=info,
            )
        )
        self.set(next_event=number + 1)

    def _wait(self, *waits: Wait) -> None:
        """Replace the reasons; one of a code that was there before keeps its beginning."""
        since = {each.code: each.since for each in self.state.reasons}
        self.set(
            reasons=tuple(
                msgspec.structs.replace(each, since=since.get(each.code) or each.since or self.now) for each in waits
            )
        )

    def finished(self, action: Action | None) -> Step:
        """Return the step. Its reasons are complete, and its token is the owner's if there is anything to write."""
        state = self.state
        if state.step == "cleaning" and not state.reasons:
            what = " and ".join(each.replace("_", " ") for each in state.pending)
            self._wait(Wait("CleaningUp", f"{what} after {self._why()}"[:MAX_TEXT]))
        elif state.step == "admitting" and not state.reasons:
            self._wait(Wait("Plugin", "is about to be admitted"))
        if self.release:
            self.set(granted=())
        if self.state != self.execution.state:
            self.set(token=self.execution.token or self.state.token)
        state = self.state
        wake = next_wake(self.spec, state, self.now)
        if state.step != "done":
            wake = min(filter(None, (*self.timers, wake)), default=None)
        return Step(state, tuple(self.events), action, self.release, wake)


def _name(phase: Phase) -> TaskPhase:
    return str(phase)  # type: ignore[return-value]


def _error(error: ExecutionError | None) -> TaskError | None:
    return TaskError(error.code[:MAX_TEXT], error.message[:MAX_TEXT], error.kind.value) if error else None


def _bounded(info: TaskInfo | None) -> dict[str, Any] | None:
    """Return the info as JSON data of at most `MAX_TASK_INFO` bytes; fields that do not fit are named in `dropped`."""
    if info is None:
        return None
    shown = info.to_json()
    dropped = []
    for name in ("additional_reasons", "custom_info", "external_resources", "logs"):
        if len(msgspec.json.encode(shown)) <= MAX_TASK_INFO:
            break
        if shown.pop(name, None) is not None:
            dropped.append(name)
    return shown | {"dropped": dropped} if dropped else shown
