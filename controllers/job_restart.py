"""Whether a failed replica gets another pod, when, and how its failures are counted.

A pod that failed is one of three things. *Disrupted*: the cluster took it away (evicted, preempted, node lost); that is
nobody's fault, so it gets a successor under every restart policy, and no limit counts it. *Retryable* or *permanent*,
as the restart policy and the exit code say.

Exit codes, under the policy `ExitCode`: tf-operator's list where it names a code, else kubeflow's rule that a death by
a signal (128 and above) is worth a retry and an error of the program (1 to 127) is not. A pod that never reported a
code is retried, and counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from controllers.job_pods import exit_code, has_failed, has_succeeded, is_running, restarts_of, was_disrupted
from controllers.job_replicas import Slot
from controllers.job_status import Retry, whole_seconds
from controllers.job_types import Backoff, RestartPolicy
from store.kube.objects import Object, uid_of

Verdict: TypeAlias = Literal["permanent", "retryable", "disrupted"]

_PERMANENT = frozenset({1, 2, 126, 127, 128, 139})  # errors, misuse, can't execute, not found, bad exit, SIGSEGV
_RETRYABLE = frozenset({130, 137, 138, 143})  # SIGINT, SIGKILL, SIGUSR1 (free for users to ask for a retry), SIGTERM
_FIRST_SIGNAL = 128


def is_retryable(code: int) -> bool:
    """Whether a program that ended with this code may do better when it runs again."""
    if code in _PERMANENT or code in _RETRYABLE:
        return code in _RETRYABLE
    return code >= _FIRST_SIGNAL


def judge(pod: Object, policy: RestartPolicy, container: str = "") -> Verdict:
    """What the failure of a pod means for its replica."""
    if was_disrupted(pod):
        return "disrupted"
    if policy == "Never":
        return "permanent"
    if policy == "ExitCode":
        code = exit_code(pod, container)
        return "retryable" if code is None or is_retryable(code) else "permanent"
    return "retryable"


def new_failure(slot: Slot) -> Object | None:
    """The replica's pod, when it failed and that is not counted yet."""
    failed = slot.pod is not None and has_failed(slot.pod) and uid_of(slot.pod) not in slot.retry.counted
    return slot.pod if failed else None


def counted(slot: Slot, pod: Object, verdict: Verdict, now: datetime) -> Slot:
    """The replica with the failure of its pod in its record."""
    before, disrupted = slot.retry, verdict == "disrupted"
    record = Retry(
        failures=before.failures + (not disrupted),
        disruptions=before.disruptions + disrupted,
        restarts=before.restarts + restarts_of(pod),
        last_failure_time=whole_seconds(now),
        counted=[*_still_needed(slot), uid_of(pod)],
    )
    return replace(slot, retry=record)


def _still_needed(slot: Slot) -> Iterable[str]:
    """UIDs of pods that can still be seen; the newest always, since a cache may lag behind."""
    seen = {uid_of(pod) for pod in slot.duplicates}
    newest = slot.retry.counted[-1:]
    return [uid for uid in slot.retry.counted[:-1] if uid in seen] + newest


def not_before(slot: Slot, backoff: Backoff) -> datetime | None:
    """When the replica may have its next pod; None: at once."""
    last = slot.retry.last_failure_time
    if last is None:
        return None
    return last + timedelta(seconds=backoff.delay(slot.retry.failures + slot.retry.disruptions))


def is_restarting(slot: Slot, since: datetime | None) -> bool:
    """Whether the replica has failed since the job's start (`since`) and does not run again yet."""
    last = slot.retry.last_failure_time
    if last is None or (since is not None and last < since):
        return False
    return slot.pod is None or not (is_running(slot.pod) or has_succeeded(slot.pod))


def limit_reached(slots: Iterable[Slot], limit: int | None) -> str:
    """How the job used up its retries, or "". Pods that failed are allowed `limit` times; restarts in place up to
    `limit`, like Kubernetes' Job counts them; both together not more than `limit`."""
    if limit is None:
        return ""
    failures = restarts = 0
    for slot in slots:
        failures += slot.retry.failures
        restarts += slot.retry.restarts + _live_restarts(slot)
    if failures + restarts <= limit and (restarts < limit or not restarts):
        return ""
    return f"{failures} failed pods and {restarts} restarts of containers reach the back-off limit of {limit}"


def _live_restarts(slot: Slot) -> int:
    if slot.pod is None or slot.spec.restart_policy == "Never" or uid_of(slot.pod) in slot.retry.counted:
        return 0
    return restarts_of(slot.pod)
