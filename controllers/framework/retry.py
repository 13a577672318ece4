"""Whether an attempt that completed is followed by another: decided once, when it completes."""

from __future__ import annotations

from random import Random

from controllers.framework.codes import NEVER_RETRIED, has_attribute, is_failed
from controllers.framework.constants import CONFLICT, PERMANENT, TRANSIENT
from controllers.framework.types import CompletionStatus, RetryPolicy, RetryPolicyStatus

RETRY_ALWAYS = -2
RETRY_FAILURES = -1


def retry_delay(
    policy: RetryPolicy,
    retried: RetryPolicyStatus,
    outcome: CompletionStatus,
    *,
    conflict_delay: tuple[int, int] = (0, 0),
    rng: Random,
) -> int | None:
    """Seconds until the retry, or None when the attempt was the last.

    `conflict_delay`: the least and the most seconds to wait after a transient conflict, so that gangs that starved
    each other do not meet again. It is the Framework's; tasks are retried at once.
    """
    if outcome.code in NEVER_RETRIED:
        return None
    if not is_accountable(policy, outcome):
        return rng.randint(*conflict_delay) if has_attribute(outcome, CONFLICT) else 0
    failed, limit = is_failed(outcome), policy.max_retry_count
    if policy.fancy_retry_policy and failed and has_attribute(outcome, PERMANENT):
        return None
    is_within = limit == RETRY_FAILURES or retried.accountable_retried_count < limit
    return 0 if limit == RETRY_ALWAYS or (failed and is_within) else None


def is_accountable(policy: RetryPolicy, outcome: CompletionStatus) -> bool:
    """Whether a retry after this outcome counts against the policy's limit."""
    return not (policy.fancy_retry_policy and is_failed(outcome) and has_attribute(outcome, TRANSIENT))
