"""Expectations against a model that remembers everything, under any order of events."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controllers.jobs.controller import Expectations, Expected

TTL, UNCERTAIN_TTL = 300.0, 10.0

jobs = st.sampled_from(["uid-1", "uid-2"])
kinds = st.sampled_from(["worker/pods", "worker/services", "ps/pods"])
things = st.sets(st.sampled_from("abc"), min_size=1)
thing = st.sampled_from("abc")
verbs = st.sampled_from(["create", "delete"])


class ExpectationsMachine(RuleBasedStateMachine):
    """`never_satisfied_while_something_is_outstanding`, `always_satisfied_after_the_time_to_live`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.expectations = Expectations(ttl=TTL, uncertain_ttl=UNCERTAIN_TTL, clock=lambda: self.now)
        self.model: dict[Expected, float] = {}

    @rule(job=jobs, kind=kinds, verb=verbs, texts=things)
    def expect(self, job: str, kind: str, verb: Any, texts: set[str]) -> None:
        entries = [Expected(f"{job}/{kind}", verb, text) for text in texts]
        self.expectations.expect(entries)
        self.model |= dict.fromkeys(entries, self.now + TTL)

    @rule(job=jobs, kind=kinds, verb=verbs, what=thing)
    def observe(self, job: str, kind: str, verb: Any, what: str) -> None:
        self.expectations.cross_off(Expected(f"{job}/{kind}", verb, what))
        self.model.pop(Expected(f"{job}/{kind}", verb, what), None)

    @rule(job=jobs, kind=kinds, verb=verbs, what=thing)
    def lose_the_answer(self, job: str, kind: str, verb: Any, what: str) -> None:
        expected = Expected(f"{job}/{kind}", verb, what)
        self.expectations.uncertain(expected)
        if expected in self.model:
            self.model[expected] = min(self.model[expected], self.now + UNCERTAIN_TTL)

    @rule(job=jobs)
    def job_goes(self, job: str) -> None:
        self.expectations.forget(job)
        self.model = {expected: end for expected, end in self.model.items() if not expected.key.startswith(job)}

    @rule(seconds=st.sampled_from([0.5, UNCERTAIN_TTL, TTL]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def agrees_with_the_model(self) -> None:
        for job in ("uid-1", "uid-2"):
            live = {e: end for e, end in self.model.items() if e.key.startswith(job) and end > self.now}
            assert set(self.expectations.outstanding(job)) == set(live)
            expected_end = max(live.values()) - self.now if live else None
            assert self.expectations.expires_in(job) == expected_end


TestExpectations = ExpectationsMachine.TestCase
