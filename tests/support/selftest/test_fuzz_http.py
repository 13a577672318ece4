"""A short run of the fuzzer of listeners, with a seed of its own; `python -m tests.fuzz_http` makes long ones."""

from __future__ import annotations

from tests.fuzz_http import run


def test_no_request_is_answered_with_a_defect() -> None:
    """Five hundred odd requests: no 500 of our own, no traceback, and all listeners still answer. Response times are
    not checked, because other tests use the machine."""
    findings, summary = run(500, seed=7)
    assert findings.violations == [], summary
