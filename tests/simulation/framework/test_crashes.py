"""The operator of a Framework dies at every single call of a life, and another takes over: the result is the same as
without a crash."""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple, get_args

import pytest

from controllers.framework.api.types import FRAMEWORKS
from store.kube.api.objects import Object, Resource
from tests.support.framework.cluster import Cluster, framework, role
from tests.support.kube.faults.network import Moment, MortalKube

pytestmark = pytest.mark.looptime

FAILS = {"hollow/exit-code": "7", "hollow/run-seconds": "2"}
SERVES = {"hollow/exit-code": "0", "hollow/run-seconds": "1"}
RETRIED_ONCE = {"totalRetriedCount": 1, "accountableRetriedCount": 1, "retryDelaySec": None}
NEVER_RETRIED = {"totalRetriedCount": 0, "accountableRetriedCount": 0, "retryDelaySec": None}
EXPECTED = (1, 7, RETRIED_ONCE, [("ps", 0, 0, NEVER_RETRIED), ("worker", 1, 7, RETRIED_ONCE)])


def failing_twice() -> Object:
    """Return a Framework with two attempts, each ended by the second failure of its worker: two retries in all, one of
    them a task's."""
    worker = role("worker", 1, annotations=FAILS, retry={"maxRetryCount": 1}, policy={"minFailedTaskCount": 1})
    return framework("job", role("ps", 1, annotations=SERVES), worker, retryPolicy={"maxRetryCount": 1})


class Life(NamedTuple):
    """The result of a life, and the `breaches` of guarantees on the way. `calls`: the number of its first operator's
    calls."""

    outcome: tuple[object, ...]
    breaches: list[str]
    calls: int


class Witness:
    """Checks each write of a status for changes that must never happen."""

    def __init__(self) -> None:
        self.breaches: list[str] = []

    def __call__(self, resource: Resource, new: Object, old: Object | None) -> None:
        if resource == FRAMEWORKS and old is not None:
            before, after = _task_attempts(old), _task_attempts(new)
            for attempt in before.keys() & after.keys():
                for known, new_value in zip(before[attempt], after[attempt], strict=True):
                    if known is not None and new_value != known:
                        self.breaches.append(f"{attempt}: {known} became {new_value}")


def _task_attempts(obj: Object) -> dict[tuple[int, str, int], tuple[object, object]]:
    """Return UID and outcome of each pod by the Framework's attempt, the pod's name and the task's attempt."""
    attempt = (obj.get("status") or {}).get("attemptStatus") or {"id": 0, "taskRoleStatuses": []}
    tasks = [task["attemptStatus"] for role in attempt["taskRoleStatuses"] for task in role["taskStatuses"]]
    return {
        (attempt["id"], task["podName"], task["id"]): (task["podUID"], (task["completionStatus"] or {}).get("code"))
        for task in tasks
    }


async def life(dies_at: float, moment: Moment) -> Life:
    """Run a Framework from creation to completion, with the death of the operator at one call."""
    async with Cluster(nodes=1).running(operator=False) as cluster:
        cluster.api.admission = witness = Witness()
        mortal = MortalKube(cluster.api, dies_at, moment)
        cluster.start_operator(mortal)
        await cluster.create(failing_twice())
        completed = asyncio.create_task(cluster.until_state("job", "Completed"))
        died = asyncio.create_task(mortal.died.wait())
        await asyncio.wait([completed, died], return_when=asyncio.FIRST_COMPLETED)
        if mortal.died.is_set():
            await cluster.kill_operator()
            cluster.start_operator()
        died.cancel()
        status = await completed
        assert await cluster.pods("job") == {}
        assert await cluster.config_map("job") is None
        return Life(_outcome(status), witness.breaches, len(mortal.calls))


def _outcome(status: Object) -> tuple[object, ...]:
    attempt = status["attemptStatus"]
    tasks = [
        (role["name"], last["id"], last["completionStatus"]["code"], task["retryPolicyStatus"])
        for role in attempt["taskRoleStatuses"]
        for task in role["taskStatuses"]
        for last in [task["attemptStatus"]]
    ]
    return attempt["id"], attempt["completionStatus"]["code"], status["retryPolicyStatus"], tasks


@pytest.mark.parametrize("moment", get_args(Moment))
async def test_a_death_at_any_call_changes_nothing_of_the_outcome(moment: Moment) -> None:
    """Whether the operator dies before or after its call number k takes effect, for every k, the next operator ends the
    Framework with the same codes and the same retries. No attempt of a task ever changes its pod or its outcome, and no
    pod is left behind."""
    undisturbed = await life(math.inf, moment)
    assert undisturbed.outcome == EXPECTED
    assert undisturbed.breaches == []
    assert undisturbed.calls > 20
    for number in range(undisturbed.calls):
        disturbed = await life(number, moment)
        assert disturbed.outcome == EXPECTED, f"{moment} call {number}"
        assert disturbed.breaches == [], f"{moment} call {number}"
