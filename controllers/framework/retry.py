"""Whether an attempt that completed is followed by another: decided once, when it completes."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from controllers.framework.codes import NEVER_RETRIED, has_attribute, is_failed
from controllers.framework.constants import CONFLICT, PERMANENT, TRANSIENT
from controllers.framework.types import CompletionStatus, RetryPolicy, RetryPolicyStatus


class Retry(NamedTuple):
    """`delay` in seconds. `accountable`: it counts against the policy's limit."""

    delay: int
    accountable: bool


def decide_retry(
    policy: RetryPolicy,
    retried: RetryPolicyStatus,
    outcome: CompletionStatus,
    *,
    conflict_delay: tuple[int, int] = (0, 0),
    rng: Random,
) -> Retry | None:
    """The retry, or None when the attempt was the last.

    `conflict_delay`: the least and the most seconds to wait after a transient conflict, so that gangs that starved
    each other do not meet again. It is the Framework's; tasks are retried at once.
    """
    if outcome.code in NEVER_RETRIED:
        return None
    failed = is_failed(outcome)
    if policy.fancy_retry_policy and failed:
        if has_attribute(outcome, TRANSIENT):
            delay = rng.randint(*conflict_delay) if has_attribute(outcome, CONFLICT) else 0
            return Retry(delay, accountable=False)
        if has_attribute(outcome, PERMANENT):
            return None
    limit = policy.max_retry_count
    always = limit == -2
    within = failed and (limit == -1 or retried.accountable_retried_count < limit)
    return Retry(0, accountable=True) if always or within else None
